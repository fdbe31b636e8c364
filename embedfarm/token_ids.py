"""Texts as a model's token ids, made by its tokenizer.json alone: the same anywhere, without torch.

Workers find out whether that gives what the model's own preprocessing gives, and say with a
`TokenRecipe` how; from then on a producer with the same tokenizer.json may send ids for texts.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from embedfarm.model_files import sha256
from embedfarm.records import TokenRecipe

FILE: Final = "tokenizer.json"
CHARACTERS_PER_TOKEN_MAX: Final = 32  # of texts that are cut before they are tokenised


class RecipeMismatch(ValueError):
    """The tokenizer at hand is not the one that a recipe is about."""


@dataclass(frozen=True)
class TokenEncoder:
    """Makes token ids by a recipe; may be used by several threads."""

    recipe: TokenRecipe
    tokenizer: Tokenizer

    @classmethod
    def describe(cls, directory: Path, prompt: str, tokens_max: int) -> "TokenEncoder":
        """An encoder for the model in a directory, and with it the recipe.

        Args:
            directory: Where tokenizer.json is.
            prompt: Put before every text.
            tokens_max: Tokens kept of a text, those that frame it included.

        Raises:
            OSError: There is no such file.
            ValueError: It is no tokenizer.
        """
        file = directory / FILE
        recipe = TokenRecipe(tokenizer=sha256(file), prompt=prompt, tokens_max=tokens_max)
        try:
            tokenizer = Tokenizer.from_file(str(file))
        except Exception as error:  # the library raises nothing more specific
            raise ValueError(f"{file}: not a tokenizer: {error}") from error
        tokenizer.no_padding()
        tokenizer.enable_truncation(tokens_max)
        return cls(recipe, tokenizer)

    @classmethod
    def open(cls, directory: Path, recipe: TokenRecipe) -> "TokenEncoder":
        """An encoder by a recipe that somebody else made.

        Raises:
            RecipeMismatch: The directory's tokenizer is another one.
            OSError, ValueError: As for `describe`.
        """
        encoder = cls.describe(directory, recipe.prompt, recipe.tokens_max)
        if encoder.recipe != recipe:
            raise RecipeMismatch(f"{directory / FILE} is another tokenizer than the workers'")
        return encoder

    @cached_property
    def vocabulary(self) -> int:
        """Ids are below this number."""
        return 1 + max(self.tokenizer.get_vocab().values(), default=-1)

    def encode(self, texts: Sequence[str]) -> tuple[NDArray[np.uint32], NDArray[np.int64]]:
        """Ids of all texts end to end, and how many each has, shape (texts,).

        All cores are used unless TOKENIZERS_PARALLELISM says otherwise.
        """
        limit = self.recipe.tokens_max
        cut = cut_texts(texts, limit)
        rows = self._encode(cut)
        for place, (before, after) in enumerate(zip(texts, cut, strict=True)):
            # What was cut and is not full now would have more tokens: blanks make none.
            if len(after) < len(before) and len(rows[place]) < limit:
                rows[place] = self._encode([before])[0]
        lengths = np.fromiter(map(len, rows), dtype=np.int64, count=len(rows))
        ids = np.fromiter(chain.from_iterable(rows), np.uint32, int(lengths.sum()))
        return ids, lengths

    def _encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Ids of each text."""
        prompt = self.recipe.prompt
        prompted = [prompt + text for text in texts] if prompt else list(texts)
        return [encoding.ids for encoding in self.tokenizer.encode_batch_fast(prompted)]


def cut_texts(texts: Sequence[str], tokens_max: int) -> list[str]:
    """Texts without most of what is truncated anyway, so that a huge one costs no more.

    They are cut before a blank, where every tokenizer ends a token. One that then has fewer than
    `tokens_max` tokens must be tokenised whole.
    """
    limit = tokens_max * CHARACTERS_PER_TOKEN_MAX
    return [text[: _last_blank(text, limit)] if len(text) > limit else text for text in texts]


def _last_blank(text: str, limit: int) -> int:
    """Where the last blank before `limit` is, after a character that is none; else the end."""
    found = len(text[:limit].rsplit(maxsplit=1)[0]) if text[:limit].split(maxsplit=1)[1:] else 0
    return found or len(text)


def decode_ids(tokenizer: Tokenizer, rows: Sequence[Sequence[int]]) -> list[str]:
    """Texts of which a tokenizer makes just these ids, with or without those that frame them.

    Raises:
        ValueError: No text has these.
    """
    size = tokenizer.get_vocab_size()
    for place, row in enumerate(rows):
        if not row or max(row) >= size:
            raise ValueError(f"input {place}: token ids are 0 to {size - 1}, at least one")
    texts = [tokenizer.decode(list(row), skip_special_tokens=True) for row in rows]
    plain = tokenizer.encode_batch(texts, add_special_tokens=False)
    framed = tokenizer.encode_batch(texts)
    for place, row in enumerate(rows):
        if list(row) not in (plain[place].ids, framed[place].ids):
            raise ValueError(
                f"input {place}: not what the model's tokenizer makes of any text; send text"
            )
    return texts
