"""One child process for each device, each pinned by its environment before it starts."""

from typing import Final

from embedfarm.contract.processes import RUN_MODULE, Child
from embedfarm.contract.settings import Settings
from embedfarm.workers.devices import Device

WORKER: Final = "worker-"  # begins the name of each


def children(devices: list[Device], settings: Settings) -> list[Child]:
    """Return the worker processes of these devices; the server is `settings.redis_url`."""
    return [
        Child(
            name=f"{WORKER}{device.label}",
            command=[*RUN_MODULE, "embedfarm.workers.main", "--device", device.label],
            environment=settings.environment() | device.environment(),
        )
        for device in devices
    ]
