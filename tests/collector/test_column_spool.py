"""Tests of columns on their way to the parts of an output, and of their comparison."""

import errno
import tempfile
from collections import deque
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from embedfarm.collector import column_spool
from embedfarm.collector.column_check import ColumnCheck
from embedfarm.collector.column_rows import compact, same_rows, take_rows, unify_dictionaries
from embedfarm.collector.column_spool import ColumnsMissing, ColumnSpool
from embedfarm.collector.manifest import OutputError, Part
from embedfarm.collector.sinks import KeptColumns
from embedfarm.collector.source_check import SourceChanged


def table_of(count: int) -> pa.Table:
    """Return columns of several types."""
    inner = [None if n % 4 == 0 else {"names": [str(n)] * (n % 3)} for n in range(count)]
    return pa.table(
        {
            "n": pa.array(range(count), pa.int32()),
            "x": pa.array([float("nan") if n % 3 == 0 else n / 7 for n in range(count)]),
            "kind": pa.array([f"kind {n % 5}" for n in range(count)]).dictionary_encode(),
            "inner": pa.array(inner, pa.struct([("names", pa.list_(pa.string()))])),
            "view": pa.array([str(n) * 10 for n in range(count)], pa.string_view()),
        }
    )  # fmt: skip


def list_of(values: pa.Array) -> pa.Array:
    """Return lists of one value each."""
    return pa.ListArray.from_arrays(pa.array(range(len(values) + 1), pa.int32()), values)


def list_view_of(values: pa.Array) -> pa.Array:
    """Return views of lists of one value each, the last one first."""
    places = pa.array(range(len(values))[::-1], pa.int32())
    return pa.ListViewArray.from_arrays(places, pa.array([1] * len(values), pa.int32()), values)


def fixed_list_of(values: pa.Array) -> pa.Array:
    """Return lists of always one value each."""
    return pa.FixedSizeListArray.from_arrays(values, 1)


def struct_of(values: pa.Array) -> pa.Array:
    """Return structs of a value each, every third of which is null."""
    mask = pa.array([n % 3 == 0 for n in range(len(values))], pa.bool_())
    return pa.StructArray.from_arrays([values], ["v"], mask=mask)


def put_all(spool: ColumnSpool, table: pa.Table, rows: int, first: int = 0) -> None:
    """Put the columns of a table from a row on, so many rows at a time."""
    for batch in table.slice(first).to_batches(rows):
        spool.put(batch)


@settings(max_examples=60, deadline=None)
@given(
    count=st.integers(1, 200),
    rows=st.integers(1, 60),
    segment_bytes=st.integers(1, 4000),
    cuts=st.lists(st.integers(0, 200), max_size=6),
    begins=st.tuples(st.integers(0, 50), st.integers(0, 50)),
    data=st.data(),
)
def test_any_part_has_its_columns(  # noqa: PLR0913, PLR0917 -- each is drawn
    count: int,
    rows: int,
    segment_bytes: int,
    cuts: list[int],
    begins: tuple[int, int],
    data: st.DataObject,
) -> None:
    """Whatever the sizes of batches, files and parts, each part takes the columns of its rows."""
    table = table_of(count)
    first = min(begins[0], count)
    wanted = min(max(first, begins[1]), count)
    with tempfile.TemporaryDirectory() as name, pytest.MonkeyPatch.context() as patch:
        patch.setattr(column_spool, "SEGMENT_BYTES", segment_bytes)
        spool = ColumnSpool(Path(name) / "columns", table.schema)
        spool.begin(0, 0)
        put_all(spool, table.slice(0, data.draw(st.integers(0, count))), rows)
        spool.begin(first, wanted)  # as when the source is read anew
        put_all(spool, table, rows, first)
        bounds = sorted({wanted, count, *(min(max(cut, wanted), count) for cut in cuts)})
        for start, end in pairwise(bounds):
            good = np.array(
                data.draw(st.lists(st.booleans(), min_size=end - start, max_size=end - start))
            )
            places = start + np.flatnonzero(good)
            assert same_rows(spool.take(start, good), take_rows(table, places))
            assert spool.size(start, end - start) > 0
            spool.forget(end)
        assert not list(Path(name).glob("columns/*.arrow"))  # the last rows are in memory


def test_memory_and_disk_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is in no part yet is on the disk but for a little, and goes with its part."""
    monkeypatch.setattr(column_spool, "SEGMENT_BYTES", 1 << 14)
    table = table_of(20_000)
    spool = ColumnSpool(tmp_path / "columns", table.schema)
    spool.begin(0, 0)
    put_all(spool, table, 100)
    files = sorted((tmp_path / "columns").iterdir())
    assert len(files) > 20
    assert max(file.stat().st_size for file in files) < 1 << 16
    spool.forget(10_000)
    left = sorted((tmp_path / "columns").iterdir())
    assert 0.4 < len(left) / len(files) < 0.6
    with pytest.raises(ColumnsMissing, match="of 10 rows from 0 on"):
        spool.take(0, np.ones(10, np.bool_))
    with pytest.raises(ColumnsMissing):
        spool.take(19_995, np.ones(10, np.bool_))


ROWS = 3000
LONG = pa.array([f"{n:0100d}" if n % 7 else None for n in range(ROWS)])
VIEWS = LONG.cast(pa.string_view())
ENCODED = LONG.dictionary_encode().cast(pa.dictionary(pa.uint16(), pa.string()))
OFFSETS = pa.array(range(ROWS + 1), pa.int32())
STARTS, ONES = OFFSETS.slice(0, ROWS), pa.array([1] * ROWS, pa.int32())
SCATTERED = pa.array([n * 1009 % ROWS for n in range(ROWS)], pa.int32())
VIEW_KIND, CODE_KIND = pa.json_(pa.string_view()), pa.opaque(ENCODED.type, "code", "test")
SHARED = [
    VIEWS,
    LONG.cast(pa.binary()).cast(pa.binary_view()),
    ENCODED,
    LONG.cast(pa.binary()).dictionary_encode(),
    pa.ListViewArray.from_arrays(STARTS, ONES, LONG),
    pa.ListViewArray.from_arrays(SCATTERED, ONES, LONG),
    pa.ListViewArray.from_arrays(SCATTERED, ONES, VIEWS),
    pa.LargeListViewArray.from_arrays(SCATTERED.cast("int64"), ONES.cast("int64"), ENCODED),
    pa.ListArray.from_arrays(OFFSETS, ENCODED),
    pa.LargeListArray.from_arrays(OFFSETS.cast("int64"), VIEWS),
    pa.FixedSizeListArray.from_arrays(ENCODED, 1),
    pa.MapArray.from_arrays(OFFSETS, LONG.fill_null("").dictionary_encode(), VIEWS),
    pa.StructArray.from_arrays([STARTS, VIEWS, ENCODED], ["n", "view", "code"]),
    pa.ListArray.from_arrays(
        OFFSETS, pa.StructArray.from_arrays([VIEWS], fields=[pa.field("v", VIEWS.type)])
    ),
    pa.ExtensionArray.from_storage(VIEW_KIND, VIEWS),
    pa.ExtensionArray.from_storage(CODE_KIND, ENCODED),
]


@pytest.mark.parametrize("column", SHARED, ids=lambda column: str(column.type))
def test_rows_take_the_room_of_their_values(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, column: pa.Array
) -> None:
    """A slice of views or of a dictionary is counted and written as its rows, and not as all."""
    monkeypatch.setattr(column_spool, "SEGMENT_BYTES", 1 << 16)
    gaps = pa.concat_arrays([column.slice(0, ROWS - 100), pa.nulls(100, column.type)])
    schema = pa.schema([pa.field("c", column.type, metadata={"unit": "kg"})], {"of": "all"})
    table = pa.table([gaps], schema)
    spool = ColumnSpool(tmp_path / "columns", table.schema)
    spool.begin(0, 7)
    put_all(spool, table, 50)
    files = [*(tmp_path / "columns").iterdir()]
    assert len(files) < 20
    assert sum(file.stat().st_size for file in files) < 1 << 20
    assert spool.size(7, ROWS) < 1 << 20
    rows = spool.take(7, np.ones(ROWS - 7, np.bool_))
    rows.validate(full=True)
    assert rows.schema.equals(table.schema, check_metadata=True)
    assert same_rows(rows, table.slice(7))


def test_an_order_of_values_stays(tmp_path: Path) -> None:
    """Values of a dictionary that have an order are all in it still, but for null."""
    places, values = pa.array([2, None, 0, 1] * 9, pa.int8()), ["low", None, "high", "highest"]
    kinds = pa.DictionaryArray.from_arrays(places, values, ordered=True)
    whole = pa.DictionaryArray.from_arrays(places, ["c", "b", "a", "d"], ordered=True)
    table = pa.table({"kind": kinds, "whole": whole})
    spool = ColumnSpool(tmp_path / "columns", table.schema)
    spool.begin(0, 0)
    put_all(spool, table, 5)
    rows = spool.take(0, np.ones(36, np.bool_))
    assert rows.schema.equals(table.schema)
    assert rows.to_pylist() == table.to_pylist()
    (one,) = unify_dictionaries(rows)
    assert one.column("kind").chunk(1).dictionary.to_pylist() == ["low", "high", "highest"]
    assert one.column("whole").chunk(1).dictionary.to_pylist() == ["c", "b", "a", "d"]


@settings(max_examples=60, deadline=None)
@given(
    indices=st.lists(st.none() | st.integers(0, 4), max_size=30),
    values=st.lists(st.none() | st.text(max_size=20), min_size=5, max_size=5),
    cut=st.tuples(st.integers(0, 30), st.integers(0, 30)),
    wrap=st.sampled_from([lambda a: a, list_of, fixed_list_of, list_view_of, struct_of]),
    ordered=st.booleans(),
)
def test_any_dictionary_is_compact(
    indices: list[int | None],
    values: list[str | None],
    cut: tuple[int, int],
    wrap: Callable[[pa.Array], pa.Array],
    ordered: bool,  # noqa: FBT001 -- it is drawn
) -> None:
    """Whatever a dictionary has, null and what no row uses too, its rows stay as they are."""
    codes = pa.array(indices, pa.int8())
    column = wrap(pa.DictionaryArray.from_arrays(codes, pa.array(values), ordered=ordered))
    batch = pa.record_batch([column, wrap(pa.array(range(len(codes))))], ["c", "n"]).slice(*cut)
    found = compact(batch)
    found.validate(full=True)
    assert found.schema.equals(batch.schema)
    assert found.to_pylist() == batch.to_pylist()
    pq.write_table(pa.table(found), file := pa.BufferOutputStream())
    assert pq.read_table(file.getvalue()).to_pylist() == batch.to_pylist()


def test_a_full_disk_loses_no_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Columns that the disk refused are put once more, and are there once."""
    monkeypatch.setattr(column_spool, "SEGMENT_BYTES", 1 << 10)
    table, refusals = table_of(1000), iter([True, False] * 1000)
    spool = ColumnSpool(tmp_path / "columns", table.schema)
    spool.begin(0, 0)
    new_stream = pa.ipc.new_stream

    def refuse_now_and_then(*words: object) -> object:
        if next(refusals):
            raise OSError(errno.ENOSPC, "No space left on device")
        return new_stream(*words)

    monkeypatch.setattr(pa.ipc, "new_stream", refuse_now_and_then)
    refused = 0
    for batch in table.to_batches(50):
        while True:
            try:
                spool.put(batch)
                break
            except OSError:
                refused += 1
    assert refused > 3
    assert same_rows(spool.take(0, np.ones(1000, np.bool_)), table)


def test_columns_that_become_others(tmp_path: Path) -> None:
    """A file that was exchanged for one with other types is noticed."""
    spool = ColumnSpool(tmp_path / "columns", table_of(1).schema.remove(4))
    spool.begin(0, 0)
    spool.put(table_of(3).to_batches()[0])  # which has one more
    other = table_of(3).set_column(0, "n", pa.array([1, 2, 3], pa.int64()))
    with pytest.raises(OutputError, match="became n int64, x double"):
        spool.put(other.to_batches()[0])


TAGS = pa.dictionary(pa.int16(), pa.string())
NUMBER = {"name": "a", "number": float("nan")}


@pytest.mark.parametrize(
    ("kind", "values"),
    [
        (pa.list_(TAGS), [["a", "b"], ["b"], None, ["a", None], [], ["a"]]),
        (pa.large_list(TAGS), [["a", "b"], ["b"], None, ["a", None], [], ["a"]]),
        (pa.list_view(TAGS), [["a", "b"], ["b"], None, ["a", None], [], ["a"]]),
        (pa.list_view(pa.float64()), [[float("nan")], [2.0], None, [], [float("nan")], [-0.0]]),
        (
            pa.fixed_shape_tensor(pa.float32(), [2]),
            [[float("nan"), 1.0], [2.0, 1.0], None, [0.0, 1.0], [1.0, 0.0], [float("nan")] * 2],
        ),
        (pa.list_(TAGS, 2), [["a", "b"], ["b", "a"], None, ["a", None], ["c", "a"], ["d", "d"]]),
        (pa.map_(TAGS, TAGS), [[("a", "b")], [("b", None)], None, [("a", "a")], [], [("c", "b")]]),
        (
            pa.struct([("name", TAGS), ("number", pa.float64())]),
            [NUMBER, {"name": "b"}, {}, None, NUMBER, {"name": "c", "number": -0.0}],
        ),
        (
            pa.list_(pa.struct([("name", TAGS), ("number", pa.float64())])),
            [[NUMBER, None], [{"name": "b"}], None, [], [NUMBER], [None]],
        ),
    ],
    ids=str,
)
def test_values_count_and_not_dictionaries(kind: pa.DataType, values: list[object]) -> None:
    """Values are the same in any dictionaries, however deep; another one is another."""
    pieces = [pa.array(values[start : start + 2], kind) for start in (0, 2, 4)]
    whole, split = pa.array(values, kind), pa.chunked_array(pieces)
    assert same_rows(pa.table({"c": whole}), pa.table({"c": split}))
    assert same_rows(pa.table({"c": whole}).slice(1), pa.table({"c": split}).slice(1))
    for place, other in ((0, 1), (2, 3), (5, 4)):
        changed = [*values]
        changed[place] = values[other]
        assert not same_rows(pa.table({"c": pa.array(changed, kind)}), pa.table({"c": split}))


def parts_of(bounds: Sequence[int]) -> list[Part]:
    """Return parts with these bounds."""
    return [
        Part(
            file=f"part-{start}", bytes=1, sha256="", start=start, count=end - start,
            rows=end - start, errors=0, tokens=0, texts_sha256="",
        )
        for start, end in pairwise(bounds)
    ]  # fmt: skip


@pytest.mark.parametrize("rows", [1, 7, 100])
@pytest.mark.parametrize("changed", ["n", "x", "kind", "inner", "view"])
def test_a_change_is_found_in_its_part(rows: int, changed: str) -> None:
    """A value that was changed is found in the part that has it; NaN is no change."""
    table, parts = table_of(100), parts_of([0, 10, 40, 70, 90])
    now = table.select(sorted(table.column_names))
    values = now.column(changed).to_pylist()
    values[50] = values[51]
    place = now.schema.names.index(changed)
    other = now.set_column(
        place, now.schema.field(place), pa.array(values, now.schema.types[place])
    )

    def read(part: Part) -> KeptColumns:
        indices = np.array([n for n in range(part.start, part.end) if n % 13])
        return KeptColumns(indices, take_rows(table, indices))

    same = ColumnCheck(read, parts, 10)
    same.feed_all(deque_of(now.slice(10), rows))
    check = ColumnCheck(read, parts)
    with pytest.raises(SourceChanged, match="other columns now") as found:
        check.feed_all(deque_of(other, rows))
    assert found.value.part is parts[2]


def deque_of(table: pa.Table, rows: int) -> deque[pa.RecordBatch]:
    """Return the batches of a table in a queue."""
    return deque(table.to_batches(rows))
