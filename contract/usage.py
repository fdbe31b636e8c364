"""Accounts of what a worker's device did for a job: counts, times, and how good the vectors are.

They are statistics: what a worker that dies had not noted yet is lost. Exact counts of chunks and
tokens come with the results.
"""

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any

import msgspec

from embedfarm.contract.encoding import Count, Fact, Record


class Parity(Record):
    """A sample of a job's vectors, compared with two other embeddings of the same texts.

    Attributes:
        texts: Number of texts in the sample.
        reference_mean: Mean cosine with float32 on the CPU; 0 without a reference.
        reference_least: Least cosine of a text with float32 on the CPU; 0 without a reference.
        composition_least: Least cosine of a text with its vector by the same engine in a device
            batch of its own.
        reference: What embedded in float32, such as "openvino float32", whose graph was compared
            with torch when it was made and when the worker started.
        shared: Whether the sample is of another job that the worker embedded shortly before with
            the same engine: a job of few texts has none of its own.
    """

    texts: Count = 0
    reference_mean: Fact = 0.0
    reference_least: Fact = 0.0
    composition_least: Fact = 0.0
    reference: str = ""
    shared: bool = False


class Account(Record):
    """Account of what one worker did for a job; accounts of the same worker add up.

    Attributes:
        engine: Name and precision of the engine, such as "torch bfloat16".
        device: Kind of the device.
        chunks: Chunks committed.
        real_tokens: Tokens through the device, padding not included.
        padded_tokens: Tokens through the device, padding included.
        batches: Device batches.
        batches_refused: Device batches that did not fit into memory.
        duplicates: Results that somebody else had stored before.
        rows_repeated: Rows that were run again in float32.
        budget_tokens: Padded tokens that a device batch may have at the end.
        texts_full: Texts that fill what the model takes, where longer ones are cut off there.
        texts_empty: Texts that are empty, or of white space alone.
        cost_seconds: What a device batch takes: "launch", for each padded "token", and for each
            "pair" of tokens of a text (`embedfarm.contract.costs`); empty until it is learned.
        flops: Floating-point operations that the model needs for the real tokens.
        peak_flops_per_second: Peak of this device, measured by multiplying matrices; 0 when
            unknown.
        seconds: Time by activity: "queue" (the device waits for work), "tokenise", "forward" (the
            device works), "lane" (it works for interactive requests meanwhile), "commit", "cache"
            (looking for vectors there). All but "queue", "forward" and "lane" run beside the
            device.
        parity: The sample that was checked, None without one.
        chunks_cached: Chunks whose vectors were in the worker's cache, so that no device made them.
    """

    engine: str = ""
    device: str = ""
    chunks: Count = 0
    real_tokens: Count = 0
    padded_tokens: Count = 0
    batches: Count = 0
    batches_refused: Count = 0
    duplicates: Count = 0
    rows_repeated: Count = 0
    budget_tokens: Count = 0
    flops: Fact = 0.0
    peak_flops_per_second: Fact = 0.0
    seconds: dict[str, Fact] = msgspec.field(default_factory=dict)
    parity: Parity | None = None
    cost_seconds: dict[str, Fact] = msgspec.field(default_factory=dict)
    texts_full: Count = 0
    texts_empty: Count = 0
    chunks_cached: Count = 0

    def spend(self, activity: str, seconds: float) -> None:
        """Add time to an activity."""
        self.seconds[activity] = self.seconds.get(activity, 0.0) + seconds

    def add(self, other: "Account") -> None:
        """Add a later account of the same worker to this one."""
        for name in SUMS:
            setattr(self, name, getattr(self, name) + getattr(other, name))
        for name in LATEST:
            setattr(self, name, getattr(other, name) or getattr(self, name))
        for activity, seconds in other.seconds.items():
            self.spend(activity, seconds)


def split(whole: Account, weights: Sequence[int]) -> list[Account]:
    """Divide an account by weights, not all of them 0, into parts that add up to it."""
    ends = [0, *accumulate(weights)]
    parts = []
    for first, end in pairwise(ends):
        part = Account(**{name: getattr(whole, name) for name in LATEST})
        for name in SUMS:
            value = getattr(whole, name)
            if isinstance(value, int):  # rounded where it is cut, so that nothing is lost
                share: float = value * end // ends[-1] - value * first // ends[-1]
            else:
                share = value * ((end - first) / ends[-1])
            setattr(part, name, share)
        for activity, seconds in whole.seconds.items():
            part.spend(activity, seconds * ((end - first) / ends[-1]))
        parts.append(part)
    return parts


SUMS = (
    "chunks",
    "real_tokens",
    "padded_tokens",
    "batches",
    "batches_refused",
    "duplicates",
    "rows_repeated",
    "texts_full",
    "texts_empty",
    "chunks_cached",
    "flops",
)
LATEST = (
    "engine",
    "device",
    "budget_tokens",
    "peak_flops_per_second",
    "parity",
    "cost_seconds",
)


def describe(account: Account) -> dict[str, Any]:
    """Return an account for people: its figures, and the ratios that follow from them.

    Returns:
        The attributes by name, and padding_ratio (padding as a share of all tokens of device
        batches), tokens_per_second (real tokens, while the device worked), busy_ratio (working
        time as a share of working and waiting time), peak_ratio (share of the measured peak); a
        ratio that is not known is left out.
    """
    forward = account.seconds.get("forward", 0.0)
    waited = account.seconds.get("queue", 0.0)
    peak = account.peak_flops_per_second
    ratios = {
        "padding_ratio": _ratio(account.padded_tokens - account.real_tokens, account.padded_tokens),
        "tokens_per_second": _ratio(account.real_tokens, forward),
        "busy_ratio": _ratio(forward, forward + waited),
        "peak_ratio": _ratio(account.flops, peak * forward),
    }
    figures = msgspec.structs.asdict(account)
    figures["parity"] = account.parity and msgspec.structs.asdict(account.parity)
    return figures | {name: round(value, 4) for name, value in ratios.items() if value is not None}


def _ratio(part: float, whole: float) -> float | None:
    return part / whole if whole > 0 else None
