"""Lance datasets, in directories or object storage: the rows of one version, in its order.

A version never changes, so that rows come in the same order the next time, whatever was written
meanwhile.
"""

import re
from collections.abc import Iterator
from typing import Any, Final

import pyarrow as pa

from embedfarm.readers.fields import Fields
from embedfarm.readers.items import CorpusError, Item
from embedfarm.readers.record_batches import RowReader
from embedfarm.readers.source import LANCE_SOURCE, Cursor

_BATCH_ROWS: Final = 512
_BUFFER_BYTES: Final = 64 << 20


def read(source: str, name: str, fields: Fields, cursor: Cursor) -> Iterator[Item]:
    """Yield an item per row that is not deleted; an integer as id becomes its digits.

    Raises:
        CorpusError: The package is not installed, there is no such dataset or version, or a column
            is missing or of a type that holds no text.
    """
    dataset = _open(source, name)
    rows = RowReader(schema(source, name), name, fields)
    columns = list(dict.fromkeys(each.partition(".")[0] for each in rows.columns))
    batches = _scan(dataset, columns, cursor.offset).to_batches()
    yield from rows.items(batches, 0, cursor)


def schema(source: str, name: str) -> pa.Schema:
    """Return the schema of the rows of a dataset.

    Raises:
        CorpusError: The package is not installed, or there is no such dataset or version.
    """
    return _scan(_open(source, name), None, 0).projected_schema


def facts(source: str, name: str) -> tuple[int, str]:
    """Return the version that is read, and when it was made: both are others once it is another.

    Raises:
        CorpusError: The package is not installed, or there is no such dataset or version.
    """
    about = _open(source, name).get_version()
    return about["version"], str(about["timestamp"])


def _open(source: str, name: str) -> Any:  # noqa: ANN401 -- of an extra, that is imported late
    """Return the dataset in the version that the source names, or in its newest one."""
    try:
        import lance  # noqa: PLC0415 -- an extra, which imports pandas
    except ImportError as error:
        raise CorpusError(f"{name}: Lance needs embedfarm[lance]: {error}") from error
    place, version = split_version(source)
    try:
        return lance.dataset(place, version=version)
    except (OSError, ValueError) as error:
        which = "" if version is None else f", or none of version {version} any more"
        raise CorpusError(
            f"{name}: no Lance dataset is there{which}: {_LINES_OF_RUST.sub('', str(error))}"
        ) from error


_LINES_OF_RUST: Final = re.compile(r", /\S+\.rs:\d+:\d+")


def split_version(source: str) -> tuple[str, int | None]:
    """Return the place of a dataset, and the version that is named behind it, or None."""
    found = LANCE_SOURCE.fullmatch(source)
    if found is None or found["version"] is None:
        return source, None
    return found["place"], int(found["version"])


def _scan(dataset: Any, columns: list[str] | None, offset: int) -> Any:  # noqa: ANN401 -- as above
    """Return a scanner of rows in their order, which reads ahead by a little only."""
    return dataset.scanner(
        columns=columns,
        offset=offset or None,
        batch_size=_BATCH_ROWS,
        batch_readahead=4,
        fragment_readahead=1,
        io_buffer_size=_BUFFER_BYTES,
        scan_in_order=True,
        blob_handling="all_binary",
    )
