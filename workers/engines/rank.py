"""The process of a rank beside the first: `python -m embedfarm.workers.engines.rank --device cpu`.

It does what its first rank, which starts it, tells it through its standard input (`group`), and
ends with that: whatever becomes of the first rank, the pipe ends.
"""

import argparse
import gc
import logging
import os
import queue
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO, Final, NoReturn

import torch
from numpy.typing import NDArray
from transformers.utils.logging import disable_progress_bar

from embedfarm.contract.processes import RAISED
from embedfarm.contract.redaction import start_logging
from embedfarm.workers.engines.device_errors import device_errors
from embedfarm.workers.engines.engine import OutOfMemory
from embedfarm.workers.engines.group import Subgroups, join_ranks
from embedfarm.workers.engines.rank_orders import (
    DropOrder,
    ForwardOrder,
    JoinOrder,
    LoadOrder,
    Order,
    RankAnswer,
    read_order,
    write_message,
)
from embedfarm.workers.engines.sentence_transformer import (
    follow_routes,
    load_files,
)
from embedfarm.workers.engines.tensor_parallel import sharding

ORDERS_MAX: Final = 16  # more than a first rank ever sends before it waits for something

log = logging.getLogger(__name__)
Orders = queue.Queue[tuple[Order, dict[str, NDArray[Any]]]]


class Follower:
    """A rank that follows the first.

    Args:
        device: torch's name of its device.
        answers: Pipe for its answers.
    """

    def __init__(self, device: str, answers: BinaryIO) -> None:
        self._device = device
        self._answers = answers
        self._size = int(os.environ["WORLD_SIZE"])
        self._models: dict[int, torch.nn.Module] = {}
        self._subgroups = Subgroups()
        self._store: object = None

    def follow(self, orders: Orders) -> NoReturn:
        """Carry out orders, one by one, for as long as the process lives.

        Raises:
            Exception: Whatever a forward pass raised: the others may wait for this rank, for ever.
        """
        while True:
            order, arrays = orders.get()
            if isinstance(order, ForwardOrder):
                failure = self._try(lambda: self._forward(order, arrays))  # noqa: B023 # called at once
                if failure is not None:
                    self._answer(failure)
                    raise failure
            else:
                failure = self._try(lambda: self._prepare(order))  # noqa: B023 # same
                model = order.model if isinstance(order, LoadOrder) else -1
                self._answer(failure, self._subgroups.count(model))

    def _try(self, action: Callable[[], object]) -> Exception | None:
        """Return what an action raises, if anything."""
        try:
            with device_errors():
                action()
        except Exception as error:  # noqa: BLE001 # a model's files may make anything happen
            return error
        return None

    def _answer(self, failure: Exception | None, subgroups: int = 0) -> None:
        reason, full = "" if failure is None else str(failure), isinstance(failure, OutOfMemory)
        write_message(self._answers, RankAnswer(reason, full, subgroups))

    def _prepare(self, order: Order) -> None:
        """Do what is no forward pass."""
        if isinstance(order, JoinOrder):
            self._join(order)
        elif isinstance(order, LoadOrder):
            directory, options = Path(order.directory), sharding(self._size)
            with self._subgroups.noting(order.model):
                loaded = load_files(directory, self._device, order.dtype, options)
            self._models[order.model] = follow_routes(loaded, order.task)[0].eval()
        elif isinstance(order, DropOrder):
            self._drop(order)
        else:
            torch.distributed.barrier()

    def _join(self, order: JoinOrder) -> None:
        kind, rank = torch.device(self._device).type, int(os.environ["RANK"])
        self._store = join_ranks(order, kind, rank, self._size)

    def _drop(self, order: DropOrder) -> None:
        for model in order.models:
            self._models.pop(model, None)  # none where it did not load
        self._subgroups.end(order.models)
        gc.collect()  # the modules of a model refer to each other
        if self._device != "cpu":
            torch.cuda.empty_cache()

    def _forward(self, order: ForwardOrder, arrays: dict[str, NDArray[Any]]) -> None:
        """Run this rank's part of a model; the first rank has all of what comes out."""
        tensors = {name: torch.from_numpy(array) for name, array in arrays.items()}
        features = {name: tensor.to(self._device) for name, tensor in tensors.items()}
        with torch.inference_mode():
            self._models[order.model](features | order.rest)


def main() -> NoReturn:
    """Follow the first rank until it ends."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", required=True)
    arguments = parser.parse_args()
    start_logging(logging.INFO)
    disable_progress_bar()
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what a library prints is no answer
    orders: Orders = queue.Queue(maxsize=ORDERS_MAX)
    threading.Thread(target=_hear, args=(orders,), daemon=True).start()
    try:
        Follower(arguments.device, answers).follow(orders)
    except Exception:
        log.exception("rank %s", os.environ["RANK"])
    os._exit(RAISED)  # what it waits for in a library, nothing else would end


def _hear(orders: Orders) -> None:
    """Read orders; end the process with the first rank, whatever it is at."""
    with open(0, "rb", closefd=False) as pipe:
        try:
            while True:
                orders.put(read_order(pipe))
        except EOFError:
            os._exit(0)


if __name__ == "__main__":
    main()
