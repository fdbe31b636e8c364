"""Blocks, jobs and engines that the tests of the worker share."""

from collections.abc import Sequence

import numpy as np
import pytest
from numpy.typing import NDArray

from embedfarm.contract.encoding import encode
from embedfarm.contract.entries import Entry
from embedfarm.contract.farm_client import FarmClient
from embedfarm.contract.job_spec import JobSpec
from embedfarm.contract.jobs import Job
from embedfarm.contract.records import Block, JobShare, Plan, Result
from embedfarm.contract.wire import entry_id
from embedfarm.workers import model_room, model_store
from embedfarm.workers.engines.engine import Chunk, Engine, Finish, Tokenised
from embedfarm.workers.engines.null import NullEngine
from embedfarm.workers.leases import Lease, MicroBatch

NULL = "null:8"


def block_of(start: int, count: int, text: str = "chunk") -> Block:
    """A block of numbered texts."""
    texts = [f"{text} {index}" for index in range(start, start + count)]
    return Block(start=start, texts=texts, token_count=4 * count)


def lease_of(block: Block, stream: str = "", job: str = "j", generation: str = "") -> Lease:
    """A lease on a block that was delivered once."""
    entry = Entry(
        stream or f"ef:{{{job}}}:in",
        entry_id(block.start, block.count),
        encode(block),
        block.count,
        block.token_count,
        generation=generation,
    )
    return Lease(job, entry, block)


def micro_batch(
    blocks: Sequence[Block],
    engine: Engine,
    spec: JobSpec | None = None,
    leases: Sequence[Lease] = (),
) -> MicroBatch:
    """A micro-batch of blocks, of one job unless leases are given, as the first stage makes it."""
    texts = [text for block in blocks for text in block.texts]
    return MicroBatch(
        spec=spec or JobSpec(model=NULL),
        engine=engine,
        leases=list(leases) or [lease_of(block) for block in blocks],
        tokenised=engine.tokenise(texts),
        reasons={},
        fetch_began=0.0,
    )


def let_models_take(monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    """Let every model take so many bytes of memory: a null model would take none."""
    for module in (model_room, model_store):
        monkeypatch.setattr(module, "predict_bytes", lambda *_: size)


def null_vectors(texts: Sequence[str], model: str = NULL) -> NDArray[np.float32]:
    """The vectors that the null engine makes of texts, all at once."""
    engine = NullEngine.open(JobSpec(model=model))
    return engine.forward(engine.tokenise(texts), np.arange(len(texts)))


def create_job(
    farm: FarmClient, blocks: Sequence[Block], name: str = "j", model: str = NULL, prompt: str = ""
) -> Job:
    """A closed job with these blocks."""
    job = farm.job(name)
    job.create(JobSpec(model=model, prompt=prompt), 0)
    job.push([(block, encode(block)) for block in blocks])
    job.close(sum(block.count for block in blocks))
    return job


def plan_blocks(farm: FarmClient, worker: str, blocks: int, job: str = "j") -> None:
    """A plan that allows so many blocks at a time."""
    fence = farm.plans.elect("test", 60)
    share = JobShare(job=job, tokens=blocks, blocks=blocks)
    assert farm.plans.publish([Plan(worker=worker, fence=fence, shares=[share])], fence, 60)


def results(job: Job) -> list[Result]:
    """All results of a job by start index."""
    return [result for start in sorted(job.results.starts()) if (result := job.results.at(start))]


def embedded(job: Job) -> NDArray[np.float32]:
    """The vectors of all results in order; they must tile the job from its first chunk on."""
    found = results(job)
    counts = [result.count for result in found]
    assert [result.start for result in found] == np.cumsum([0, *counts[:-1]]).tolist()
    return np.concatenate([result.matrix() for result in found]).astype(np.float32)


class FakeEngine:
    """An engine whose vectors can be told from the texts: (length of the text, its first letter).

    A token is a character, so that a test decides what a text costs.
    """

    name = "fake"
    peak_flops_per_second = 0.0
    dimensions = 2
    normalised = False
    padded = True
    batch_tokens = 1000
    launch_tokens = 1000
    tokenisation = None
    exact_twin = None
    asynchronous = False
    fingerprint: dict[str, str] = {}  # noqa: RUF012 # a protocol's plain attribute; never changed

    def __init__(self) -> None:
        self.batches: list[list[str]] = []

    def for_job(self, spec: JobSpec) -> None:
        """Return None, as an engine that serves one job only."""

    def flops(self, lengths: NDArray[np.int64]) -> float:
        """Count one operation for a token."""
        return float(lengths.sum())

    def tokenise(self, chunks: Sequence[Chunk]) -> Tokenised:
        """Keep the texts themselves as features."""
        lengths = np.asarray([len(text) for text in chunks], dtype=np.int64)
        return Tokenised(lengths, list(chunks))

    def start(self, batch: Tokenised, rows: NDArray[np.intp]) -> Finish:
        """Compute all at once."""
        vectors = self.forward(batch, rows)
        return lambda: vectors

    def forward(self, batch: Tokenised, rows: NDArray[np.intp]) -> NDArray[np.float32]:
        """Note the texts, and return their vectors, unless `refuse` raises."""
        texts = [batch.features[row] for row in rows]
        self.batches.append(texts)
        self.refuse(texts)
        return self.vectors(texts)

    def vectors(self, texts: Sequence[str]) -> NDArray[np.float32]:
        """Return the length and the first letter of each text."""
        return np.asarray([[len(text), ord(text[0])] for text in texts], dtype=np.float32)

    def refuse(self, texts: Sequence[str]) -> None:
        """Raise what this engine raises for these texts."""
