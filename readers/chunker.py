"""Long texts cut into chunks that each fit a number of tokens."""

import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Final, TypeAlias

from tokenizers import Tokenizer

Span: TypeAlias = tuple[int, int]
"""Where a token begins and ends, in characters of the text it comes from."""

FindSpans: TypeAlias = Callable[[str], Sequence[Span]]
"""The spans of a text's tokens, in order."""

CHARACTERS_PER_TOKEN_MAX: Final = 64
"""A chunk is at most this many characters for each token it may hold, so that control characters
and unknown words, which cost no token or one however long they are, do not make endless chunks."""

_CHARACTERS_PER_TOKEN: Final = 6  # More than prose has: the first window is a little too wide

_NOT_SPACE: Final = re.compile(r"\S")
_WORD_START: Final = re.compile(r"(?<!\S)\S")
_BREAKS: Final = (
    re.compile(r"\n\s*\n"),  # paragraph
    re.compile(r"[.!?…][\"'”’)\]]*\s+|[。！？][”’」』）]*"),  # noqa: RUF001 - full-width is meant
    re.compile(r"\s+"),
)


def load_tokenizer(path: str | Path) -> Tokenizer:
    """Load the tokenizer in a tokenizer.json, with neither truncation nor padding.

    Raises:
        ValueError: The file is missing or holds no tokenizer.
    """
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # The library raises nothing more specific
        raise ValueError(f"{path}: not a tokenizer: {error}") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def token_spans(tokenizer: Tokenizer, text: str) -> list[Span]:
    """Return the spans of a text's tokens, without what a model puts around every text."""
    spans: list[Span] = tokenizer.encode(text, add_special_tokens=False).offsets
    return spans


def cut(text: str, find_spans: FindSpans, chunk_tokens: int, chunk_overlap: int) -> Iterator[str]:
    """Yield chunks of at most `chunk_tokens` tokens, as `find_spans` counts each on its own.

    Together they hold every character of the text, in order, apart from white space around them. A
    chunk ends at the last paragraph end in its last third, else at a sentence end, else at white
    space, else between two tokens. It repeats the end of the one before, from the start of a word
    where there is one: at most its last `chunk_overlap` tokens, at most half of them, and nothing
    where that would leave no room for anything new.

    Takes time in proportion to the text: only a window of about the size of a chunk is tokenised at
    a time. The one exception to the limit is a single character of more tokens than that.
    """
    width, width_max = chunk_tokens * _CHARACTERS_PER_TOKEN, chunk_tokens * CHARACTERS_PER_TOKEN_MAX
    start = end = _skip_spaces(text, 0)
    while end < len(text):
        window = text[start : start + width].rstrip()
        spans = find_spans(window)
        if len(spans) <= chunk_tokens and width < min(width_max, len(text) - start):
            width = min(2 * width, width_max)
            continue
        chunk, spans = _shrink(window, spans, find_spans, chunk_tokens)
        if start + len(chunk) <= end:  # The repeated part left no room for anything new
            start = end
            continue
        yield chunk
        end = _skip_spaces(text, start + len(chunk))
        start = _skip_spaces(text, start + _repeat_from(chunk, spans, chunk_overlap))
        width = min(max(len(chunk) * 3 // 2, chunk_tokens), width_max)


def _skip_spaces(text: str, start: int) -> int:
    """Return the index of the next character that is not white space."""
    found = _NOT_SPACE.search(text, start)
    return found.start() if found else len(text)


def _shrink(
    chunk: str, spans: Sequence[Span], find_spans: FindSpans, chunk_tokens: int
) -> tuple[str, Sequence[Span]]:
    """Return the beginning of `chunk` that fits, and its spans, which a cut may change."""
    while len(spans) > chunk_tokens and len(chunk) > 1:
        chunk = chunk[: _break_before(chunk, spans[chunk_tokens][0])].rstrip()
        spans = find_spans(chunk)
    return chunk, spans


def _break_before(chunk: str, position: int) -> int:
    """Return the best place to cut a chunk: `position`, or up to a third before it.

    The chunk must not end in white space. The place is at least 1, so that a character is left, and
    less than the length, so that the chunk shrinks.
    """
    position = _skip_spaces(chunk, min(max(position, 1), len(chunk) - 1))
    for pattern in _BREAKS:
        if breaks := list(pattern.finditer(chunk, position * 2 // 3, position)):
            return breaks[-1].end()
    return position


def _repeat_from(chunk: str, spans: Sequence[Span], chunk_overlap: int) -> int:
    """Return where the part of `chunk` begins that the next one repeats; its end for none."""
    repeated = min(chunk_overlap, len(spans) // 2)
    position = spans[-repeated][0] if repeated else 0
    if not position:
        return len(chunk)
    word = _WORD_START.search(chunk, position)
    return word.start() if word else position
