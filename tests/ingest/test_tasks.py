"""Tests of what programs ask for through RQ."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq
from rq import Retry

from embedfarm.contract.broker import closing_client
from embedfarm.contract.farm_client import FarmClient
from embedfarm.contract.job_spec import JobSpec
from tests.contract.little_job import make_job
from tests.farm.harness import check_output, manifest, texts_of, write_corpus
from tests.ingest.rq_farm import SLOW, START_SECONDS, Door, failure, returned, wait_for
from tests.runs.test_by_reference import shared
from tests.support import wait_until

if TYPE_CHECKING:
    from rq.job import Job


def test_a_corpus_is_embedded_and_exported(door: Door, tmp_path: Path) -> None:
    """A program that has only rq can embed, export and check a corpus, with progress in `meta`.

    What is done is not done again, and a corpus that changed since is a problem that is named.
    """
    texts = list(texts_of(4_000))
    corpus = str(write_corpus(tmp_path / "corpus.jsonl", texts))
    out, copy = str(tmp_path / "out"), str(tmp_path / "copy")
    first = door.enqueue("embed_corpus", corpus, out, model=SLOW, priority="high")
    then = door.enqueue("export", out, copy, format="npy", depends_on=first)
    last = door.enqueue("reconcile", copy, corpus, depends_on=then)
    with door.ingest(), door.work():
        wait_until(lambda: 0 < first.get_meta().get("done", 0) < 4_000, START_SECONDS)
        assert [each.priority for each in door.farm_jobs().values()] == [1]
        wait_for(last, "finished")
        again = door.enqueue("retry_failed", corpus, out, model=SLOW)
        wait_for(again, "finished")
        write_corpus(tmp_path / "corpus.jsonl", [*texts[:-1], "another"])
        check = door.enqueue("reconcile", out, corpus)
        wait_for(check, "finished")
    first.refresh()
    assert first.description == f"embed {corpus} into {out} with {SLOW}"
    assert first.meta | {"job": ""} == {
        "job": "", "state": "finished", "out": out, "done": 4_000, "of": 4_000, "failed": 0,
    }  # fmt: skip
    assert returned(first)["count"] == 4_000
    assert returned(first)["finished_before"] is False
    assert returned(last)["problems"] == []
    assert (returned(again)["finished_before"], returned(again)["repaired"]) == (True, 0)
    assert "other texts" in returned(check)["problems"][0]["problem"]
    check_output(Path(out), texts, 16)
    assert manifest(Path(copy))["format"] == "npy"
    assert not door.farm_jobs()
    assert 0 < door.connection.ttl(first.key) <= 86_400


def test_vectors_of_other_outputs_are_taken(door: Door, tmp_path: Path) -> None:
    """A program names outputs whose vectors are taken, and has repeated texts embedded once."""
    texts = list(texts_of(60))
    corpora = [texts[:20], texts[20:40] * 2, [*texts, *texts], texts]
    paths = [str(write_corpus(tmp_path / f"{n}.jsonl", each)) for n, each in enumerate(corpora)]
    outs = [str(tmp_path / f"out {n}") for n in range(4)]
    options: list[dict[str, Any]] = [{}, {"deduplicate": True}, {"reuse": outs[:2]}]
    options.append({"reuse": outs[0], "by_reference": True})
    jobs: list[Job] = []
    for path, out, more in zip(paths, outs, options, strict=True):
        after = {"depends_on": jobs[-1]} if jobs else {}
        jobs.append(door.enqueue("embed_corpus", path, out, model="null:16", **more, **after))
    with door.ingest(), door.work():
        wait_for(jobs[-1], "finished")
    reused = [returned(job)["reused"] for job in jobs]
    assert reused == [{}, {".": 20}, {outs[0]: 40, outs[1]: 40, ".": 20}, {outs[0]: 20}]
    for out, corpus in zip(outs, corpora, strict=True):
        check_output(Path(out), corpus, 16)
    assert shared(Path(outs[3]), Path(outs[0])) == {"part-000000000000.parquet"}
    assert not shared(Path(outs[2]), Path(outs[0]))


def test_parts_by_reference_of_nothing(door: Door, tmp_path: Path) -> None:
    """A program that names no output, or another format, is told what the command line says."""
    corpus = str(write_corpus(tmp_path / "corpus.jsonl", ["a river"]))
    outs = [str(tmp_path / f"out {n}") for n in range(3)]
    wrong: list[dict[str, Any]] = [{}, {"reuse": outs[0], "format": "npy"}]
    with door.ingest(), door.work():
        made = door.enqueue("embed_corpus", corpus, outs[0], model="null:16")
        wait_for(made, "finished")
        jobs = [
            door.enqueue("embed_corpus", corpus, out, model="null:16", by_reference=True, **more)
            for out, more in zip(outs[1:], wrong, strict=True)
        ]
        wait_for(jobs[-1], "failed")
    assert "--by-reference takes parts of an output that --reuse names" in failure(jobs[0])
    assert "both have to be parquet or both jsonl" in failure(jobs[1])


def test_columns_stay_beside_the_vectors(door: Door, tmp_path: Path) -> None:
    """A program names columns to keep, and the fields that make the text."""
    table = pa.table({"title": ["a", "b"], "body": ["c", "d"], "n": [1, None]})
    pq.write_table(table, tmp_path / "corpus.parquet")
    words = (str(tmp_path / "corpus.parquet"), str(tmp_path / "out"))
    options = {"text": "{title}\n{body}", "keep": ["n", "title"]}
    job = door.enqueue("embed_corpus", *words, model="null:16", **options)
    with door.ingest(), door.work():
        wait_for(job, "finished")
    check_output(tmp_path / "out", ["a\nc", "b\nd"], 16)
    part = pq.read_table(tmp_path / "out" / "part-000000000000.parquet")
    assert part.select(["n", "title"]).equals(table.select(["n", "title"]))


def test_a_failure_says_why_and_is_tried_again(door: Door, tmp_path: Path) -> None:
    """A failed command's own sentence is logged, and a retry that was asked for comes in time."""
    corpus = tmp_path / "corpus.jsonl"
    corpus.write_text("no json\n")
    words = (str(corpus), str(tmp_path / "out"))
    retry = Retry(max=3, interval=[1, 2, 3])
    with door.ingest(), door.work():
        job = door.enqueue("embed_corpus", *words, model="null:16", retry=retry)
        wait_for(job, "scheduled")
        write_corpus(corpus, ["a river"])
        wait_for(job, "finished")
    assert "corpus.jsonl" in door.log()


def test_an_unfinished_output_is_reconciled(door: Door, tmp_path: Path) -> None:
    """`reconcile` reports the chunks of an unfinished output that the farm has lost."""
    out = tmp_path / "out"
    (out / ".embedfarm").mkdir(parents=True)
    (out / ".embedfarm" / "job-id").write_text("j")
    job = make_job(door.connection, 3, "j")
    door.connection.hdel(job.keys.meta, "out")
    door.connection.xdel(job.keys.blocks, "3-2")
    corpus = str(write_corpus(tmp_path / "corpus.jsonl", ["a river"]))
    with door.ingest():
        asked = door.enqueue("reconcile", str(out), corpus)
        wait_for(asked, "finished")
    found = returned(asked)
    assert (found["job"], found["missing"], found["waiting"]) == ("j", [[2, 4]], 4)


def test_options_that_are_none(door: Door, tmp_path: Path) -> None:
    """Paths outside the roots and unknown options are refused by name, before anything is run."""
    inside = tmp_path / "inside"
    inside.mkdir()
    corpus = str(write_corpus(inside / "corpus.jsonl", ["a river"]))
    out = str(inside / "out")
    refused: list[tuple[tuple[Any, ...], dict[str, Any], str]] = [
        ((str(tmp_path / "secret.jsonl"), out), {}, "is not below"),
        (([corpus, "-"], out), {}, "is not below"),
        ((corpus, str(tmp_path / "out")), {}, "is not below"),
        ((corpus, out), {"ranges": "/etc/passwd"}, "is not below"),
        ((corpus, out), {"model": str(tmp_path)}, "is not below"),
        ((corpus, out), {"redis": "redis://elsewhere"}, "no option 'redis'"),
        ((corpus, out), {"prompt": ["a", "list"]}, "'prompt' must be"),
        ((corpus, out), {"reuse": [str(inside), "/etc"]}, "is not below"),
        ((corpus, out), {"reuse": [str(inside), 3]}, "'reuse' must be"),
    ]
    with door.ingest(ingest_roots=json.dumps([str(inside)])):
        jobs = [door.enqueue("embed_corpus", *words, **more) for words, more, _ in refused]
        wait_for(jobs[-1], "failed")
    for job, (words, more, reason) in zip(jobs, refused, strict=True):
        assert reason in failure(job), (words, more)
    assert not Path(out).exists()


def test_cleanup(door: Door) -> None:
    """`cleanup` removes cancelled jobs, on the farm and in the queue, once they are old enough."""
    with closing_client(door.server.url) as client:
        farm = FarmClient(client)
        for name in ("wanted", "unwanted"):
            farm.job(name).create(JobSpec(model="null:16"), 0)
        farm.job("unwanted").cancel()
        cancelled = door.enqueue("embed_corpus", "a", "b")
        cancelled.cancel()
        early, late = door.enqueue("cleanup", 3600), door.enqueue("cleanup", 0)
        with door.ingest():
            wait_for(late, "finished")
        assert farm.job_ids() == ["wanted"]
    assert returned(early) == {"jobs": [], "requests": [], "directories": []}
    assert returned(late) == {
        "jobs": ["unwanted"], "requests": [cancelled.id], "directories": [],
    }  # fmt: skip
    assert not door.connection.exists(cancelled.key)
