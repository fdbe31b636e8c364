"""Tests of what an RQ worker does not run."""

import json
import subprocess
import sys
import zlib
from pathlib import Path

from rq import Callback, Queue, Retry, Webhook

from tests.ingest.rq_farm import START_SECONDS, Door, failure, wait_for
from tests.support import wait_until


def test_nothing_runs_that_is_not_on_the_list(door: Door, tmp_path: Path) -> None:
    """A job that is not an allowed task is refused and logged, and the worker goes on.

    That is os.system by name, pickles, methods, callbacks and webhooks. A refusal names what was
    asked for.
    """
    bait = tmp_path / "bait"
    touch = f"touch {bait}"
    pickled = Queue("embedfarm", door.connection)
    jobs = {
        "'os.system'": door.queue.enqueue("os.system", touch),
        "'posix.system'": door.queue.enqueue("posix.system", touch),
        "'producer.tasks.run_command'": door.enqueue("run_command", ["doctor"]),
        "not JSON": pickled.enqueue("os.system", touch),
        "no callbacks": door.enqueue("cleanup", on_success=Callback("os.system")),
        "no webhooks": door.enqueue("cleanup", webhooks=[Webhook("http://127.0.0.1", "finished")]),
    }
    again, paths = Retry(max=3, interval=[600]), (str(tmp_path / "corpus"), str(tmp_path / "out"))
    (tmp_path / "corpus").touch()
    jobs |= {
        "no option 'modle'": door.enqueue("embed_corpus", *paths, modle="null:8", retry=again),
        "/etc/passwd": door.enqueue("embed_corpus", "/etc/passwd", paths[1], retry=again),
        "unexpected keyword": door.enqueue("cleanup", secnods=9, retry=again),
    }
    failing = door.enqueue("embed_corpus", on_failure=Callback("os.system"))
    method = door.enqueue("cleanup")
    data = json.dumps(["producer.tasks.cleanup", "an instance", [], {}]).encode()
    door.connection.hset(method.key, "data", zlib.compress(data))
    with door.ingest() as process:
        door.enqueue("embed_corpus", "a", "b", meta=["odd"]).cancel()
        last = door.enqueue("cleanup", meta=["odd"])
        wait_for(last, "finished")
        [worker] = process.children()
        assert last.worker_name is None or str(worker.pid) in last.worker_name
    for reason, job in jobs.items():
        assert job.get_status() == "failed", reason
        assert reason in failure(job)
        meta = door.connection.hget(job.key, "meta")
        assert reason in json.loads(meta or b"{}").get("reason", ""), (reason, meta)
        assert job.id in door.log()
    assert failing.get_status() == method.get_status() == "failed"
    assert not bait.exists()


def test_it_is_seen_by_rq_info(door: Door) -> None:
    """`rq info` shows the queue and the workers by names that say what they are."""
    door.enqueue("cleanup")
    with door.ingest("--workers", "2"):
        words = [sys.executable, "-m", "rq.cli", "info", "--url", door.server.url, "--raw"]
        wait_until(
            lambda: door.connection.scard("rq:workers") == 2 and door.queue.is_empty(),
            START_SECONDS,
        )
        done = subprocess.run(words, capture_output=True, check=True, text=True)
    assert done.stdout.startswith("queue embedfarm 0")
    assert "-ingest-" in done.stdout


def test_the_worker_is_light() -> None:
    """The RQ worker, which forks for every job, imports no torch."""
    words = [
        sys.executable,
        "-c",
        "import embedfarm.ingest.main, sys; print('torch' in sys.modules)",
    ]
    done = subprocess.run(words, capture_output=True, check=True, text=True)
    assert done.stdout == "False\n"
