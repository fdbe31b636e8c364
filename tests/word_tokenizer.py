"""A tokenizer whose tokens are words, as small as one can be."""

from pathlib import Path
from typing import Final

from tokenizers import Tokenizer, models, pre_tokenizers

from embedfarm.contract.token_ids import FILE

WORDS: Final = {"[UNK]": 0, "a": 1, "b": 2, "p": 3, "chunk": 4, "number": 5}


def write_tokenizer(directory: Path) -> Path:
    """Write the tokenizer to a directory, and return the directory."""
    tokenizer = Tokenizer(models.WordLevel(WORDS, unk_token=next(iter(WORDS))))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.enable_padding()  # as the files of some models have it; ids are without
    tokenizer.save(str(directory / FILE))
    return directory
