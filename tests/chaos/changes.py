"""Changes of a corpus and an id, between two runs of a command and while one reads."""

import contextlib
import signal
from typing import Final

from embedfarm.contract.backlog import read_backlogs
from embedfarm.contract.broker import UNAVAILABLE, closing_client, host_name
from tests.chaos.commands import BAD_ROW, Job
from tests.chaos.corpora import CHANGES, turn
from tests.chaos.scene import Scene

STOPS: Final = (signal.SIGKILL, signal.SIGINT)
WAKE_SECONDS: Final = (0.0, 1.0)  # after others have begun on what the sleeper still holds


def change_stopped(scene: Scene) -> None:
    """Stop the command and change its corpus, before the same command is typed again."""
    job, draw, watch = scene.pick_job(), scene.random, scene.witness.watch
    begun = draw.randrange(max(1, len(job.corpus.texts) // 4))
    job.wait_until_it(lambda: watch.chunks_done > begun)
    with job.stopped(draw.choice(STOPS)):
        if not job.is_over:
            job.corpus.change(draw.choice(CHANGES), draw, whole=False)


def change_read(scene: Scene) -> None:
    """Change the corpus while the command reads it."""
    job, draw = scene.pick_job(), scene.random
    with job.stopped(signal.SIGKILL):  # so that it has to read again
        pass
    job.wait_until_it(lambda: _freeze_reading(job))
    if not job.is_over:
        job.corpus.change(draw.choice(CHANGES), draw, whole=True)
    job.signal(signal.SIGCONT)


def _freeze_reading(job: Job) -> bool:
    """Stop a command while it reads its corpus, which is soon done; return whether it does."""
    if not job.is_reading():
        return False
    job.signal(signal.SIGSTOP)
    reads = job.is_reading()
    if not reads:
        job.signal(signal.SIGCONT)
    return reads


def make_anew(scene: Scene) -> None:
    """Stop a worker while its job fails over a bad row and is made anew in another order."""
    worker = scene.pick("worker")
    awake = scene.proof
    job = scene.pick_job()
    written = scene.proof
    scene.proof = lambda since: awake(since) and written(since)
    worker.signal(signal.SIGSTOP)
    try:
        _fail(job)
        with job.stopped():
            if not job.is_over:
                job.corpus.change(turn, scene.random, whole=False)
        asleep = f"{host_name()}:{worker.name.removeprefix('worker-')}"
        job.wait_until_it(lambda: _others_hold(scene, job, asleep))
        scene.last(WAKE_SECONDS)
    finally:
        worker.signal(signal.SIGCONT)


def _fail(job: Job) -> None:
    """Stop a command, and make it fail over a row at the end of its corpus."""
    with job.stopped(signal.SIGKILL):
        if job.is_over:
            return
        before = job.refusals.get(BAD_ROW, 0)
        job.corpus.write(job.corpus.texts, spoiled=True, whole=False)
    job.wait_until_it(lambda: job.refusals.get(BAD_ROW, 0) > before)


def _others_hold(scene: Scene, job: Job, asleep: str) -> bool:
    """Tell whether another worker has blocks of the job."""
    with contextlib.suppress(*UNAVAILABLE), closing_client(scene.world.servers.url) as client:
        backlogs = read_backlogs(client, [job.name])
        return any(each.held_blocks.keys() - {asleep} for each in backlogs)
    return False
