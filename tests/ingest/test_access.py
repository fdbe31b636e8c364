"""The rights that docs/rq.md gives to programs and to the role."""

import re
from pathlib import Path
from typing import Any

import pytest
import redis
from rq import Queue

from tests.ingest.door import Door, returned, wait_for

DOCUMENT = Path(__file__).parents[2] / "docs" / "rq.md"
LINES = re.findall(r"^ACL SETUSER (\w+) (.+)$", DOCUMENT.read_text(), re.MULTILINE)


def test_the_users_of_the_documentation_suffice(door: Door) -> None:
    """One enqueues and sees no key of the farm, the other one runs the job."""
    connection: Any = door.connection
    for name, rules in LINES:
        connection.execute_command("ACL", "SETUSER", name, *rules.split())
    socket = door.server.url.removeprefix("unix://")
    urls = {name: f"unix://{name}@{socket}?password=change-me" for name, _ in LINES}
    with redis.Redis.from_url(urls["submitter"]) as submitter:
        queue = Queue("embedfarm", connection=submitter, serializer="json")
        job = queue.enqueue("producer.tasks.cleanup")
        with pytest.raises(redis.exceptions.NoPermissionError):
            submitter.zrange("ef:{farm}:jobs", 0, -1)
        with door.ingest(redis_url=urls["ingest"]):
            wait_for(job, "finished")
        assert returned(job)["jobs"] == []
