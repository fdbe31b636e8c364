"""Tests of what is shown of URLs."""

import io
import logging
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from embedfarm.contract.redaction import (
    CORPUS_CHARACTERS_MAX,
    hide_in_word,
    hide_password,
    hide_secrets,
    hide_urls,
    is_hidden,
    name_corpus,
    name_source,
    start_logging,
)

SECRET = "c4nary"  # noqa: S105 -- what is looked for
AWS = (
    "X-Amz-Algorithm=AWS4-HMAC-SHA256&X-Amz-Credential=AKIA%2F20260101%2Fus-east-1%2Fs3"
    f"&X-Amz-Date=20260101T000000Z&X-Amz-Expires=60&X-Amz-Signature={SECRET}"
)
AZURE = f"sv=2024-11-04&ss=b&srt=o&sp=r&se=2026-01-01&st=2025-01-01&spr=https&sig={SECRET}"


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        (f"https://me:{SECRET}@host/a.jsonl", "https://***@host/a.jsonl"),
        (f"https://{SECRET}@host:8443/a", "https://***@host:8443/a"),
        (f"HTTP://host/a?{AWS}", "HTTP://host/a?***"),
        (f"https://host/a?{SECRET}", "https://host/a?***"),
        (f"https://host/a#{SECRET}", "https://host/a?***"),
        (f"https://me:{SECRET}/x@host/a", "https://***@host/a"),
        (f"https://me:x?{SECRET}@host/a", "https://***@host/a"),
        (f"s3://AKIA:{SECRET}@bucket/part-*.parquet", "s3://***@bucket/part-*.parquet"),
        (f"sftp://me:{SECRET}@[::1]:22/a", "sftp://***@[::1]:22/a"),
        (f"az://box/a?{AZURE}", "az://box/a?***"),
        (f"zip://a.csv::https://me:{SECRET}@host/a.zip?{SECRET}", "zip://a.csv::https://***@host/a.zip?***"),
        (f"simplecache::https://host/a?sig={SECRET}", "simplecache::https://host/a?***"),
        (f"qdrant://{SECRET}@host:6333#documents", "qdrant://***@host:6333#documents"),
        (f"milvus+https://{SECRET}@host#documents", "milvus+https://***@host#documents"),
        (f"postgresql://me:{SECRET}@host/db#documents", "postgresql://***@host/db#documents"),
        (f"postgresql://host/db?password={SECRET}#documents", "postgresql://host/db?***"),
        (f"redis://me:{SECRET}@host:6379/0?db=1", "redis://me:***@host:6379/0?db=1"),
        (f"redis+sentinel://:{SECRET}@a,b/name?sentinel_password={SECRET}&db=1",
         "redis+sentinel://:***@a,b/name?sentinel_password=***&db=1"),
    ],
)  # fmt: skip
def test_secrets_are_hidden(url: str, shown: str) -> None:
    """Passwords and queries of URLs are hidden, alone and in a sentence, and only once."""
    assert hide_secrets(url) == hide_in_word(url) == shown
    assert hide_secrets(shown) == shown
    assert (
        hide_secrets(f"cannot read '{url}' of x@y.z: gone")
        == f"cannot read '{shown}' of x@y.z: gone"
    )
    assert hide_in_word(f"--corpus={url}") == f"--corpus={shown}"
    assert SECRET not in hide_urls(url) or not url.lower().startswith("http")


@pytest.mark.parametrize(
    "text",
    [
        "s3://bucket/part-?.jsonl", "https://host:80/a@b/c", "abfs://box@account.dfs.core/a",
        "sftp://me@host/a", "https://[::1]:80/a@b", "a: b@c?d=e", "data/*.jsonl?x=1", "null:16", "",
        "unix:///run/redis.sock", "https://host", "file:///a/b",
    ],
)  # fmt: skip
def test_the_rest_stays(text: str) -> None:
    """A text without secrets is shown as it is, and is its own name as a source."""
    assert hide_secrets(text) == hide_in_word(text) == name_source(text) == text
    assert not is_hidden(text)


@given(st.text(min_size=1), st.text(min_size=1))
def test_any_secret_is_hidden_in_a_word(password: str, signature: str) -> None:
    """Secrets of any characters are hidden while the URL still has its parts."""
    url = f"https://me:{SECRET}{password}{SECRET}@host/a?sig={SECRET}{signature}{SECRET}"
    if "@" not in signature and not set("/?#:") & set(password) and "://" not in url[8:]:
        assert hide_in_word(url) == "https://***@host/a?***"


def test_hosts_alone() -> None:
    """A password is hidden in a URL that ends with its host, too."""
    assert hide_urls(f"to https://me:{SECRET}@host and on") == "to https://host and on"
    assert (
        hide_urls(f"https://{SECRET}@host?{SECRET} s3://{SECRET}:x@b")
        == "https://host/… s3://***@b"
    )


def test_urls_are_hidden_in_logs() -> None:
    """Only scheme, host and port of a URL are left in logs."""
    text = (
        "embed('https://a.example/hook/secret?x', 'HTTP://me:secret@b.example:80#secret', '/c?d')"
    )
    assert hide_urls(text) == "embed('https://a.example/…', 'HTTP://b.example:80/…', '/c?d')"


SECRETS = st.text(min_size=1).map(lambda text: f"s3cret{text}s3cret")


@given(
    scheme=st.sampled_from(["redis://", "rediss://", "unix://", ""]),
    user=st.text(st.characters(exclude_characters=":@/?&")),
    secret=SECRETS,
    host=st.sampled_from(["host:6379/0", "[::1]:6379", "/run/redis.sock?db=1", ""]),
)
def test_hide_password(scheme: str, user: str, secret: str, host: str) -> None:
    """Only user and server are left of a URL, whatever characters its password has."""
    assert hide_password(f"{scheme}{user}:{secret}@{host}") == f"{scheme}{user}:***@{host}"


@given(st.text(st.characters(exclude_characters="&")))
def test_hide_password_in_the_query(secret: str) -> None:
    """A password that is given as an option of the URL is hidden as well."""
    shown = hide_password(f"unix:///s?db=1&password=s3cret{secret}&x=1")
    assert shown == "unix:///s?db=1&password=***&x=1"


@pytest.mark.parametrize(
    "url",
    ["redis://host:6379/0", "redis://user@host:6379", "unix:///run/redis.sock", "host", "", "a: b"],
)
def test_hide_password_leaves_the_rest(url: str) -> None:
    """A URL without a password is shown as it is."""
    assert hide_password(url) == url


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        (f"https://h/a?{AWS}", f"https://h/a?{AWS.replace(SECRET, 'x').replace('60', '90')}", True),
        (f"https://h/a?{AZURE}", f"https://h/a?{AZURE.replace('2026', '2027')}", True),
        ("https://h/a?id=1&token=x", "https://h/a?token=y&id=1", True),
        ("https://me:x@h/a", "https://you:y@h/a", True),
        ("https://h/a?id=1", "https://h/a?id=2", False),
        ("https://h/a?versionId=1&sig=x", "https://h/a?versionId=2&sig=x", False),
        ("https://h/a?sig=x", "https://h/b?sig=x", False),
        ("https://h/a?sig=x", "https://i/a?sig=x", False),
        ("https://h/a?x", "https://h/a?y", False),
    ],
)
def test_names_of_sources(one: str, other: str, *, same: bool) -> None:
    """A URL is the same source whoever signed it and when, and another one for other arguments."""
    names = name_source(one), name_source(other)
    assert (names[0] == names[1]) is same
    for name in names:
        assert is_hidden(name)
        assert name_source(name) == name
        assert SECRET not in name


def test_names_of_corpora(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A corpus is called by its sources, without secrets; uploads and standard input are not."""
    monkeypatch.chdir(tmp_path)
    uploads = tmp_path / "jobs"
    url = f"https://host/a.parquet?sig={SECRET}"
    assert name_corpus(["a.jsonl", url], uploads) == f"{tmp_path}/a.jsonl {name_source(url)}"
    assert name_corpus([f"{tmp_path}/a.jsonl"], uploads) == name_corpus(["a.jsonl"], uploads)
    assert name_corpus([f"{uploads}/j/input.jsonl"], uploads) == ""
    assert name_corpus(["-"], uploads) == ""
    many = [f"/data/part-{number}.parquet" for number in range(1000)]
    names = {name_corpus(some, uploads) for some in (many, many[:-1], many[::-1])}
    assert {len(name) for name in names} == {CORPUS_CHARACTERS_MAX}
    assert len(names) == 3


def test_logs(monkeypatch: pytest.MonkeyPatch) -> None:
    """A log has no secrets of URLs in messages or tracebacks."""
    said = io.StringIO()
    monkeypatch.setattr("sys.stderr", said)
    monkeypatch.setattr(logging.root, "handlers", [])
    start_logging(logging.INFO)
    try:
        int(f"https://me:{SECRET}@host/a")
    except ValueError:
        logging.getLogger("any").exception("at %s", f"https://host/a?sig={SECRET}")
    assert "at https://host/a?***" in said.getvalue()
    assert "'https://***@host/a'" in said.getvalue()
    assert SECRET not in said.getvalue()
