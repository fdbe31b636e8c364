"""Tests of which URLs name a server, and of what the error about another one may say."""

import traceback
from typing import Any, cast

import pytest
import redis
from hypothesis import given
from hypothesis import strategies as st

from embedfarm.contract.broker import SOCKET_SECONDS, connect
from embedfarm.contract.server_url import UrlError, cluster_seeds, make_pool

SENTINELS = "sentinel://worker:p%40ss@one:1,[::1]:2,three/primary/4"


def arguments(url: str) -> dict[str, Any]:
    """Return the arguments of the connection that would be made."""
    return make_pool(url).connection_kwargs


def test_tls_is_kept() -> None:
    """Certificates in the URL reach the connection, beside the options of `connect`."""
    with connect(f"rediss://u:p@h:1/2?ssl_ca_certs={__file__}&ssl_cert_reqs=optional") as client:
        connection = client.connection_pool.make_connection()
    assert isinstance(connection, redis.SSLConnection)
    assert (connection.ca_certs, connection.db) == (__file__, 2)
    assert connection.check_hostname
    assert connection.socket_timeout == SOCKET_SECONDS


@pytest.mark.parametrize("scheme", ["sentinel", "redis+sentinel", "rediss+sentinel"])
def test_sentinels(scheme: str) -> None:
    """User, password and database of a sentinel URL go to the server, and not to the sentinels."""
    url = SENTINELS.replace("sentinel", scheme, 1)
    with connect(f"{url}?sentinel_password=other&client_name=me") as client:
        pool = client.connection_pool
        assert isinstance(pool, redis.sentinel.SentinelConnectionPool)
        connection = cast("redis.Connection", pool.make_connection())
        asked = [each.connection_pool.connection_kwargs for each in pool.sentinel_manager.sentinels]
    assert pool.service_name == "primary"
    assert [(each["host"], each["port"]) for each in asked] == [
        ("one", 1), ("::1", 2), ("three", 26379),
    ]  # fmt: skip
    assert {each["password"] for each in asked} == {"other"}
    assert (connection.username, connection.password, connection.db) == ("worker", "p@ss", 4)
    assert connection.client_name == "me"
    assert connection.retry.get_retries() == 0
    assert connection.socket_timeout == SOCKET_SECONDS
    encrypted = scheme.startswith("rediss")
    assert isinstance(connection, redis.SSLConnection) == encrypted
    for sentinel in pool.sentinel_manager.sentinels:
        kind = sentinel.connection_pool.connection_class
        assert issubclass(kind, redis.SSLConnection) == encrypted


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("http://h", "begins with none of"),
        ("h:6379", "begins with none of"),
        ("redis://h:port", "port is no number"),
        ("redis://h?colour=red", "colour"),
        ("redis://h?socket_timeout=long", "socket_timeout"),
        ("rediss://h?ssl_ca_certs=/nowhere", "no file /nowhere"),
        ("sentinel://h", "no name of a service"),
        ("sentinel://h/name?sentinel_colour=red", "colour"),
    ],
)
def test_no_url(url: str, reason: str) -> None:
    """A wrong URL is refused when it is read, with the reason."""
    with pytest.raises(UrlError, match=reason):
        make_pool(url)


def test_nodes_of_a_cluster() -> None:
    """A cluster's URL names nodes, each with a port or the usual one, and no database."""
    assert cluster_seeds("redis+cluster://:word@a:1,b/0") == [("a", 1), ("b", 6379)]
    with pytest.raises(UrlError, match="no databases"):
        cluster_seeds("redis+cluster://a:1,b:2/3")
    with pytest.raises(UrlError, match="port is no number"):
        cluster_seeds("redis+cluster://a:1,b:port")


@given(
    before=st.text(st.sampled_from("/?#[]@:%1a"), max_size=8),
    after=st.text(st.sampled_from("/?#[]@:%1a"), max_size=8),
    scheme=st.sampled_from(["redis", "rediss", "sentinel"]),
)
def test_a_torn_password_is_not_quoted(before: str, after: str, scheme: str) -> None:
    """An error about a URL quotes nothing of a password, even one that is not encoded."""
    url = f"{scheme}://user:{before}s3cret{after}@host:6379/0"
    said = ""
    try:
        make_pool(url)
    except UrlError:
        said = traceback.format_exc()
    assert "s3cret" not in said
