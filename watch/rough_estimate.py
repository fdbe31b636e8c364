"""Estimates of jobs within a request: from a beginning of the corpus, and what the farm remembers.

Nothing is embedded and nothing simulated, as `embedfarm.watch.forecast` does; so ranges are wider.
"""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from embedfarm.contract.farm_client import FarmClient
from embedfarm.contract.formatting import HOUR, counted, format_range
from embedfarm.contract.job_spec import JobSpec
from embedfarm.contract.spending import format_cost, format_device_hours
from embedfarm.contract.token_counter import TokenCounter
from embedfarm.watch.corpus_beginning import CorpusBeginning
from embedfarm.watch.forecast import HISTORY_SPREAD, SPREAD_MIN, remembered_paces

DEVIATIONS: Final = 1.645  # to both sides of a mean lie nine cases of ten
UNSEEN_SPREAD: Final = 0.3  # by which chunks that were not read may differ from those that were
UNTOKENISED_SPREAD: Final = 0.3  # of the bytes in a token, where no tokenizer was at hand


@dataclass(frozen=True)
class RoughEstimate:
    """What a job will take on a farm that has nothing else to do.

    Attributes:
        chunks: Chunks of the corpus.
        tokens: Their tokens, after cutting what is too long.
        read_ratio: Share of the corpus that this comes from; the smaller, the wider the ranges.
        workers: Workers that share the job.
        tokens_per_second: Speed of all of them together, as the farm remembers it.
        seconds: Time from the first block to the last result.
        seconds_least: Least of that time.
        seconds_most: Most of that time.
        device_hours: Hours of single devices.
        device_hours_least: Least of these.
        device_hours_most: Most of these.
        cost: Their cost, by the prices of the workers; 0 without any.
        cost_least: Least of that cost.
        cost_most: Most of that cost.
    """

    chunks: int
    tokens: int
    read_ratio: float
    workers: int
    tokens_per_second: float
    seconds: float
    seconds_least: float
    seconds_most: float
    device_hours: float
    device_hours_least: float
    device_hours_most: float
    cost: float
    cost_least: float
    cost_most: float

    @property
    def size(self) -> str:
        """How large the corpus is, in words."""
        about = "" if self.read_ratio == 1 else "about "
        return f"{about}{counted(self.chunks, 'chunk')}, about {self.tokens:,} tokens"

    @property
    def speed(self) -> str:
        """How fast the farm is, in words."""
        return f"{counted(self.workers, 'worker')}, {self.tokens_per_second:,.0f} tokens/s"

    @property
    def words(self) -> str:
        """What the job will take, in words."""
        least, most = map(format_device_hours, (self.device_hours_least, self.device_hours_most))
        hours = least if least == most else f"{least} to {most}"
        said = f"{format_range(self.seconds_least, self.seconds_most)}, {hours} of devices' time"
        if not self.cost:
            return said
        return f"{said}, cost {format_cost(self.cost_least)} to {format_cost(self.cost_most)}"


def estimate_roughly(
    farm: FarmClient,
    spec: JobSpec,
    beginning: CorpusBeginning,
    counter: TokenCounter,
    half_life_seconds: float,
) -> RoughEstimate:
    """Estimate a job from the beginning of its corpus.

    Args:
        farm: The farm, which remembers how fast its workers were.
        spec: What the job asks for.
        beginning: The beginning of its corpus.
        counter: Estimates the tokens of texts, the worse where no tokenizer is at hand.
        half_life_seconds: Setting `rate_half_life_seconds`.

    Raises:
        ForecastError: No worker of the farm has embedded anything with the model.
    """
    sizes = np.asarray([len(text.encode()) for text in beginning.texts])
    lengths = counter.estimate(sizes).tolist()
    mean = statistics.fmean(lengths)
    paces = remembered_paces(farm, spec, half_life_seconds, mean)
    speeds = [each.tokens_per_second for each in paces]
    tokens = mean * beginning.chunks
    shares = [(tokens * each.tokens_per_second / sum(speeds), each) for each in paces]
    seconds = tokens / sum(speeds)
    hours = sum(share * each.device_seconds for share, each in shares) / HOUR
    cost = sum(share * each.cost for share, each in shares)
    spread = _spread_of_size(lengths, beginning.read_ratio) * _spread_of_speed(speeds)
    spread *= 1 if counter.bytes_per_token else 1 + UNTOKENISED_SPREAD
    return RoughEstimate(
        chunks=beginning.chunks,
        tokens=round(tokens),
        read_ratio=beginning.read_ratio,
        workers=len(paces),
        tokens_per_second=sum(speeds),
        seconds=seconds,
        seconds_least=seconds / spread,
        seconds_most=seconds * spread,
        device_hours=hours,
        device_hours_least=hours / spread,
        device_hours_most=hours * spread,
        cost=cost,
        cost_least=cost / spread,
        cost_most=cost * spread,
    )


def _spread_of_size(lengths: Sequence[int], read_ratio: float) -> float:
    """Return the factor, to both sides, by which the tokens of a corpus may be other ones.

    What was read is known. Of the rest the mean length has the error of a sample, and beyond that
    the rest of a corpus may differ from its beginning.
    """
    if read_ratio == 1:
        return 1.0
    error = statistics.pstdev(lengths) / statistics.fmean(lengths) / math.sqrt(len(lengths))
    return 1 + (1 - read_ratio) * (UNSEEN_SPREAD + DEVIATIONS * error)


def _spread_of_speed(speeds: Sequence[float]) -> float:
    """Return the factor, to both sides, by which workers together may be of another speed."""
    deviation = HISTORY_SPREAD * math.hypot(*speeds) / sum(speeds)
    return max(1 + SPREAD_MIN, math.exp(DEVIATIONS * deviation))
