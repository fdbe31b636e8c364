"""Canaries of a worker: what its engines make of the fixed texts that all workers embed."""

import logging
import time
import weakref
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Final

import numpy as np
from numpy.typing import NDArray

from embedfarm.contract.canaries import TEXTS, Canaries, canaries_of, disagreement
from embedfarm.workers.engines.engine import DeviceAway, DeviceFailed, Engine
from embedfarm.workers.engines.null import NullEngine
from embedfarm.workers.engines.windows import pool_windows
from embedfarm.workers.leases import MicroBatch
from embedfarm.workers.packing import pack
from embedfarm.workers.texts import tokenise
from embedfarm.workers.watchdog import Watchdog

ENGINES_MAX: Final = 64  # of which the canaries are kept
CHECK_TEXTS_MIN: Final = 2  # another text's vector is seen only beside that one
CHECK_SHARE: Final = 0.04  # characters for each token of a micro-batch: a hundredth of its work
_CHARACTERS: Final = list(accumulate(map(len, TEXTS)))

log = logging.getLogger(__name__)


class ComputesWrongly(DeviceAway):
    """Raised when a device makes other vectors of a text than it made of it before."""


@dataclass
class CanaryKeeper:
    """The canaries of the engines that a worker has; each engine makes them once.

    An engine that is loaded anew makes them anew, whatever one of the same files made before.
    """

    _made: OrderedDict[int, tuple["weakref.ref[Engine]", Canaries | None]] = field(
        default_factory=OrderedDict
    )

    def attach(self, batch: MicroBatch, watchdog: Watchdog) -> None:
        """Give a micro-batch the canaries of its engine, which makes them if it has not.

        They are made before the engine embeds anything else, so that `check` knows later whether
        the device has changed since.

        Raises:
            DeviceFailed: Nothing works on the device any more.
        """
        if not self.has(batch.engine):
            began = time.monotonic()
            with watchdog.watch("the canaries", watchdog.load_limit, batch.leases):
                self.make(batch.engine)
            batch.account.spend("check", time.monotonic() - began)
        batch.canaries = self.of(batch.engine)

    def check(self, batch: MicroBatch, watchdog: Watchdog) -> None:
        """Have the device embed canaries once more behind a micro-batch that it has embedded.

        The first ones of them, as many as are a hundredth of the micro-batch's work, and at least
        two. Nothing of a micro-batch is stored before: whenever the device began to compute
        wrongly, nothing of that is.

        Raises:
            ComputesWrongly: A vector is not what the same engine made of the text before.
            DeviceFailed: Nothing works on the device any more.
        """
        known = batch.canaries
        if known is None or not batch.account.batches:  # the device made nothing
            return
        began = time.monotonic()
        count = bisect_right(_CHARACTERS, CHECK_SHARE * batch.account.real_tokens)
        texts = TEXTS[: max(CHECK_TEXTS_MIN, count)]
        with watchdog.watch("the canaries", watchdog.load_limit):
            made = make_canaries(batch.engine, texts)
        batch.account.spend("forward", time.monotonic() - began)
        before = canaries_of(known.matrix()[: len(texts)], texts)
        words = disagreement(before, made, batch.dtype) if made is not None else ""
        if words:
            raise ComputesWrongly(f"it makes other vectors of the same texts than before: {words}")

    def has(self, engine: Engine) -> bool:
        """Tell whether an engine has made its canaries; its id may be that of an earlier one."""
        kept, _ = self._made.get(id(engine), (None, None))
        return kept is not None and kept() is engine

    def make(self, engine: Engine) -> None:
        """Have an engine make its canaries.

        Raises:
            DeviceFailed: Nothing works on the device any more.
        """
        self._made[id(engine)] = weakref.ref(engine), make_canaries(engine)
        self._made.move_to_end(id(engine))
        while len(self._made) > ENGINES_MAX:
            self._made.popitem(last=False)

    def of(self, engine: Engine) -> Canaries | None:
        """Return the canaries that an engine has made; None where it made none."""
        kept, canaries = self._made.get(id(engine), (None, None))
        return canaries if kept is not None and kept() is engine else None


def make_canaries(engine: Engine, texts: tuple[str, ...] = TEXTS) -> Canaries | None:
    """Embed canaries as an engine embeds the texts of its job.

    Returns:
        The canaries; None where the engine raises, as it may over texts that are not the job's.

    Raises:
        DeviceFailed: Nothing works on the device any more.
    """
    if isinstance(engine, NullEngine):  # a modelled device takes its time for a job's texts alone
        engine = replace(engine, tokens_per_second=0.0)
    try:
        return canaries_of(embed_texts(engine, texts), texts)
    except DeviceFailed:
        raise
    except Exception as error:  # noqa: BLE001 # a model may raise anything; a canary is no result
        log.warning("no canaries: %s", error)
        return None


def embed_texts(engine: Engine, texts: Sequence[str]) -> NDArray[np.float32]:
    """Return the vectors of a few texts, shape (texts, dimensions), as a job has them.

    The vector of a text that cannot be embedded is zero.

    Raises:
        DeviceFailed: Nothing works on the device any more.
        Exception: Whatever the engine raises.
    """
    batch, reasons = tokenise(engine, texts)
    rows = np.flatnonzero(batch.lengths > 0)
    vectors = np.zeros((len(batch.lengths), engine.dimensions), np.float32)
    lengths = batch.lengths[rows]
    for each in pack(lengths, engine.batch_tokens, engine.launch_tokens, padded=engine.padded):
        vectors[rows[each]] = engine.forward(batch, rows[each])
    pooled = pool_windows(batch, vectors, normalised=engine.normalised)
    pooled[list(reasons)] = 0
    return pooled
