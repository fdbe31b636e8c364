"""Tests of what is installed: the wheel, in an environment of its own, outside of the tree."""

import json
import subprocess
import sys
import tempfile
import venv
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import pytest

from embedfarm.contract.settings import DEFAULT_MODEL
from tests.support import LiveServer, wait_until

pytestmark = pytest.mark.system

ROOT: Final = Path(__file__).parents[1]
TEXTS: Final = [f"text number {number}" for number in range(10)]


class Environment:
    """A virtual environment with the wheel in it, and commands that run there.

    Attributes:
        path: Its directory, outside of the tree.
    """

    def __init__(self, path: Path, wheel: Path, extras: str) -> None:
        self.path = path
        venv.create(path)
        # Of thousands of modules only some are used, and compiled then.
        install = ("install", "--quiet", "--no-compile", "-c", ROOT / "constraints.txt")
        if "worker" in extras or "all" in extras:
            self.pip(*install, "torch")
        self.pip(*install, f"{wheel}{extras}")

    def pip(self, *words: object) -> str:
        """Run pip for the environment, and return what it prints."""
        pip = (sys.executable, "-m", "pip", "--python", self.path / "bin" / "python", *words)
        done = subprocess.run(list(map(str, pip)), capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def command(self, *words: object) -> list[str]:
        """Return a command of the environment, by the name of its program."""
        program, *rest = map(str, words)
        return [str(self.path / "bin" / program), *rest]

    def run(self, *words: object) -> str:
        """Run a command outside of the tree, and return what it prints."""
        done = subprocess.run(
            self.command(*words), cwd=self.path, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    @contextmanager
    def running(self, *words: object) -> Iterator[None]:
        """Run a command beside the block, and end it by SIGTERM."""
        process = subprocess.Popen(self.command(*words), cwd=self.path)
        try:
            yield
        finally:
            process.terminate()
            process.wait(60)

    def names(self) -> set[str]:
        """Return the top-level names that the wheel has installed."""
        listed = self.pip("show", "--files", "embedfarm")
        files = listed.partition("Files:\n")[2].split()
        places = {Path(file).parts[0] for file in files}
        return {place for place in places if place != ".." and not place.endswith(".dist-info")}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the wheel from the tree."""
    directory = tmp_path_factory.mktemp("wheel")
    pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps"]
    subprocess.run([*pip, "-w", str(directory), str(ROOT)], check=True)
    (found,) = directory.glob("embedfarm-*.whl")
    return found


@contextmanager
def installed(wheel: Path, extras: str) -> Iterator[Environment]:
    """Install the wheel into an environment that is gone afterwards: it may take gigabytes."""
    with tempfile.TemporaryDirectory(prefix="embedfarm-wheel-") as directory:
        yield Environment(Path(directory), wheel, extras)


@pytest.fixture(scope="module")
def base(wheel: Path) -> Iterator[Environment]:
    """Install the wheel without extras."""
    with installed(wheel, "") as environment:
        yield environment


def corpus(directory: Path) -> Path:
    """Write a corpus of ten lines."""
    path = directory / "ten.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    return path


@pytest.mark.timeout(600)
def test_all(wheel: Path, tmp_path: Path) -> None:
    """The wheel with all extras does the main job, and installs no name but ours."""
    out = tmp_path / "vectors"
    with installed(wheel, "[all]") as environment:
        assert environment.names() == {"embedfarm"}
        environment.run("embedfarm", "embed", corpus(tmp_path), "--out", out, "--devices", "cpu")
        environment.run("embedfarm", "verify", out, "--against", tmp_path / "ten.jsonl")
    manifest = json.loads((out / "_manifest.json").read_text())
    assert (manifest["count"], manifest["dimensions"]) == (len(TEXTS), 384)
    assert manifest["model"] == DEFAULT_MODEL


def test_base(base: Environment, server: LiveServer, tmp_path: Path) -> None:
    """The wheel without extras has no torch, and schedules, submits, collects and lists jobs."""
    packages = base.pip("list", "--format", "freeze").lower()
    assert not {"torch", "rq", "fastapi"} & {line.partition("==")[0] for line in packages.split()}
    out = tmp_path / "vectors"
    redis = ("--redis", server.url)
    words = [*redis, "--devices", "cpu", "--workers", "1"]
    worker = [sys.executable, "-m", "embedfarm", "work", *words]
    with base.running("embedfarm", "schedule", *redis):
        process = subprocess.Popen(worker, cwd=ROOT)
        try:
            wait_until(lambda: base.run("embedfarm", "workers", "--json", *redis) != "[]\n")
            embed = ["embed", corpus(tmp_path), "--out", out, "--model", "null:8", *redis]
            base.run("embedfarm", *embed, "--job-id", "ten")
            jobs = base.run("embedfarm", "jobs", "show", "ten", "--json", *redis)
        finally:
            process.terminate()
            process.wait(60)
    assert json.loads(jobs)["state"] == "finished"
    base.run("embedfarm", "verify", out)


def test_a_missing_extra_is_named(base: Environment) -> None:
    """A verb that needs a library which is not installed says which extra brings it."""
    done = subprocess.run(
        base.command("embedfarm", "serve"), capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert "pip install 'embedfarm[web]'" in done.stderr
