"""Paths that a job from outside may name."""

from pathlib import Path

import pytest

from producer.roots import PathRefused, allow, allow_source


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
