"""Tests of jobs that are larger than jobs from outside may be."""

import gzip
from pathlib import Path

import pytest

from embedfarm.contract.settings import Settings
from embedfarm.ingest.job_limits import CHUNKS_MAX, OUTPUT_BYTES_MAX, limit
from embedfarm.ingest.outbound import Url, parse_url
from tests.farm.harness import texts_of, write_corpus
from tests.ingest.rq_farm import Door, failure, wait_for

COUNT = 2_000
LIMITS = {"job_chunks_max": COUNT, "job_output_bytes_max": 60_000, "http_upload_bytes_max": 500}


def test_a_job_that_is_too_large_fails(door: Door) -> None:
    """A job fails over too many chunks, too large an output or upload, and says which."""
    corpora = {
        "job_chunks_max allows, 2,000": ["a"] * (COUNT + 1),
        "job_output_bytes_max allows, 60,000 bytes": list(texts_of(COUNT)),
    }
    jobs = {}
    for number, (reason, texts) in enumerate(corpora.items()):
        corpus = write_corpus(door.home / f"{number}.jsonl", texts)
        out = str(door.home / f"out-{number}")
        jobs[reason] = door.enqueue("embed_corpus", str(corpus), out, model="null:16")
    upload = door.home / "jobs" / "a" / "input.jsonl.gz"
    upload.parent.mkdir(parents=True)
    upload.write_bytes(gzip.compress(b'{"text": "a"}\n' * 40))
    jobs["unpacks to more than corpus_bytes_max, 500 bytes"] = door.enqueue(
        "embed_corpus", str(upload), str(door.home / "out"), model="null:16"
    )
    settings = LIMITS | {"jobs_directory": door.home / "jobs", "part_bytes_max": 16_000}
    with door.ingest(**settings), door.work():
        for reason, job in jobs.items():
            wait_for(job, "failed")
            assert reason in failure(job)
        assert set(door.farm_states()) <= {"failed"}


@pytest.mark.parametrize("chosen", [None, 7, 0])
def test_limits_by_default(tmp_path: Path, chosen: int | None) -> None:
    """Limits that are not set have defaults for jobs from outside, by where the corpus is from."""
    settings = Settings().model_copy(
        update={"jobs_directory": tmp_path, "corpus_bytes_max": chosen, "job_chunks_max": chosen}
    )
    url = parse_url("http://127.0.0.1/a.jsonl.gz")
    sizes: dict[Path | Url, int | None] = {
        Path("/data/a"): None, tmp_path / "a": settings.http_upload_bytes_max,
        url: settings.fetch_bytes_max,
    }  # fmt: skip
    for source, size in sizes.items():
        found = limit(settings, [source])
        assert found.corpus_bytes_max == (size if chosen is None else chosen)
        assert found.job_chunks_max == (CHUNKS_MAX if chosen is None else chosen)
        assert found.job_output_bytes_max == OUTPUT_BYTES_MAX
