"""Rows into blocks: consecutive chunks, sized to the farm."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Final

from embedfarm.records import Block, Rows
from embedfarm.settings import Settings

BYTES_PER_TOKEN: Final = 4  # of English in the tokenizers in use; only the unit of plans
TOKENS_MAX: Final = 512  # what a chunk counts at most when its job names no maximum length


@dataclass
class Blocker:
    """Cuts rows into blocks of about `tokens_target` estimated tokens.

    A block has `block_chunks_min` to `block_chunks_max` chunks (the last one may have fewer) and at
    most `block_bytes_max` of text, unless a single chunk is larger.

    Attributes:
        start: Index of the next chunk.
        tokens_target: May change at any time; the next block follows it.
    """

    start: int
    settings: Settings
    tokens_max: int = TOKENS_MAX
    tokens_target: float = 1.0
    _texts: list[str] = field(default_factory=list)
    _ids: list[str] | None = None
    _sizes: list[int] = field(default_factory=list)

    def add(self, rows: Rows) -> Iterator[Block]:
        """Take rows in; yields the blocks that are full."""
        self._texts += rows.texts
        self._sizes += [len(t) if t.isascii() else len(t.encode()) for t in rows.texts]
        if rows.ids is not None:
            self._ids = (self._ids or []) + rows.ids
        first = 0
        while (count := self._full(first)) > 0:
            yield self._cut(first, first + count)
            first += count
        self._forget(first)

    def flush(self) -> Iterator[Block]:
        """The last block, if anything is left."""
        if self._texts:
            yield self._cut(0, len(self._texts))
            self._forget(len(self._texts))

    def _full(self, first: int) -> int:
        """Chunks of the block that begins at `first`; 0 when it may still grow."""
        sizes = self._sizes[first : first + self.settings.block_chunks_max]
        for count, (size, tokens) in enumerate(
            zip(accumulate(sizes), accumulate(map(self._tokens, sizes)), strict=True), start=1
        ):
            if size > self.settings.block_bytes_max:
                return max(1, count - 1)
            if tokens >= self.tokens_target and count >= self.settings.block_chunks_min:
                return count
        return len(sizes) if len(sizes) == self.settings.block_chunks_max else 0

    def _tokens(self, size: int) -> int:
        """Estimated tokens of a text of `size` bytes, with the two that frame it."""
        return min(size // BYTES_PER_TOKEN + 2, self.tokens_max)

    def _cut(self, first: int, end: int) -> Block:
        texts = self._texts[first:end]
        block = Block(
            start=self.start,
            texts=texts,
            ids=None if self._ids is None else self._ids[first:end],
            token_count=sum(map(self._tokens, self._sizes[first:end])),
        )
        self.start += len(texts)
        return block

    def _forget(self, count: int) -> None:
        del self._texts[:count]
        del self._sizes[:count]
        if self._ids is not None:
            del self._ids[:count]
