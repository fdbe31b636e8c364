"""Conversion between texts and token ids of a model, by its tokenizer.json alone."""

from collections.abc import Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Final

from fastapi import HTTPException
from tokenizers import Encoding, Tokenizer

from embedfarm.contract import token_ids
from embedfarm.contract.lane import too_long, too_many
from embedfarm.contract.model_files import ModelError, find_local
from embedfarm.contract.settings import Settings
from embedfarm.contract.token_ids import FILE

TOKENIZERS_MAX: Final = 8
TEXT_BYTES_MAX: Final = 1 << 15  # that are tokenised: a token takes some 400 bytes meanwhile
CHARACTERS_AT_A_TIME: Final = 1 << 13  # of several texts together


def tokenizer_of(model: str, settings: Settings) -> Tokenizer:
    """Open the tokenizer of a model whose files are on this machine; it neither pads nor cuts.

    Raises:
        HTTPException: The model's tokenizer is not on this machine.
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


def check_count(texts: Sequence[object], settings: Settings) -> None:
    """Refuse more texts than a request may have, before anything is made of them.

    Raises:
        HTTPException: There are too many texts.
    """
    if len(texts) > settings.lane_texts_max:
        raise HTTPException(422, too_many(len(texts), settings))


def check_texts(texts: Sequence[str], settings: Settings) -> None:
    """Refuse texts that take much memory as tokens, or more than a request for vectors may have.

    Raises:
        HTTPException: The texts are too many, or too long.
    """
    check_count(texts, settings)
    sizes = [len(text.encode()) for text in texts]
    for place, size in enumerate(sizes):
        if size > TEXT_BYTES_MAX:
            raise HTTPException(422, f"text {place}: {size} bytes, at most {TEXT_BYTES_MAX}")
    if sum(sizes) > settings.lane_bytes_max:
        raise HTTPException(422, too_long(sum(sizes), settings))


def tokenize(tokenizer: Tokenizer, texts: Sequence[str], *, special: bool) -> Iterator[Encoding]:
    """Yield the tokens of each text, with the special ones if wanted, some texts at a time."""
    sizes = [len(text) for text in texts]
    for some in token_ids.group_by_size(sizes, CHARACTERS_AT_A_TIME):
        yield from tokenizer.encode_batch(list(texts[some]), add_special_tokens=special)


def decode_ids(tokenizer: Tokenizer, rows: Sequence[Sequence[int]]) -> list[str]:
    """Decode token ids to texts, like `embedfarm.contract.token_ids.decode_ids`, but for a request.

    Raises:
        HTTPException: No text has these token ids; the vector would be of another text.
    """
    try:
        return token_ids.decode_ids(tokenizer, rows)
    except ValueError as error:
        raise HTTPException(422, str(error)) from error
