"""Tests of jobs whose vectors are stored past the server, with real processes and kills."""

import contextlib
import os
import random
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis

from embedfarm.contract.farm_client import FarmClient
from tests.farm.failed_chunks import fail_chunks
from tests.farm.harness import (
    Embedding,
    check_output,
    manifest,
    role,
    run,
    start_role,
    texts_of,
    write_corpus,
)
from tests.farm.listed_output import check_listed, listed_files
from tests.support import LiveServer, wait_until

MODEL = ("--model", "null:16", "--devices", "cpu", "--workers", "2")
SMALL = {"EMBEDFARM_PART_BYTES_MAX": "65536"}


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A directory below which jobs store their vectors."""
    directory = tmp_path / "stored"
    directory.mkdir()
    return directory


def stored_files(place: Path) -> list[Path]:
    """Return all files of all jobs in a place."""
    return [path for path in place.rglob("*") if path.is_file()]


def test_a_private_farm_stores_vectors(tmp_path: Path, place: Path) -> None:
    """Vectors, failed chunks and ids are those of an inline job, and nothing is left behind."""
    texts = list(texts_of(5_000))
    corpus = write_corpus(tmp_path / "c.jsonl", texts, [str(each) for each in range(len(texts))])
    for words in ((), ("--stored", place)):
        out = tmp_path / f"out-{len(words)}"
        done = run("embed", corpus, "--id-field", "id", "--out", out, *MODEL, *words)
        assert done.returncode == 0, done.stderr
        check_output(out, texts, 16)
    facts = [manifest(tmp_path / name) for name in ("out-0", "out-2")]
    assert facts[0]["settings"] == facts[1]["settings"]
    assert facts[0]["count"] == facts[1]["count"]
    assert list(place.iterdir()) == []


LISTED = ("--format", "stored")


def test_an_output_lists_what_is_stored(tmp_path: Path, place: Path) -> None:
    """Vectors stay where workers stored them, all other commands read them there, and no more."""
    texts = [f"text {number % 4_000}" for number in range(5_000)]
    corpus, out = write_corpus(tmp_path / "c.jsonl", texts), tmp_path / "out"
    words = (corpus, *MODEL, "--stored", place, *LISTED)
    for more in ((), ("--deduplicate",)):
        assert run("embed", *words, *more, "--out", out, environment=SMALL).returncode == 0
        check_listed(out, texts, 16)
        assert listed_files(out) == {str(path) for path in stored_files(place)}
        assert run("verify", out, "--against", corpus).returncode == 0
        assert "chunk 7\n" in run("search", out, texts[7]).stdout
        facts = manifest(out)
        assert sum(part["stored_bytes"] for part in facts["parts"]) == 5_000 * 16 * 4
        assert all(part["bytes"] < part["stored_bytes"] for part in facts["parts"])
        assert bool(facts["reused"]) == bool(more)
        copy = tmp_path / f"copy-{len(more)}"
        assert run("export", out, "--out", copy, "--format", "parquet").returncode == 0
        check_output(copy, texts, 16)
        shutil.rmtree(out)
        shutil.rmtree(place)
    done = run("embed", corpus, *MODEL, *LISTED, "--out", out)
    assert (done.returncode, "say where (--stored)" in done.stderr) == (2, True)
    done = run("export", copy, "--out", out, *LISTED)
    assert (done.returncode, "'stored' is not one of" in done.stderr) == (2, True)


@pytest.mark.parametrize("more", [(), LISTED], ids=["carried", "listed"])
def test_a_copy_leaves_the_original_its_vectors(
    tmp_path: Path, place: Path, more: tuple[str, ...]
) -> None:
    """A copy of an unfinished output is refused while it would delete what that needs."""
    texts = list(texts_of(2_000))
    corpus, out = write_corpus(tmp_path / "c.jsonl", texts), tmp_path / "out"
    tiny = {"EMBEDFARM_PART_BYTES_MAX": "2048"}
    words = [corpus, *MODEL, "--model", "null:16:200000", *more, "--stored", place]
    embedding = Embedding(words, out, tiny)
    wait_until(lambda: len(list(out.glob("part-*"))) >= 2)
    embedding.process.send_signal(signal.SIGINT)
    assert embedding.wait() == 130
    copy = shutil.copytree(out, tmp_path / "copy")

    def go_on(directory: Path) -> None:
        done = run("embed", *words, "--out", directory, environment=tiny)
        assert done.returncode == 0, done.stderr
        assert run("verify", directory, "--against", corpus).returncode == 0

    def is_refused() -> None:
        done = run("embed", *words, "--out", copy, environment=tiny)
        assert (done.returncode, f"is a copy of {out}" in done.stderr) == (2, True), done.stderr

    is_refused()
    go_on(out)
    is_refused() if more else go_on(copy)
    assert run("verify", out).returncode == 0


def test_chunks_that_failed_are_tried_again(tmp_path: Path, place: Path) -> None:
    """A retry stores the vectors that were missing, and leaves the others where they are."""
    texts = list(texts_of(400))
    corpus, out = write_corpus(tmp_path / "c.jsonl", texts), tmp_path / "out"
    words = ("embed", corpus, *MODEL, *LISTED, "--out", out)
    assert run(*words, "--stored", place).returncode == 0
    fail_chunks(out, texts, {0, 120, 121, 399})
    before = listed_files(out)
    done = run(*words, "--retry-failed")
    assert done.returncode == 0, done.stderr
    check_listed(out, texts, 16)
    assert before < listed_files(out)
    assert sum(Path(each).stat().st_size for each in listed_files(out) - before) == 4 * 16 * 4
    assert run("verify", out, "--against", corpus).returncode == 0


@pytest.mark.parametrize("more", [(), LISTED], ids=["carried", "listed"])
def test_kills_lose_no_stored_vector(tmp_path: Path, place: Path, more: tuple[str, ...]) -> None:
    """Command, workers and server are killed, a file is damaged, and all goes on to the end."""
    texts = list(texts_of(60_000))
    corpus = write_corpus(tmp_path / "c.jsonl", texts)
    generator, out, listed = random.Random(1), tmp_path / "out", bool(more)
    words = ["--stored", place, *MODEL, corpus, *more]
    for victim in ("worker", "server", "command"):
        embedding = Embedding(words, out, SMALL)
        wait_until(lambda e=embedding: e.chunks_done() > 2_000 or e.process.poll() is not None)  # type: ignore[misc] # mypy#6
        if victim == "command":
            embedding.kill()
            kept = listed_files(out)  # which nobody makes anew: verify tells of it
            found = [path for path in stored_files(place) if str(path) not in kept]
            for path in generator.sample(found, min(2, len(found))):
                with contextlib.suppress(FileNotFoundError), path.open("r+b") as file:
                    file.truncate(6) if listed else file.write(b"damage")
        else:
            embedding.kill_one(victim)
            with contextlib.suppress(TimeoutError):
                before = embedding.chunks_done()
                wait_until(lambda e=embedding, b=before: e.chunks_done() > b, 20)  # type: ignore[misc] # mypy#6
            embedding.kill()
    assert run("embed", *words, "--out", out, environment=SMALL).returncode == 0
    if listed:
        check_listed(out, texts, 16)
        assert listed_files(out) == {str(path) for path in stored_files(place)}
    else:
        check_output(out, texts, 16)
        assert list(place.iterdir()) == []


@pytest.fixture
def farm(
    server: LiveServer, client: redis.Redis, tmp_path: Path, place: Path
) -> Iterator[FarmClient]:
    """Start a scheduler and a worker that may store vectors."""
    roots = f'["{place}"]'
    with (
        role(server, tmp_path, "schedule"),
        role(server, tmp_path, "work", "--devices", "cpu", "--workers", "1", stored_roots=roots),
    ):
        wait_until(lambda: FarmClient(client).workers())
        yield FarmClient(client)


def test_another_place_is_refused(
    server: LiveServer, farm: FarmClient, tmp_path: Path, place: Path
) -> None:
    """Workers refuse a place that their operator did not allow, and the command says so."""
    corpus = write_corpus(tmp_path / "c.jsonl", ["one", "two"])
    words = ("embed", corpus, "--model", "null:16", "--redis", server.url)
    elsewhere = tmp_path / "elsewhere"
    done = run(*words, "--out", tmp_path / "out", "--stored", elsewhere)
    assert done.returncode == 2
    assert "is not below one of stored_roots" in done.stderr
    assert not elsewhere.exists() or list(elsewhere.iterdir()) == []
    done = run(*words, "--out", tmp_path / "out", "--stored", "s3://key:secret@bucket")
    assert (done.returncode, "secret@" in done.stderr) == (2, False)
    done = run(*words, "--out", tmp_path / "out", "--stored", place)
    assert done.returncode == 0, done.stderr
    assert farm.statuses() == {} or all(each.ended for each in farm.statuses().values())


def test_a_resume_with_another_place(
    server: LiveServer, farm: FarmClient, tmp_path: Path, place: Path
) -> None:
    """A job that has begun stays where it is stored, until somebody removes it."""
    corpus = write_corpus(tmp_path / "c.jsonl", ["one", "two"])
    words = ["embed", corpus, "--model", "null:8", "--redis", server.url, "--job-id", "j"]
    words += ["--out", tmp_path / "out"]
    with role_stopped(farm):
        first = start_role(server, tmp_path, *map(str, words), "--stored", str(place))
        wait_until(lambda: (found := farm.statuses().get("j")) and found.chunk_count == 2)
        first.kill()
        first.wait(20)
        done = run(*words, "--stored", place / "other")
        assert done.returncode == 2
        assert "go on with that, or remove the job first: embedfarm jobs rm j" in done.stderr
    assert run(*words, "--stored", place).returncode == 0
    assert stored_files(place) == []


@contextlib.contextmanager
def role_stopped(farm: FarmClient) -> Iterator[None]:
    """Let the farm's worker stand still."""
    (beat,) = farm.workers()
    os.kill(beat.pid, 19)
    try:
        yield
    finally:
        os.kill(beat.pid, 18)
