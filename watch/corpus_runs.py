"""The last jobs of one corpus side by side: how fast each was, what it cost, and what failed."""

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
