"""What the first rank of a group tells the others, and what they answer: messages on pipes.

A message is its length in eight bytes (little-endian), a msgpack object, and the raw values of the
arrays that the object names, in their order. Nothing in it is ever executed.
"""

from collections.abc import Mapping
from typing import Any, BinaryIO, Final, TypeAlias

import msgspec
import numpy as np
from numpy.typing import NDArray

LENGTH_BYTES: Final = 8


class JoinOrder(msgspec.Struct, tag="join", frozen=True):
    """Order to meet the other ranks.

    Attributes:
        port: Port of loopback where the first rank tells all ranks each other's addresses.
        seconds: Longest that anything which all ranks do together may take.
    """

    port: int
    seconds: float


class LoadOrder(msgspec.Struct, tag="load", frozen=True):
    """Order to load a rank's part of a model.

    Attributes:
        model: Number by which later orders name it.
        directory: Directory of the model's files.
        dtype: Type that the model computes in.
        task: Task of the job, where the model has modules for several.
    """

    model: int
    directory: str
    dtype: str
    task: str


class ArrayForm(msgspec.Struct, array_like=True, frozen=True):
    """Name, type and shape of an array whose values follow."""

    name: str
    dtype: str
    shape: tuple[int, ...]


class ForwardOrder(msgspec.Struct, tag="forward", frozen=True):
    """Order to run a model on a device batch.

    Attributes:
        model: Number of the model.
        arrays: Inputs that are arrays.
        rest: Inputs that are none, such as the kind of data.
    """

    model: int
    arrays: tuple[ArrayForm, ...]
    rest: dict[str, Any]


class DropOrder(msgspec.Struct, tag="drop", frozen=True):
    """Order to free the memory of models."""

    models: tuple[int, ...]


class MeetOrder(msgspec.Struct, tag="meet", frozen=True):
    """Order to wait for all ranks, which shows whether they are still in step."""


Order: TypeAlias = JoinOrder | LoadOrder | ForwardOrder | DropOrder | MeetOrder


class RankAnswer(msgspec.Struct, frozen=True):
    """Answer to an order.

    Attributes:
        failure: Why it could not be carried out, "" if it was.
        full: Whether that was for want of memory.
        subgroups: Process groups that the load of a model made before it ended, well or not.
    """

    failure: str = ""
    full: bool = False
    subgroups: int = 0


def forward_order(model: int, features: Mapping[str, Any]) -> tuple[ForwardOrder, list[Any]]:
    """Return the order to run a model on some features, and the arrays among them."""
    arrays = {name: value for name, value in features.items() if isinstance(value, np.ndarray)}
    forms = [ArrayForm(name, value.dtype.str, value.shape) for name, value in arrays.items()]
    rest = {name: value for name, value in features.items() if name not in arrays}
    return ForwardOrder(model, tuple(forms), rest), list(arrays.values())


def write_message(
    pipe: BinaryIO, message: Order | RankAnswer, arrays: list[NDArray[Any]] | None = None
) -> None:
    """Write a message, and the arrays that it names.

    Raises:
        BrokenPipeError: Nobody reads it any more.
    """
    body = msgspec.msgpack.encode(message)
    pipe.write(len(body).to_bytes(LENGTH_BYTES, "little") + body)
    pipe.writelines(np.ascontiguousarray(array).data for array in arrays or ())
    pipe.flush()


def read_order(pipe: BinaryIO) -> tuple[Order, dict[str, NDArray[Any]]]:
    """Read an order and its arrays by name.

    Raises:
        EOFError: There are no more.
    """
    order: Order = msgspec.msgpack.decode(_read_body(pipe), type=Order)
    forms = order.arrays if isinstance(order, ForwardOrder) else ()
    return order, {form.name: _read_array(pipe, form) for form in forms}


def read_answer(pipe: BinaryIO) -> RankAnswer:
    """Read an answer.

    Raises:
        EOFError: There are no more.
    """
    return msgspec.msgpack.decode(_read_body(pipe), type=RankAnswer)


def _read_body(pipe: BinaryIO) -> bytearray:
    return _read(pipe, int.from_bytes(_read(pipe, LENGTH_BYTES), "little"))


def _read_array(pipe: BinaryIO, form: ArrayForm) -> NDArray[Any]:
    array: NDArray[Any] = np.empty(form.shape, dtype=form.dtype)
    values = _read(pipe, array.nbytes)
    return np.frombuffer(values, dtype=form.dtype).reshape(form.shape)


def _read(pipe: BinaryIO, size: int) -> bytearray:
    """Read so many bytes, to memory that may be written, as torch wants it."""
    values = bytearray(size)
    rest = memoryview(values)
    while rest:
        count = pipe.readinto(rest)  # type: ignore[attr-defined] # every pipe has it
        if not count:
            raise EOFError
        rest = rest[count:]
    return values
