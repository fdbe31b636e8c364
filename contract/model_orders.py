"""What people want of models, whatever jobs and requests ask for: loaded, kept, or unloaded."""

import time
from dataclasses import dataclass
from typing import Final, cast

from msgspec.structs import replace

from embedfarm.contract import wire
from embedfarm.contract.encoding import Amount, Record, encode
from embedfarm.contract.errors import EmbedfarmError
from embedfarm.contract.farm_keys import FarmKeys

ORDERS_MAX: Final = 256


class TooManyOrders(EmbedfarmError, RuntimeError):
    """Raised when so many models are ordered already that no other one may be."""

    exit_status = 2


class ModelOrder(Record):
    """What is wanted of a model on every worker that can have it.

    Attributes:
        pinned: Whether it stays where it is loaded, however long nobody uses it.
        load_at: Unix time at which it was last wanted to be loaded, 0 for never.
        unload_at: Unix time at which it was last wanted to be unloaded, 0 for never.
    """

    pinned: bool = False
    load_at: Amount = 0.0
    unload_at: Amount = 0.0

    @property
    def loaded(self) -> bool:
        """Whether workers are to load it, also those that start later."""
        return self.load_at > self.unload_at


NO_ORDER: Final = ModelOrder()


@dataclass
class ModelOrders(FarmKeys):
    """The orders of a farm's models, which its workers follow."""

    def all(self) -> dict[str, ModelOrder]:
        """Return the orders by model."""
        rows = cast("dict[bytes, bytes]", self.client.hgetall(wire.MODELS))
        orders = {
            name.decode(errors="replace"): self._read(ModelOrder, wire.MODELS, data)
            for name, data in rows.items()
        }
        return {name: order for name, order in orders.items() if order is not None}

    def pin(self, model: str, *, pinned: bool) -> None:
        """Have a model kept where it is loaded, or let it go when its memory is wanted.

        Raises:
            TooManyOrders: There are `ORDERS_MAX` already.
        """
        self._set(model, replace(self._order(model), pinned=pinned))

    def load(self, model: str) -> float:
        """Have all workers load a model that can, beside what they have in hand.

        Returns:
            The time of the order.

        Raises:
            TooManyOrders: There are `ORDERS_MAX` already.
        """
        now = time.time()
        self._set(model, replace(self._order(model), load_at=now))
        return now

    def unload(self, model: str) -> float:
        """Have all workers unload a model as soon as no work needs it.

        It is no longer pinned, and comes back when work asks for it.

        Returns:
            The time of the order.

        Raises:
            TooManyOrders: There are `ORDERS_MAX` already.
        """
        now = time.time()
        self._set(model, ModelOrder(unload_at=now))
        return now

    def _order(self, model: str) -> ModelOrder:
        return self.all().get(model, NO_ORDER)

    def _set(self, model: str, order: ModelOrder) -> None:
        """Write an order; for a new one, those that want nothing any more make room."""
        others = self.all()
        if model not in others and len(others) >= ORDERS_MAX:
            idle = [name for name, each in others.items() if not (each.pinned or each.loaded)]
            if not idle:
                raise TooManyOrders(f"{ORDERS_MAX} models are pinned or wanted: let one go first")
            self.client.hdel(wire.MODELS, *idle)
        self.client.hset(wire.MODELS, model, encode(order))
