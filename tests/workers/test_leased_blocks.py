"""Tests of blocks that no producer of ours wrote."""

from typing import Any

import msgspec
import pytest

from embedfarm.contract import wire
from embedfarm.contract.encoding import RecordError, encode
from embedfarm.contract.entries import Entry
from embedfarm.contract.records import Block
from embedfarm.workers.leased_blocks import read_block

RIGHT = Block(start=4, texts=["one", "two"], token_count=2)
KEYS = wire.JobKeys("j")


def entry_of(block: Block) -> Entry:
    """An entry with a block, and with the ID of the right one."""
    place = wire.entry_id(RIGHT.start, RIGHT.count)
    return Entry(KEYS.blocks, place, encode(block), RIGHT.count, RIGHT.token_count)


def test_a_right_block() -> None:
    """A block comes out of its entry as it went in."""
    assert read_block("j", entry_of(RIGHT)) == RIGHT


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        ({"texts": []}, "no chunks"),
        ({"start": 5}, "holds the block of"),
        ({"known": b"\0\1"}, "2 texts for 1 chunks to embed"),
        ({"ids": ["a"]}, "1 ids for 2 chunks"),
    ],
)
def test_blocks_that_are_refused(wrong: dict[str, Any], reason: str) -> None:
    """A block that contradicts itself, or its entry, is refused with the reason."""
    with pytest.raises(RecordError, match=reason):
        read_block("j", entry_of(msgspec.structs.replace(RIGHT, **wrong)))
