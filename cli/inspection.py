"""`embedfarm workers | devices | doctor`: list workers and devices, and check this machine."""

import importlib.metadata
import platform
import shutil
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path

import redis as redis_client
import typer
from rich.console import Console

from embedfarm.cli.options import (
    FAILED,
    AsJson,
    RedisUrl,
    farm_settings,
    plain_errors,
    print_json,
    read_settings,
    url_of_up,
)
from embedfarm.cli.progress import worker_table
from embedfarm.contract import model_files
from embedfarm.contract.broker import KEEPS_KEYS, ServerError, closing_client, find_server
from embedfarm.contract.encoding import as_dict
from embedfarm.contract.farm_client import FarmClient
from embedfarm.contract.farm_timeline import TIMELINE_MAX
from embedfarm.contract.plans import DECISIONS_MAX
from embedfarm.contract.redaction import hide_password
from embedfarm.contract.settings import DEFAULT_MODEL, Settings
from embedfarm.watch.overview import read_jobs
from embedfarm.workers.engines.kept_choices import Choice, kept_choices

DISK_BYTES_MIN = 4 << 30
HOUR_SECONDS = 3600
JOBS_MAX = 1000  # of those that have ended
LIBRARIES = ("torch", "sentence-transformers", "transformers", "redis", "pyarrow", "numpy")


def workers(redis: RedisUrl = "", as_json: AsJson = False) -> None:  # noqa: FBT002 -- a flag
    """List the workers that are alive."""
    settings = farm_settings(redis)
    with plain_errors(), closing_client(settings.redis_url) as client:
        unreadable: dict[str, str] = {}
        beats = FarmClient(client, unreadable.__setitem__).workers()
    for place, reason in unreadable.items():
        typer.echo(f"{place} is left out: {reason}", err=True)
    if as_json:
        print_json([as_dict(beat) for beat in beats])
    else:
        Console().print(worker_table(beats))


def devices(as_json: AsJson = False) -> None:  # noqa: FBT002 -- a flag
    """List the devices of this host, or say why there are no GPUs."""
    from embedfarm.workers.cores import available_cores, cpu_workers_default
    from embedfarm.workers.devices import describe_devices

    report = describe_devices()
    cores = len(available_cores())
    if as_json:
        print_json(
            {
                "gpus": [asdict(gpu) | report.facts[gpu.label] for gpu in report.gpus],
                "reason": report.reason,
                "cores": cores,
            }
        )
        return
    console = Console(highlight=False, soft_wrap=True)
    for index, gpu in enumerate(report.gpus):
        facts = report.facts[gpu.label]
        node = f", NUMA node {gpu.node}" if gpu.node >= 0 else ""
        place = f"PCI {gpu.pci}{node}  " if gpu.pci else ""
        console.print(
            f"{index}  {gpu.name}  {gpu.uuid or gpu.label}  {place}"
            f"{facts.get('memory_used_bytes', 0) / (1 << 30):.1f} of "
            f"{gpu.memory_total_bytes / (1 << 30):.1f} GiB used, "
            f"{facts.get('utilization_ratio', 0):.0%} busy"
        )
    if not report.gpus:
        console.print(f"no GPU: {report.reason}")
    console.print(f"{cores} CPU cores, {cpu_workers_default(cores)} CPU workers by default")


def doctor(redis: RedisUrl = "", as_json: AsJson = False) -> None:  # noqa: FBT002 -- a flag
    """Check what a farm on this machine needs; exit with status 1 when something will not work."""
    settings = read_settings(redis)
    if not settings.redis_url:
        settings = settings.model_copy(update={"redis_url": url_of_up(settings)})
    findings = list(_examine(settings))
    if as_json:
        print_json([{"what": what, "ok": ok, "found": found} for what, ok, found in findings])
    else:
        console = Console(highlight=False, soft_wrap=True)
        for what, ok, found in findings:
            mark = "[green]ok  [/green]" if ok else "[red]bad [/red]"
            console.print(f"{mark} {what:12} {found}")
    if not all(ok for _, ok, _ in findings):
        raise typer.Exit(FAILED)


def _examine(settings: Settings) -> Iterator[tuple[str, bool, str]]:
    """Yield for each check its subject, whether it passed, and what was found."""
    yield "python", True, f"{platform.python_version()} on {platform.platform()}"
    yield "libraries", True, ", ".join(map(_version, LIBRARIES))
    yield from _examine_server(settings)
    try:
        yield _examine_devices()
    except ModuleNotFoundError as error:
        yield "devices", True, f"no workers here: pip install 'embedfarm[worker]' ({error})"
    yield _examine_model(settings)
    for choice in kept_choices(settings).values():
        yield "engine", True, _describe_choice(choice)
    free = shutil.disk_usage(Path.cwd()).free
    yield "disk", free > DISK_BYTES_MIN, f"{free / (1 << 30):.0f} GiB free here"


def _version(library: str) -> str:
    """Return a library's name and version; a base installation has not all of them."""
    try:
        return f"{library} {importlib.metadata.version(library)}"
    except importlib.metadata.PackageNotFoundError:
        return f"no {library}"


def _examine_server(settings: Settings) -> Iterator[tuple[str, bool, str]]:
    if not settings.redis_url:
        try:
            yield "server", True, f"private: {' '.join(find_server())}"
        except ServerError as error:
            yield "server", False, str(error)
        return
    try:
        with closing_client(settings.redis_url) as client:
            facts = client.info()
            unreadable = examine_records(FarmClient(client))
    except redis_client.RedisError as error:
        yield "server", False, f"{hide_password(settings.redis_url)}: {error}"
        return
    version = facts.get("valkey_version", facts["redis_version"])
    yield "server", True, f"{version} at {hide_password(settings.redis_url)}"
    persistent = bool(facts["aof_enabled"])
    yield "persistence", persistent, "append-only file" if persistent else "no append-only file"
    policy = facts["maxmemory_policy"]
    yield "eviction", policy == KEEPS_KEYS, f"maxmemory-policy {policy}"
    for place, reason in unreadable.items():
        yield "record", False, f"{place} is left out: {reason}"


def examine_records(farm: FarmClient) -> dict[str, str]:
    """Return why records on the server cannot be read, by the place of each."""
    unreadable: dict[str, str] = {}
    reader = replace(farm, on_unreadable=unreadable.__setitem__)
    for beat in reader.workers():
        reader.plans.plan(beat.worker)
    reader.plans.policy()
    reader.plans.scheduler_stats()
    reader.plans.decisions(DECISIONS_MAX)
    reader.statistics.history()
    reader.statistics.recent_batches(HOUR_SECONDS)
    reader.statistics.samples(HOUR_SECONDS)
    reader.timeline.newest(TIMELINE_MAX)
    read_jobs(reader, [*reader.job_ids(), *reader.ended_ids(JOBS_MAX)])
    return unreadable


def _examine_devices() -> tuple[str, bool, str]:
    from embedfarm.workers.cores import available_cores
    from embedfarm.workers.devices import describe_devices

    report = describe_devices()
    if report.gpus:
        return "devices", True, ", ".join(gpu.name for gpu in report.gpus)
    return (
        "devices",
        not report.broken,
        f"{len(available_cores())} CPU cores; no GPU: {report.reason}",
    )


def _describe_choice(choice: Choice) -> str:
    """Describe which engine is used for a model on this machine, and why."""
    speeds = sorted(choice.tokens_per_second.items(), key=lambda pair: -pair[1])
    tried = ", ".join(f"{name} {speed:,.0f}" for name, speed in speeds)
    days = (time.time() - choice.tried_at) / 86_400
    why = f"of {tried} tokens/s, {days:.0f} days ago" if tried else "which alone takes it"
    return f"{choice.engine} for {choice.model} {choice.dtype}, {why}; `embedfarm bench` tries anew"


def _examine_model(settings: Settings) -> tuple[str, bool, str]:
    """Find out whether the default model is on this host, without asking the hub for it."""
    path = model_files.find_local(DEFAULT_MODEL, settings.model_cache)
    found = f"in {path}" if path else "would be downloaded"
    return "model", True, f"{DEFAULT_MODEL} {found}"
