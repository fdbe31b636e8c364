"""Tests of records and their bytes."""

from typing import Any, ClassVar, get_args, get_type_hints

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from embedfarm.contract.encoding import (
    COUNT_MAX,
    VERSION,
    Amount,
    Count,
    EntryId,
    Fact,
    ForeignVersion,
    Record,
    RecordError,
    Some,
    Speed,
    decode,
    encode,
)
from embedfarm.contract.farm_timeline import FarmEvent, Happening
from embedfarm.contract.job_spec import JOB_FIELDS, JobSpec, encode_spec
from embedfarm.contract.load_attempts import LoadAttempts
from embedfarm.contract.model_orders import ModelOrder
from embedfarm.contract.model_states import ModelState, StateOfModel
from embedfarm.contract.records import (
    Block,
    ChunkError,
    Completion,
    Decision,
    Heartbeat,
    JobShare,
    LaneAnswer,
    LanePiece,
    Plan,
    Policy,
    Rate,
    Receipt,
    Result,
    Sample,
    SchedulerStats,
    TokenIds,
    TokenisationSettings,
    text_checksums,
)
from embedfarm.contract.source_places import SourceReference

KINDS: list[type[Record]] = [
    Block,
    ChunkError,
    Receipt,
    SourceReference,
    Result,
    Completion,
    Heartbeat,
    JobShare,
    Plan,
    Policy,
    Decision,
    SchedulerStats,
    Rate,
    Sample,
    FarmEvent,
    JobSpec,
    TokenIds,
    TokenisationSettings,
    LanePiece,
    LaneAnswer,
    LoadAttempts,
    ModelOrder,
    ModelState,
]
TEXTS = st.text(max_size=20)
COUNTS = st.integers(0, 2**53)
AMOUNTS = st.floats(0, 1e15)
FACTS = st.floats(-1e300, 1e300)
VALUES: dict[object, st.SearchStrategy[Any]] = {
    bool: st.booleans(),
    bytes: st.binary(max_size=50),
    dict[str, Fact]: st.dictionaries(TEXTS, FACTS, max_size=3),
    dict[str, Amount]: st.dictionaries(TEXTS, AMOUNTS, max_size=3),
    dict[str, str]: st.dictionaries(TEXTS, TEXTS, max_size=3),
    dict[str, Count]: st.dictionaries(TEXTS, COUNTS, max_size=3),
    dict[str, dict[str, Count]]: st.dictionaries(
        TEXTS, st.dictionaries(TEXTS, COUNTS, max_size=3), max_size=3
    ),
    dict[str, tuple[Count, Count]]: st.dictionaries(TEXTS, st.tuples(COUNTS, COUNTS), max_size=3),
    Amount: AMOUNTS,
    Fact: FACTS,
    Speed: st.floats(1e-9, 1e15),
    Count: COUNTS,
    Some: st.integers(1, COUNT_MAX),
    list[EntryId]: st.lists(st.from_regex(r"[0-9]{1,17}-[0-9]{1,17}", fullmatch=True), max_size=3),
    int: COUNTS,
    list[str]: st.lists(TEXTS, max_size=3),
    list[tuple[str, str]]: st.lists(st.tuples(TEXTS, TEXTS), max_size=3),
    list[str] | None: st.none() | st.lists(TEXTS, max_size=3),
    str: TEXTS,
    Happening: st.sampled_from(get_args(Happening)),
    StateOfModel: st.sampled_from(get_args(StateOfModel)),
}


def records(kind: type[Record]) -> st.SearchStrategy[Record]:
    """Return a strategy for any record of a kind."""
    if kind is TokenIds:
        return TOKEN_IDS
    # What the table says of a job's fields is no part of their types.
    hints = get_type_hints(kind, include_extras=kind is not JobSpec)
    fields = {name: VALUES[of] for name, of in hints.items() if of != ClassVar[int]}
    if kind is not JobSpec:
        return st.builds(kind, **fields)
    ways = ({name: st.just("")} for name in ("prompt", "prompt_name"))  # one or the other
    return st.one_of([st.builds(kind, **(fields | SPEC_VALUES | way)) for way in ways])


SPEC_VALUES: dict[str, st.SearchStrategy[Any]] = {
    **{n: st.sampled_from(field.choices) for n, field in JOB_FIELDS.items() if field.choices},
    **dict.fromkeys(("max_length", "dimensions", "long_overlap"), COUNTS),
    "lsh_bits": st.integers(8, 1024).map(lambda count: 8 * count),
}
TOKEN_IDS = st.builds(
    lambda tokenisation, lengths, width: TokenIds(
        tokenisation=tokenisation,
        ids=bytes(width * sum(lengths)),
        width=width,
        lengths=np.asarray(lengths, dtype="<u4").tobytes(),
        checksums=bytes(4 * len(lengths)),
    ),
    records(TokenisationSettings),
    st.lists(st.integers(0, 5), max_size=4),
    st.sampled_from([2, 4]),
)
VALUES[TokenIds | None] = st.none() | TOKEN_IDS
VALUES[Receipt | None] = st.none() | records(Receipt)
VALUES[SourceReference | None] = st.none() | records(SourceReference)
VALUES[list[ChunkError]] = st.lists(records(ChunkError), max_size=3)
VALUES[list[ModelState]] = st.lists(records(ModelState), max_size=3)
VALUES[JobSpec] = records(JobSpec)
VALUES[list[JobShare]] = st.lists(records(JobShare), max_size=3)


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=40)
@given(data=st.data())
def test_round_trip(kind: type[Record], data: st.DataObject) -> None:
    """Every record comes back from its bytes as it was, in any Unicode, NUL and emptiness."""
    record = data.draw(records(kind))
    assert decode(kind, encode(record)) == record


def test_all_kinds_are_tested() -> None:
    """Each kind of record is in these tests."""
    assert set(KINDS) == {
        kind
        for kind in Record.__subclasses__()
        if kind.__module__
        in {
            each.__module__
            for each in (
                Block,
                FarmEvent,
                JobSpec,
                LoadAttempts,
                ModelOrder,
                ModelState,
                SourceReference,
            )
        }
    }


def test_block_layout() -> None:
    """A block's bytes are as documented: a version byte, then a msgpack array of its fields."""
    block = Block(start=64, texts=["a", "é"], ids=["x", "y"], token_count=300)
    assert encode(block) == bytes.fromhex("01 97 40 92 a161 a2c3a9 92 a178 a179 cd012c c0 c400 c0")
    assert encode(Block(start=0, texts=[])) == bytes.fromhex("01 97 00 90 c0 00 c0 c400 c0")
    some = Block(start=1, texts=["b"], known=b"\1\0")
    assert encode(some) == bytes.fromhex("02 97 01 91 a162 c0 00 c0 c402 0100 c0")
    assert decode(Block, encode(some)) == some
    there = SourceReference(
        file="/c", format="jsonl", text_field="t", offset=5, length=9, rows=2, checksum=7
    )
    referring = Block(start=1, texts=[], reference=there)
    assert encode(referring) == bytes.fromhex(
        "03 97 01 90 c0 00 c0 c400 98 a22f63 a5 6a736f6e6c a174 a0 05 09 02 07"
    )
    assert decode(Block, encode(referring)) == referring


def test_result_layout() -> None:
    """A result's bytes are as documented, with vectors and checksums as little-endian binary."""
    result = Result(
        start=8,
        count=1,
        dimensions=2,
        dtype="<f4",
        vectors=np.array([1.0, -2.0], "<f4").tobytes(),
        checksums=text_checksums(["a"]),
        errors=[ChunkError(index=8, reason="bad")],
        token_count=3,
        worker="w",
        seconds=0.5,
        cost=0.25,
    )
    expected = (
        "01 9e 08 01 02 a33c6634 c408 0000803f 000000c0 c404 43beb7e8"
        "c0 91 93 08 a3626164 01 03 a177 cb3fe0000000000000 c400 cb3fd0000000000000"
    )
    assert encode(result) == bytes.fromhex(f"{expected} c0")
    receipt = Receipt(file="1.8-9.f", offset=8, bytes=4, checksum=1)
    stored = msgspec.structs.replace(result, receipt=receipt)
    assert encode(stored)[0] == 2
    assert encode(stored).endswith(bytes.fromhex("94 a7 312e382d392e66 08 04 01"))
    assert decode(Result, encode(stored)) == stored


def test_specs_of_before_a_field() -> None:
    """A spec that asks for nothing new is sent as before the last fields, and reads as it was."""
    names = list(JOB_FIELDS)
    for last, spec in {
        "lsh_bits": JobSpec(model="m", name="n"),  # the last of those that were there at first
        "task": JobSpec(model="m", task="query"),
        "stored": JobSpec(model="m", stored="/mnt"),
        "texts_from": JobSpec(model="m", texts_from="source"),
    }.items():
        values = list(msgspec.structs.astuple(spec))[: names.index(last) + 1]
        assert encode_spec(spec) == encode(spec)[:1] + msgspec.msgpack.encode(values)
        assert decode(JobSpec, encode_spec(spec)) == spec


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=40)
@given(data=st.binary(max_size=60))
def test_foreign_bytes_are_refused(kind: type[Record], data: bytes) -> None:
    """Any bytes are a record or give a `RecordError` that names the kind."""
    for candidate in (data, b"\x01" + data):
        try:
            assert isinstance(decode(kind, candidate), kind)
        except RecordError as error:
            assert kind.__name__ in str(error)  # noqa: PT017 -- most bytes raise, some may not


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=40)
@given(data=st.data())
def test_damage_is_refused(kind: type[Record], data: st.DataObject) -> None:
    """A record cut short or with bytes behind its end is refused by name."""
    whole = encode(data.draw(records(kind)))
    end = data.draw(st.integers(0, len(whole) - 1))
    for damaged in (whole[:end], whole + b"\x00"):
        with pytest.raises(RecordError, match=kind.__name__):
            decode(kind, damaged)


@pytest.mark.parametrize("kind", KINDS)
def test_another_version_is_refused(kind: type[Record]) -> None:
    """A record of another layout is refused: both versions are named, and what to update."""
    read = kind.versions
    for version, update in ((read + 1, "this program"), (VERSION - 1, "the program that wrote")):
        says = (
            f"{kind.__name__} record of version {version}, .*reads version {read}: update {update}"
        )
        with pytest.raises(ForeignVersion, match=says):
            decode(kind, bytes([version]) + b"\x90")


@pytest.mark.parametrize(("data", "begins"), [(b"", "is empty"), (b'{"a": 1}', "byte 7b")])
def test_what_is_no_record_at_all_has_no_version(data: bytes, begins: str) -> None:
    """Empty or other bytes are not taken for a record of a later version."""
    with pytest.raises(RecordError, match=f"not a Rate record: .*{begins}") as refused:
        decode(Rate, data)
    assert not isinstance(refused.value, ForeignVersion)


@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), -1.0, 1e16])
@pytest.mark.parametrize("field", ["seconds", "overhead_seconds"])
def test_what_cannot_be_reckoned_with_is_refused(field: str, wrong: float) -> None:
    """A negative, huge or infinite time, or NaN, is refused by the place of its field."""
    done = dict.fromkeys(Completion.__struct_fields__, 1) | {
        "worker": "w", "model": "m", "job": "j", field: wrong
    }  # fmt: skip
    place = Completion.__struct_fields__.index(field)
    with pytest.raises(RecordError, match=rf"at `\$\[{place}\]`"):
        decode(Completion, bytes([VERSION]) + msgspec.msgpack.encode(list(done.values())))


@pytest.mark.parametrize(
    "wrong",
    [
        {"dtype": "float"},
        {"vector_dtype": "float64"},
        {"engine": "no name of an engine"},
        {"long": ""},
        {"max_length": -1},
        {"dimensions": -8},
        {"long_overlap": -1},
        {"lsh_bits": 100},
        {"lsh_bits": 0},
        {"lsh_bits": 16384},
        {"task": "rerank"},
        {"prompt": "p: ", "prompt_name": "query"},
    ],
)
def test_a_spec_that_nobody_could_follow_is_refused(wrong: dict[str, Any]) -> None:
    """An impossible spec is refused by the name of the field, when it is made and when read."""
    name = next(iter(wrong))
    with pytest.raises(ValueError, match=name):
        JobSpec(model="m", **wrong)
    fields = msgspec.structs.asdict(JobSpec(model="m")) | wrong
    data = b"\x01" + msgspec.msgpack.encode(list(fields.values()))
    with pytest.raises(RecordError, match=name):
        decode(JobSpec, data)


def test_another_kind_is_refused() -> None:
    """A block where a result should be is an error that names the result."""
    with pytest.raises(RecordError, match="not a Result record"):
        decode(Result, encode(Block(start=0, texts=["a"])))


def test_invalid_unicode_is_refused() -> None:
    """A text that is not UTF-8 is refused."""
    with pytest.raises(RecordError, match="Block"):
        decode(Block, b"\x01\x92\x00\x91\xa1\xff")


def test_bottomless_nesting_is_refused() -> None:
    """A field nested a hundred thousand deep is a refused record, not an overflow."""
    with pytest.raises(RecordError, match="Block"):
        decode(Block, b"\x01\x95\x00\x90\xc0\x00" + b"\x91" * 100_000 + b"\x00")


class Grown(Block, kw_only=True, array_like=True):
    """A block with a further field, as a later program may write it."""

    language: str = "en"


def test_a_field_added_at_the_end_needs_no_new_version() -> None:
    """An old record reads with the new field's default, and an old reader skips the new field."""
    old, new = Block(start=1, texts=["a"]), Grown(start=1, texts=["a"], language="fr")
    assert decode(Grown, encode(old)) == Grown(start=1, texts=["a"])
    assert decode(Block, encode(new)) == old


@pytest.mark.parametrize("kind", [JobSpec, TokenisationSettings])
def test_a_demand_that_is_not_known_is_refused(kind: type[Record]) -> None:
    """An unknown field in a spec or in tokenisation settings is refused: it decides the vectors."""
    record = (
        JobSpec(model="m")
        if kind is JobSpec
        else TokenisationSettings(tokenizer="0", prompt="", tokens_max=1)
    )
    grown = [*msgspec.structs.astuple(record), "a field of a later program"]
    with pytest.raises(RecordError, match="at most length"):
        decode(kind, bytes([VERSION]) + msgspec.msgpack.encode(grown))


@pytest.mark.parametrize(
    "kind", [each for each in KINDS if each not in {JobSpec, TokenisationSettings}]
)
@settings(max_examples=10)
@given(data=st.data())
def test_a_later_program_s_further_field_is_skipped(
    kind: type[Record], data: st.DataObject
) -> None:
    """A further field at the end of any other record is skipped."""
    record = data.draw(records(kind))
    grown = [*msgspec.structs.astuple(record), {"more": [1, None]}]
    assert decode(kind, bytes([VERSION]) + msgspec.msgpack.encode(grown)) == record


@given(count=st.integers(1, 5), dimensions=st.integers(1, 4), data=st.data())
def test_rest_of_a_result(count: int, dimensions: int, data: st.DataObject) -> None:
    """The rest of a result has exactly the rows, checksums, ids and errors from there on."""
    start = data.draw(st.integers(100, 100 + count))
    known = bytes(data.draw(st.lists(st.booleans(), min_size=count, max_size=count)))
    new = [row for row in range(count) if not known[row]]
    matrix = np.arange(count * dimensions, dtype="<f2").reshape(count, dimensions)
    texts = [str(row) for row in range(count)]
    failed = data.draw(st.sets(st.sampled_from(new))) if new else set()
    result = Result(
        start=100,
        count=count,
        dimensions=dimensions,
        dtype="<f2",
        vectors=matrix[new].tobytes(),
        checksums=text_checksums([texts[row] for row in new]),
        ids=data.draw(st.sampled_from([None, texts])),
        errors=[ChunkError(index=100 + row, reason="bad") for row in sorted(failed)],
        known=known if any(known) else b"",
    )
    rest = result.rest(start)
    skip = start - 100
    left = [row for row in new if row >= skip]
    assert (rest.start, rest.count) == (start, count - skip)
    assert np.array_equal(rest.matrix(), matrix[left])
    assert rest.checksums == text_checksums([texts[row] for row in left])
    assert rest.ids == (None if result.ids is None else texts[skip:])
    assert [error.index - 100 for error in rest.errors] == sorted(r for r in failed if r >= skip)
    assert rest.known == (known[skip:] if any(known[skip:]) else b"")


def test_checksums() -> None:
    """A text's checksum is the CRC-32 of its UTF-8, little-endian."""
    assert text_checksums(["", "123456789"]) == bytes(4) + (0xCBF43926).to_bytes(4, "little")
