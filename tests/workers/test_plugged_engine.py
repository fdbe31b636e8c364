"""Tests of an engine that an installed package brings."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest

from embedfarm.contract.broker import connect
from embedfarm.contract.farm_client import FarmClient
from embedfarm.contract.job_spec import JobSpec
from embedfarm.contract.model_files import ModelError
from embedfarm.contract.settings import Settings
from embedfarm.workers.engines.opening import open_engine
from tests.farm.harness import role
from tests.support import LiveServer

MODULE = """
import os
import signal
import threading
from dataclasses import replace

from embedfarm.workers.engines.null import NullEngine


def open_doubled(spec, device, settings):
    engine = NullEngine.open(spec)
    return replace(engine, name="doubled on " + device)


def kill(spec, device, settings):
    os.kill(os.getpid(), signal.SIGKILL)


def fail(spec, device, settings):
    raise RuntimeError("no libfoo.so")


def hang(spec, device, settings):
    threading.Event().wait()
"""
ENGINES = """
[embedfarm.engines]
doubled = doubled:open_doubled
broken = doubled:nothing
deadly = doubled:kill
failing = doubled:fail
hanging = doubled:hang
"""


@pytest.fixture
def plugged(tmp_path: Path) -> dict[str, str]:
    """Install a package with an engine into a directory; give the environment that finds it."""
    (tmp_path / "doubled.py").write_text(MODULE)
    facts = tmp_path / "doubled-1.0.dist-info"
    facts.mkdir()
    (facts / "METADATA").write_text("Metadata-Version: 2.1\nName: doubled\nVersion: 1.0\n")
    (facts / "entry_points.txt").write_text(ENGINES)
    return {**os.environ, "PYTHONPATH": str(tmp_path)}


def embed(
    environment: dict[str, str], out: Path, engine: str, devices: str = "cpu"
) -> subprocess.CompletedProcess[str]:
    """Embed a text by the command line with an engine."""
    corpus = out.with_suffix(".jsonl")
    corpus.write_text('{"text": "a"}\n')
    words = ["embed", corpus, "--out", out, "--model", "null:4", "--devices", devices]
    command = [sys.executable, "-m", "embedfarm", *map(str, words), "--engine", engine]
    return subprocess.run(command, capture_output=True, text=True, check=False, env=environment)


def test_it_is_found_by_name(plugged: dict[str, str], tmp_path: Path) -> None:
    """The command line offers an engine of another package, and workers embed with it."""
    done = embed(plugged, tmp_path / "out", "doubled")
    assert done.returncode == 0, done.stderr
    manifest = json.loads((tmp_path / "out" / "_manifest.json").read_text())
    engines = {account["engine"] for account in manifest["accounts"].values()}
    assert engines == {"doubled on cpu float32"}


def test_one_that_does_not_load(plugged: dict[str, str], tmp_path: Path) -> None:
    """A job for an engine whose package does not load ends with the reason."""
    done = embed(plugged, tmp_path / "out", "broken")
    assert done.returncode != 0
    assert "'broken' of doubled:nothing does not load" in done.stderr


ENDS: Final = {
    "deadly": ("3 times in a row the worker's process ended while it loaded this model", 3),
    "failing": ("null:4 does not load: RuntimeError: no libfoo.so", 0),
    "hanging": ("the loading of null:4 did not finish within 2 s", 1),
}


@pytest.mark.parametrize("engine", list(ENDS))
def test_one_that_cannot_be_loaded(
    engine: str,
    plugged: dict[str, str],
    server: LiveServer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A job of such a model ends soon and says why; the next job is done by the same workers."""
    words, deaths = ENDS[engine]
    farm = FarmClient(connect(server.url))
    monkeypatch.setenv("PYTHONPATH", plugged["PYTHONPATH"])
    monkeypatch.setenv("EMBEDFARM_REDIS_URL", server.url)
    limits = {"load_seconds_max": "2", "hang_seconds": "1"}
    with role(server, tmp_path, "work", "--devices", "cpu", **limits):
        bad = embed(dict(os.environ), tmp_path / "bad", engine, "none")
        assert bad.returncode == 2
        assert words in bad.stderr
        good = embed(dict(os.environ), tmp_path / "good", "doubled", "none")
        assert good.returncode == 0, good.stderr
        assert max(beat.restarts for beat in farm.workers()) == deaths


def test_one_that_is_not_installed() -> None:
    """A record may name an engine of a package that is missing here; a worker refuses it."""
    spec = JobSpec(model="null:4", engine="doubled")
    with pytest.raises(ModelError, match="no engine 'doubled' here; there are auto, torch, openv"):
        open_engine(spec, "cpu", Settings())
    for name in ("", "Doubled", "no name", "x" * 41):
        with pytest.raises(ValueError, match="is none of auto, torch, openvino"):
            JobSpec(model="null:4", engine=name)
