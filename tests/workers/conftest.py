"""Fixtures that tests of workers share."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.workers.tiny_models import build


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Directories of tiny models by kind."""
    made: dict[str, Path] = {}

    def make(kind: str) -> Path:
        if kind not in made:
            made[kind] = build(kind, tmp_path_factory.mktemp(kind))
        return made[kind]

    return make
