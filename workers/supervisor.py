"""One child process for each device, each pinned by its environment before it starts."""

import sys

from embedfarm.processes import Child
from embedfarm.settings import Settings
from workers.devices import Device


def children(devices: list[Device], settings: Settings) -> list[Child]:
    """Return the worker processes of these devices; the server is `settings.redis_url`."""
    return [
        Child(
            name=f"worker-{device.label}",
            command=[sys.executable, "-m", "workers.main", "--device", device.label],
            environment=settings.environment() | device.environment(),
        )
        for device in devices
    ]
