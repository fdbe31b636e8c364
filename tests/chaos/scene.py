"""The scene of the faults: what there is to shoot at."""

import random
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tests.chaos.commands import Job, World
from tests.chaos.roles import Role
from tests.chaos.victims import Proof, Witness, nothing_to_show

FREEZE_SECONDS: Final = (2.0, 20.0)  # of a process, within and beyond its lease


@dataclass
class Scene:
    """The processes, disks and servers that faults may hit.

    Attributes:
        world: The servers, the settings and the switches.
        roles: The roles by name.
        job: The command that embeds, another one for each job.
        sink: The disk of the output.
        log: The disk of the server's log.
        random: Random numbers of all choices.
        witness: Knows when a process is at work again.
        stretch: Factor of all times that faults last.
        proof: Tells whether what was hit last is at work again.
    """

    world: World
    roles: dict[str, Role]
    job: Job
    sink: Path
    log: Path
    random: random.Random
    witness: Witness
    stretch: float = 1.0
    proof: Proof = nothing_to_show

    def last(self, seconds: tuple[float, float]) -> None:
        """Wait while the harm lasts."""
        threading.Event().wait(self.random.uniform(*seconds) * self.stretch)

    def pick(self, kind: str) -> Role:
        """Choose a role by name, or any worker, as the one that is hit next."""
        role = self.random.choice([r for name, r in self.roles.items() if name.startswith(kind)])
        self.proof = self.witness.proof(role.name, lambda: role.pid)
        return role

    def pick_job(self) -> Job:
        """Return the command that embeds, as the one that is hit next."""
        self.proof = self.witness.proof("embed")
        return self.job
