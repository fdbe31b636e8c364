"""The workers of one actor on a cluster: the ordinary `embedfarm work`, started and drained.

Between the actor and the workers stands a process of its own, as on any other host. A cluster that
ends an actor at once ends that process with it at most; the workers see it gone, and drain.
"""

import shutil
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

import msgspec

from embedfarm.contract.broker import HOST_NAME, host_name
from embedfarm.contract.errors import EmbedfarmError
from embedfarm.contract.processes import KILL_SECONDS, RUN_MODULE, Child, Supervisor
from embedfarm.contract.redaction import hide_secrets
from embedfarm.contract.systemd_notify import ALIVE_FILE
from embedfarm.workers.cores import LENT_CORES

WORK: Final = "work"  # names the process and its log
DRAIN: Final = "EMBEDFARM_DRAIN_SECONDS"
STATE: Final = "EMBEDFARM_STATE_DIRECTORY"
UNKNOWN: Final = "on a node that is not known"


class PlacedWorkersError(EmbedfarmError, RuntimeError):
    """Raised when workers are asked about that were never told to begin."""


class Look(msgspec.Struct):
    """What the workers of one actor are at, as JSON between the actor and who has placed it.

    Attributes:
        host: Name of their host.
        logs: Directory of their logs there.
        begun: Whether all of them have sent a heartbeat.
        failed: Why they cannot go on, with the end of a log; "" if they can.
        node: The cluster's id of the node.
        leaving: Whether the cluster is about to take the node away.
    """

    host: str = UNKNOWN
    logs: str = ""
    begun: bool = False
    failed: str = ""
    node: str = ""
    leaving: bool = False


class PlacedWorkers:
    """Workers of the devices that a cluster has lent to this process.

    Args:
        name: Name of the actor, of letters and digits. Workers on CPUs have it behind the name of
            their host, as several actors may share one; a GPU is one worker's by itself.
        gpus: Ids of the GPUs that they have, as `--devices` takes them; none for those on CPUs.
    """

    def __init__(self, name: str, gpus: Sequence[str]) -> None:
        self._name = name
        self._gpus = gpus
        self._host = host_name()
        self._directory = Path()
        self._supervisor: Supervisor | None = None

    def begin(self, environment: Mapping[str, str], cores: int) -> None:
        """Start the workers, without waiting until they are ready.

        Args:
            environment: Settings as variables, which overrule those of this host; the server's URL
                and `drain_seconds` are among them.
            cores: Cores that they may use; 0 for all that the host lets them have.
        """
        self._directory = Path(tempfile.mkdtemp(prefix=f"embedfarm-{self._name}-"))
        own = {STATE: str(self._directory), ALIVE_FILE: str(self._directory / "alive")}
        if cores:
            own[LENT_CORES] = str(cores)
        if not self._gpus:
            own[HOST_NAME] = f"{self._host}.{self._name}"
        devices = ",".join(self._gpus) or "cpu"
        command = [*RUN_MODULE, "embedfarm", WORK, "--devices", devices]
        self._supervisor = Supervisor(
            [Child(WORK, command, {**environment, **own})],
            self._directory,
            # It ends the workers in its own time, and is not to be killed while it does.
            float(environment[DRAIN]) + 2 * KILL_SECONDS,
        )
        self._supervisor.start()

    def look(self) -> Look:
        """Return what the workers are at.

        Raises:
            PlacedWorkersError: They were never told to begin.
        """
        if self._supervisor is None:
            raise PlacedWorkersError("these workers have not been told to begin")
        error = self._supervisor.failed or self._supervisor.unstartable()
        return Look(
            host=self._host,
            logs=str(self._directory),
            begun=(self._directory / "alive").exists(),
            failed=hide_secrets(str(error)) if error else "",
        )

    def drain(self) -> None:
        """End the workers: they commit what they have in hand, and hand back the rest.

        The logs of workers that ended so are removed; what they said is on the farm for a day.
        """
        if self._supervisor is None:
            return
        self._supervisor.stop()
        if not self.look().failed:
            shutil.rmtree(self._directory, ignore_errors=True)
