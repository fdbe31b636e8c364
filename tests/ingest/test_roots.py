"""Paths that a job from outside may name."""

from pathlib import Path

import pytest

from producer.outbound import UrlRefused
from producer.roots import PathRefused, allow, allow_source, allow_url, is_url


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """An allowed directory with a corpus and a link out of it; beside it, a secret."""
    root = tmp_path / "root"
    root.mkdir()
    (tmp_path / "secret.txt").write_text("secret")
    (root / "corpus.txt").write_text("corpus")
    return root


def test_what_is_below_a_root(root: Path) -> None:
    """Files, directories, what does not exist yet, and links that stay inside."""
    (root / "link.txt").symlink_to(root / "corpus.txt")
    roots = [Path("/nowhere"), root]
    assert allow(str(root / "new" / "out"), roots) == root / "new" / "out"
    assert allow_source(str(root / "link.txt"), roots) == root / "corpus.txt"
    assert allow_source(str(root), roots) == root


@pytest.mark.parametrize(
    "path",
    [
        "{root}/../secret.txt",
        "{root}/out.txt",
        "{root}/outside/secret.txt",
        "{root}/outside/new",
        "{root}",
        "file://{root}/../secret.txt",
        "{root}/*.txt",
        "{root}2/corpus.txt",
        "-",
        "",
    ],
)
def test_what_leads_outside(root: Path, path: str) -> None:
    """By dots, by links, as a URL, as a pattern, or by a name that only begins like a root."""
    (root / "out.txt").symlink_to(root.parent / "secret.txt")
    (root / "outside").symlink_to(root.parent, target_is_directory=True)
    with pytest.raises(PathRefused):
        allow_source(path.format(root=root), [root])


def test_without_roots(root: Path) -> None:
    """Nothing is allowed, and the reason says what to set."""
    with pytest.raises(PathRefused, match="ingest_roots is empty"):
        allow(str(root), [])


PREFIXES = ["https://data.example/corpora/", "http://intern:8080/one.jsonl"]


@pytest.mark.parametrize(
    "url",
    [
        "https://data.example/corpora/a.jsonl",
        "HTTPS://DATA.example:443/corpora/b/c.jsonl?signature=x/../y",
        "https://data.example/corpora",
        "http://intern:8080/one.jsonl",
        "https://data.example/corpora/a%20b/..c.jsonl",
    ],
)
def test_urls_below_a_prefix(url: str) -> None:
    """Scheme, host and port are the same, and the path goes on at a slash."""
    assert is_url(url)
    assert allow_url(url, PREFIXES).host in url.lower()


@pytest.mark.parametrize(
    "url",
    [
        "http://data.example/corpora/a.jsonl",
        "https://data.example:8443/corpora/a.jsonl",
        "https://data.example.evil.example/corpora/a.jsonl",
        "https://data.example@evil.example/corpora/a.jsonl",
        "https://data.example/corpora2/a.jsonl",
        "https://data.example/Corpora/a.jsonl",
        "https://data.example/",
        "https://data.example/corpora/../secret.jsonl",
        "https://data.example/corpora/..;x/secret.jsonl",
        "https://data.example/corpora/%2e%2E/secret.jsonl",
        "https://data.example/corpora/..%2fsecret.jsonl",
        "https://data.example/corpora/%252e%252e/secret.jsonl",
        "https://data.example/corpora/.%5csecret.jsonl",
        "https://data.example/corpora/a%00.jsonl",
        "https://data.example/corpora\\..\\secret.jsonl",
        "http://intern:8080/one.jsonl.bak",
        "http://intern/one.jsonl",
        "https:/data.example/corpora/a.jsonl",
    ],
)
def test_urls_that_lead_elsewhere(url: str) -> None:
    """By another host, by dots in any spelling, or by a name that only begins like a prefix."""
    with pytest.raises(UrlRefused):
        allow_url(url, PREFIXES)


def test_without_prefixes() -> None:
    """No URL is allowed, and the reason says what to set, but not what may be a signature."""
    with pytest.raises(UrlRefused, match=r"ingest_urls \(empty\)") as refused:
        allow_url("https://data.example/corpora/a.jsonl?signature=secret", [])
    assert "secret" not in str(refused.value)
