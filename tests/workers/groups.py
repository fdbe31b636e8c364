"""Groups whose first rank is the process of a test, and what they compute."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from embedfarm.contract.job_spec import JobSpec
from embedfarm.contract.settings import Settings
from embedfarm.workers.engines.engine import Engine
from embedfarm.workers.engines.group import FORMED, Group
from embedfarm.workers.engines.opening import open_engine
from embedfarm.workers.engines.sentence_transformer import SentenceTransformerEngine
from tests.workers.tiny_models import SENTENCES

TEXTS: Final = (*SENTENCES, "one", "a", "emoji 🦊🦊 and 漢字", "long " * 2000, "x" * 500)
SECONDS: Final = 60.0  # that a group has for anything


@contextmanager
def formed(size: int, seconds: float = SECONDS) -> Iterator[tuple[Group, list[str]]]:
    """Make this process the first rank of a group, and yield it with the reasons of its end."""
    ends: list[str] = []
    group = Group("cpu", size, seconds, ends.append)
    FORMED.append(group)
    try:
        yield group, ends
    finally:
        FORMED.remove(group)
        group.close()


def open_model(model: Path | str, **job: Any) -> Engine:  # noqa: ANN401 # any field of a job
    """Open a model in float32 on what this process has."""
    spec = JobSpec(model=str(model), **({"dtype": "float32"} | job))
    return open_engine(spec, "cpu", Settings())


def embed(engine: Engine) -> NDArray[np.float32]:
    """Vectors of all texts, some at a time."""
    batch = engine.tokenise(TEXTS)
    rows = np.array_split(np.arange(len(TEXTS)), 3)
    return np.concatenate([engine.forward(batch, each) for each in rows])


def alone(model: Path) -> SentenceTransformerEngine:
    """The model in this process only."""
    spec = JobSpec(model=str(model), dtype="float32")
    return SentenceTransformerEngine.open(spec, "cpu", None)
