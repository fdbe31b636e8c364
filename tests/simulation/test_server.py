"""Tests that the model of the server does what real servers do."""

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

from tests.simulation import command_strategies
from tests.simulation.both import BothServers
from tests.simulation.farm_steps import FarmSteps, JobSteps, Steps
from tests.simulation.server.server import DATA
from tests.support import LiveServer

STEPS: Final = 50
EXAMPLES: Final = int(os.environ.get("EMBEDFARM_MODEL_EXAMPLES", "5"))


class WordsMachine(RuleBasedStateMachine):
    """A state machine that sends both servers the same commands, of which most make sense."""

    def __init__(self, live: LiveServer) -> None:
        super().__init__()
        self.both = BothServers(live)

    def teardown(self) -> None:
        """Close the connection to the real server."""
        self.both.close()

    @rule(each=st.one_of(command_strategies.COMMANDS))
    def run(self, each: list[bytes]) -> None:
        """Execute one command."""
        self.both.execute(each)

    @rule(each=st.one_of(command_strategies.COMMANDS))
    def run_without_arguments(self, each: list[bytes]) -> None:
        """Execute a command's name without its other words."""
        self.both.execute(each[:1])

    @rule(each=command_strategies.SCRIPTED)
    def evaluate(self, each: list[bytes]) -> None:
        """Execute a script."""
        self.both.execute(each)

    @rule(
        each=st.lists(st.one_of(command_strategies.COMMANDS), max_size=4),
        end=st.sampled_from(["EXEC", "DISCARD"]),
    )
    def run_together(self, each: list[list[bytes]], end: str) -> None:
        """Run a transaction. With its memory full, only an old server queues nothing at all."""
        if self.both.model.full:
            each = [one for one in each if DATA[one[0]].grows]
        for one in [[b"MULTI"], *each, [end.encode()]]:
            self.both.execute(one)

    @rule(full=st.booleans())
    def fill(self, *, full: bool) -> None:
        """Make the servers' memory full, or give it room again."""
        self.both.fill(full=full)

    @rule(sleeper=command_strategies.SLEEPERS, waker=command_strategies.WAKERS)
    def wake(self, sleeper: list[bytes], waker: list[bytes]) -> None:
        """Send a command that waits, and one that may end its waiting."""
        self.both.wake(sleeper, waker)


class Restarts(RuleBasedStateMachine):
    """A state machine that adds at most two crashes: each takes as long as a hundred commands."""

    both: BothServers
    left = 2

    @precondition(lambda self: self.left > 0)
    @rule()
    def restart(self) -> None:
        """Kill both servers, and start them again on their logs."""
        self.left -= 1
        self.both.restart()


class WordsAndRestarts(Restarts, WordsMachine):
    """A state machine of any commands, and crashes."""


class JobAndRestarts(Restarts, JobSteps):
    """A state machine of what is done with jobs, and crashes."""


class FarmAndRestarts(Restarts, FarmSteps):
    """A state machine of what is done with the rest of the farm, and crashes."""


Machine: TypeAlias = type[WordsMachine | Steps]


def check(machine: Machine, server: LiveServer, examples: int) -> None:
    """Run a state machine on a server."""
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
    """Each answer and, after each command, all stored data are the same on both servers."""
    check(machine, server, EXAMPLES)


@pytest.mark.parametrize("machine", [WordsAndRestarts, JobAndRestarts, FarmAndRestarts])
def test_restart(server: LiveServer, machine: Machine) -> None:
    """Both servers start again with the same data, leases and their ages, but without scripts."""
    check(machine, server, -(-EXAMPLES // 4))
