"""One child process for each device, each pinned by its environment before it starts."""

import sys

from embedfarm.contract.processes import Child
from embedfarm.contract.settings import Settings
from embedfarm.workers.devices import Device


def children(devices: list[Device], settings: Settings) -> list[Child]:
    """Return the worker processes of these devices; the server is `settings.redis_url`."""
    return [
        Child(
            name=f"worker-{device.label}",
            command=[sys.executable, "-m", "embedfarm.workers.main", "--device", device.label],
            environment=settings.environment() | device.environment(),
        )
        for device in devices
    ]
