"""A worker process whose engine comes to harm by some texts: `python -m tests.poison_worker`.

The process is `workers.main` with another engine. While the file that `EMBEDFARM_TEST_HEALED` names
exists, every text is harmless; while that of `EMBEDFARM_TEST_STUCK` does, the device's driver says
nothing.
"""

import ctypes
import os
import re
import signal
import sys
import threading
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from embedfarm.contract.job_spec import JobSpec
from embedfarm.workers import main as process
from embedfarm.workers import model_store
from embedfarm.workers.engines.engine import Chunk, Tokenised, only_texts
from embedfarm.workers.engines.null import NullEngine

HEALED: Final = "EMBEDFARM_TEST_HEALED"
STUCK: Final = "EMBEDFARM_TEST_STUCK"
MARKER: Final = "poison that "
DEEDS: Final = ("raises", "kills", "hangs", "locks")


def hold_lock(*, busy: bool = False) -> None:
    """Let no other thread of this process run, for ages: at work, or in a wait for nothing."""
    if busy:
        re.match(r"(a+)+$", "a" * 64 + "b")
    ctypes.PyDLL(None).pause()


class PoisonEngine(NullEngine):
    """The null engine, until it meets a text with a marker."""

    poisons: Final[dict[int, str]] = {}

    def tokenise(self, chunks: Sequence[Chunk]) -> Tokenised:
        """Tokenise as the null engine does, note poisons, and hang at once on one that locks."""
        for text in only_texts(chunks):
            deed = text.partition(MARKER)[2]
            if deed and not Path(os.environ[HEALED]).exists():
                self.poisons[zlib.crc32(text.encode())] = deed
                if deed == "locks":
                    hold_lock()
        return super().tokenise(chunks)

    def forward(self, batch: Tokenised, rows: NDArray[np.intp]) -> NDArray[np.float32]:
        """Embed as the null engine does, unless a poison among the rows raises, kills or hangs."""
        deeds = {self.poisons.get(int(checksum)) for checksum in batch.features[rows]}
        if Path(os.environ[HEALED]).exists():
            deeds = set()
        if "raises" in deeds:
            raise RuntimeError("poison")
        if "kills" in deeds:
            os.kill(os.getpid(), signal.SIGKILL)
        if "hangs" in deeds:
            threading.Event().wait()
        return super().forward(batch, rows)


def open_poison_engine(spec: JobSpec, *_: Any) -> PoisonEngine:  # noqa: ANN401 # as open_engine
    """Open the poison engine, in the place of `open_engine`."""
    engine = PoisonEngine.open(spec)
    assert isinstance(engine, PoisonEngine)
    return engine


def read_facts(_: object) -> dict[str, float]:
    """Return no facts of the device, or hang like a driver that does not answer."""
    if Path(os.environ.get(STUCK, "/nowhere")).exists():
        threading.Event().wait()
    return {}


def main() -> int:
    """Run a worker whose engine comes to harm by some texts."""
    vars(model_store)["open_engine"] = open_poison_engine  # where it is looked up
    vars(process)["_facts"] = read_facts
    return process.main()


if __name__ == "__main__":
    sys.exit(main())
