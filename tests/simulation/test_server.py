"""The model of the server does what real servers do."""

import os
from typing import Final, TypeAlias

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    precondition,
    rule,
    run_state_machine_as_test,
)

from tests.simulation import words
from tests.simulation.both import BothServers
from tests.simulation.farm_steps import FarmSteps, JobSteps, Steps
from tests.simulation.server.server import DATA
from tests.support import LiveServer

STEPS: Final = 50
EXAMPLES: Final = int(os.environ.get("EMBEDFARM_MODEL_EXAMPLES", "5"))


class WordsMachine(RuleBasedStateMachine):
    """Both servers get the same commands, of which most make sense."""

    def __init__(self, live: LiveServer) -> None:
        super().__init__()
        self.both = BothServers(live)

    def teardown(self) -> None:
        """Let go of the real server."""
        self.both.close()

    @rule(each=st.one_of(words.COMMANDS))
    def run(self, each: list[bytes]) -> None:
        """One command."""
        self.both.execute(each)

    @rule(each=st.one_of(words.COMMANDS))
    def run_without_arguments(self, each: list[bytes]) -> None:
        """One that has too few words."""
        self.both.execute(each[:1])

    @rule(each=words.SCRIPTED)
    def evaluate(self, each: list[bytes]) -> None:
        """A script."""
        self.both.execute(each)

    @rule(
        each=st.lists(st.one_of(words.COMMANDS), max_size=4),
        end=st.sampled_from(["EXEC", "DISCARD"]),
    )
    def run_together(self, each: list[list[bytes]], end: str) -> None:
        """A transaction. With its memory full, only an old server queues nothing at all."""
        if self.both.model.full:
            each = [one for one in each if DATA[one[0]].grows]
        for one in [[b"MULTI"], *each, [end.encode()]]:
            self.both.execute(one)

    @rule(full=st.booleans())
    def fill(self, *, full: bool) -> None:
        """Memory is full, or is no more."""
        self.both.fill(full=full)

    @rule(sleeper=words.SLEEPERS, waker=words.WAKERS)
    def wake(self, sleeper: list[bytes], waker: list[bytes]) -> None:
        """A command that waits, and one that may end its waiting."""
        self.both.wake(sleeper, waker)


class Restarts(RuleBasedStateMachine):
    """Adds a crash or two, since each takes as long as a hundred commands."""

    both: BothServers
    left = 2

    @precondition(lambda self: self.left > 0)
    @rule()
    def restart(self) -> None:
        """Both are killed, and start again on their logs."""
        self.left -= 1
        self.both.restart()


class WordsAndRestarts(Restarts, WordsMachine):
    """Any commands, and crashes."""


class JobAndRestarts(Restarts, JobSteps):
    """What is done with jobs, and crashes."""


class FarmAndRestarts(Restarts, FarmSteps):
    """What is done with the rest of the farm, and crashes."""


Machine: TypeAlias = type[WordsMachine | Steps]


def check(machine: Machine, server: LiveServer, examples: int) -> None:
    """Run a machine on a server."""
    run_state_machine_as_test(
        lambda: machine(server),  # type: ignore[arg-type] # it calls whatever makes a machine
        settings=settings(
            max_examples=examples,
            stateful_step_count=STEPS,
            deadline=None,
            suppress_health_check=list(HealthCheck),  # a loaded machine is no fault of the model
        ),
    )


@pytest.mark.parametrize("machine", [WordsMachine, JobSteps, FarmSteps])
def test_answers(server: LiveServer, machine: Machine) -> None:
    """Every answer and, after every command, all that is stored are the same on both."""
    check(machine, server, EXAMPLES)


@pytest.mark.parametrize("machine", [WordsAndRestarts, JobAndRestarts, FarmAndRestarts])
def test_restart(server: LiveServer, machine: Machine) -> None:
    """What a log brings back is the same: data, leases and their ages, but no scripts."""
    check(machine, server, -(-EXAMPLES // 4))
