"""Results of a comparison, as build/bench.json keeps them, and figures that follow from them."""

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
IDENTITY: Final = ("command", "model", "device", "hardware")  # equal in a run and its resume


class Run(msgspec.Struct, kw_only=True):
    """Figures of one run of one contender.

    Attributes:
        seconds: Time from the first text to the last vector, with a warm model.
        load_seconds: Time until the model is warm.
        wall_seconds: Time from the start of the process to its end.
        rss_bytes_max: Peak of resident memory, summed over its processes.
    """

    seconds: float
    load_seconds: float
    wall_seconds: float
    rss_bytes_max: int


class Outcome(msgspec.Struct, kw_only=True):
    """Outcome of a contender on a corpus: all its runs, or why there are none.

    Attributes:
        contender: Name of the contender.
        runs: One for each round; none where it did not work.
        reason: Reason why there are no runs, "" where there are some.
        version: Package and version of the contender.
        facts: Further facts that it reports of its last run, by name.
        cosine_mean: Mean cosine with the float32 vectors of `encode`, over all texts.
        cosine_min: Least cosine with the float32 vectors of `encode`.
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
        """Median of the runs' seconds from the first text to the last vector."""
        return statistics.median(run.seconds for run in self.runs)

    @property
    def wall_seconds(self) -> float:
        """Median of the runs' seconds from the start of the process to its end."""
        return statistics.median(run.wall_seconds for run in self.runs)

    @property
    def load_seconds(self) -> float:
        """Median of the runs' seconds until the model was warm."""
        return statistics.median(run.load_seconds for run in self.runs)

    @property
    def rss_bytes_max(self) -> float:
        """Median of the runs' peaks of resident memory, in bytes."""
        return statistics.median(run.rss_bytes_max for run in self.runs)

    def speedup(self, other: "Outcome") -> float:
        """Return how many times as fast it was as another: median over rounds in which both ran."""
        pairs = zip(self.runs, other.runs, strict=False)  # a slow one runs in the first round only
        return statistics.median(theirs.seconds / ours.seconds for ours, theirs in pairs)


def find_dtype(outcomes: Sequence[Outcome]) -> str:
    """Return the type in which the farm computed, else float32, that of `encode`."""
    found = (outcome.facts.get("dtype") for outcome in outcomes)
    return next((dtype for dtype in found if dtype), "float32")


class Comparison(msgspec.Struct, kw_only=True):
    """Outcomes of all contenders on one corpus.

    Attributes:
        corpus: Name of the corpus.
        about: Sentence that says what the corpus is.
        chunks: Number of texts in the corpus.
        tokens: Tokens of all texts, as the model counts and cuts them.
        tokens_max: Tokens of the longest text.
        flops: Operations that the model needs for the texts, without padding.
        peaks: Measured peak of the device in operations per second, one for each round.
        outcomes: Outcomes by contender, in the order of the table.
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
        """Return the outcome of a contender that ran, None if it did not."""
        return next((o for o in self.outcomes if o.contender == contender and o.runs), None)

    def peak_share(self, outcome: Outcome) -> float:
        """Return the model's operations per second as a share of the device's peak."""
        return self.flops / outcome.seconds / statistics.median(self.peaks)


class Bench(msgspec.Struct, kw_only=True):
    """Comparisons of one run of the benchmark, with what it ran on.

    Attributes:
        created: Day of the run, as ISO 8601.
        command: Command that made it.
        model: Name of the model.
        device: "cpu" or "cuda".
        dtype: Type in which the farm computed and the peak was measured.
        hardware: Hardware and versions that it ran on, by name of the part.
        comparisons: Comparisons by corpus.
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
        """Make an empty benchmark of today on this machine."""
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
            msgspec.ValidationError: The file holds something else.
        """
        earlier = self.load(path)
        if all(getattr(earlier, name) == getattr(self, name) for name in IDENTITY):
            self.created = earlier.created
            for comparison in earlier.comparisons:
                self.add(comparison)

    def add(self, comparison: Comparison) -> None:
        """Add what was found on one more corpus."""
        self.comparisons.append(comparison)
        self.dtype = find_dtype(comparison.outcomes)

    def save(self, path: Path) -> None:
        """Write the benchmark as JSON."""
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(msgspec.json.format(msgspec.json.encode(self), indent=1) + b"\n")

    @classmethod
    def load(cls, path: Path) -> "Bench":
        """Read a benchmark that `save` wrote.

        Raises:
            msgspec.ValidationError: The file holds something that is no benchmark.
        """
        return msgspec.json.decode(path.read_bytes(), type=cls)
