"""A group: one worker on several devices, each of which has a process, a rank, of its own.

The worker's process is rank 0. It alone leases, commits and heartbeats; it starts the other ranks
and tells each of them through a pipe what to do, so that an idle rank waits for its pipe and not in
a collective, which would time out, and keep a GPU busy. All ranks do the same in the same order;
what a model's layers exchange meanwhile goes through `torch.distributed`.

The ranks live and die together: they end at the end of their pipe, and rank 0 is told of the end of
a rank as soon as its process has ended. Nothing waits for a collective to time out.
"""

import contextlib
import itertools
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from itertools import chain
from typing import Any, BinaryIO, Final, TypeVar, cast

from numpy.typing import NDArray

from embedfarm.contract.model_files import ModelError
from embedfarm.contract.processes import RUN_ROLE
from embedfarm.workers.engines.engine import DeviceFailed, OutOfMemory
from embedfarm.workers.engines.rank_orders import (
    DropOrder,
    JoinOrder,
    LoadOrder,
    MeetOrder,
    Order,
    RankAnswer,
    forward_order,
    read_answer,
    write_message,
)
from embedfarm.workers.supervisor import describe_exit

BACKENDS: Final = {"cpu": "gloo", "cuda": "nccl"}
HOST: Final = "127.0.0.1"
INTERFACE: Final = "lo" if sys.platform == "linux" else "lo0"
# Without these, ranks would listen on the address that the host's name stands for.
LOOPBACK: Final = dict.fromkeys(("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"), INTERFACE)
GONE_SECONDS: Final = 1.0  # between the error of a collective and the end of the rank that it had
LEARN_SECONDS: Final = 2.0  # that rank 0 has to note that a device batch was too large for a rank
CLOSE_SECONDS: Final = 5.0
DRAIN_SIGNALS: Final = (signal.SIGTERM, signal.SIGINT)
ANSWERS_MAX: Final = 4

T = TypeVar("T")
Ended = Callable[[str], object]


class OtherRank:
    """The process of a rank beside the first, and what it answers.

    Args:
        number: Number of the rank, from 1.
        size: Ranks of the group.
        kind: Kind of its device, "cpu" or "cuda".
        on_end: Called when the process has ended, in a thread of this rank's own.

    Attributes:
        full: Whether it has failed for want of memory.
    """

    def __init__(
        self, number: int, size: int, kind: str, on_end: Callable[["OtherRank"], object]
    ) -> None:
        self.number = number
        self.full = False
        self.answers: queue.Queue[RankAnswer] = queue.Queue(maxsize=ANSWERS_MAX)
        device = "cpu" if kind == "cpu" else f"{kind}:{number}"
        places = {"RANK": number, "LOCAL_RANK": number, "WORLD_SIZE": size}
        with _signals_blocked():
            self.process = subprocess.Popen(
                [*RUN_ROLE, "embedfarm.workers.engines.rank", "--device", device],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env=os.environ | {name: str(value) for name, value in places.items()},
            )
        self._hearing = threading.Thread(target=self._hear, args=(on_end,), daemon=True)
        self._hearing.start()

    def tell(self, order: Order, arrays: list[NDArray[Any]] | None = None) -> None:
        """Send an order.

        Raises:
            BrokenPipeError: The process has ended.
        """
        write_message(cast("BinaryIO", self.process.stdin), order, arrays)

    def close(self) -> None:
        """End the process, and wait until it has ended."""
        # Whoever writes to the pipe of a rank that has ended may have left something in it.
        with contextlib.suppress(BrokenPipeError):
            cast("BinaryIO", self.process.stdin).close()
        try:
            self.process.wait(CLOSE_SECONDS)
        except subprocess.TimeoutExpired:
            self.process.kill()
        self._hearing.join()

    def ending(self) -> str:
        """Return how the process has ended, in words."""
        return f"rank {self.number} of the group: {describe_exit(self.process.wait())}"

    def _hear(self, on_end: Callable[["OtherRank"], object]) -> None:
        """Keep answers until the process ends."""
        with cast("BinaryIO", self.process.stdout) as pipe, contextlib.suppress(EOFError):
            while True:
                answer = read_answer(pipe)
                self.full = self.full or answer.full
                self.answers.put(answer)
        self.process.wait()
        on_end(self)


@contextmanager
def _signals_blocked() -> Iterator[None]:
    """Block, in what the body starts, the signals that ask all processes of a worker to drain.

    They are for the first rank, which needs the others until it has drained.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, DRAIN_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class Group:
    """The ranks of this worker beside this process, which is the first.

    Args:
        kind: Kind of the devices, "cpu" or "cuda".
        size: Ranks of the group, this one included.
        seconds: Longest that anything which all ranks do together may take: to load a model.
        ended: Called with the reason, in any thread, when a rank has ended and so the group has.
    """

    def __init__(self, kind: str, size: int, seconds: float, ended: Ended) -> None:
        self.size = size
        self._kind = kind
        self._seconds = seconds
        self._ended = ended
        self._lock = threading.RLock()  # two threads that issued collectives would mix them up
        self._lost = ""  # why the ranks are in step no longer
        self._gone = threading.Event()
        self._closing = False
        self._store: object = None
        self._numbers = itertools.count()
        self._subgroups = Subgroups()
        self._models: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        self._unused: deque[int] = deque()
        os.environ.update(LOOPBACK)
        self._ranks = [OtherRank(each, size, kind, self._lose) for each in range(1, size)]

    @property
    def pids(self) -> list[int]:
        """Process ids of the other ranks."""
        return [rank.process.pid for rank in self._ranks]

    def load(self, directory: str, dtype: str, task: str, here: Callable[[], T]) -> tuple[int, T]:
        """Load a model on all ranks at once, on this one by `here`.

        Returns:
            The number of the model, for `keep`, and what `here` returned.

        Raises:
            DeviceFailed: The ranks are in step no longer.
            Exception: Whatever `here` raised; the ranks are in step all the same.
            OutOfMemory: Another rank has no memory for its part.
            ModelError: Another rank cannot load it.
        """
        with self._together():
            self._join()
            self.free()
            number = next(self._numbers)
            self._tell(LoadOrder(number, directory, dtype, task))
            failed: Exception | None = None
            try:
                with self._subgroups.noting(number):
                    loaded = here()
            except Exception as error:  # noqa: BLE001 # raised below, when it is known what others say
                failed = error
            answers = self._answers()
            bad = next((answer for answer in answers if answer.failure), None)
            if failed or bad:
                made = self._subgroups.count(number)
                if any(answer.subgroups != made for answer in answers):
                    raise DeviceFailed("not all ranks of the group came as far in a load")
                self._meet()
                self._unused.append(number)
        if failed:
            raise failed
        if bad:
            raise OutOfMemory(bad.failure) if bad.full else ModelError(bad.failure)
        return number, loaded

    def keep(self, module: object, number: int) -> None:
        """Keep a loaded model on the other ranks for as long as this rank has its `module`."""
        self._models[module] = number
        weakref.finalize(module, self._unused.append, number).atexit = False

    @contextmanager
    def forward(self, module: object, features: Mapping[str, Any]) -> Iterator[None]:
        """Run the transformer `module` on all other ranks, while the body runs it on this one.

        Args:
            module: Module of a model that is kept.
            features: Its inputs, by name: arrays of numpy, and plain values.

        Raises:
            OutOfMemory: A rank has no memory for it. The group has lost step over it, and must end.
            DeviceFailed: The ranks are in step no longer.
        """
        with self._together():
            self.free()
            order, arrays = forward_order(self._models[module], features)
            self._tell(order, arrays)
            yield

    def free(self) -> None:
        """Have all ranks free the memory of models that this rank has no longer.

        Raises:
            DeviceFailed: The ranks are in step no longer.
        """
        if not self._unused:
            return
        with self._together():
            unused = tuple(self._unused.popleft() for _ in range(len(self._unused)))
            self._tell(DropOrder(unused))
            self._subgroups.end(unused)
            self._agree()

    def close(self) -> None:
        """End the other ranks, and wait until they have ended."""
        self._closing = True
        for rank in self._ranks:
            rank.close()
        if self._store is not None:
            import torch.distributed  # noqa: PLC0415 # as in `_join`

            torch.distributed.destroy_process_group()

    @contextmanager
    def _together(self) -> Iterator[None]:
        """Do what all ranks do; if it fails in the midst of it, they are in step no longer."""
        with self._lock:
            if self._lost:
                raise DeviceFailed(self._lost)
            try:
                yield
            except (DeviceFailed, OutOfMemory) as error:
                self._note(str(error))
                raise
            except Exception as error:
                self._gone.wait(GONE_SECONDS)
                self._note(f"the ranks of the group lost step: {error}")
                if any(rank.full for rank in self._ranks):
                    raise OutOfMemory(self._lost) from error
                raise DeviceFailed(self._lost) from error

    def _note(self, reason: str) -> None:
        """Note why the ranks are in step no longer; the first reason stays."""
        self._lost = self._lost or reason

    def _join(self) -> None:
        """Meet the other ranks, once: not before a model needs them, since that takes torch."""
        if self._store is not None:
            return
        listener = socket.socket()
        listener.bind((HOST, 0))
        order = JoinOrder(listener.getsockname()[1], self._seconds)
        self._tell(order)
        self._store = join_ranks(order, self._kind, 0, self.size, listener.detach())
        self._agree()

    def _tell(self, order: Order, arrays: list[NDArray[Any]] | None = None) -> None:
        for rank in self._ranks:
            rank.tell(order, arrays)

    def _answers(self) -> list[RankAnswer]:
        """Return the answers of all other ranks.

        Raises:
            DeviceFailed: A rank has ended, or does not answer in time.
        """
        return [self._answer(rank) for rank in self._ranks]

    def _agree(self) -> None:
        """Wait until all other ranks have done what they were told.

        Raises:
            DeviceFailed: One could not, or has ended, or does not answer in time.
        """
        failures = [answer.failure for answer in self._answers() if answer.failure]
        if failures:
            raise DeviceFailed(failures[0])

    def _answer(self, rank: OtherRank) -> RankAnswer:
        deadline = time.monotonic() + self._seconds
        while not self._gone.is_set() and time.monotonic() < deadline:
            try:
                return rank.answers.get(timeout=GONE_SECONDS)
            except queue.Empty:
                continue
        raise DeviceFailed(self._lost or f"rank {rank.number} of the group does not answer")

    def _meet(self) -> None:
        """Wait for all ranks.

        Raises:
            RuntimeError: A rank is somewhere else, such as in a collective of a load that failed.
        """
        import torch.distributed as dist  # noqa: PLC0415 # as in `_join`

        self._tell(MeetOrder())
        dist.barrier()
        self._agree()

    def _lose(self, rank: OtherRank) -> None:
        """Note that a rank has ended, and that the group has with it."""
        if self._closing:
            return
        self._note(rank.ending())
        self._gone.set()
        if rank.full:
            # The next one takes smaller batches if this process lives to say so.
            threading.Event().wait(LEARN_SECONDS)
        self._ended(self._lost)


class Subgroups:
    """What `torch.distributed` keeps for each model that was loaded: threads, and open files."""

    def __init__(self) -> None:
        self._of: dict[int, list[Any]] = {}

    @contextmanager
    def noting(self, model: int) -> Iterator[None]:
        """Note what comes up in the body, which loads a model."""
        import torch.distributed as dist  # noqa: PLC0415 # as in `Group._join`

        known = dist.distributed_c10d._world.pg_map  # noqa: SLF001 # nothing public lists them
        before = set(known)
        try:
            yield
        finally:
            self._of[model] = [each for each in known if each not in before]

    def count(self, model: int) -> int:
        """Return how many came up in the load of a model."""
        return len(self._of.get(model, ()))

    def end(self, models: Sequence[int]) -> None:
        """End what was kept for some models; a model that is not known has nothing."""
        import torch.distributed as dist  # noqa: PLC0415 # as in `Group._join`

        for each in chain.from_iterable(self._of.pop(model, ()) for model in models):
            dist.destroy_process_group(each)


FORMED: Final[list[Group]] = []
"""The group whose first rank this process is, if it is one: torch has one for a process, too."""


def current_group() -> Group | None:
    """Return the group whose first rank this process is, None on a single device."""
    return FORMED[0] if FORMED else None


def join_ranks(order: JoinOrder, kind: str, rank: int, size: int, listener: int = -1) -> object:
    """Make this process a rank of a group.

    Args:
        order: Port where ranks learn each other's addresses, and how long all may take.
        kind: Kind of the devices, "cpu" or "cuda".
        rank: Number of this rank.
        size: Ranks of the group.
        listener: Socket of the port, for the first rank, which serves it.

    Returns:
        The store of addresses, which must live as long as the group.
    """
    import torch  # noqa: PLC0415 # a null engine does without it

    seconds = timedelta(seconds=order.seconds)
    serving: dict[str, Any] = {}
    if listener >= 0:
        serving = {"is_master": True, "master_listen_fd": listener}
    store = torch.distributed.TCPStore(  # type: ignore[attr-defined] # it is there, and documented
        HOST, order.port, timeout=seconds, wait_for_workers=False, **serving
    )
    device = torch.device(kind, rank) if kind != "cpu" else None
    torch.distributed.init_process_group(
        BACKENDS[kind], store=store, rank=rank, world_size=size, timeout=seconds, device_id=device
    )
    return cast("object", store)
