"""Tests of the bottlenecks that hold a farm back, rule by rule."""

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Final

import msgspec
import pytest

from embedfarm.contract.records import Heartbeat
from embedfarm.contract.settings import Settings
from embedfarm.contract.sizing import FarmRoom
from embedfarm.watch.bottlenecks import FEW, RULES, Bottleneck, Situation, find_bottlenecks
from embedfarm.watch.overview import JobFacts
from tests.contract.little_job import heartbeat

SETTINGS: Final = Settings()
WINDOW: Final = SETTINGS.window_bytes_max


def job(name: str = "job", **facts: Any) -> JobFacts:  # noqa: ANN401 -- facts of any type
    """Return a job that is half embedded, and wholly sent."""
    usual: dict[str, Any] = {
        "state": "running",
        "chunk_count": 100,
        "chunks_in": 100,
        "chunks_done": 50,
        "blocks_in": 10,
        "blocks_done": 5,
        "name": name,
        "model": "null:2",
        "late_seconds": 0.0,
        "device_hours": 0.0,
        "cost": 0.0,
        "refused": {},
    }
    return JobFacts(job=f"id of {name}", **usual | facts)


def workers(*states: str, **facts: Any) -> list[Heartbeat]:  # noqa: ANN401 -- facts of any type
    """Return heartbeats of workers in these states."""
    return [
        msgspec.structs.replace(heartbeat(f"w{place}"), state=state, **facts)
        for place, state in enumerate(states)
    ]


USUAL: Final = Situation(
    jobs=[job()],
    jobs_total=1,
    waiting_blocks={"id of job": 5},
    workers=workers("busy", "idle"),
    lost_seconds={},
    scheduler_active=True,
    memory_used_bytes=100 << 20,
    memory_bytes_max=1 << 30,
    settings=SETTINGS,
)


def situation(**changes: Any) -> Situation:  # noqa: ANN401 -- facts of any type
    """Return a usual farm with changes; blocks of all its jobs wait."""
    jobs = changes.get("jobs", USUAL.jobs)
    waiting = {each.job: 5 for each in jobs}
    usual: dict[str, Any] = {"jobs_total": len(jobs), "waiting_blocks": waiting}
    return replace(USUAL, **usual | changes)


def said(**changes: Any) -> list[tuple[str, str]]:  # noqa: ANN401 -- facts of any type
    """Return severities and sentences about a usual farm with changes."""
    return [(each.severity, each.text) for each in find_bottlenecks(situation(**changes))]


def test_nothing_is_said_of_a_farm_that_runs() -> None:
    """A farm with a busy worker and blocks that wait for an idle one has no bottleneck."""
    assert said() == []


def test_lost_workers() -> None:
    """Lost workers are named, the latest first, and of many only a few."""
    lost = {f"w{place}": 300.0 - 10 * place for place in range(5)}
    found = said(lost_seconds=lost)
    assert found[0] == (
        "warning", "worker w4 is lost: not heard of for 4 min 20 s; its work goes to others",
    )  # fmt: skip
    assert found[-1] == ("warning", "2 more workers are lost")
    assert len(found) == 4


def test_no_workers() -> None:
    """A farm without workers is an error where there is work, and else only a remark."""
    assert said(workers=[]) == [("error", "no workers")]
    assert said(workers=[], jobs=[]) == [("info", "no workers")]


def test_a_server_that_is_nearly_full() -> None:
    """A server's memory at nine tenths of its limit is an error; without a limit it is none."""
    full: dict[str, Any] = {"memory_used_bytes": 950 << 20}
    assert said(**full) == [("error", "server memory is nearly full: 950 of 1,024 MiB")]
    assert said(**full, memory_bytes_max=0) == []


def test_results_at_their_limit() -> None:
    """Jobs whose results are at their limit are named as the reason for which nothing is leased."""
    full = [job(each, result_bytes=SETTINGS.results_bytes_max) for each in ("one", "two")]
    idle = workers("idle", "idle")
    text = "nothing more is leased: results of job one are not collected"
    assert said(jobs=full[:1], workers=idle) == [("error", text)]
    text = "nothing more is leased: results of 2 jobs are not collected"
    assert said(jobs=full, workers=idle) == [("error", text)]
    reading = [replace(each, chunk_count=-1) for each in full]
    assert said(jobs=reading) == [("error", text)]


def test_producers_that_wait_for_other_jobs() -> None:
    """Producers wait for a full farm window; the job with most uncollected results is named."""
    room = FarmRoom(bytes_max=512 << 20, used_bytes=500 << 20)
    assert said(room=room) == []
    room = replace(room, refusing=True)
    text = "producers wait: jobs fill the farm's window, 500 of 512 MiB"
    assert said(room=room) == [("warning", text)]
    held = [job("one", result_bytes=3 << 19), job("two", result_bytes=1)]
    text += "; most results that nobody has collected are of job one, 1.5 MiB"
    assert said(room=room, jobs=held) == [("warning", text)]
    text = "producers wait: jobs fill the farm's window"
    assert said(room=room, sees_all=False) == [("warning", text)]
    text += "; most of the tenant's results that nobody has collected are of job one, 1.5 MiB"
    assert said(room=room, jobs=held, sees_all=False) == [("warning", text)]


def test_producers_that_wait_for_the_collector() -> None:
    """A producer's window is a bottleneck if it is full of results, not of waiting blocks."""
    window: dict[str, Any] = {"chunk_count": -1, "bytes_in": 30, "bytes_done": 10}
    text = "producers wait: results of job job are not collected"
    assert said(jobs=[job(**window, result_bytes=WINDOW - 40)]) == [("warning", text)]
    assert said(jobs=[job(**window, result_bytes=WINDOW // 2)]) == []
    waiting = window | {"bytes_in": WINDOW}
    assert said(jobs=[job(**waiting, result_bytes=WINDOW // 4)]) == []
    vectors: dict[str, Any] = {"vector_bytes": WINDOW // 100}  # half a window waits
    assert said(jobs=[job(**window, **vectors, result_bytes=WINDOW // 2 + 1)]) == [
        ("warning", text)
    ]


def test_refusals() -> None:
    """A refusal is a warning while another worker can do the job, else an error; both say why."""
    refused = job(refused={"w0": "no\nmemory", "w1": "no\nmemory", "gone": "old"})
    beats = workers("busy", "busy", "busy")
    beats[0].refused = [refused.job]
    text = "worker w0 refuses job job: no memory"
    assert ("warning", text) in said(jobs=[refused], workers=beats)
    assert ("error", text) in said(jobs=[refused], workers=beats[:1])
    beats[1].refused = [refused.job]
    assert ("warning", "2 workers refuse job job: no memory") in said(jobs=[refused], workers=beats)
    assert said(jobs=[refused]) == []  # nobody refuses it any more


def test_no_scheduler() -> None:
    """A missing scheduler is a warning, since workers go on by their own rates."""
    text = "no scheduler: workers go on by their own rates"
    assert said(scheduler_active=False) == [("warning", text)]


def test_all_jobs_are_paused() -> None:
    """The view says that all jobs are paused, unless one of them can be worked on."""
    paused = job(state="paused")
    assert said(jobs=[paused], workers=workers("idle")) == [("warning", "all jobs are paused")]
    assert said(jobs=[paused, job()]) == []
    assert said(jobs=[paused, job(state="cancelled")]) == [("warning", "all jobs are paused")]


def test_missed_deadlines() -> None:
    """Missed deadlines are named, the latest first, and of many only a few."""
    late = [job(str(place), late_seconds=60.0 * place) for place in range(FEW + 3)]
    found = find_bottlenecks(situation(jobs=late))
    assert [each.text for each in found] == [
        "job 5 misses its deadline by 5 min 00 s",
        "job 4 misses its deadline by 4 min 00 s",
        "job 3 misses its deadline by 3 min 00 s",
        "2 more jobs miss their deadlines",
    ]
    assert found[0] == Bottleneck("warning", found[0].text, ("id of 5",), "missed_deadlines")
    assert found[-1].jobs == ("id of 2", "id of 1")


@pytest.mark.parametrize(
    ("jobs", "severity", "text"),
    [
        ([job()], "warning", "2 of 3 workers are idle: nothing to lease"),
        ([], "info", "2 of 3 workers are idle: there are no jobs"),
        ([job(blocks_done=10)], "info", "2 of 3 workers are idle: there are no jobs"),
        (
            [job(chunk_count=-1)],
            "warning",
            "2 of 3 workers are idle: nothing to lease, job job still being read",
        ),
    ],
)
def test_idle_workers(jobs: Sequence[JobFacts], severity: str, text: str) -> None:
    """Idle workers are counted, and the reason for it is given."""
    states = workers("idle", "idle", "busy")
    assert said(jobs=jobs, waiting_blocks={}, workers=states) == [(severity, text)]


def test_loading_and_busy_workers() -> None:
    """Workers that load a model, or are all busy, are remarks."""
    loading = ("info", "1 worker loads a model")
    assert said(workers=workers("loading", "busy")) == [loading]
    assert said(workers=workers("loading", "loading")) == [("info", "2 workers load a model")]
    busy = ("info", "both workers are busy: the devices are the limit")
    assert said(workers=workers("busy", "busy")) == [busy]
    for states, words in ((("idle",), "the worker is"), (("idle", "idle"), "both workers are")):
        text = f"{words} idle: there are no jobs"
        assert said(jobs=[], workers=workers(*states)) == [("info", text)]


def test_older_jobs() -> None:
    """The view says how many of the jobs were looked at, if not all of them."""
    text = "only the newest 1 of 7 jobs are looked at"
    assert said(jobs_total=7) == [("info", text)]


def test_the_worst_comes_first() -> None:
    """Errors come before warnings, and warnings before remarks, whatever the rule."""
    found = said(
        jobs_total=7,
        scheduler_active=False,
        memory_used_bytes=1 << 30,
        jobs=[job(late_seconds=9.0)],
    )
    assert [severity for severity, _ in found] == ["error", "warning", "warning", "info"]


def test_a_strange_name_stays_in_its_line() -> None:
    """A name with control characters is shown without them, since it is other people's words."""
    late = job("\x1b[2J\n" + "long" * 100, late_seconds=9.0)
    ((_, text),) = said(jobs=[late])
    assert text.isprintable()
    assert len(text) < 100


def test_a_thousand_jobs_are_looked_at_quickly() -> None:
    """Looking at a thousand jobs and 512 workers takes less than 5 s, and says only a little."""
    refused = {f"w{place}": "no memory" for place in range(8)}
    jobs = [job(str(n), refused=refused, late_seconds=n, result_bytes=n) for n in range(1000)]
    beats = workers(*["busy"] * 512)
    for beat in beats[:8]:
        beat.refused = [each.job for each in jobs]
    began = time.perf_counter()
    found = find_bottlenecks(situation(jobs=jobs, workers=beats))
    assert time.perf_counter() - began < 5
    assert len(found) <= len(RULES) * (FEW + 1)
