"""Fixtures of the RQ door."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.ingest.rq_farm import Door
from tests.support import LiveServer


@pytest.fixture
def door(server: LiveServer, tmp_path: Path) -> Iterator[Door]:
    """Give the door of a farm on a server of its own; the test opens it."""
    door = Door(server, tmp_path)
    yield door
    door.connection.close()
