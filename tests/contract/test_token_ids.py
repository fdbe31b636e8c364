"""Tests of token ids in blocks: cutting loses nothing, and what does not fit is refused."""

from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from embedfarm.contract.encoding import RecordError, decode, encode
from embedfarm.contract.records import Block, TokenIds, TokenisationSettings, text_checksums
from embedfarm.contract.token_ids import (
    CHARACTERS_PER_TOKEN_MAX,
    FILE,
    TokenEncoder,
    TokenisationMismatch,
    decode_ids,
)
from tests.word_tokenizer import write_tokenizer

TOKENISATION = TokenisationSettings(tokenizer="0" * 64, prompt="query: ", tokens_max=9)


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """Write a model's directory with a tokenizer."""
    return write_tokenizer(tmp_path)


def block_of(rows: list[list[int]], width: int = 2) -> Block:
    """Return a block of chunks with these token ids."""
    tokens = TokenIds(
        tokenisation=TOKENISATION,
        ids=np.asarray([i for row in rows for i in row], dtype=f"<u{width}").tobytes(),
        width=width,
        lengths=np.asarray([len(row) for row in rows], dtype="<u4").tobytes(),
        checksums=text_checksums([str(row) for row in rows]),
    )
    return Block(start=7, texts=[], tokens=tokens, token_count=sum(map(len, rows)))


@given(st.lists(st.lists(st.integers(0, 65535), max_size=5), max_size=8), st.sampled_from([2, 4]))
def test_ids_come_back(rows: list[list[int]], width: int) -> None:
    """Each chunk has its ids and its checksum after encoding, decoding and cutting into pieces."""
    block = decode(Block, encode(block_of(rows, width)))
    assert [chunk.tolist() for chunk in map(np.asarray, block.chunks())][: len(rows)] == rows
    assert (block.count, block.end) == (len(rows), 7 + len(rows))
    packed = [np.asarray(row, dtype=f"<u{width}").tobytes() for row in rows]
    assert block.identities() == packed
    for first in range(len(rows)):
        piece = block.piece(first, first + 1)
        assert [np.asarray(chunk).tolist() for chunk in piece.chunks()] == [rows[first]]
        assert (piece.start, piece.count) == (7 + first, 1)
        assert piece.checksums() == text_checksums([str(rows[first])])


@pytest.mark.parametrize(
    ("field", "value", "says"),
    [
        ("width", 3, "2 or 4 bytes"),
        ("lengths", b"\1\0\0", "lengths of 4"),
        ("lengths", b"\1\0\0\0", "not those of the token ids"),
        ("ids", b"\1\0\2", "not those of the token ids"),
        ("checksums", b"", "a checksum for each"),
    ],
)
def test_damage_is_refused(field: str, value: object, says: str) -> None:
    """Token ids whose parts do not fit together are no record."""
    block = block_of([[1, 2], [3]])
    start, texts, ids, count, tokens, *_ = msgspec.structs.astuple(block)
    fields = {**msgspec.structs.asdict(tokens), field: value}
    damaged = [start, texts, ids, count, list(fields.values())]
    with pytest.raises(RecordError, match=says):
        decode(Block, encode(block)[:1] + msgspec.msgpack.encode(damaged))


def test_an_encoder_is_known_by_its_recipe(directory: Path) -> None:
    """An encoder made by settings makes their ids, and one with another tokenizer is refused."""
    one = TokenEncoder.describe(directory, "p ", 4)
    other = TokenEncoder.open(directory, one.tokenisation)
    ids, lengths = other.encode(["a b", "", "a b a b a b a"])
    assert lengths.tolist() == [3, 1, 4]
    assert ids.tolist() == [3, 1, 2, 3, 3, 1, 2, 1]
    with (directory / FILE).open("a", encoding="utf-8") as file:
        file.write("\n")
    with pytest.raises(TokenisationMismatch, match="another tokenizer"):
        TokenEncoder.open(directory, one.tokenisation)


def test_a_huge_text_is_cut_but_loses_no_token(directory: Path) -> None:
    """A huge text that is cut gives the same tokens up to the maximum, even among blanks."""
    encoder = TokenEncoder.describe(directory, "", 4)
    blanks = " " * CHARACTERS_PER_TOKEN_MAX * 8
    ids, lengths = encoder.encode(["a " * 10_000, f"a{blanks}b a"])
    assert lengths.tolist() == [4, 3]
    assert ids.tolist() == [1, 1, 1, 1, 1, 2, 1]


def test_what_is_no_tokenizer_is_said(tmp_path: Path) -> None:
    """The error about a file that is no tokenizer has the file's name."""
    (tmp_path / FILE).write_text("{}", encoding="utf-8")
    with pytest.raises(ValueError, match=r"tokenizer\.json: not a tokenizer"):
        TokenEncoder.describe(tmp_path, "", 4)


@pytest.mark.parametrize("row", [[], [-1, 1], [-(2**70)], [1, 2**32], [2**70]])
def test_ids_that_no_tokenizer_has(directory: Path, row: list[int]) -> None:
    """Token ids below zero, beyond the vocabulary, or none at all are refused in words."""
    tokenizer = TokenEncoder.describe(directory, "", 9).tokenizer
    (text,) = decode_ids(tokenizer, [tokenizer.encode("a").ids])
    assert text == "a"
    with pytest.raises(ValueError, match="input 1: token ids are 0 to"):
        decode_ids(tokenizer, [tokenizer.encode("a").ids, row])
