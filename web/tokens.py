"""Texts and token ids of a model, by its tokenizer.json alone."""

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

from fastapi import HTTPException
from tokenizers import Encoding, Tokenizer

from embedfarm import token_ids
from embedfarm.model_files import ModelError, find_local
from embedfarm.settings import Settings
from embedfarm.token_ids import FILE

TOKENIZERS_MAX = 8


def tokenizer_of(model: str, settings: Settings) -> Tokenizer:
    """The tokenizer of a model whose files are on this machine; it neither pads nor cuts.

    Raises:
        HTTPException: There is none.
    """
    try:
        directory = find_local(model, settings.model_cache)
    except ModelError as error:
        raise HTTPException(422, str(error)) from error
    if directory is None or not (directory / FILE).is_file():
        raise HTTPException(422, f"there is no {FILE} of {model} where this is served")
    return _open(directory / FILE)


@lru_cache(maxsize=TOKENIZERS_MAX)
def _open(file: Path) -> Tokenizer:
    tokenizer = Tokenizer.from_file(str(file))
    tokenizer.no_padding()
    tokenizer.no_truncation()
    return tokenizer


def tokenize(tokenizer: Tokenizer, texts: Sequence[str], *, special: bool) -> list[Encoding]:
    """Tokens of texts, with those that frame them if wanted."""
    return list(tokenizer.encode_batch(list(texts), add_special_tokens=special))


def decode_ids(tokenizer: Tokenizer, rows: Sequence[Sequence[int]]) -> list[str]:
    """As `embedfarm.token_ids.decode_ids`, for a request.

    Raises:
        HTTPException: No text has these; a vector would be of something else.
    """
    try:
        return token_ids.decode_ids(tokenizer, rows)
    except ValueError as error:
        raise HTTPException(422, str(error)) from error
