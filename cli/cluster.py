"""`embedfarm work --on ray`: workers on the hosts of a cluster, which this command only watches."""

import logging

from rich.console import Console

from embedfarm.cli.options import USAGE, fail, plain_errors, stop_on_signals
from embedfarm.contract.redaction import hide_password, start_logging
from embedfarm.contract.settings import Settings
from embedfarm.contract.systemd_notify import Notifier
from embedfarm.workers.placement import FleetWish, parse_kinds

LOOK_SECONDS = 1.0
OWN = ("state_directory", "jobs_directory", "keys_file", "queue_url", "stores", "webhook_secret")
"""Settings of this host, or that no worker needs to know."""


def work_on(cluster: str, devices: str, workers: int, cpus: int, settings: Settings) -> None:
    """Have workers on a cluster until this command is stopped, and let them drain then.

    Args:
        cluster: "ray", or "ray://HOST:PORT".
        devices: "all", "gpu" or "cpu".
        workers: Number of actors, 0 for as many as there are devices.
        cpus: CPUs of each actor, 0 for the default.
        settings: The farm's settings; those that were given go with the workers.
    """
    if cluster != "ray" and not cluster.startswith("ray://"):
        fail(f"--on {cluster}: it is ray, or ray://HOST:PORT", USAGE)
    if settings.redis_url.startswith("unix:"):
        fail("no other host reaches a server at a unix socket: give --redis redis://HOST", USAGE)
    console = Console(highlight=False, soft_wrap=True)
    with plain_errors():
        wish = FleetWish(parse_kinds(devices), workers, cpus)
        from embedfarm.workers.ray_cluster import NEAREST, RayFleet, join_cluster

        notifier = Notifier()
        join_cluster(NEAREST if cluster == "ray" else cluster)
        stop = stop_on_signals()  # Ray has handlers of its own until then
        start_logging(logging.INFO)
        fleet = RayFleet(wish, environment_of(settings))
        console.print(f"working on {cluster} for {hide_password(settings.redis_url)}")
        try:
            said = ""
            while not stop.is_set():
                fleet.tick()
                if (words := fleet.describe()) != said:
                    console.print(words)
                said = words
                notifier.tick(words)
                stop.wait(LOOK_SECONDS)
        finally:
            notifier.stop()
            fleet.drain()
    console.print("all workers on the cluster have ended")


def environment_of(settings: Settings) -> dict[str, str]:
    """Return what was set here as variables for workers elsewhere; the rest their hosts say."""
    given = settings.model_fields_set - set(OWN) | {"redis_url", "drain_seconds"}
    names = {f"EMBEDFARM_{name.upper()}" for name in given}
    return {name: value for name, value in settings.environment().items() if name in names}
