"""Kinds of devices: names under which workers that do the same at the same price are counted."""

import re
from typing import Final

from embedfarm.contract.records import Heartbeat
from embedfarm.contract.settings.advice_limits import KIND_CHARACTERS, KIND_LENGTH_MAX

_PLAIN: Final = ("cpu", "endpoint")  # products of these differ, but nobody starts them by product
_OTHERS: Final = re.compile(rf"[^{KIND_CHARACTERS}]+")
_BEFORE: Final = re.compile("^[^A-Za-z0-9]+")


def name_kind(device: str, product: str) -> str:
    """Name the kind of a device where its settings do not: a GPU's is its product.

    Args:
        device: Label of the device, such as "cpu-0" or "cuda-0-1".
        product: Name of its product, such as "NVIDIA L4, 22 GiB".

    Returns:
        "cpu", "endpoint", or the product as far as the name of a kind may be that.
    """
    plain = device.partition("-")[0]
    if plain in _PLAIN:
        return plain
    name = _BEFORE.sub("", " ".join(_OTHERS.sub(" ", product).split()))
    return name[:KIND_LENGTH_MAX].rstrip() or "gpu"


def kind_of(beat: Heartbeat) -> str:
    """Return the kind of a worker's device; one of an older version says no product."""
    return beat.kind or name_kind(beat.device, "gpu")


def price_of(beat: Heartbeat) -> float:
    """Return the price of an hour of a worker: of all of its devices."""
    return beat.devices * beat.device_cost_per_hour
