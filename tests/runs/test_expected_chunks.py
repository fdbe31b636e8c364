"""Test that a job says how many chunks it will have, while its corpus is still read."""

from pathlib import Path

import redis

from embedfarm.contract.farm_client import FarmClient
from embedfarm.contract.settings import Settings
from embedfarm.contract.status import JobStatus
from embedfarm.watch.advice_reader import read_advice
from tests.farm.harness import Embedding, write_corpus
from tests.support import LiveServer, wait_until

CHUNKS = 40_000
SMALL = {"EMBEDFARM_WINDOW_BYTES_MAX": str(1 << 20), "EMBEDFARM_PART_BYTES_MAX": str(1 << 15)}


def test_a_corpus_larger_than_the_window_is_expected(
    server: LiveServer, client: redis.Redis, tmp_path: Path
) -> None:
    """A producer that waits for room has said how much is to come, and advice goes by it."""
    farm = FarmClient(client)
    corpus = write_corpus(tmp_path / "corpus.jsonl", ["a text of some words"] * CHUNKS)
    words = (corpus, "--model", "null:16", "--redis", server.url)
    running = Embedding(words, tmp_path / "out", SMALL)

    def status() -> JobStatus | None:
        return next(iter(farm.statuses().values()), None)

    try:
        wait_until(lambda: (now := status()) is not None and now.chunks_expected)
        found = status()
        assert found is not None
        assert found.chunk_count < 0
        assert 0 < found.chunks_in < CHUNKS / 2
        assert abs(found.chunks_expected / CHUNKS - 1) < 0.05
        advice = read_advice(farm, Settings())
        whole = CHUNKS * found.tokens_in / found.chunks_in
        assert abs(advice.backlog_tokens / whole - 1) < 0.05
    finally:
        running.kill()
