"""Counters of models: what all workers together have done with each; a restart undoes none."""

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, NamedTuple, cast

from embedfarm.contract import wire
from embedfarm.contract.broker import if_allowed
from embedfarm.contract.farm_keys import FarmKeys

COUNTED_MAX: Final = 200  # models with counters of their own; jobs may name any number of them
OTHERS: Final = "(others)"  # stands for those that came later

UNLOADS: Final = {"room": "unloads_room", "idle": "unloads_idle", "order": "unloads_order"}
"""The counter of unloads by their reason: memory for another model, no use, or people."""

_NUMBER: Final = re.compile(rb"[0-9]{1,15}")


class ModelCounts(NamedTuple):
    """Counters of one model, which only grow.

    Attributes:
        loads: Times that it was loaded.
        load_ms: Milliseconds that these took.
        unloads_room: Times that it had to go for another model.
        unloads_idle: Times that it was unloaded since nobody had used it for a while.
        unloads_order: Times that people had it unloaded.
        requests: Interactive requests that were answered with it.
        texts_full: Texts that filled what it takes: if they were longer, the rest was cut off.
    """

    loads: int = 0
    load_ms: int = 0
    unloads_room: int = 0
    unloads_idle: int = 0
    unloads_order: int = 0
    requests: int = 0
    texts_full: int = 0

    @property
    def load_seconds(self) -> float:
        """Seconds that all its loads took."""
        return self.load_ms / 1000


@dataclass
class ModelCounters(FarmKeys):
    """The counters of a farm's models."""

    def add(self, model: str, counts: Mapping[str, int]) -> None:
        """Add to the counters of a model, by the names that `ModelCounts` has."""
        amounts = [
            str(word) for name in ModelCounts._fields for word in (name, counts.get(name, 0))
        ]
        fields_max = COUNTED_MAX * len(ModelCounts._fields)
        with if_allowed():
            self._script("tally")(
                keys=[wire.MODEL_COUNTS], args=[model, fields_max, OTHERS, *amounts]
            )

    def all(self) -> dict[str, ModelCounts]:
        """Return the counters by model, ordered by its name."""
        found: dict[str, Counter[str]] = {}
        for field, value in cast(
            "Mapping[bytes, bytes]", self.client.hgetall(wire.MODEL_COUNTS)
        ).items():
            name, _, model = field.decode(errors="replace").partition(" ")
            if name in ModelCounts._fields and _NUMBER.fullmatch(value):
                found.setdefault(model, Counter())[name] = int(value)
        return {model: ModelCounts(**found[model]) for model in sorted(found)}
