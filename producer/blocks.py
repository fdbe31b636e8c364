"""Rows cut into blocks: consecutive chunks, sized to the farm."""

import sys
import zlib
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence, Sized
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from embedfarm.contract.records import Block, Rows, TokenIds, text_checksums
from embedfarm.contract.settings import Settings
from embedfarm.contract.source_places import RowRun, SourceReference
from embedfarm.contract.token_counter import TokenCounter
from embedfarm.contract.token_ids import TokenEncoder


@dataclass
class Blocker:
    """Cuts rows into blocks of about `tokens_target` estimated tokens.

    A block has at most `chunks_max` chunks to embed, `block_chunks_max` with those whose vectors
    are known, and at most `block_bytes_max` of texts or token ids, unless a single chunk is larger.
    It has at least `block_chunks_min` chunks, unless one of these limits or the end of the source
    comes first.

    Attributes:
        start: Index of the next chunk that no block has yet.
        counter: Estimates the tokens of texts.
        tokens_target: Estimated tokens of a block; may change at any time, for the next full block.
        chunks_max: Most chunks to embed of a block; may change at any time, for the next full
            block.
        cuts: Rows before which a block ends, in order.
        files: Beginnings of the files of the corpus; blocks refer to places in them, instead of
            having texts. Such a block has rows of one file that follow one another.
    """

    start: int
    settings: Settings
    counter: TokenCounter = field(default_factory=TokenCounter)
    tokens_target: float = 1.0
    cuts: Sequence[int] = ()
    files: Sequence[SourceReference] = ()
    chunks_max: int = field(init=False)
    _texts: list[str] = field(default_factory=list)
    _ids: list[str] = field(default_factory=list)
    _token_ids: list[NDArray[np.uint32]] = field(default_factory=list)
    _known: bytearray = field(default_factory=bytearray)
    _run: RowRun | None = None  # that the rows of the block are in
    _span: tuple[int, int] = (0, 0)  # offsets before and behind them
    _encoder: TokenEncoder | None = None
    _bytes: int = 0
    _tokens: int = 0

    def __post_init__(self) -> None:
        self.chunks_max = self.settings.block_chunks_max

    def add(self, rows: Rows, encoder: TokenEncoder | None = None) -> Iterator[Block]:
        """Take rows in, and yield the blocks that are full. All rows of a job have ids, or none.

        Args:
            rows: The next chunks.
            encoder: Makes token ids, which then go in place of texts; their counts are exact.
        """
        if encoder is not self._encoder:
            yield from self.flush()
        self._encoder = encoder
        known = np.frombuffer(rows.known or bytes(len(rows.texts)), np.uint8)
        new = np.flatnonzero(known == 0)
        texts = [rows.texts[row] for row in new.tolist()] if rows.known else rows.texts
        token_ids = _encode(encoder, texts) if encoder and texts else []
        counts = _ends(1 - known.astype(np.int64))
        size_ends, token_ends = (ends[counts] for ends in self._measure(texts, token_ids))
        begin, first = 0, self.start + len(self._known)
        runs, begins, ends = rows.places
        breaks = _breaks(runs)
        if self._run is not None and runs and runs[0] is not self._run:
            yield self._cut()
        while begin < len(known):
            cut = min(self._next_cut(first + begin) - first, _next(breaks, begin))
            full = self._full(token_ends, counts, begin)
            fitting = self._fitting(size_ends, begin)
            end = min(full, fitting, cut, len(known))
            own = slice(*counts[[begin, end]].tolist())
            self._texts += texts[own]
            self._token_ids += token_ids[own]
            self._ids += rows.ids[begin:end] if rows.ids is not None else []
            self._known += known[begin:end].tobytes()
            if runs and end > begin:  # a block without room takes none of the rows
                self._span = (begins[begin] if self._run is None else self._span[0], ends[end - 1])
                self._run = runs[begin]
            self._bytes += int(size_ends[end] - size_ends[begin])
            self._tokens += int(token_ends[end] - token_ends[begin])
            begin = end
            if end in {full, cut} or end < len(known):
                yield self._cut()

    def flush(self) -> Iterator[Block]:
        """Yield the last block, if anything is left."""
        if self._known:
            yield self._cut()

    def _measure(
        self, texts: Sequence[str], token_ids: Sequence[NDArray[np.uint32]]
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the bytes and the tokens before each text, and after the last one."""
        if self._encoder:
            tokens = _lengths(token_ids)
            sizes = tokens * np.dtype(np.uint32).itemsize
        else:
            sizes = _lengths(texts if all(map(str.isascii, texts)) else map(str.encode, texts))
            tokens = self.counter.estimate(sizes)
        return _ends(sizes), _ends(tokens)

    def _full(self, token_ends: NDArray[np.int64], counts: NDArray[np.int64], begin: int) -> int:
        """Return the end of the chunks that make the block full, when it goes on with `begin`.

        Args:
            token_ends: Tokens before each chunk, and after the last one.
            counts: Chunks to embed before each chunk, and after the last one.
            begin: The chunk that the block goes on with.
        """
        wanted = token_ends[begin] + self.tokens_target - self._tokens
        enough = int(np.searchsorted(token_ends, wanted))
        first = begin - len(self._known)
        enough = max(enough, first + self.settings.block_chunks_min)
        most = counts[begin] + self.chunks_max - len(self._texts)
        enough = min(enough, int(np.searchsorted(counts, most)))
        return max(begin + 1, min(enough, first + self.settings.block_chunks_max))

    def _next_cut(self, row: int) -> int:
        """Return the first row behind `row` before which a block has to end."""
        return _next(self.cuts, row)

    def _fitting(self, size_ends: NDArray[np.int64], begin: int) -> int:
        """Return the first chunk from `begin` on without room; an empty block has room for one."""
        room = size_ends[begin] + self.settings.block_bytes_max - self._bytes
        fitting = int(np.searchsorted(size_ends, room, side="right")) - 1
        return max(begin if self._known else begin + 1, fitting)

    def _cut(self) -> Block:
        """Make a block of all that came since the last one."""
        refers = self._run is not None
        block = Block(
            start=self.start,
            texts=[] if self._encoder or refers else self._texts,
            ids=None if refers else self._ids or None,
            token_count=self._tokens,
            tokens=self._pack(self._encoder) if self._encoder and self._texts else None,
            known=bytes(self._known) if any(self._known) else b"",
            reference=self._refer(self._run, *self._span) if self._run is not None else None,
        )
        self.start += len(self._known)
        self._texts, self._ids, self._token_ids, self._run = [], [], [], None
        self._known.clear()
        self._bytes, self._tokens = 0, 0
        return block

    def _refer(self, run: RowRun, begin: int, end: int) -> SourceReference:
        """Return where in a file the texts are, between two offsets."""
        return replace(
            self.files[run.file],
            offset=begin,
            length=end - begin,
            rows=len(self._known),
            checksum=zlib.crc32(text_checksums(self._texts)),
        )

    def _pack(self, encoder: TokenEncoder) -> TokenIds:
        """Pack the token ids into as few bytes as they need."""
        ids = np.concatenate(self._token_ids)
        width = 2 if ids.max(initial=0) <= np.iinfo(np.uint16).max else 4
        lengths = _lengths(self._token_ids).astype("<u4")
        return TokenIds(
            tokenisation=encoder.tokenisation,
            ids=ids.astype(f"<u{width}").tobytes(),
            width=width,
            lengths=lengths.tobytes(),
            checksums=text_checksums(self._texts),
        )


def _breaks(runs: Sequence[RowRun]) -> list[int]:
    """Return the rows, counted from 0, that begin another run than that of the row before."""
    if not runs or runs[0] is runs[-1]:
        return []
    pairs = enumerate(pairwise(runs), 1)
    return [row for row, (one, other) in pairs if one is not other]


def _next(cuts: Sequence[int], row: int) -> int:
    """Return the first of the cuts, which are in order, behind a row."""
    place = bisect_right(cuts, row)
    return cuts[place] if place < len(cuts) else sys.maxsize


def _encode(encoder: TokenEncoder, texts: Sequence[str]) -> list[NDArray[np.uint32]]:
    """Return the token ids of each text."""
    ids, lengths = encoder.encode(texts)
    return np.split(ids, np.cumsum(lengths)[:-1])


def _lengths(items: Iterable[Sized]) -> NDArray[np.int64]:
    """Return the length of each item."""
    return np.fromiter(map(len, items), dtype=np.int64)


def _ends(sizes: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return where each part ends, after a zero for where the first one begins."""
    return np.concatenate([[0], np.cumsum(sizes)])
