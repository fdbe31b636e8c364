"""The layout of records on the wire: a version, and then a msgpack array of fields.

Every record is one byte, the version of its layout, and a msgpack array of its fields in the order
of their classes. A reader that meets another version refuses it by name, without guessing:
`ForeignVersion`. A field may be added at the end of a record, with a default, without a new
version; but a new field of a `JobSpec` or of `TokenisationSettings`, which decide the vectors, is
refused by older readers. A record that older readers would take for another one has the next
version (`Record.version`), and only such a record.
"""

from typing import Annotated, Any, ClassVar, Final, TypeAlias, TypeVar

import msgspec

from embedfarm.contract.errors import EmbedfarmError

VERSION: Final = 1
VERSIONS_MAX: Final = 31
"""A first byte beyond it is no version: it would be text."""

COUNT_MAX: Final = 1 << 53
Count: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=COUNT_MAX)]
"""A number that every language, and the server's scripts, keep exactly."""

Amount: TypeAlias = Annotated[float, msgspec.Meta(ge=0, le=1e15)]
"""A number of seconds, tokens or the like that one may reckon with: neither infinite nor NaN."""

Speed: TypeAlias = Annotated[float, msgspec.Meta(ge=1e-9, le=1e15)]
"""Something in a second that one may divide by."""

Fact: TypeAlias = Annotated[float, msgspec.Meta(ge=-1e300, le=1e300)]
"""Any finite number: of what is only shown."""


EntryId: TypeAlias = Annotated[str, msgspec.Meta(pattern=r"^[0-9]{1,17}-[0-9]{1,17}\Z")]
"""ID of a stream entry, which the server would not take otherwise."""

Some: TypeAlias = Annotated[int, msgspec.Meta(ge=1, le=COUNT_MAX)]
"""A number of things to ask for."""


class RecordError(EmbedfarmError, ValueError):
    """Raised when bytes off the wire are not a record of a version that this program reads."""

    exit_status = 2


class ForeignVersion(RecordError):
    """Raised when a record has another version: undamaged, it seems, but not for this program."""


class Record(msgspec.Struct, array_like=True, kw_only=True, gc=False):
    """Base of all records on the wire."""

    versions: ClassVar[int] = VERSION
    """The last version of the layout that is read here."""

    @property
    def version(self) -> int:
        """Version of the layout that this record needs."""
        return VERSION


R = TypeVar("R", bound=Record)

_encoder: Final = msgspec.msgpack.Encoder()


def encode(record: Record) -> bytes:
    """Return the bytes of a record."""
    return bytes([record.version]) + _encoder.encode(record)


def decode(kind: type[R], data: bytes) -> R:
    """Return the record in `data`.

    Raises:
        ForeignVersion: The record has a version that is not read here.
        RecordError: The bytes are damaged, or of another kind.
    """
    if not data or not VERSION <= data[0] <= kind.versions:
        raise _no_version(kind, data)
    try:
        return msgspec.msgpack.decode(memoryview(data)[1:], type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise RecordError(f"not a {kind.__name__} record: {error}") from error


def _no_version(kind: type[Record], data: bytes) -> RecordError:
    """Return an error that says why bytes do not begin with our version, and what to do."""
    if not data or data[0] > VERSIONS_MAX:
        begins = f"begins with byte {data[:1].hex()}" if data else "is empty"
        return RecordError(f"not a {kind.__name__} record: it {begins}, not with its version")
    older = "this program" if data[0] > kind.versions else "the program that wrote it"
    return ForeignVersion(
        f"{kind.__name__} record of version {data[0]}, but this program reads version "
        f"{kind.versions}: update {older}"
    )


def as_dict(record: Record) -> dict[str, Any]:
    """Return the fields of a record by name; those of records in its lists as well."""
    return {name: _plain(value) for name, value in msgspec.structs.asdict(record).items()}


def _plain(value: Any) -> Any:  # noqa: ANN401 # any field
    if isinstance(value, list):
        return [_plain(each) for each in value]
    return as_dict(value) if isinstance(value, Record) else value
