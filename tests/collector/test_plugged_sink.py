"""Tests of a sink that an installed package brings."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from embedfarm.collector.sinks import open_sink, sink_names

MODULE = """
from embedfarm.collector.sinks import Jsonl


class Upside(Jsonl):
    about = "JSON Lines by another name"
"""


@pytest.fixture
def plugged(tmp_path: Path) -> dict[str, str]:
    """Install a package with a sink into a directory; give the environment that finds it."""
    (tmp_path / "upside.py").write_text(MODULE)
    facts = tmp_path / "upside-1.0.dist-info"
    facts.mkdir()
    (facts / "METADATA").write_text("Metadata-Version: 2.1\nName: upside\nVersion: 1.0\n")
    (facts / "entry_points.txt").write_text(
        "[embedfarm.sinks]\nupside = upside:Upside\nbroken = upside:Nothing\n"
    )
    return {**os.environ, "PYTHONPATH": str(tmp_path)}


def embed(environment: dict[str, str], out: Path, sink: str) -> subprocess.CompletedProcess[str]:
    """Embed a text by the command line into a format."""
    corpus = out.with_suffix(".jsonl")
    corpus.write_text('{"text": "a"}\n')
    words = ["embed", corpus, "--out", out, "--model", "null:4", "--devices", "cpu"]
    command = [sys.executable, "-m", "embedfarm", *map(str, words), "--format", sink]
    return subprocess.run(command, capture_output=True, text=True, check=False, env=environment)


def test_it_is_found_by_name(plugged: dict[str, str], tmp_path: Path) -> None:
    """The command line offers a sink of another package, writes by it, and reads what it wrote."""
    out = tmp_path / "out"
    done = embed(plugged, out, "upside")
    assert done.returncode == 0, done.stderr
    assert (out / "part-000000000000.jsonl").is_file()
    verify = [sys.executable, "-m", "embedfarm", "verify", str(out)]
    assert subprocess.run(verify, check=False, env=plugged).returncode == 0


def test_one_that_does_not_load(plugged: dict[str, str], tmp_path: Path) -> None:
    """A sink whose package does not load is named with the reason."""
    done = embed(plugged, tmp_path / "out", "broken")
    assert done.returncode != 0
    assert "'broken' of upside:Nothing does not load" in done.stderr


def test_one_that_nobody_brings(tmp_path: Path) -> None:
    """A name that no sink has is refused, with the names that there are."""
    assert sink_names()[:3] == ("parquet", "npy", "jsonl")
    with pytest.raises(ValueError, match="there are parquet, npy, jsonl"):
        open_sink("nothing", tmp_path)
