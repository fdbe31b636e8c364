"""Objects of JSON as rows: the text and id of each, at the top or inside."""

import logging
from collections.abc import Callable, Iterator, Sequence
from functools import reduce
from itertools import islice, product, repeat
from operator import attrgetter, or_
from typing import Any, Final

import msgspec

from embedfarm.readers.fields import ALL, Fields
from embedfarm.readers.items import BadRow, CorpusError, Item
from embedfarm.readers.text_columns import TextColumns, columns_of_json

ID_OPTION: Final = "--id-field"
FIELDS_SHOWN: Final = 10  # of an object without the field that is asked for

_TEXT_KINDS: Final = (str,)
_NUMBER_KINDS: Final = (str, int, float)
log = logging.getLogger(__name__)

decode_pieces = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
"""Decodes an object to the pieces of JSON that its fields hold."""

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

_Path = tuple[str, ...]


class JsonRows:
    """Decodes the objects of one file to rows; other fields are skipped, not decoded.

    A number as id becomes the text Python writes for it. A field with dots, such as "doc.text", is
    the one of that name, or, in an object that has none, one inside others.

    Args:
        name: Name of the file, for people.
        fields: The fields of text and id.

    Raises:
        CorpusError: The decoder cannot look for a field of that name.
    """

    def __init__(self, name: str, fields: Fields) -> None:
        self._name, self._fields = name, fields
        names = fields.names
        self._kinds = [
            _NUMBER_KINDS if fields.numbers_allowed(place) else _TEXT_KINDS
            for place in range(len(names))
        ]
        self._alone = len(names) == 1
        self.columns = columns_of_json(fields)
        is_watched = fields.keep == (ALL,) and fields.columns is not None
        self._known = {each.name for each in fields.kept} if is_watched else None
        try:
            self._decoders = [
                _decoder(paths, self._kinds) for paths in product(*map(_paths, names))
            ]
        except ValueError as error:
            raise CorpusError(f"{name}: {error}") from error

    def item(self, line: bytes, number: int) -> Item | None:
        """Return the row of one object, or what is wrong with it; None for a blank line."""
        reason = ""
        for decoder, get in self._decoders:
            try:
                found = get(decoder.decode(line))
            except _UNREADABLE as error:
                reason = str(error)
            else:
                if self.columns and (bad := self._keep(self.columns, line, number)):
                    return bad
                values = [str(found)] if self._alone else [*map(str, found)]
                return self._fields.row(values)
        if line.isspace():
            return None
        field, known = self._diagnose(line)
        return BadRow(self._name, number, field, known or reason)

    def texts(self, lines: bytes) -> list[str]:
        """Return the texts of lines of which each is a good row, or blank; else of those before."""
        decoder, get = self._decoders[0]
        try:
            found = map(get, decoder.decode_lines(lines))
            if self._alone and self._fields.template is None:
                return [*map(str, found)]
            rows = ([values] if self._alone else values for values in found)
            return [self._fields.row([*map(str, values)])[0] for values in rows]
        except _UNREADABLE:  # some may have the field elsewhere
            return [*self._texts_before_bad(lines.splitlines(keepends=True))]

    def _texts_before_bad(self, lines: Sequence[bytes]) -> Iterator[str]:
        for item in map(self.item, lines, repeat(0)):
            if isinstance(item, BadRow):
                return
            if item is not None:
                yield item[0]

    def _keep(self, columns: TextColumns, line: bytes, number: int) -> BadRow | None:
        """Take what is kept of an object, or tell what is wrong with it."""
        try:
            pieces = decode_pieces(line)
        except _UNREADABLE as error:  # what is skipped otherwise, such as a name that is not UTF-8
            return BadRow(self._name, number, None, f"not JSON: {error}")
        if self._known is not None and not pieces.keys() <= self._known:
            unknown = next(name for name in pieces if name not in self._known)
            self._known = None
            log.warning(
                "%s line %d: none of the first rows has the field %r, which is not kept; --keep "
                "takes it by its name, into another --out, and with --reuse nothing is embedded "
                "again", self._name, number, unknown,
            )  # fmt: skip
        unfit = columns.add([pieces.get(name) for name in columns.names])
        return BadRow(self._name, number, unfit.field, unfit.reason) if unfit else None

    def _diagnose(self, line: bytes) -> tuple[str | None, str]:
        """Return field and reason for which an object was refused; "" where the decoder knows."""
        try:
            row = msgspec.json.decode(line)
        except UnicodeDecodeError as error:
            return None, f"not UTF-8: {error.reason}"
        except _UNREADABLE as error:
            return None, f"not JSON: {error}"
        if not isinstance(row, dict):
            return None, f"an object is expected, not {_JSON_NAMES[type(row)]}"
        for place, (field, kinds) in enumerate(zip(self._fields.names, self._kinds, strict=True)):
            option = ID_OPTION if place >= len(self._fields.texts) else self._fields.text_option
            if problem := _field_problem(row, field, kinds, option):
                return field, problem
        return None, ""  # such as a key given twice, wrong and right


def _paths(field: str) -> list[_Path]:
    """Return where a field may lie: at the top under its whole name, or inside others."""
    return list(dict.fromkeys([(field,), tuple(field.split("."))]))


def _path(field: str, row: dict[str, Any]) -> _Path:
    """Return where a field lies in an object, or would be looked for."""
    whole, *inside = _paths(field)
    return inside[0] if inside and field not in row and inside[0][0] in row else whole


def _decoder(
    paths: Sequence[_Path], kinds: Sequence[tuple[type, ...]]
) -> tuple[msgspec.json.Decoder[Any], Callable[[Any], Any]]:
    """Return a decoder, and what gets of its objects what lies at these paths.

    That is a tuple if they are several.
    """
    unions = [reduce(or_, each) for each in kinds]
    kind, places = _struct(dict(zip(paths, unions, strict=True)))
    return msgspec.json.Decoder(kind), attrgetter(*(places[path] for path in paths))


def _struct(kinds: dict[_Path, Any]) -> tuple[type, dict[_Path, str]]:
    """Return a struct of fields at these paths, and where `attrgetter` finds each in it."""
    levels: dict[str, dict[_Path, Any]] = {}
    for path, kind in kinds.items():
        levels.setdefault(path[0], {})[path[1:]] = kind
    fields: list[tuple[str, Any]] = []
    rename: dict[str, str] = {}
    places: dict[_Path, str] = {}
    for place, (key, inner) in enumerate(levels.items()):
        name = f"f{place}"
        rename[name] = key
        if () in inner:
            fields.append((name, inner[()]))
            places[key,] = name
        else:
            kind, below = _struct(inner)
            fields.append((name, kind))
            places |= {(key, *path): f"{name}.{where}" for path, where in below.items()}
    return msgspec.defstruct("JsonRow", fields, rename=rename, gc=False), places


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
    *above, last = _path(field, row)
    for key in above:
        inner = row.get(key)
        if not isinstance(inner, dict):
            return f"missing; {key!r} holds no object"
        row = inner
    if last not in row:
        if not row:
            return "missing; the row has no fields"
        fields = ", ".join(map(repr, islice(row, FIELDS_SHOWN)))
        more = ", …" if len(row) > FIELDS_SHOWN else ""
        return f"missing; there are {fields}{more}, and {option} says which it is"
    kind = type(row[last])
    if kind in kinds:
        return None
    expected = " or ".join(dict.fromkeys(_JSON_NAMES[kind] for kind in kinds))
    return f"{expected} expected, not {_JSON_NAMES[kind]}"
