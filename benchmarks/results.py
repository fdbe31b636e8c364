"""What a comparison found, as build/bench.json keeps it, and the figures that follow from it."""

import datetime as dt
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import msgspec

from benchmarks.hardware import describe_hardware

BASELINE: Final = "encode"
BEST_BATCH: Final = "encode, best batch"
FARM: Final = "farm"
BARE_ENGINE: Final = "bare engine"
IDENTITY: Final = ("command", "model", "device", "hardware")  # of a run that may be gone on with


class Run(msgspec.Struct, kw_only=True):
    """One run of one contender.

    Attributes:
        seconds: From the first text to the last vector, with a warm model.
        load_seconds: From nothing to a warm model.
        wall_seconds: Of the process, from its start to its end.
        rss_bytes_max: Peak of resident memory, summed over its processes.
    """

    seconds: float
    load_seconds: float
    wall_seconds: float
    rss_bytes_max: int


class Outcome(msgspec.Struct, kw_only=True):
    """All runs of one contender on one corpus.

    Attributes:
        contender: Its name.
        runs: One for each round; none where it did not work.
        reason: Why there are none, "" where there are.
        version: Of its package.
        facts: What else it says of its last run.
        cosine_mean: With the float32 vectors of `encode`, over all texts.
        cosine_min: The same, of the worst text.
    """

    contender: str
    runs: list[Run] = []  # msgspec makes a new list for each
    reason: str = ""
    version: str = ""
    facts: dict[str, str] = {}  # the same
    cosine_mean: float = 0.0
    cosine_min: float = 0.0

    @property
    def seconds(self) -> float:
        """Median of the runs."""
        return statistics.median(run.seconds for run in self.runs)

    @property
    def wall_seconds(self) -> float:
        """Median of the runs."""
        return statistics.median(run.wall_seconds for run in self.runs)

    @property
    def load_seconds(self) -> float:
        """Median of the runs."""
        return statistics.median(run.load_seconds for run in self.runs)

    @property
    def rss_bytes_max(self) -> float:
        """Median of the peaks."""
        return statistics.median(run.rss_bytes_max for run in self.runs)

    def speedup(self, other: "Outcome") -> float:
        """How many times as fast as another one: median over the rounds in which both ran."""
        pairs = zip(self.runs, other.runs, strict=False)  # a slow one runs in the first round only
        return statistics.median(theirs.seconds / ours.seconds for ours, theirs in pairs)


def find_dtype(outcomes: Sequence[Outcome]) -> str:
    """The type in which the farm computed, else that of `encode`."""
    found = (outcome.facts.get("dtype") for outcome in outcomes)
    return next((dtype for dtype in found if dtype), "float32")


class Comparison(msgspec.Struct, kw_only=True):
    """All contenders on one corpus.

    Attributes:
        corpus: Its name.
        about: What it is, in a sentence.
        chunks: Texts in it.
        tokens: Of all texts, as the model counts and cuts them.
        tokens_max: Of the longest.
        flops: What the model needs for them, without padding.
        peaks: Measured peak of the device in operations per second, one for each round.
        outcomes: By contender, in the order of the table.
    """

    corpus: str
    about: str
    chunks: int
    tokens: int
    tokens_max: int
    flops: float
    peaks: list[float]
    outcomes: list[Outcome]

    def find(self, contender: str) -> Outcome | None:
        """The outcome of one that ran, None of one that did not."""
        return next((o for o in self.outcomes if o.contender == contender and o.runs), None)

    def peak_share(self, outcome: Outcome) -> float:
        """Operations that the model needs, per second, as a share of the device's peak."""
        return self.flops / outcome.seconds / statistics.median(self.peaks)


class Bench(msgspec.Struct, kw_only=True):
    """One run of the benchmark.

    Attributes:
        created: Day, as ISO 8601.
        command: That made it.
        model: Its name.
        device: "cpu" or "cuda".
        dtype: In which the farm computed, and the peak was measured.
        hardware: What it ran on, by name of the part.
        comparisons: By corpus.
    """

    created: str
    command: str
    model: str
    device: str
    dtype: str
    hardware: dict[str, str]
    comparisons: list[Comparison] = []  # msgspec makes a new list for each

    @classmethod
    def begin(cls, command: str, model: str, device: str) -> "Bench":
        """One of today on this machine, with nothing in it."""
        return cls(
            created=dt.datetime.now(dt.UTC).date().isoformat(),
            command=command,
            model=model,
            device=device,
            dtype=find_dtype([]),
            hardware=describe_hardware(),
        )

    def resume(self, path: Path) -> None:
        """Take in what an earlier run of the same command found on this machine before it ended.

        Raises:
            msgspec.ValidationError: There is something else.
        """
        earlier = self.load(path)
        if all(getattr(earlier, name) == getattr(self, name) for name in IDENTITY):
            self.created = earlier.created
            for comparison in earlier.comparisons:
                self.add(comparison)

    def add(self, comparison: Comparison) -> None:
        """Take in what was found on one more corpus."""
        self.comparisons.append(comparison)
        self.dtype = find_dtype(comparison.outcomes)

    def save(self, path: Path) -> None:
        """Write it as JSON."""
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(msgspec.json.format(msgspec.json.encode(self), indent=1) + b"\n")

    @classmethod
    def load(cls, path: Path) -> "Bench":
        """Read what `save` wrote.

        Raises:
            msgspec.ValidationError: It is something else.
        """
        return msgspec.json.decode(path.read_bytes(), type=cls)
