"""The last jobs of one corpus side by side: how fast each was, what it cost, and what failed."""

from dataclasses import dataclass
from typing import Final, NamedTuple

from embedfarm.contract.farm_client import FarmClient
from embedfarm.watch.job_search import JobQuery, search_jobs
from embedfarm.watch.overview import JobFacts, read_jobs

RUNS_MAX: Final = 6


class CorpusRun(NamedTuple):
    """One of the jobs of a corpus.

    Attributes:
        facts: The job.
        seconds: Time from its first block to its last result.
        chunks_per_second: Chunks embedded in that time, per second.
        tokens_per_second: Tokens embedded in that time, per second.
    """

    facts: JobFacts
    seconds: float
    chunks_per_second: float
    tokens_per_second: float


@dataclass(frozen=True)
class RunFigures:
    """Figures of one of the jobs of a corpus, as programs read them.

    Attributes:
        job: Id of the job.
        created_ms: Unix time in ms at which it was made.
        state: Its state.
        chunks: Its chunks.
        seconds: Time from its first block to its last result.
        chunks_per_second: Chunks embedded in that time, per second.
        tokens_per_second: Tokens embedded in that time, per second.
        device_hours: Hours of single devices that it took.
        cost: What these cost; 0 without a price.
        failed: Chunks that failed.
    """

    job: str
    created_ms: int
    state: str
    chunks: int
    seconds: float
    chunks_per_second: float
    tokens_per_second: float
    device_hours: float
    cost: float
    failed: int


def figures_of(run: CorpusRun) -> RunFigures:
    """Return the figures of one of the jobs of a corpus."""
    facts = run.facts
    return RunFigures(
        job=facts.job,
        created_ms=facts.created_ms,
        state=facts.state,
        chunks=facts.known,
        seconds=run.seconds,
        chunks_per_second=run.chunks_per_second,
        tokens_per_second=run.tokens_per_second,
        device_hours=facts.device_hours,
        cost=facts.cost,
        failed=facts.chunks_failed,
    )


def last_runs(farm: FarmClient, facts: JobFacts) -> list[CorpusRun]:
    """Return the last jobs of the corpus of a job, newest first; none where nobody can tell.

    What a job embedded before it began anew, or took from other outputs, is in no rate.
    """
    if not facts.corpus:
        return []
    found = search_jobs(farm, JobQuery(corpus=facts.corpus)).jobs[:RUNS_MAX]
    return [_run(each) for each in read_jobs(farm, found)]


def _run(facts: JobFacts) -> CorpusRun:
    seconds = facts.embed_seconds
    if not seconds:
        return CorpusRun(facts, 0.0, 0.0, 0.0)
    return CorpusRun(
        facts, seconds, facts.chunks_embedded / seconds, facts.real_tokens_done / seconds
    )
