"""Tests of a server that speaks TLS only, and asks for certificates (the carried one cannot)."""

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
import trustme

from embedfarm.contract.settings import Settings
from tests.farm.farm_of_all_roles import whole_farm
from tests.farm.harness import run
from tests.support import LiveServer, free_port

pytestmark = pytest.mark.system
PASSWORD = "s3cret-of-the-server"  # noqa: S105 -- what is looked for


class Link(NamedTuple):
    """The URL and the certificates by which clients reach a server over TLS.

    Attributes:
        base: The server's URL up to the certificates.
        mine: The client's certificate, as options of the URL.
        authority: File of the authority that has signed the server's certificate.
        stranger: File of another authority.
    """

    base: str
    mine: str
    authority: Path
    stranger: Path


@pytest.fixture
def link(tmp_path: Path) -> Iterator[Link]:
    """Start a server with a password, whose clients must have a certificate."""
    authority, stranger = trustme.CA(), trustme.CA()
    files = {name: tmp_path / f"{name}.pem" for name in ("authority", "stranger", "server", "mine")}
    authority.cert_pem.write_to_path(files["authority"])
    stranger.cert_pem.write_to_path(files["stranger"])
    authority.issue_cert("127.0.0.1").private_key_and_cert_chain_pem.write_to_path(files["server"])
    authority.issue_cert("worker").private_key_and_cert_chain_pem.write_to_path(files["mine"])
    port = free_port()
    base = f"rediss://:{PASSWORD}@127.0.0.1:{port}/0"
    mine = f"&ssl_certfile={files['mine']}&ssl_keyfile={files['mine']}"
    words = {
        "tls-port": port, "tls-cert-file": files["server"], "tls-key-file": files["server"],
        "tls-ca-cert-file": files["authority"], "requirepass": PASSWORD,
    }  # fmt: skip
    live = LiveServer(
        tmp_path / "server",
        "redis-server",
        Settings(),
        f"{base}?ssl_ca_certs={files['authority']}{mine}",
        [word for name, value in words.items() for word in (f"--{name}", str(value))],
    )
    live.start()
    yield Link(base, mine, files["authority"], files["stranger"])
    live.stop()


def test_the_farm_works_over_tls(link: Link, tmp_path: Path) -> None:
    """A corpus, a job by HTTP and a request are embedded by a farm whose roles use TLS."""
    url = f"{link.base}?ssl_ca_certs={link.authority}{link.mine}"
    with whole_farm(tmp_path, lambda _: url) as farm:
        farm.embed_corpus("over-tls")
        farm.embed_by_http()
        farm.ask()


@pytest.mark.parametrize("words", ["doctor", "jobs ls", "work --devices cpu"])
def test_a_server_that_is_not_trusted(link: Link, words: str) -> None:
    """A server whose certificate another authority signed is refused, without the password."""
    url = f"{link.base}?ssl_ca_certs={link.stranger}{link.mine}"
    done = run(*words.split(), environment={"EMBEDFARM_REDIS_URL": url}, seconds_max=60)
    assert done.returncode == 1
    said = done.stdout + done.stderr
    assert "certificate verify failed" in said
    assert PASSWORD not in said


def test_a_client_without_a_certificate(link: Link) -> None:
    """`doctor` says that a server is not well that refuses a client without a certificate."""
    url = f"{link.base}?ssl_ca_certs={link.authority}"
    done = run("doctor", environment={"EMBEDFARM_REDIS_URL": url}, seconds_max=60)
    assert done.returncode == 1
    server = next(line for line in done.stdout.splitlines() if "server " in line)
    assert not server.startswith("ok"), server
    assert PASSWORD not in done.stdout + done.stderr
