"""Leases that a worker holds on blocks, and micro-batches made of them."""

import threading
import time
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import groupby
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from embedfarm.contract.canaries import Canaries
from embedfarm.contract.entries import Entry
from embedfarm.contract.job_spec import JobSpec
from embedfarm.contract.records import Block
from embedfarm.contract.usage import Account, split
from embedfarm.workers.engines.engine import DeviceAway, Engine, Tokenised

Making: TypeAlias = tuple[str, str]
"""A job and its generation: a job made anew under the same name is another one."""


@dataclass(eq=False)
class Lease:
    """One block that this worker embeds.

    Attributes:
        job: The job it belongs to.
        entry: The entry that is pending on the server.
        block: Content of the entry.
        deliveries: How often the server has handed it out, this time included.
        copied: Whether another worker holds the lease, and this is a speculative copy at the tail.
        tried: Whether the device has begun with it, so that this delivery counts.
        lost: Whether the server gave it to somebody else, it was committed elsewhere, or its job
            was cancelled or deleted.
        engine: Key of the engine that embeds it, by `embedfarm.contract.farm_client.engine_key`.
        agreed: Fingerprint that the job's workers agreed on, as the server had it.
        stored: Place where the job's vectors are stored; "" where they go through the server.
    """

    job: str
    entry: Entry
    block: Block
    deliveries: int = 1
    copied: bool = False
    tried: bool = False
    lost: bool = False
    engine: str = ""
    agreed: bytes = b""
    stored: str = ""

    @property
    def making(self) -> Making:
        """The job that the block was made for."""
        return self.job, self.entry.generation

    @property
    def attempts(self) -> int:
        """Tries of its chunks, with this one, and with those of the block it was split from."""
        return self.entry.attempts + self.deliveries


@dataclass(eq=False)
class JobPart:
    """One job's part of a micro-batch.

    Attributes:
        making: The job.
        leases: Its leases.
        texts: Its texts among those of the micro-batch.
        account: What is true of its texts alone, and once it is shared its part of the rest.
    """

    making: Making
    leases: list[Lease]
    texts: slice
    account: Account = field(default_factory=Account)

    @property
    def job(self) -> str:
        """The name of the job."""
        return self.making[0]

    @property
    def lost(self) -> bool:
        """Whether all its leases are lost, as after a cancel."""
        return all(lease.lost for lease in self.leases)


@dataclass(eq=False)
class CachedTexts:
    """What a micro-batch has of the vector cache, and what the cache gets of it.

    Attributes:
        keys: The key of each text.
        texts: The texts whose vectors were found.
        vectors: Their vectors, shape (texts, dimensions), in float32 as the model makes them.
        share: The part of the micro-batch's tokens that they have.
        spared_seconds: Time that the device would have taken for them.
        new: Vectors to be kept, by key.
    """

    keys: list[bytes]
    texts: NDArray[np.intp]
    vectors: NDArray[np.float32]
    share: float
    spared_seconds: float = 0.0
    new: dict[bytes, NDArray[np.float32]] = field(default_factory=dict)


@dataclass(eq=False)
class MicroBatch:
    """The run of blocks that a worker embeds at a time, tokenised.

    They are of one job, or of several that are embedded alike: then one follows another.

    Attributes:
        spec: Specification of the jobs, in all that decides how they are embedded and stored.
        leases: Leases in the order of their texts.
        tokenised: Tokens of all texts of all leases.
        reasons: Why single texts cannot be embedded, by row in `tokenised`.
        fetch_began: Monotonic time at which fetching began.
        fetched: Monotonic time at which it was ready for the device.
        forward_began: Monotonic time at which the device began, 0 before.
        account: Counts and times of what was done with it so far.
        canaries: What the engine makes of the canaries, None where it makes none.
        cached: What the vector cache has of it, None where that was not asked.
        parts: The parts of the jobs, one after the other.
    """

    spec: JobSpec
    engine: Engine
    leases: list[Lease]
    tokenised: Tokenised
    reasons: dict[int, str]
    fetch_began: float
    fetched: float = 0.0
    forward_began: float = 0.0
    account: Account = field(default_factory=Account)
    canaries: Canaries | None = None
    cached: CachedTexts | None = None
    parts: list[JobPart] = field(init=False, default_factory=list)

    def __post_init__(self) -> None:
        first = 0
        for making, group in groupby(self.leases, lambda lease: lease.making):
            leases = list(group)
            end = first + sum(lease.block.to_embed for lease in leases)
            part = JobPart(making, leases, slice(first, end))
            if self.spec.long == "truncate":  # which makes one row of each text
                part.account.texts_full = int(self.tokenised.full[part.texts].sum())
            texts = (text for lease in leases for text in lease.block.texts)
            part.account.texts_empty = sum(not text or text.isspace() for text in texts)
            self.parts.append(part)
            first = end

    def begin_forward(self, idle_since: float, lane_seconds: float) -> None:
        """Note that the device begins with it, and why it did not sooner.

        Args:
            idle_since: Monotonic time at which the device could have begun.
            lane_seconds: Seconds that the device spent on requests since its last micro-batch.
        """
        self.forward_began = time.monotonic()
        waited = self.forward_began - idle_since
        self.account.spend("queue", waited - min(waited, lane_seconds))
        if lane_seconds > 0:  # and if before it was fetched, it was not delayed
            self.account.spend("lane", min(lane_seconds, self.forward_began - self.fetch_began))

    def share_account(self) -> None:
        """Add to the account of each part its share of what was done for all, by tokens.

        A job that lost all leases had no part in it, unless all did.
        """
        lengths = self.tokenised.text_lengths
        tokens = [max(1, int(lengths[part.texts].sum())) for part in self.parts]
        ours = [0 if part.lost else n for part, n in zip(self.parts, tokens, strict=True)]
        shares = split(self.account, ours if any(ours) else tokens)
        for part, share in zip(self.parts, shares, strict=True):
            part.account.add(share)

    @property
    def dtype(self) -> str:
        """Type that the engine computes in, "" where it does not say."""
        return self.engine.fingerprint.get("dtype", "")

    @property
    def texts_full(self) -> int:
        """Texts that fill what the model takes."""
        return sum(part.account.texts_full for part in self.parts)

    def take_cached(self, vectors: NDArray[np.float32]) -> None:
        """Put the vectors that were in the cache among those of all texts."""
        if self.cached is not None:
            vectors[self.cached.texts] = self.cached.vectors

    def note_made(self, texts: NDArray[np.intp], vectors: NDArray[np.float32]) -> None:
        """Note what the cache is to keep: vectors of texts that the device embedded.

        Args:
            texts: Texts that were to be embedded; all of them were, unless all leases are lost.
            vectors: Vectors of all texts of the micro-batch.
        """
        if self.cached is not None and not self.lost:
            made = [text for text in np.unique(texts).tolist() if text not in self.reasons]
            self.cached.new |= {self.cached.keys[text]: vectors[text] for text in made}

    @property
    def cached_share(self) -> float:
        """The part of its tokens that need no device, since their vectors are in the cache."""
        return 0.0 if self.cached is None else self.cached.share

    @property
    def job(self) -> str:
        """The first of the jobs."""
        return self.leases[0].job

    @property
    def jobs(self) -> set[str]:
        """All of the jobs."""
        return {lease.job for lease in self.leases}

    @contextmanager
    def trying(self) -> Iterator[None]:
        """Count the body as a try of all leases, unless the device turns out to be away."""
        for lease in self.leases:
            lease.tried = True
        try:
            yield
        except DeviceAway:
            for lease in self.leases:
                lease.tried = False
            raise

    @property
    def forward_seconds(self) -> float:
        """Seconds that the micro-batch took on the device."""
        return self.account.seconds.get("forward", 0.0)

    @property
    def lost(self) -> bool:
        """Whether all leases are lost, as after a cancel."""
        return all(lease.lost for lease in self.leases)

    def rows(self) -> Iterable[tuple[Lease, slice]]:
        """Yield each lease with its rows in `tokenised`."""
        first = 0
        for lease in self.leases:
            end = first + lease.block.to_embed
            yield lease, slice(first, end)
            first = end


@dataclass
class Holdings:
    """The leases that this process has not given up, for renewal; safe between threads."""

    _leases: dict[tuple[str, str], Lease] = field(default_factory=dict)
    _lock: threading.Condition = field(default_factory=threading.Condition)

    def add(self, leases: Iterable[Lease]) -> None:
        """Hold more leases."""
        with self._lock:
            self._leases.update({(lease.entry.stream, lease.entry.id): lease for lease in leases})

    def remove(self, leases: Iterable[Lease]) -> None:
        """Give leases up; a later lease of an entry that a crash of the server made new is kept."""
        with self._lock:
            for lease in leases:
                place = lease.entry.stream, lease.entry.id
                if self._leases.get(place) is lease:
                    del self._leases[place]
            self._lock.notify_all()

    def holds(self, stream: str, entry_id: str) -> bool:
        """Tell whether this process already works on an entry."""
        with self._lock:
            return (stream, entry_id) in self._leases

    def wait_empty(self, seconds: float) -> bool:
        """Wait at most `seconds` until nothing is held, and tell whether that came true."""
        with self._lock:
            return self._lock.wait_for(lambda: not self._leases, seconds)

    def by_stream(self) -> Mapping[tuple[str, str], list[Lease]]:
        """Return this worker's own leases (no copies) by job and stream."""
        groups: dict[tuple[str, str], list[Lease]] = defaultdict(list)
        with self._lock:
            for lease in self._leases.values():
                if not lease.copied:
                    groups[lease.job, lease.entry.stream].append(lease)
        return groups

    def jobs(self) -> list[str]:
        """Return the jobs of all leases, copies included, in the order in which they came."""
        with self._lock:
            return list(dict.fromkeys(lease.job for lease in self._leases.values()))

    def engines(self) -> set[str]:
        """Return the keys of the engines that are to embed all leases, copies included."""
        with self._lock:
            return {lease.engine for lease in self._leases.values()}

    def lose(self, jobs: Collection[str]) -> None:
        """Mark all leases of some jobs, copies included, as lost."""
        with self._lock:
            for lease in self._leases.values():
                lease.lost = lease.lost or lease.job in jobs

    @property
    def tokens(self) -> int:
        """Tokens leased and not committed."""
        with self._lock:
            return sum(lease.entry.tokens for lease in self._leases.values())
