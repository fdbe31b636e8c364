"""Tests of exports into vector stores, the same ones for each of them."""

import contextlib
import random
import shutil
import threading
from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

import embedfarm
from embedfarm.collector.dequantisation import restore
from embedfarm.collector.id_digests import RepeatedIds
from embedfarm.collector.manifest import read_manifest, write_manifest
from embedfarm.collector.patch import patch
from embedfarm.collector.store_export import ExportReport, Others
from embedfarm.collector.stores import open_store
from embedfarm.collector.stores.address import parse_address
from embedfarm.collector.stores.store import RowShape, Store, StoreError, StoreRows
from embedfarm.contract.settings import Settings
from embedfarm.runs.store_feed import Destination, exporting
from tests.stores.contents import (
    DIMENSIONS,
    Vector,
    assert_contents,
    scale,
    vectors_of,
    write_output,
)
from tests.stores.servers import PostgresServer

KINDS = ("postgresql", "qdrant", "lancedb", "milvus")
TOLERANCE = {"qdrant": 1e-6}  # a collection for cosine scales vectors to length 1 again
TEXTS = {f"id {n}": f"text {n}" for n in range(230)}


@pytest.fixture(scope="module")
def postgresql(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PostgresServer]:
    """A PostgreSQL server for the tests of this file."""
    with PostgresServer(tmp_path_factory.mktemp("store")) as server:
        yield server


@pytest.fixture(params=KINDS)
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """URL of a collection that is not there yet, in a store of each kind."""
    return new_collection(request.param, request.getfixturevalue, tmp_path)


def new_collection(kind: str, fixture: Callable[[str], Any], directory: Path) -> str:
    """Return the URL of a collection that is not there yet."""
    if kind == "postgresql":
        return f"{fixture('postgresql').url}#{directory.name}"
    return f"{kind}://{directory / 'store.db'}#documents"


def export(
    out: Path,
    url: str,
    others: Others = "refuse",
    wrap: Callable[[Store], Store] = lambda store: store,
) -> ExportReport:
    """Export a finished output, by a store that is wrapped."""
    to = Destination(url, others)
    with exporting(out, to, Settings(store_seconds_max=60), threading.Event()) as started:
        started.patient.store = wrap(started.patient.store)
        return started.finish(read_manifest(out))


def rows_of(texts: dict[str, str]) -> dict[str, Any]:
    """Return the vectors of texts by id."""
    return dict(zip(texts, vectors_of(list(texts.values())), strict=True))


def assert_rows(url: str, texts: dict[str, str]) -> None:
    """Assert that a collection has the vectors of these texts, and nothing else."""
    assert_contents(url, rows_of(texts), TOLERANCE.get(url.partition(":")[0], 0.0))


def test_all_rows_are_there_once(tmp_path: Path, url: str) -> None:
    """A store has each vector under its id, bit for bit; a second export has nothing to do."""
    out = write_output(tmp_path / "out", TEXTS, failed=["text 7"])
    report = export(out, url)
    assert (report.sent, report.deleted, report.rows, report.exact) == (229, 0, 229, True)
    assert_rows(url, {name: text for name, text in TEXTS.items() if text != "text 7"})
    again = export(out, url)
    assert (again.sent, again.deleted, again.rows, again.exact) == (0, 0, 229, True)


def test_rows_without_ids_are_known_by_job_and_index(tmp_path: Path, url: str) -> None:
    """A corpus without ids has rows whose names are made of the job and the index."""
    texts = list(TEXTS.values())[:60]
    out = write_output(tmp_path / "out", texts)
    assert export(out, url).rows == 60
    assert_rows(url, {f"job-out:{n}": text for n, text in enumerate(texts)})
    assert export(out, url).sent == 0


class Killed(BaseException):
    """Stands for the end of the process."""


class Dying:
    """A store whose process is killed around one of its calls.

    Args:
        store: The store.
        call: Number of the call.
        after: Whether the call has its effect before that.
    """

    def __init__(self, store: Store, call: int, *, after: bool) -> None:
        self._store, self._left, self._after = store, call, after

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 -- whatever a store has
        found = getattr(self._store, name)
        return partial(self._call, found) if callable(found) and name != "close" else found

    def _call(self, method: Callable[..., Any], *values: Any) -> Any:  # noqa: ANN401 -- the same
        if method.__name__ not in {"key", "may_pass"}:
            self._left -= 1
            if self._left == 0:
                if self._after:
                    method(*values)
                raise Killed
        return method(*values)


def test_a_killed_command_goes_on(tmp_path: Path, url: str) -> None:
    """Whatever call of the store a kill comes at, the next command ends with the same rows."""
    out = write_output(tmp_path / "out", TEXTS)
    kills = 0
    for number, call in enumerate([1, 2, 2, 3, 3, 2, 4, 3, 3]):
        try:
            export(out, url, wrap=partial(Dying, call=call, after=bool(number % 2)))
        except Killed:
            kills += 1
    assert kills >= 6
    export(out, url)
    assert export(out, url).sent == 0
    assert_rows(url, TEXTS)


def new_version(out: Path, before: Path) -> tuple[Path, dict[str, str]]:
    """Write an output of which a twentieth is not as before; return it with what a store has then.

    Of `before`, "text 7" had failed, and has its vector now; a text that is new has none.
    """
    texts = {name: text for name, text in TEXTS.items() if name not in {"id 3", "id 100"}}
    texts |= {f"id {n}": f"other {n}" for n in range(40, 48)}
    texts |= {"new 1": "text new", "new 2": "text 3", "id 50": "broken"}
    names = list(texts)
    random.Random(1).shuffle(names)  # all rows move
    write_output(out, {name: texts[name] for name in names}, failed=["broken"], before=before)
    return out, {name: text for name, text in texts.items() if text != "broken"}


@pytest.mark.parametrize("others", ["refuse", "delete"])
def test_a_new_version_sends_what_has_changed(tmp_path: Path, url: str, others: Others) -> None:
    """Only rows that changed or are new are sent, and those removed are deleted when asked."""
    first = write_output(tmp_path / "first", TEXTS, failed=["text 7"])
    export(first, url)
    second, texts = new_version(tmp_path / "second", first)
    report = export(second, url, others)
    removed = {"id 3": TEXTS["id 3"], "id 100": TEXTS["id 100"]}
    if others == "delete":
        assert (report.sent, report.deleted, report.rows) == (11, 2, len(texts))
        assert report.exact
    else:
        assert (report.sent, report.deleted, report.rows) == (11, 0, len(texts) + 2)
        assert not report.exact
        assert_rows(url, texts | removed)
        assert export(second, url).sent == 0
        asked = export(second, url, "delete")
        assert (asked.sent, asked.deleted, asked.rows, asked.exact) == (0, 2, len(texts), True)
    assert_rows(url, texts)
    assert export(second, url, others).deleted == 0


def test_a_killed_update_goes_on(tmp_path: Path, url: str) -> None:
    """An update of a new version ends with the same rows, whatever call a kill comes at."""
    first = write_output(tmp_path / "first", TEXTS, failed=["text 7"])
    export(first, url)
    second, texts = new_version(tmp_path / "second", first)
    for call in range(2, 12):
        dying = partial(Dying, call=call, after=bool(call % 2))
        with contextlib.suppress(Killed):
            export(second, url, "delete", dying)
    assert export(second, url, "delete").exact
    assert_rows(url, texts)


def begin_update(out: Path, url: str) -> None:
    """Have a command killed that has begun to export a new version, and sent nothing of it."""
    with pytest.raises(Killed):  # when it has found the collection, and marked it
        export(out, url, wrap=partial(Dying, call=2, after=True))


@pytest.mark.parametrize("replaced", [False, True])
def test_an_update_goes_on_from_another_base(tmp_path: Path, url: str, *, replaced: bool) -> None:
    """All rows are sent where the version before was retried, or made anew, since a kill."""
    first = write_output(tmp_path / "first", TEXTS, failed=["text 7"])
    export(first, url)
    texts = {name: text for name, text in TEXTS.items() if name not in {"id 3", "id 100"}}
    second = write_output(tmp_path / "second", texts, before=first)
    begin_update(second, url)
    if replaced:
        shutil.rmtree(first)
        write_output(first, TEXTS)
    else:
        patch(first, write_output(tmp_path / "again", ["text 7"]))
    report = export(second, url)
    assert (report.rows, report.exact) == (len(texts) + 2, False)
    assert_rows(url, TEXTS)
    assert export(second, url).sent == 0
    assert export(second, url, "delete").rows == len(texts)
    assert_rows(url, texts)


def test_an_update_that_was_made_anew_since_another_version(tmp_path: Path, url: str) -> None:
    """All rows are sent of an output that is new in its place, and was made from another one."""
    first = write_output(tmp_path / "first", TEXTS)
    export(first, url)
    texts = TEXTS | {"id 9": "text nine"}
    never = write_output(tmp_path / "never", texts)
    second = write_output(tmp_path / "second", texts, before=first)
    begin_update(second, url)
    for path in second.iterdir():
        if path.is_file():
            path.unlink()
    write_output(second, texts, before=never)
    assert export(second, url).sent == len(texts)
    assert_rows(url, texts)


def test_an_update_of_a_base_that_was_made_anew(tmp_path: Path, url: str) -> None:
    """An output goes only whole where another one has come into the directory of its base."""
    first = write_output(tmp_path / "first", TEXTS)
    export(first, url)
    texts = TEXTS | {"id 9": "text nine"}
    second = write_output(tmp_path / "second", texts, before=first)
    export(second, url)
    shutil.rmtree(first)
    write_output(first, texts | {"id 5": "text five"}, before=second)
    assert export(first, url).sent == 1
    with pytest.raises(StoreError, match="has rows of another output, that of job job-first"):
        export(second, url)
    assert export(second, url, "delete").sent == len(texts)
    assert_rows(url, texts)


def test_an_update_that_has_ended_needs_no_base(tmp_path: Path, url: str) -> None:
    """Nothing is sent again when the version before goes after an export."""
    first = write_output(tmp_path / "first", TEXTS, failed=["text 7"])
    export(first, url)
    second, texts = new_version(tmp_path / "second", first)
    export(second, url, "delete")
    shutil.rmtree(first)
    report = export(second, url)
    assert (report.sent, report.rows, report.exact) == (0, len(texts), True)
    assert_rows(url, texts)


def test_the_old_version_again(tmp_path: Path, url: str) -> None:
    """A collection that has gone on to a new version takes the old one only when told so."""
    first = write_output(tmp_path / "first", TEXTS)
    export(first, url)
    second, _ = new_version(tmp_path / "second", first)
    export(second, url, "delete")
    with pytest.raises(StoreError, match="has rows of another output, that of job job-second"):
        export(first, url)
    assert export(first, url, "delete").sent == len(TEXTS)
    assert_rows(url, TEXTS)


def test_removed_ids_of_several_versions(tmp_path: Path, url: str) -> None:
    """Rows that earlier versions left go when the last one asks for it."""
    first = write_output(tmp_path / "first", TEXTS)
    export(first, url)
    second, texts = new_version(tmp_path / "second", first)
    export(second, url)
    third = dict(list(texts.items())[5:]) | {"id 3": "back"}
    write_output(tmp_path / "third", third, before=second)
    report = export(tmp_path / "third", url, "delete")
    assert (report.sent, report.rows) == (1, len(third))
    assert_rows(url, third)


def test_a_retry_sends_the_parts_that_it_patched(tmp_path: Path, url: str) -> None:
    """Parts that had failed chunks are sent after a retry of these, and no others."""
    out = write_output(tmp_path / "out", TEXTS, failed=["text 7", "text 120"])
    export(out, url)
    again = write_output(tmp_path / "again", ["text 7", "text 120"], failed=["text 120"])
    patch(out, again)
    report = export(out, url)
    assert (report.sent, report.rows) == (50, 229)
    assert_rows(url, {name: text for name, text in TEXTS.items() if text != "text 120"})


def test_a_store_that_lost_rows_gets_them_again(tmp_path: Path, url: str) -> None:
    """An export says that rows are gone which were confirmed, and the next one sends all again."""
    out = write_output(tmp_path / "out", TEXTS)
    export(out, url)
    store = open_store(parse_address(url))
    store.delete([name for name in TEXTS if name.endswith("7")])
    store.close()
    with pytest.raises(StoreError, match="has 207 rows, where it has confirmed 230"):
        export(out, url)
    assert export(out, url).sent == 230
    assert_rows(url, TEXTS)


def test_rows_of_others(tmp_path: Path, url: str) -> None:
    """A collection with other rows is not touched unless it is said what becomes of them."""
    first = write_output(tmp_path / "first", {"a": "one", "b": "two"})
    second = write_output(tmp_path / "second", TEXTS)
    export(first, url)
    with pytest.raises(StoreError, match="--others delete"):
        export(second, url)
    assert_rows(url, {"a": "one", "b": "two"})
    report = export(second, url, "keep")
    assert (report.sent, report.rows, report.exact) == (230, 232, False)
    assert_rows(url, TEXTS | {"a": "one", "b": "two"})
    report = export(second, url, "delete")
    assert (report.sent, report.deleted, report.rows, report.exact) == (0, 2, 230, True)
    assert_rows(url, TEXTS)


def test_a_row_that_somebody_added(tmp_path: Path, url: str) -> None:
    """A row that came by another way is named, and stays or goes as it is said."""
    out = write_output(tmp_path / "out", TEXTS)
    export(out, url)
    address = parse_address(url)
    store = open_store(address)
    shape = RowShape(DIMENSIONS, "float32", ids=True)
    store.upsert(StoreRows(["x"], np.zeros(1, np.int64), vectors_of(["x"])), shape)
    store.close()
    with pytest.raises(StoreError, match="has 1 rows that are not of"):
        export(out, url)
    assert export(out, url, "keep").rows == 231
    assert export(out, url, "delete").rows == 230
    assert_rows(url, TEXTS)


def test_vectors_of_another_kind_are_refused(tmp_path: Path, url: str) -> None:
    """Vectors of other dimensions, or of another model, do not go into a collection."""
    export(write_output(tmp_path / "out", TEXTS), url)
    wide = write_output(tmp_path / "wide", ["a"], matrix=vectors_of(["a"], 12))
    with pytest.raises(StoreError, match=r"has vectors of 8 float32, and .* of 12 float32"):
        export(wide, url, "delete")
    other = write_output(tmp_path / "other", TEXTS, model="b")
    with pytest.raises(StoreError, match=r"made in another way.*weights: a before, b now"):
        export(other, url, "delete")
    assert_rows(url, TEXTS)


def test_ids_that_repeat_are_refused(tmp_path: Path, url: str) -> None:
    """An output in which two chunks have one id cannot be a collection of rows by id."""
    write_output(tmp_path / "out", {"a": "one", "b": "two"})
    manifest = read_manifest(tmp_path / "out")
    write_manifest(
        tmp_path / "out", msgspec.structs.replace(manifest, repeated_ids=RepeatedIds(1, 1, 0))
    )
    with pytest.raises(StoreError, match="1 chunks with the id of an earlier one"):
        export(tmp_path / "out", url)


ODD = [
    "a', 'b",
    'a", "b',
    "x'] or id not in ['y",
    'x"] or id != "',
    "O'Brien",
    "\\",
    "a\\n",
    "a\nb\r\tc",
]


def test_ids_are_texts_to_a_store(tmp_path: Path, url: str) -> None:
    """Rows go by their ids and no others do, whatever quotes or line ends these have in them."""
    plain = {name: f"text {name}" for name in ("a", "b", "x", "y", "a\n", "a\\\\n")}
    odd = {name: f"odd {name}" for name in ODD}
    first = write_output(tmp_path / "first", plain | odd)
    assert export(first, url).rows == len(plain) + len(odd)
    second = write_output(tmp_path / "second", plain | odd, failed=[*odd.values()], before=first)
    export(second, url)
    assert_rows(url, plain)
    export(write_output(tmp_path / "third", plain | odd, before=second), url)
    assert_rows(url, plain | odd)
    export(write_output(tmp_path / "fourth", plain), url, "delete")
    assert_rows(url, plain)


def test_pages_go_on_behind_any_id(
    tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each row is in one page of a store, also behind an id with quotes and backslashes."""
    monkeypatch.setattr("embedfarm.collector.stores.milvus.PAGE_ROWS", 1)
    texts = {name: f"text {name}" for name in [*ODD, "a", "z"]}
    export(write_output(tmp_path / "out", texts), url)
    store = open_store(parse_address(url))
    there = [key for page in islice(store.pages(), 2 * len(texts)) for key in page]
    assert sorted(there) == sorted(map(store.key, texts))
    store.close()


def test_two_stores_at_once(tmp_path: Path) -> None:
    """An output goes into two collections, each with a journal of its own."""
    out = write_output(tmp_path / "out", TEXTS)
    urls = [f"lancedb://{tmp_path}/db#{name}" for name in ("one", "two")]
    for each in urls:
        assert export(out, each).sent == 230
        assert_rows(each, TEXTS)
    assert len(list((out / "_stores").iterdir())) == 2


def test_rows_of_parts_that_are_no_more_go(tmp_path: Path, url: str) -> None:
    """What an output had sent before its corpus changed under it goes, without being asked."""
    out = write_output(tmp_path / "out", TEXTS)
    export(out, url)
    shutil.move(out / "_stores", tmp_path / "_stores")
    shutil.rmtree(out)
    texts = dict(list(TEXTS.items())[:100]) | {f"id {n}": f"other {n}" for n in range(300, 330)}
    write_output(out, texts)
    shutil.move(tmp_path / "_stores", out / "_stores")
    report = export(out, url)
    assert (report.sent, report.deleted, report.rows, report.exact) == (30, 130, 130, True)
    assert_rows(url, texts)
    assert export(out, url).deleted == 0


def test_python_programs_export(tmp_path: Path) -> None:
    """A program brings a collection up to an output that it has opened."""
    vectors = embedfarm.open(write_output(tmp_path / "out", TEXTS))
    url = f"lancedb://{tmp_path}/db#documents"
    assert vectors.export_to(url).sent == 230
    assert vectors.export_to(url, others="delete").sent == 0
    assert vectors.verify() == []
    assert_rows(url, TEXTS)


def test_two_commands_at_once(tmp_path: Path, url: str) -> None:
    """A second export of an output into the same collection is refused while the first one runs."""
    out = write_output(tmp_path / "out", TEXTS)
    stop = threading.Event()
    with (
        exporting(out, Destination(url), Settings(), stop),
        pytest.raises(StoreError, match="another command exports"),
    ):
        export(out, url)
    export(out, url)
    assert_rows(url, TEXTS)


@pytest.mark.parametrize("kind", ["postgresql", "lancedb"])  # which two at a time can open
def test_two_outputs_at_once(tmp_path: Path, request: pytest.FixtureRequest, kind: str) -> None:
    """An export notices that another one has written into the collection meanwhile."""
    url = new_collection(kind, request.getfixturevalue, tmp_path)
    first = write_output(tmp_path / "first", TEXTS)
    second = write_output(tmp_path / "second", {"a": "one"})

    class Interrupted(Dying):
        def __getattr__(self, name: str) -> Any:  # noqa: ANN401 -- whatever a store has
            if name == "finish" and not (second / "_stores").exists():
                export(second, url, "keep")
            return getattr(self._store, name)

    with pytest.raises(StoreError, match="another command has exported into"):
        export(first, url, wrap=partial(Interrupted, call=0, after=False))
    with pytest.raises(StoreError, match="another output"):
        export(first, url)


QUANTISED = [
    ("float16", {"postgresql": 0, "lancedb": 0, "qdrant": 1e-3, "milvus": 0}),
    ("int8", {"postgresql": 0, "lancedb": 0, "qdrant": 1e-6, "milvus": 0}),
    ("uint8", {"postgresql": 0, "lancedb": 0, "qdrant": 1e-6, "milvus": 0}),
]


def bits_of(made: Vector, kind: str) -> tuple[Vector, Vector]:
    """Return the signs of vectors as an output has them, and as a store has them."""
    matrix = np.packbits(made > 0, axis=1)
    if kind in {"postgresql", "lancedb"}:
        return matrix, matrix
    return matrix, np.where(made > 0, 1, -1).astype(np.float32)


@pytest.mark.parametrize(("dtype", "tolerance"), QUANTISED)
def test_quantised_vectors(
    tmp_path: Path, url: str, dtype: str, tolerance: dict[str, float]
) -> None:
    """A store has vectors in the type in which they are, or as the numbers that they stand for."""
    kind = url.partition(":")[0]
    made = vectors_of(list(TEXTS.values()), 16)
    ranges = [[-1.0] * 16, [1.0] * 16]
    if dtype == "uint8":
        matrix, wanted = bits_of(made, kind)
    else:
        matrix = np.floor(made * 127).astype(dtype) if dtype == "int8" else made.astype(dtype)
        wanted = restore(matrix, 16, ranges)
    if kind == "qdrant":
        wanted = scale(wanted)
    settings = {"ranges": ranges} if dtype == "int8" else {}
    export(write_output(tmp_path / "out", TEXTS, matrix=matrix, settings=settings), url)
    rows = dict(zip(TEXTS, wanted, strict=True))
    assert_contents(url, rows, tolerance[kind])


def test_bits_that_fill_no_byte(tmp_path: Path, url: str) -> None:
    """Bits whose number is no multiple of eight go into a store, which has them again."""
    matrix, wanted = bits_of(vectors_of(list(TEXTS.values()), 12), kind := url.partition(":")[0])
    wide = write_output(tmp_path / "wide", TEXTS, matrix=np.pad(matrix, ((0, 0), (0, 1))))
    settings = {"dimensions": 12}
    out = write_output(tmp_path / "out", TEXTS, matrix=matrix, settings=settings)
    assert export(out, url).sent == 230
    assert export(out, url).sent == 0
    with pytest.raises(StoreError, match=r"has vectors of \d+ \w+, and .* of 24 bit"):
        export(wide, url, "delete")
    if kind == "qdrant":
        wanted = scale(wanted)
    rows = dict(zip(TEXTS, wanted, strict=True))
    assert_contents(url, rows, 1e-6 if kind == "qdrant" else 0)
