"""Tests of the world of the simulation: time, locks, kills and stops."""

import pytest

from tests.simulation import library
from tests.simulation.world import Process, World, enter


@pytest.fixture
def world() -> World:
    """Enter an empty world, and return it."""
    world = World(1)
    enter(world)
    return world


def run_all(world: World, process: Process, *programs: object) -> None:
    """Run programs as tasks of a process until all have ended."""
    for number, program in enumerate(programs):
        assert callable(program)
        world.spawn(process, f"task-{number}", program)
    assert world.run(lambda: not process.tasks, 1000.0)


def test_time_passes_only_in_waits(world: World) -> None:
    """Sleeping takes exactly as long as it says, and nothing else takes any time."""
    seen = []

    def sleeper() -> None:
        for _ in range(3):
            library.sleep(1.5)
            seen.append(library.monotonic())

    run_all(world, Process("one"), sleeper)
    assert seen == [1.5, 3.0, 4.5]


def test_a_lock_has_one_holder(world: World) -> None:
    """A lock is held by one task at a time, and each that waits gets it in the end."""
    lock = library.Lock()
    inside = []

    def holder() -> None:
        with lock:
            inside.append(1)
            assert len(inside) == 1
            library.sleep(1.0)
            inside.pop()

    run_all(world, Process("one"), *[holder] * 5)
    assert world.now == pytest.approx(5.0)


def test_a_condition_times_out(world: World) -> None:
    """A wait returns False when its time is over and True when it was notified."""
    event = library.Event()
    answers = []

    def waiter() -> None:
        answers.append(event.wait(1.0))
        answers.append(event.wait(5.0))

    def setter() -> None:
        library.sleep(2.0)
        event.set()

    run_all(world, Process("one"), waiter, setter)
    assert answers == [False, True]
    assert world.now == pytest.approx(2.0)


def test_a_killed_process_does_nothing_more(world: World) -> None:
    """A killed program cannot wait on its way out, and nothing in it goes on."""
    done = []

    def program() -> None:
        try:
            library.sleep(10.0)
            done.append("slept")
        finally:
            library.sleep(1.0)
            done.append("tidied up")

    process = Process("one")
    world.spawn(process, "main", program)
    world.call_at(1.0, lambda: world.kill(process))
    assert world.run(lambda: process.dead, 100.0)
    assert done == []
    assert not process.tasks


def test_a_frozen_process_goes_on_late(world: World) -> None:
    """Time goes on without a frozen process; what was due meanwhile is done when it thaws."""
    seen = []

    def program() -> None:
        library.sleep(1.0)
        seen.append(library.monotonic())

    process = Process("one")
    world.spawn(process, "main", program)
    world.call_at(0.5, lambda: world.freeze(process))
    world.call_at(7.0, lambda: world.thaw(process))
    assert world.run(lambda: not process.tasks, 100.0)
    assert seen == [7.0]
