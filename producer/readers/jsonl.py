"""JSON Lines: one object per line."""

from collections.abc import Iterator
from itertools import islice
from typing import Any, BinaryIO, Final

import msgspec

from embedfarm.producer.readers.items import BadRow, CorpusError, Item
from embedfarm.producer.readers.source import Cursor, number_lines

TEXT_OPTION: Final = "--text-field"
ID_OPTION: Final = "--id-field"
FIELDS_SHOWN: Final = 10  # of a row without the field that is asked for

_UNREADABLE: Final = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
_JSON_NAMES: Final = {
    str: "string",
    int: "number",
    float: "number",
    bool: "boolean",
    list: "array",
    dict: "object",
    type(None): "null",
}


def read(
    file: BinaryIO, name: str, text_field: str, id_field: str | None, cursor: Cursor
) -> Iterator[Item]:
    """Yield an item per line that is not blank; other fields are skipped, not decoded.

    A number as id becomes the text Python writes for it.

    Raises:
        CorpusError: A line is too long, or the decoder cannot look for a field of that name.
    """
    decode = _row_decoder(name, text_field, id_field).decode
    for number, line in number_lines(file, name, cursor):
        try:
            row = decode(line)
        except _UNREADABLE as error:
            if not line.isspace():
                field, reason = _diagnose(line, text_field, id_field)
                yield BadRow(name, number, field, reason or str(error))
            continue
        yield row.text, "" if id_field is None else str(row.id)


def _row_decoder(name: str, text_field: str, id_field: str | None) -> msgspec.json.Decoder[Any]:
    """Return a decoder of lines to `text` and, if asked, `id`, whatever their names in the file."""
    fields: list[tuple[str, Any]] = [("text", str)]
    rename = {"text": text_field}
    if id_field is not None:
        fields.append(("id", str | int | float))
        rename["id"] = id_field
    try:
        kind = msgspec.defstruct("JsonRow", fields, rename=rename, gc=False)
    except ValueError as error:
        raise CorpusError(f"{name}: {error}") from error
    return msgspec.json.Decoder(kind)


def _diagnose(line: bytes, text_field: str, id_field: str | None) -> tuple[str | None, str]:
    """Return field and reason for which a line was refused; "" where the decoder knows better."""
    try:
        row = msgspec.json.decode(line)
    except UnicodeDecodeError as error:
        return None, f"not UTF-8: {error.reason}"
    except _UNREADABLE as error:
        return None, f"not JSON: {error}"
    if not isinstance(row, dict):
        return None, f"an object is expected, not {_JSON_NAMES[type(row)]}"
    if problem := _field_problem(row, text_field, (str,), TEXT_OPTION):
        return text_field, problem
    if id_field is not None and (
        problem := _field_problem(row, id_field, (str, int, float), ID_OPTION)
    ):
        return id_field, problem
    return None, ""  # Such as a key given twice, wrong and right


def _field_problem(
    row: dict[str, Any], field: str, kinds: tuple[type, ...], option: str
) -> str | None:
    """Return what is wrong with one field of a decoded object, None if nothing is.

    Args:
        row: The object.
        field: Name of the field.
        kinds: Types that its value may have.
        option: The option by which the field is chosen.
    """
    if field not in row:
        if not row:
            return "missing; the row has no fields"
        fields = ", ".join(map(repr, islice(row, FIELDS_SHOWN)))
        more = ", …" if len(row) > FIELDS_SHOWN else ""
        return f"missing; there are {fields}{more}, and {option} says which it is"
    kind = type(row[field])
    if kind in kinds:
        return None
    expected = " or ".join(dict.fromkeys(_JSON_NAMES[kind] for kind in kinds))
    return f"{expected} expected, not {_JSON_NAMES[kind]}"
