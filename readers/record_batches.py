"""Record batches of Arrow, whatever they are read from: one item per row, and columns to keep."""

from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby

import pyarrow as pa

from embedfarm.readers.fields import ALL, Fields
from embedfarm.readers.items import BadRow, CorpusError, Item
from embedfarm.readers.source import Cursor


class RowReader:
    """Takes text, id and columns to keep out of the batches of one source.

    Args:
        schema: Schema of the batches.
        name: Name of the source, for people.
        fields: What is taken.

    Raises:
        CorpusError: A column is missing, there twice, or of a type that holds no text.
    """

    def __init__(self, schema: pa.Schema, name: str, fields: Fields) -> None:
        self._name, self._fields = name, fields
        self._paths = [_path(schema, field) for field in fields.names]
        for place, (field, path) in enumerate(zip(fields.names, self._paths, strict=True)):
            kind = _type_of(schema, path)
            if kind is None:
                there = ", ".join(schema.names)
                raise CorpusError(f"{name}: no single column {field!r}; it has {there}")
            if not _holds_text(kind, integers=fields.numbers_allowed(place)):
                raise CorpusError(
                    f"{name}: column {field!r} is of type {kind}, which holds no text"
                )
        self._keep = [] if fields.columns is None else kept_names(schema, name, fields.keep)

    @property
    def columns(self) -> list[str]:
        """The columns that are needed, each with a dot before what lies inside it."""
        return list(dict.fromkeys([*map(".".join, self._paths), *self._keep]))

    def items(self, batches: Iterable[pa.RecordBatch], skip: int, cursor: Cursor) -> Iterator[Item]:
        """Yield an item per row behind the first `skip`; the cursor counts rows.

        The kept columns of the good rows of a batch are handed on before the first of its items.
        """
        for batch in batches:
            if skip >= batch.num_rows:
                skip -= batch.num_rows
                continue
            rest = batch.slice(skip)
            skip = 0
            cells = [_cells(rest, path) for path in self._paths]
            items = [
                self._item(row, cursor.offset + number)
                for number, row in enumerate(zip(*cells, strict=True), 1)
            ]
            if self._keep and self._fields.columns is not None:
                kept = rest.select(self._keep)
                runs = _good_runs(items) if BadRow in map(type, items) else [(0, len(items))]
                self._fields.columns.extend(kept.slice(*run) for run in runs)
            for item in items:
                cursor.offset += 1
                yield item

    def _item(self, row: Sequence[bytes | None], number: int) -> Item:
        """Return the row's cells, or a bad row if one of them is null or not UTF-8."""
        values = []
        for field, cell in zip(self._fields.names, row, strict=True):
            if cell is None:
                return BadRow(self._name, number, field, "null")
            try:
                values.append(cell.decode())
            except UnicodeDecodeError:
                return BadRow(self._name, number, field, "not UTF-8")
        return self._fields.row(values)


def kept_names(schema: pa.Schema, name: str, keep: Sequence[str]) -> list[str]:
    """Return the columns to keep of a source, in their order there if all of them are kept.

    Raises:
        CorpusError: There is no single column of one of the names.
    """
    wanted = list(dict.fromkeys(schema.names if list(keep) == [ALL] else keep))
    for each in wanted:
        if len(schema.get_all_field_indices(each)) != 1:
            there = ", ".join(schema.names)
            raise CorpusError(f"{name}: no single column {each!r} to keep; it has {there}")
    return wanted


def _good_runs(items: Sequence[Item]) -> Iterator[tuple[int, int]]:
    """Yield where each run of good rows begins, and how long it is."""
    first = 0
    for is_bad, run in groupby(items, lambda item: isinstance(item, BadRow)):
        count = sum(1 for _ in run)
        if not is_bad:
            yield first, count
        first += count


def _path(schema: pa.Schema, field: str) -> list[str]:
    """Return where a column lies: at the top under its whole name, or inside structs."""
    return [field] if field in schema.names else field.split(".")


def _type_of(schema: pa.Schema, path: Sequence[str]) -> pa.DataType | None:
    """Return the type of a column, None if it is not there just once."""
    kind: pa.DataType = pa.struct(schema)
    for name in path:
        index = kind.get_field_index(name) if pa.types.is_struct(kind) else -1
        if index < 0:
            return None
        kind = kind.field(index).type
    return kind


def _holds_text(kind: pa.DataType, *, integers: bool) -> bool:
    """Tell whether a column of that type holds strings, or integers where these are allowed."""
    values = kind.value_type if pa.types.is_dictionary(kind) else kind
    is_text = values in (pa.string(), pa.large_string(), pa.string_view())
    return is_text or (integers and pa.types.is_integer(values))


def _cells(batch: pa.RecordBatch, path: Sequence[str]) -> list[bytes | None]:
    """Return the cells as they lie in the file, which no one has checked to be UTF-8."""
    import pyarrow.compute as pc  # noqa: PLC0415 # it takes long to import, and few need it

    column = batch.column(path[0])
    for name in path[1:]:
        column = pc.struct_field(column, name)
    cells: list[bytes | None] = column.cast(pa.large_string()).cast(pa.large_binary()).to_pylist()
    return cells
