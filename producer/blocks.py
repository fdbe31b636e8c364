"""Rows into blocks: consecutive chunks, sized to the farm."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final

from embedfarm.records import Block, Rows
from embedfarm.settings import Settings

BYTES_PER_TOKEN: Final = 4  # of English in the tokenizers in use; only the unit of plans
TOKENS_MAX: Final = 512  # what a chunk counts at most when its job names no maximum length


@dataclass
class Blocker:
    """Cuts rows into blocks of about `tokens_target` estimated tokens.

    A block has at most `chunks_max` chunks and at most `block_bytes_max` of text, unless a single
    chunk is larger. It has at least `block_chunks_min` chunks, unless one of these limits or the
    end of the source comes first.

    Attributes:
        start: Index of the next chunk that no block has yet.
        tokens_max: What a chunk counts at most.
        tokens_target: May change at any time; the next block to be full follows it.
        chunks_max: The same.
    """

    start: int
    settings: Settings
    tokens_max: int = TOKENS_MAX
    tokens_target: float = 1.0
    chunks_max: int = field(init=False)
    _texts: list[str] = field(default_factory=list)
    _ids: list[str] = field(default_factory=list)
    _bytes: int = 0
    _tokens: int = 0

    def __post_init__(self) -> None:
        self.chunks_max = self.settings.block_chunks_max

    def add(self, rows: Rows) -> Iterator[Block]:
        """Take rows in; yields the blocks that are full. All rows of a job have ids, or none."""
        for row, text in enumerate(rows.texts):
            size = len(text) if text.isascii() else len(text.encode())
            if self._texts and self._bytes + size > self.settings.block_bytes_max:
                yield self._cut()
            self._texts.append(text)
            if rows.ids is not None:
                self._ids.append(rows.ids[row])
            self._bytes += size
            # With the two that frame a text.
            self._tokens += min(size // BYTES_PER_TOKEN + 2, self.tokens_max)
            if self._is_full(len(self._texts)):
                yield self._cut()

    def flush(self) -> Iterator[Block]:
        """The last block, if anything is left."""
        if self._texts:
            yield self._cut()

    def _is_full(self, chunks: int) -> bool:
        enough = self._tokens >= self.tokens_target and chunks >= self.settings.block_chunks_min
        return enough or chunks >= self.chunks_max

    def _cut(self) -> Block:
        """The block of all that came since the last one."""
        block = Block(
            start=self.start,
            texts=self._texts,
            ids=self._ids or None,
            token_count=self._tokens,
        )
        self.start += len(self._texts)
        self._texts, self._ids, self._bytes, self._tokens = [], [], 0, 0
        return block
