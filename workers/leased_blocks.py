"""Blocks as they come out of leased entries."""

from embedfarm.contract import wire
from embedfarm.contract.encoding import RecordError, decode
from embedfarm.contract.entries import Entry
from embedfarm.contract.records import Block


def pieces(block: Block, count: int) -> list[Block]:
    """Cut `block` into at most `count` blocks of consecutive chunks."""
    size = -(-block.count // count)
    firsts = range(0, block.count, size)
    return [block.piece(first, min(first + size, block.count)) for first in firsts]


def read_block(job: str, entry: Entry) -> Block:
    """Decode the block of an entry.

    Raises:
        RecordError: The entry has no good block, or not the one that its ID names.
    """
    block = decode(Block, entry.data)
    place = place_of(job, entry)
    if block.count < 1:
        raise RecordError("a block of no chunks")
    if place is not None and place != range(block.start, block.end):
        named = wire.entry_id(block.start, block.count)
        raise RecordError(f"entry {entry.id} holds the block of {named}")
    if block.known and block.to_embed != block.known.count(0):
        raise RecordError(f"{block.to_embed} texts for {block.known.count(0)} chunks to embed")
    if block.ids is not None and len(block.ids) != block.count:
        raise RecordError(f"{len(block.ids)} ids for {block.count} chunks")
    return block


def place_of(job: str, entry: Entry) -> range | None:
    """Return the chunks of an entry, by what is beside its block; None where nothing says."""
    if entry.stream == wire.JobKeys(job).blocks:
        after, count = map(int, entry.id.split("-"))
        return range(after - 1, after - 1 + count)
    return None if entry.start < 0 else range(entry.start, entry.start + entry.chunks)
