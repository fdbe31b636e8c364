"""Memory for models on a worker's device: which of them have to go for another one."""

import logging
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from embedfarm.contract.formatting import format_bytes, format_seconds
from embedfarm.contract.job_spec import JobSpec
from embedfarm.contract.model_files import ModelError
from embedfarm.contract.model_orders import NO_ORDER, ModelOrder
from embedfarm.contract.settings import Settings
from embedfarm.workers.engines.engine import NoRoom
from embedfarm.workers.engines.memory import device_memory, free_memory, predict_bytes
from embedfarm.workers.host_memory import AvailableMemory
from embedfarm.workers.parked_models import ParkedModels
from embedfarm.workers.resident_models import ResidentModel, ResidentModels

MODELS_MAX: Final = 64  # loaded at a time, however small they are

log = logging.getLogger(__name__)


@dataclass
class ModelRoom:
    """Keeps the memory of loaded models within its limits.

    A model goes only when its memory is wanted for another one, or when it was not used for
    `model_idle_seconds`, or when people want it to; never while work in hand needs it, nor
    otherwise if it is pinned. Only the thread that leases work may call `make`, `follow`, `renew`
    and `unload_idle`.

    Attributes:
        gone: Told of each model that goes, by name, and why: "room", "idle" or "order".
        in_use: Returns the keys of the engines that work in hand needs.
        orders: What people want of models, by name.
        placing: Held while it is decided which models go, and while requests are taken for one.
        parked: Models that went for others, and wait in the host's memory.
    """

    resident: ResidentModels
    torch_device: str
    settings: Settings
    gone: Callable[[str, str], None] = lambda _model, _reason: None
    in_use: Callable[[], Collection[str]] = frozenset
    orders: Mapping[str, ModelOrder] = field(default_factory=dict)
    placing: threading.Lock = field(default_factory=threading.Lock)
    parked: ParkedModels = field(init=False)

    def __post_init__(self) -> None:
        self.parked = ParkedModels(self.settings)

    def make(self, spec: JobSpec, needed: Collection[str] = ()) -> bool:
        """Have models go until there is memory for another one; tell whether there is now.

        There is none yet where work in hand needs the models that would have to go, or where they
        serve engines that are `needed`, by their keys.

        Raises:
            NoRoom: There is not enough memory now, whatever goes.
            ModelError: It takes more than it may, or than there is.
        """
        takes = predict_bytes(spec, self.torch_device, self.settings)
        with self.placing:
            movable = self._movable()
            idle = [model for model in self._idle() if not model.serves(needed)]
            short = sys.maxsize if takes is None else self._short(spec, takes, _bytes(movable))
            surplus = len(list(self.resident)) + 1 - MODELS_MAX
            enough = short <= _bytes(idle) and surplus <= len(idle)
            if not enough and len(idle) < len(movable):
                return False
            victims = list(_first(idle, short, surplus))
            self.resident.remove(victims)
        self._let_go(victims, "room", f"for {spec.model}")
        return True

    def _short(self, spec: JobSpec, needed: int, movable: int) -> int:
        """Return how many of the `movable` bytes have to go for a model; 0 or less for none.

        Raises:
            NoRoom: More than there are.
            ModelError: It takes more than it may, or than there is.
        """
        limit, what = self.settings.models_bytes_max, f"{spec.model} takes {format_bytes(needed)}"
        memory = device_memory(self.torch_device) if needed else AvailableMemory(0, 0)
        if limit and needed > limit:
            raise ModelError(f"{what}, and `models_bytes_max` is {format_bytes(limit)}")
        if needed > memory.total:
            raise ModelError(f"{what}, and there are {format_bytes(memory.total)} of memory")
        over, lacking = self.resident.bytes + needed - limit if limit else 0, needed - memory.free
        if over > movable:
            pinned = format_bytes(self.resident.bytes - movable)
            most = format_bytes(limit)
            raise NoRoom(f"{what}, pinned models {pinned}, and `models_bytes_max` is {most}")
        if lacking > movable:
            free_memory(self.torch_device)
            memory = device_memory(self.torch_device)
            lacking = needed - memory.free
        if lacking > movable:
            raise NoRoom(f"{what}, and {format_bytes(memory.free)} of memory are free")
        reserved = lacking + self.settings.models_reserve_bytes if needed else 0
        return max(over, lacking, reserved)

    def _movable(self) -> list[ResidentModel]:
        """Return the models that are not pinned, those first that were not used for longest."""
        return [model for model in self.resident if not self.pinned(model.spec.model)]

    def pinned(self, model: str) -> bool:
        """Tell whether a model stays however long nobody uses it."""
        order = self.orders.get(model)
        return model in self.settings.models_pinned or (order is not None and order.pinned)

    def _idle(self) -> list[ResidentModel]:
        """Return the models that may go now, those first that were not used for longest."""
        in_use = self.in_use()
        return [model for model in self._movable() if not model.serves(in_use)]

    def follow(self, orders: Mapping[str, ModelOrder]) -> None:
        """Take new orders; models that are to be unloaded go as soon as no work needs them.

        Such an order is about what is loaded when it is first seen: clocks of hosts differ.
        """
        before, self.orders = self.orders, orders
        unload = {
            name
            for name, order in orders.items()
            if order.unload_at not in {0.0, before.get(name, NO_ORDER).unload_at}
        }
        self.parked.forget(unload)
        for model in self.resident:
            model.unwanted |= model.spec.model in unload
        self._unload_unwanted()

    def renew(self, name: str) -> None:
        """Have the models of a name go whose files have changed, as soon as no work needs them."""
        for model in self.resident:
            if model.spec.model == name and model.is_outdated(self.settings.model_cache):
                model.unwanted = True
                self._unload_unwanted()

    def _unload_unwanted(self) -> None:
        """Unload the models that are to go, and that no work needs."""
        with self.placing:
            in_use = self.in_use()
            unwanted = [
                model for model in self.resident if model.unwanted and not model.serves(in_use)
            ]
            self.resident.remove(unwanted)
        self._let_go(unwanted, "order", "for an order, or for files that have changed")

    def unload_idle(self) -> None:
        """Let the models go that were not used for a while, so that others can have the memory."""
        if not self.settings.model_idle_seconds:
            return
        before = time.monotonic() - self.settings.model_idle_seconds
        with self.placing:
            old = [model for model in self._idle() if model.used_at < before]
            self.resident.remove(old)
        self.parked.forget(used_before=before)
        seconds = format_seconds(self.settings.model_idle_seconds)
        self._let_go(old, "idle", f"not used for {seconds}")

    def _let_go(self, models: Sequence[ResidentModel], reason: str, why: str) -> None:
        """Free the memory of models that are resident no longer."""
        for model in models:
            self.gone(model.spec.model, reason)
            parked = reason == "room" and self.parked.park(model)
            log.info("%s %s, %s", "parked" if parked else "unloaded", model.spec.model, why)
        if models:
            free_memory(self.torch_device)


def _bytes(models: Iterable[ResidentModel]) -> int:
    """Return the memory that some models take together."""
    return sum(model.bytes for model in models)


def _first(models: Iterable[ResidentModel], size: int, count: int) -> Iterator[ResidentModel]:
    """Yield the first models, at least `count`, that take at least `size` bytes, or all of them."""
    for number, model in enumerate(models):
        if size <= 0 and number >= count:
            return
        size -= model.bytes
        yield model
