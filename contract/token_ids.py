"""Texts as a model's token ids, made by its tokenizer.json alone: the same anywhere, without torch.

Workers find out whether that gives what the model's own preprocessing gives, and say by
`TokenisationSettings` how; from then on a producer with the same tokenizer.json may send ids.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from embedfarm.contract.model_files import sha256
from embedfarm.contract.records import TokenisationSettings

FILE: Final = "tokenizer.json"
IDS_AT_A_TIME: Final = 1 << 13  # each takes some 400 bytes while it is compared
CHARACTERS_PER_TOKEN_MAX: Final = 32  # of texts that are cut before they are tokenised


TOKENS_REFUSED: Final = (
    "token ids are not taken here: most clients send those of OpenAI's tokenizer, which are other "
    "texts to this model. Send texts (LangChain: check_embedding_ctx_length=False), or, for ids of "
    "the model's own tokenizer, set EMBEDFARM_ACCEPT_TOKEN_IDS=true where this is served"
)


class TokenisationMismatch(ValueError):
    """Raised when the tokenizer at hand is not the one that tokenisation settings are about."""


@dataclass(frozen=True)
class TokenEncoder:
    """Encoder that makes token ids by tokenisation settings; several threads may use it."""

    tokenisation: TokenisationSettings
    tokenizer: Tokenizer

    @classmethod
    def describe(cls, directory: Path, prompt: str, tokens_max: int) -> "TokenEncoder":
        """Make an encoder for the model in a directory, and with it the tokenisation settings.

        Args:
            directory: Directory with tokenizer.json.
            prompt: Prompt put before every text.
            tokens_max: Tokens kept of a text, special tokens included.

        Raises:
            OSError: There is no tokenizer.json.
            ValueError: The file is no tokenizer.
        """
        file = directory / FILE
        tokenisation = TokenisationSettings(
            tokenizer=sha256(file), prompt=prompt, tokens_max=tokens_max
        )
        try:
            tokenizer = Tokenizer.from_file(str(file))
        except Exception as error:  # the library raises nothing more specific
            raise ValueError(f"{file}: not a tokenizer: {error}") from error
        tokenizer.no_padding()
        tokenizer.enable_truncation(tokens_max)
        return cls(tokenisation, tokenizer)

    @classmethod
    def open(cls, directory: Path, tokenisation: TokenisationSettings) -> "TokenEncoder":
        """Make an encoder by tokenisation settings that somebody else made.

        Raises:
            TokenisationMismatch: The directory's tokenizer is another one.
            OSError: There is no tokenizer.json.
            ValueError: The file is no tokenizer.
        """
        encoder = cls.describe(directory, tokenisation.prompt, tokenisation.tokens_max)
        if encoder.tokenisation != tokenisation:
            raise TokenisationMismatch(f"{directory / FILE} is another tokenizer than the workers'")
        return encoder

    @cached_property
    def vocabulary(self) -> int:
        """Number that all token ids are below."""
        return 1 + max(self.tokenizer.get_vocab().values(), default=-1)

    def encode(self, texts: Sequence[str]) -> tuple[NDArray[np.uint32], NDArray[np.int64]]:
        """Return the ids of all texts end to end, and how many each text has, shape (texts,).

        All cores are used unless TOKENIZERS_PARALLELISM says otherwise.
        """
        limit = self.tokenisation.tokens_max
        cut = cut_texts(texts, limit)
        rows = self._encode(cut)
        for place, (before, after) in enumerate(zip(texts, cut, strict=True)):
            # What was cut and is not full now would have more tokens: blanks make none.
            if len(after) < len(before) and len(rows[place]) < limit:
                rows[place] = self._encode([before])[0]
        lengths = np.fromiter(map(len, rows), dtype=np.int64, count=len(rows))
        ids = np.fromiter(chain.from_iterable(rows), np.uint32, int(lengths.sum()))
        return ids, lengths

    def offsets(self, texts: Sequence[str]) -> list[list[tuple[int, int]]]:
        """Return where each token of each text begins and ends, in characters.

        Prompt and special tokens are left out, and nothing is truncated.
        """
        whole = self._untruncated.encode_batch(list(texts), add_special_tokens=False)
        return [encoding.offsets for encoding in whole]

    @cached_property
    def _untruncated(self) -> Tokenizer:
        """The tokenizer without a limit."""
        tokenizer = Tokenizer.from_str(self.tokenizer.to_str())
        tokenizer.no_truncation()
        return tokenizer

    def _encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the ids of each text."""
        prompt = self.tokenisation.prompt
        prompted = [prompt + text for text in texts] if prompt else list(texts)
        return [encoding.ids for encoding in self.tokenizer.encode_batch_fast(prompted)]


def cut_texts(texts: Sequence[str], tokens_max: int) -> list[str]:
    """Cut off most of what the tokenizer would truncate, so that a huge text costs no more.

    They are cut before a blank, where every tokenizer ends a token. A cut text that has fewer than
    `tokens_max` tokens must be tokenised whole.
    """
    limit = tokens_max * CHARACTERS_PER_TOKEN_MAX
    return [text[: _last_blank(text, limit)] if len(text) > limit else text for text in texts]


def _last_blank(text: str, limit: int) -> int:
    """Return the index of the last blank before `limit` that follows a word; else the end."""
    found = len(text[:limit].rsplit(maxsplit=1)[0]) if text[:limit].split(maxsplit=1)[1:] else 0
    return found or len(text)


def decode_ids(tokenizer: Tokenizer, rows: Sequence[Sequence[int]]) -> list[str]:
    """Return texts that a tokenizer turns into exactly these ids, with or without special tokens.

    Raises:
        ValueError: No text has these ids.
    """
    size = tokenizer.get_vocab_size()
    for place, row in enumerate(rows):
        if not row or min(row) < 0 or max(row) >= size:
            raise ValueError(f"input {place}: token ids are 0 to {size - 1}, at least one")
    texts = [tokenizer.decode(list(row), skip_special_tokens=True) for row in rows]
    for some in group_by_size([len(row) for row in rows], IDS_AT_A_TIME):
        plain = tokenizer.encode_batch(texts[some], add_special_tokens=False)
        framed = tokenizer.encode_batch(texts[some])
        for place, row, one, other in zip(
            range(some.start, some.stop), rows[some], plain, framed, strict=True
        ):
            if list(row) not in (one.ids, other.ids):
                raise ValueError(
                    f"input {place}: not what the model's tokenizer makes of any text; send text"
                )
    return texts


def group_by_size(sizes: Sequence[int], size_max: int) -> Iterator[slice]:
    """Yield runs of neighbours that have at most `size_max` together, or of one that has more."""
    start = total = 0
    for place, size in enumerate(sizes):
        if place > start and total + size > size_max:
            yield slice(start, place)
            start, total = place, 0
        total += size
    if sizes:
        yield slice(start, len(sizes))
