"""Tests of paths and URLs that a job from outside may name."""

from pathlib import Path

import pytest

from embedfarm.ingest.allow_list import PathRefused, allow, allow_source, allow_url, is_url
from embedfarm.ingest.outbound import UrlRefused


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Make an allowed directory with a corpus; beside it is a secret."""
    root = tmp_path / "root"
    root.mkdir()
    (tmp_path / "secret.txt").write_text("secret")
    (root / "corpus.txt").write_text("corpus")
    return root


def test_what_is_below_a_root(root: Path) -> None:
    """Files, directories, new paths and links below a root are allowed."""
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
    """A path that leads outside by dots, links, a URL, a pattern or a longer name is refused."""
    (root / "out.txt").symlink_to(root.parent / "secret.txt")
    (root / "outside").symlink_to(root.parent, target_is_directory=True)
    with pytest.raises(PathRefused):
        allow_source(path.format(root=root), [root])


def test_without_roots(root: Path) -> None:
    """Every path is refused without roots, and the reason says what to set."""
    with pytest.raises(PathRefused, match="ingest_roots is empty"):
        allow(str(root), [])


@pytest.mark.parametrize("path", ["jobs", "jobs/a.txt", "jobs/none", "", "link", "sub"])
def test_a_directory_is_barred(root: Path, path: str) -> None:
    """A barred directory, what is in it or above it, and links into it are refused."""
    jobs = root / "jobs"
    jobs.mkdir()
    (jobs / "a.txt").write_text("of somebody else")
    (root / "link").symlink_to(jobs / "a.txt")
    (root / "sub").mkdir()
    (root / "sub" / "link").symlink_to(jobs / "a.txt")
    with pytest.raises(PathRefused, match="inputs and outputs of jobs by HTTP"):
        allow_source(str(root / path), [root], jobs)
    assert allow_source(str(root / "corpus.txt"), [root], jobs) == root / "corpus.txt"
    assert allow_source(str(jobs / "a.txt"), [root]) == jobs / "a.txt"  # for who runs the jobs


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
    """A URL is allowed if scheme, host and port are a prefix's, and the path goes on at a slash."""
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
    """A URL of another host, with dots in any spelling, or with a longer name is refused."""
    with pytest.raises(UrlRefused):
        allow_url(url, PREFIXES)


def test_without_prefixes() -> None:
    """Every URL is refused without prefixes, and the reason has no signature of the URL."""
    with pytest.raises(UrlRefused, match=r"ingest_urls \(empty\)") as refused:
        allow_url("https://data.example/corpora/a.jsonl?signature=secret", [])
    assert "secret" not in str(refused.value)
