"""Tests of changed corpora, shared ids and sleeping workers between runs, in real processes.

A command is stopped at a random moment, by Ctrl-C or for good; the corpus, or what else there is,
changes; and the command comes again. It may refuse, by name of what differs. It may never end well
with a vector of another text.
"""

import os
import random
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Final

import pytest

from embedfarm.contract.backlog import read_backlogs
from embedfarm.contract.broker import closing_client
from embedfarm.contract.farm_client import FarmClient
from embedfarm.contract.records import Heartbeat
from tests.farm.harness import Embedding, check_output, role, run, write_corpus
from tests.support import LiveServer, wait_until

DIMENSIONS: Final = 16
CHUNKS: Final = 20_000
MODEL: Final = f"null:{DIMENSIONS}:60000"
ENVIRONMENT: Final = {
    "EMBEDFARM_PART_BYTES_MAX": str(4000 * 4 * DIMENSIONS),
    "EMBEDFARM_WINDOW_BYTES_MAX": str(12_000 * 4 * DIMENSIONS),
    "EMBEDFARM_RESULTS_BYTES_MAX": str(20_000 * 4 * DIMENSIONS),
}
SECONDS_MAX: Final = 120.0
AGAIN: Final = ("--embed-changed",)


def texts_of(count: int) -> list[str]:
    """Return texts of about ten tokens, no two alike."""
    return [f"chunk {index} of a corpus that people change" for index in range(count)]


def insert(texts: list[str], draw: random.Random) -> list[str]:
    """Insert a row somewhere, which shifts what follows."""
    place = draw.randrange(len(texts))
    return [*texts[:place], "inserted", *texts[place:]]


def remove(texts: list[str], draw: random.Random) -> list[str]:
    """Remove a row somewhere."""
    place = draw.randrange(len(texts))
    return [*texts[:place], *texts[place + 1 :]]


def shuffle(texts: list[str], draw: random.Random) -> list[str]:
    """Shuffle a run of rows."""
    first = draw.randrange(len(texts))
    middle = texts[first : first + 3000]
    draw.shuffle(middle)
    return [*texts[:first], *middle, *texts[first + 3000 :]]


def shorten(texts: list[str], draw: random.Random) -> list[str]:
    """Remove the last rows."""
    return texts[: draw.randrange(1, len(texts))]


def grow(texts: list[str], _draw: random.Random) -> list[str]:
    """Add rows at the end."""
    return [*texts, *(f"more {index}" for index in range(500))]


CHANGES: Final[Sequence[Callable[[list[str], random.Random], list[str]]]] = (
    insert, remove, shuffle, shorten, grow,
)  # fmt: skip


def stop_at_random(embedding: Embedding, draw: random.Random) -> None:
    """End a command by Ctrl-C or kill -9 when a random part of its work is done."""
    target = draw.randrange(1, CHUNKS)
    wait_until(lambda: embedding.chunks_done() >= target or embedding.process.poll() is not None)
    if draw.random() < 0.5:
        embedding.kill()
    else:
        embedding.process.send_signal(signal.SIGINT)
        assert embedding.wait() in {0, 130}


def finish(words: Sequence[object], out: Path, texts: Sequence[str]) -> None:
    """Run the command again, with `--embed-changed` if it asks for it, and check the output."""
    done = run("embed", *words, "--out", out, environment=ENVIRONMENT)
    if done.returncode == 2:
        assert "--embed-changed" in done.stderr, done.stderr
        done = run("embed", *words, "--out", out, "--embed-changed", environment=ENVIRONMENT)
    assert done.returncode == 0, done.stderr
    check_output(out, texts, DIMENSIONS)
    verified = run("verify", out)
    assert verified.returncode == 0
    assert "compared with their source by embed" in verified.stdout


def change_between_runs(home: Path, seed: int) -> None:
    """Stop a command at random, change its corpus, and finish the output."""
    draw = random.Random(seed)
    texts = texts_of(CHUNKS)
    corpus, out = write_corpus(home / "corpus.jsonl", texts), home / "out"
    words = [corpus, "--model", MODEL, "--devices", "cpu", "--workers", 2]
    embedding = Embedding(words, out, ENVIRONMENT)
    stop_at_random(embedding, draw)
    if (out / "_manifest.json").exists():
        return
    changed = CHANGES[seed % len(CHANGES)](texts, draw)
    write_corpus(corpus, changed)
    finish(words, out, changed)


def sleep_into_the_next_generation(server: LiveServer, home: Path, seed: int) -> None:
    """Stop a worker, let its job fail over a bad row and be made anew, and wake the worker."""
    draw = random.Random(seed)
    texts = texts_of(6000)
    corpus, out = write_corpus(home / "corpus.jsonl", texts), home / "out"
    with corpus.open("a") as file:
        file.write('{"text": 7}\n')
    model = f"null:{DIMENSIONS}:20000"
    words = [corpus, "--model", model, "--redis", server.url, "--job-id", "nightly"]
    environment = {**ENVIRONMENT, "EMBEDFARM_PART_BYTES_MAX": str(5900 * 4 * DIMENSIONS)}
    with ExitStack() as stack:
        client = stack.enter_context(closing_client(server.url))
        farm = FarmClient(client)
        stack.enter_context(role(server, home, "work", "--devices", "cpu", "--workers", "2"))
        wait_until(lambda: len(farm.workers()) == 2, SECONDS_MAX)
        first = Embedding(words, out, environment)
        asleep = draw.choice(await_holders(farm))
        os.kill(asleep.pid, signal.SIGSTOP)
        stack.callback(os.kill, asleep.pid, signal.SIGCONT)
        assert first.wait() == 2, first.log()
        changed = texts[::-1]
        write_corpus(corpus, changed)
        again = Embedding([*words, *AGAIN], out, environment)
        await_holders(farm)
        wake_at = time.monotonic() + 0.2 * draw.random()
        wait_until(lambda: time.monotonic() > wake_at)
        os.kill(asleep.pid, signal.SIGCONT)
        assert again.wait() == 0, again.log()
    check_output(out, changed, DIMENSIONS)


def await_holders(farm: FarmClient) -> list[Heartbeat]:
    """Wait until some workers hold blocks of a job, and return them."""
    holders: list[Heartbeat] = []

    def look() -> bool:
        backlogs = read_backlogs(farm.client, farm.job_ids())
        held = {
            worker for each in backlogs for worker, blocks in each.held_blocks.items() if blocks
        }
        holders[:] = [beat for beat in farm.workers() if beat.worker in held]
        return bool(holders)

    wait_until(look, SECONDS_MAX)
    return holders


def share_an_id(server: LiveServer, home: Path, seed: int) -> None:
    """Run two commands with one job id for two corpora; one may be refused, none be wrong."""
    draw = random.Random(seed)
    corpora = [texts_of(CHUNKS), texts_of(CHUNKS)[::-1]]
    with role(server, home, "work", "--devices", "cpu", "--workers", "1"):
        commands = []
        for number, texts in enumerate(corpora):
            corpus = write_corpus(home / f"corpus-{number}.jsonl", texts)
            words = [corpus, "--model", MODEL, "--redis", server.url, "--job-id", "nightly"]
            commands.append(Embedding(words, home / f"out-{number}", ENVIRONMENT))
            pause = time.monotonic() + 3 * draw.random()
            wait_until(lambda pause=pause: time.monotonic() > pause)  # type: ignore[misc] # mypy#6
        statuses = [command.wait() for command in commands]
    assert sorted(statuses) in ([0, 0], [0, 2]), commands[0].log()
    for number, texts in enumerate(corpora):
        if statuses[number] == 0:
            check_output(home / f"out-{number}", texts, DIMENSIONS)


def test_a_corpus_changes_between_two_runs(tmp_path: Path) -> None:
    """A row that is inserted between two runs is in the output, and so is the rest."""
    change_between_runs(tmp_path, 0)


def test_a_worker_sleeps_into_the_next_generation(server: LiveServer, tmp_path: Path) -> None:
    """A worker that slept while its job was made anew commits nothing of the earlier order."""
    sleep_into_the_next_generation(server, tmp_path, 0)


def test_two_commands_share_an_id(server: LiveServer, tmp_path: Path) -> None:
    """Two commands that name the same job never mix their outputs."""
    share_an_id(server, tmp_path, 0)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1, 21))
def test_corpora_change_twenty_times(tmp_path: Path, seed: int) -> None:
    """An output is that of its corpus after each kind of change, at random moments."""
    change_between_runs(tmp_path, seed)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1, 21))
def test_workers_sleep_twenty_times(server: LiveServer, tmp_path: Path, seed: int) -> None:
    """A worker that slept commits nothing of an earlier order, at random moments."""
    sleep_into_the_next_generation(server, tmp_path, seed)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1, 21))
def test_ids_are_shared_twenty_times(server: LiveServer, tmp_path: Path, seed: int) -> None:
    """Two commands of one id never mix their outputs, whenever the second one comes."""
    share_an_id(server, tmp_path, seed)
