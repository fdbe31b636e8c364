"""Tests of what is installed: the wheel, in an environment of its own, outside of the tree."""

import gzip
import json
import socket
import subprocess
import sys
import tempfile
import venv
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import Distribution, distribution
from pathlib import Path
from typing import Final

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from packaging.requirements import Requirement

from embedfarm.contract.settings import DEFAULT_MODEL
from tests.support import LiveServer, wait_until

pytestmark = pytest.mark.system

ROOT: Final = Path(__file__).parents[1]
ATTEMPT_SECONDS: Final = 120  # beside other tests; none of the commands takes ten seconds
TEXTS: Final = [f"text number {number}" for number in range(10)]


def required(requirement: Requirement) -> dict[str, Distribution]:
    """Return what is installed here of all that a package requires, with itself, by name.

    Raises:
        AssertionError: The version that is here of something is not one that is required.
    """
    found, todo = {}, [requirement]
    seen: set[tuple[str, frozenset[str]]] = set()
    while todo:
        each = todo.pop()
        key = each.name.lower(), frozenset(each.extras)
        if key in seen:
            continue
        seen.add(key)
        found[key[0]] = package = distribution(each.name)
        assert each.specifier.contains(package.version, prereleases=True), each
        todo += [
            needed
            for needed in map(Requirement, package.requires or ())
            if needed.marker is None
            or any(needed.marker.evaluate({"extra": extra}) for extra in ("", *each.extras))
        ]
    return found


class Environment:
    """A virtual environment with the wheel in it, and commands that run there.

    Attributes:
        path: Its directory, outside of the tree.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        venv.create(path)

    def install(self, wheel: Path, extras: str) -> None:
        """Install the wheel by pip, with all that it requires."""
        # Of thousands of modules only some are used, and compiled then.
        install = ("install", "--quiet", "--no-compile", "-c", ROOT / "constraints.txt")
        if extras:
            self.pip(*install, "torch")
        self.pip(*install, f"{wheel}{extras}")

    def link(self, wheel: Path, extras: str) -> None:
        """Install the wheel alone by pip, and link what it requires, and nothing else, from here.

        That takes two seconds, where pip would unpack gigabytes in a minute.
        """
        self.pip("install", "--quiet", "--no-deps", wheel)
        packages = required(Requirement(f"embedfarm{extras}"))
        del packages["embedfarm"]
        (site,) = self.path.glob("lib/python*/site-packages")
        for package in packages.values():
            for name in {file.parts[0] for file in package.files or ()} - {"..", "__pycache__"}:
                if not (site / name).exists():
                    (site / name).symlink_to(str(package.locate_file(name)))

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

    def attempt(self, directory: Path, *words: object) -> "subprocess.CompletedProcess[str]":
        """Run `embedfarm` in a directory, and return how it ended."""
        return subprocess.run(
            self.command("embedfarm", *words),
            cwd=directory,
            capture_output=True,
            text=True,
            timeout=ATTEMPT_SECONDS,
            check=False,
        )

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
def environment() -> Iterator[Environment]:
    """Make an environment that is gone afterwards, on a disk: it may take gigabytes."""
    with tempfile.TemporaryDirectory(prefix="embedfarm-wheel-", dir="/var/tmp") as directory:
        yield Environment(Path(directory))


@pytest.fixture(scope="module")
def base(wheel: Path) -> Iterator[Environment]:
    """Install the wheel without extras, by pip."""
    with environment() as base:
        base.install(wheel, "")
        yield base


def corpus(directory: Path) -> Path:
    """Write a corpus of ten lines."""
    path = directory / "ten.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    return path


@pytest.fixture(scope="module")
def everything(wheel: Path) -> Iterator[Environment]:
    """Install the wheel, with what all extras require."""
    with environment() as everything:
        everything.link(wheel, "[all]")
        yield everything


@pytest.mark.slow
def test_pip_installs_all(wheel: Path, tmp_path: Path) -> None:
    """The wheel with all extras, as pip installs it, does the main job."""
    with environment() as everything:
        everything.install(wheel, "[all]")
        do_the_main_job(everything, tmp_path)


@pytest.mark.timeout(600)
def test_all(everything: Environment, tmp_path: Path) -> None:
    """The wheel with all extras does the main job, and installs no name but ours."""
    do_the_main_job(everything, tmp_path)


def do_the_main_job(everything: Environment, tmp_path: Path) -> None:
    """Embed ten lines in an environment, and look at what is installed there, and what comes."""
    out = tmp_path / "vectors"
    assert everything.names() == {"embedfarm"}
    everything.run("embedfarm", "embed", corpus(tmp_path), "--out", out, "--devices", "cpu")
    everything.run("embedfarm", "verify", out, "--against", tmp_path / "ten.jsonl")
    manifest = json.loads((out / "_manifest.json").read_text())
    assert (manifest["count"], manifest["dimensions"]) == (len(TEXTS), 384)
    assert manifest["model"] == DEFAULT_MODEL


def write_formats(directory: Path) -> list[str]:
    """Write the ten texts in ten formats; return the words that name each to `embed`."""
    rows = [{"id": str(number), "text": text} for number, text in enumerate(TEXTS)]
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    table = pa.Table.from_pylist(rows)
    (directory / "a.jsonl").write_text(lines)
    (directory / "a.ndjson.gz").write_bytes(gzip.compress(lines.encode()))
    (directory / "a.jsonl.zst").write_bytes(zstandard.compress(lines.encode()))
    (directory / "a.json").write_text(json.dumps(rows))
    for name, delimiter in (("a.csv", ","), ("semicolons.csv", ";"), ("a.tsv", "\t")):
        cells = [delimiter.join(row.values()) for row in rows]
        (directory / name).write_text("\n".join([delimiter.join(rows[0]), *cells]) + "\n")
    (directory / "a.txt").write_text("\n".join(TEXTS) + "\n")
    pq.write_table(table, directory / "a.parquet")
    (directory / "parts").mkdir()
    for part in range(2):
        pq.write_table(table[5 * part : 5 * part + 5], directory / "parts" / f"{part}.parquet")
    return [
        "a.jsonl", "a.ndjson.gz", "a.jsonl.zst", "a.json", "a.csv", "semicolons.csv", "a.tsv",
        "a.txt", "a.parquet", "parts",
    ]  # fmt: skip


MISTAKES: Final = {
    "embed none.jsonl --out o --model null:8": "none.jsonl: no such file",
    "embed a.jsonl --model null:8": "Missing option '--out'",
    "embed body.jsonl --out o --model null:8": "there are 'body', and --text-field says which",
    "embed broken.jsonl --out o --model null:8": "broken.jsonl line 2: not JSON",
    "embed latin.csv --out o --model null:8": "--encoding cp1252",
    "embed empty.jsonl --out o --model null:8": "there is nothing to embed",
    "embed notes.md --out o --model null:8": "unknown format; name one of jsonl",
    "embed a.jsonl --out s3://bucket/o --model null:8": "an output is a directory of this machine",
    "embed a.jsonl --out o --model null:8 --dimensions 9": "has vectors of 8 dimensions",
    "embed a.jsonl --out o --model no/such-model": "model 'no/such-model' is no directory",
    "embed a.jsonl --out o --model null:8 --prompt a --prompt-name b": "two ways to say the same",
    "embed a.csv --out done --model null:8": "needs a directory of its own",
    "search parts apples": "no finished output is here",
    "jobs ls": "which server? give --redis URL or set EMBEDFARM_REDIS_URL",
    "up --port {busy}": "cannot listen at 127.0.0.1, port {busy}",
}
"""Commands that cannot do what is meant, and what their users are told."""


@pytest.mark.timeout(900)
def test_the_first_hour(everything: Environment, tmp_path: Path) -> None:
    """A newcomer's files are embedded whatever their format is, and each mistake is explained.

    They lie beside Python files with the names of modules that the farm itself needs.
    """
    for name in ("queue.py", "email.py", "workers/__init__.py", "contract/__init__.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("raise RuntimeError('of the user')")
    sources, out = write_formats(tmp_path), tmp_path / "done"
    done = everything.attempt(tmp_path, "embed", *sources, "--out", out, "--model", "null:8")
    assert done.returncode == 0, done.stderr
    count = json.loads((out / "_manifest.json").read_text())["count"]
    assert count == len(sources) * len(TEXTS)
    (tmp_path / "body.jsonl").write_text('{"body": "a"}\n')
    (tmp_path / "broken.jsonl").write_text('{"text": "a"}\n{"text": \n')
    (tmp_path / "latin.csv").write_bytes("text\ncaf\u00e9\n".encode("latin-1"))
    (tmp_path / "empty.jsonl").write_text("")
    (tmp_path / "notes.md").write_text("# Notes\n")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        busy = taken.getsockname()[1]
        for command, told in MISTAKES.items():
            done = everything.attempt(tmp_path, *command.format(busy=busy).split())
            said = " ".join(done.stderr.replace("│", " ").split())
            assert done.returncode != 0, command
            assert told.format(busy=busy) in said, (command, done.stderr)
            assert "Traceback" not in done.stderr, (command, done.stderr)


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
