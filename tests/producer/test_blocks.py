"""Tests of how rows become blocks."""

from collections.abc import Iterator, Sequence
from itertools import chain, pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from embedfarm.contract.records import Block, Rows, text_checksums
from embedfarm.contract.settings import Settings
from embedfarm.contract.source_places import Places, RowRun, SourceReference
from embedfarm.contract.token_counter import TokenCounter
from embedfarm.contract.token_ids import TokenEncoder
from embedfarm.producer.blocks import Blocker
from tests.word_tokenizer import write_tokenizer

BATCHES = st.lists(st.lists(st.text(max_size=40), max_size=12), max_size=12)
LIMITS = st.builds(
    lambda least, more, size: Settings(
        block_chunks_min=least, block_chunks_max=least + more, block_bytes_max=size
    ),
    st.integers(1, 6),
    st.integers(0, 6),
    st.integers(1, 200),
)


def cut(blocker: Blocker, batches: Sequence[Rows]) -> Iterator[Block]:
    """Yield all blocks of some rows."""
    for rows in batches:
        yield from blocker.add(rows)
    yield from blocker.flush()


def bytes_of(texts: Sequence[str]) -> int:
    """Size of texts in UTF-8."""
    return sum(len(text.encode()) for text in texts)


@given(BATCHES, LIMITS, st.integers(0, 10**12), st.floats(0, 100), st.sampled_from(["ids", ""]))
def test_blocks_tile(
    batches: list[list[str]], settings: Settings, start: int, target: float, with_ids: str
) -> None:
    """The blocks are the rows, each once and in order, with their ids, from `start` on."""
    texts = [text for batch in batches for text in batch]
    ids = [str(index) for index in range(len(texts))]
    left = iter(ids)
    rows = [Rows(b, [next(left) for _ in b] if with_ids else None) for b in batches]
    blocker = Blocker(start, settings, tokens_target=target)
    blocks = list(cut(blocker, rows))
    assert [text for block in blocks for text in block.texts] == texts
    if with_ids:
        assert [each for block in blocks for each in block.ids or ()] == ids
    else:
        assert all(block.ids is None for block in blocks)
    ends = [start, *(block.start + len(block.texts) for block in blocks)]
    assert [*(block.start for block in blocks), blocker.start] == ends


@given(BATCHES, LIMITS, st.floats(0, 100), st.integers(0, 50), st.sets(st.integers(0, 150)))
def test_blocks_end_at_cuts(
    batches: list[list[str]], settings: Settings, target: float, start: int, cuts: set[int]
) -> None:
    """Each cut among the rows is the end of a block, and the blocks tile all the same."""
    blocker = Blocker(start, settings, tokens_target=target, cuts=sorted(cuts))
    blocks = list(cut(blocker, [Rows(batch, None) for batch in batches]))
    assert [text for block in blocks for text in block.texts] == [*chain(*batches)]
    starts = [*(block.start for block in blocks), blocker.start]
    assert all(block.count for block in blocks)
    assert {row for row in cuts if start < row < blocker.start} <= set(starts)


@given(BATCHES, LIMITS, st.floats(0, 100), st.data())
def test_known_chunks_have_no_text(
    batches: list[list[str]], settings: Settings, target: float, data: st.DataObject
) -> None:
    """A chunk whose vector is known has a place and an id in its block, and costs nothing else."""
    texts = [text for batch in batches for text in batch]
    known = bytes(data.draw(st.lists(st.booleans(), min_size=len(texts), max_size=len(texts))))
    ends = np.cumsum([0, *map(len, batches)]).tolist()
    rows = [
        Rows(batch, [str(n) for n in range(first, first + len(batch))], known[first:][: len(batch)])
        for first, batch in zip(ends, batches, strict=False)
    ]
    blocks = list(cut(Blocker(0, settings, tokens_target=target), rows))
    masks = b"".join(block.known or bytes(block.count) for block in blocks)
    new = [place for place, each in enumerate(known) if not each]
    assert masks == known
    assert [index for block in blocks for index in block.indices()] == new
    assert [text for block in blocks for text in block.texts] == [texts[place] for place in new]
    assert [each for block in blocks for each in block.ids or ()] == list(
        map(str, range(len(texts)))
    )
    assert all(block.version == 1 + any(block.known) for block in blocks)
    for block in blocks:
        assert 1 <= block.count <= settings.block_chunks_max
        assert block.to_embed <= 1 or bytes_of(block.texts) <= settings.block_bytes_max
        pieces = [block.piece(at, at + 1) for at in range(block.count)]
        masks = b"".join(piece.known or bytes(piece.count) for piece in pieces)
        assert masks == (block.known or bytes(block.count))
        assert all(piece.known in {b"", b"\1"} for piece in pieces), "empty where none is known"
        assert [text for piece in pieces for text in piece.texts] == block.texts


@given(BATCHES, LIMITS, st.floats(0, 100), st.data())
def test_references_cover_just_their_rows(
    batches: list[list[str]], settings: Settings, target: float, data: st.DataObject
) -> None:
    """A block refers to the places of its own rows in one file, from the first to the last."""
    offset, run, rows, offsets = 0, RowRun(0, 0), list[Rows](), [list[int](), list[int]()]
    for texts in batches:
        runs, begins, ends = list[RowRun](), list[int](), list[int]()
        for text in texts:
            if data.draw(st.integers(0, 9)) == 0:  # a bad row lies between
                offset += 7
                run = RowRun(0, offset)
            runs.append(run)
            begins.append(offset)
            offset += 1 + bytes_of([text])
            ends.append(offset)
        rows.append(Rows(texts, None, places=Places(runs, begins, ends)))
        offsets[0] += begins
        offsets[1] += ends
    files = [SourceReference(file="corpus.jsonl", format="jsonl", text_field="text")]
    blocks = list(cut(Blocker(0, settings, tokens_target=target, files=files), rows))
    for block in blocks:
        refers = block.reference
        assert refers is not None
        assert refers.rows == block.count
        assert refers.offset == offsets[0][block.start]
        assert refers.offset + refers.length == offsets[1][block.start + block.count - 1]
    assert sum(block.count for block in blocks) == len(offsets[0])


@given(BATCHES, LIMITS, st.floats(0, 100))
def test_blocks_keep_limits(batches: list[list[str]], settings: Settings, target: float) -> None:
    """A block is never empty, and has no more chunks or text than the limits, or is one chunk."""
    blocker = Blocker(0, settings, tokens_target=target)
    for block in cut(blocker, [Rows(batch, None) for batch in batches]):
        assert 1 <= len(block.texts) <= settings.block_chunks_max
        assert len(block.texts) == 1 or bytes_of(block.texts) <= settings.block_bytes_max


@given(BATCHES, LIMITS, st.floats(0, 100))
def test_blocks_are_no_smaller_than_need_be(
    batches: list[list[str]], settings: Settings, target: float
) -> None:
    """A block ends only at its target, at a limit, or with the rows."""
    blocker = Blocker(0, settings, tokens_target=target)
    blocks = list(cut(blocker, [Rows(batch, None) for batch in batches]))
    for block, following in pairwise(blocks):
        chunks = len(block.texts)
        reached = block.token_count >= target and chunks >= settings.block_chunks_min
        overfull = bytes_of(block.texts + following.texts[:1]) > settings.block_bytes_max
        assert reached or overfull or chunks == settings.block_chunks_max


@pytest.mark.parametrize(
    ("text", "tokens"), [("", 2), ("x" * 40, 12), ("ä" * 20, 12), ("x" * 4000, 30)]
)
def test_tokens(text: str, tokens: int) -> None:
    """A chunk counts a token for 4 bytes of UTF-8 and two for its frame, up to the maximum."""
    blocker = Blocker(0, Settings(), TokenCounter(30))
    blocks = list(cut(blocker, [Rows([text, text], None)]))
    assert sum(block.token_count for block in blocks) == 2 * tokens


def test_limits_change() -> None:
    """A new target or limit is followed from the next block on."""
    blocker = Blocker(0, Settings(block_chunks_min=1), tokens_target=4)
    texts = ["x" * 8] * 24
    assert [len(block.texts) for block in blocker.add(Rows(texts, None))] == [1] * 24
    blocker.tokens_target = 16
    assert [len(block.texts) for block in blocker.add(Rows(texts, None))] == [4] * 6
    blocker.chunks_max = 3
    assert [len(block.texts) for block in blocker.add(Rows(texts, None))] == [3] * 8


def test_token_ids_in_place_of_texts(tmp_path: Path) -> None:
    """Blocks have token ids from the rows that come with an encoder on; earlier rows go as text."""
    encoder = TokenEncoder.describe(write_tokenizer(tmp_path), "p ", 4)
    blocker = Blocker(0, Settings(block_chunks_min=1), tokens_target=1000)
    texts = ["a b", "", "a b a b a b"]
    ids = [["x"], ["y", "z"], ["u"]]
    blocks = [
        *blocker.add(Rows(texts[:1], ids[0])),
        *blocker.add(Rows(texts[1:], ids[1]), encoder),
        *blocker.add(Rows(texts[:1], ids[2]), encoder),
        *blocker.flush(),
    ]
    text, encoded = blocks
    assert (text.start, text.texts, text.tokens, text.ids) == (0, ["a b"], None, ["x"])
    assert (encoded.start, encoded.texts, encoded.ids) == (1, [], ["y", "z", "u"])
    chunks = [np.asarray(chunk).tolist() for chunk in encoded.chunks()]
    assert chunks == [[3], [3, 1, 2, 1], [3, 1, 2]]
    assert encoded.token_count == 8
    assert encoded.checksums() == text_checksums([*texts[1:], texts[0]])
    assert encoded.tokens is not None
    assert (encoded.tokens.width, encoded.tokens.tokenisation) == (2, encoder.tokenisation)


def test_blocks_of_token_ids_keep_limits(tmp_path: Path) -> None:
    """Token ids count four bytes each against the limit until they are packed."""
    encoder = TokenEncoder.describe(write_tokenizer(tmp_path), "", 9)
    settings = Settings(block_chunks_min=1, block_bytes_max=24)
    blocker = Blocker(0, settings, tokens_target=1000)
    blocks = [*blocker.add(Rows(["a b"] * 7, None), encoder), *blocker.flush()]
    assert [block.count for block in blocks] == [3, 3, 1]
