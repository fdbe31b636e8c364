"""Readers: files, directories and pipes -> batches of chunks.

`read_corpus` is the way in. Behind it every format is one pure function from an open file to items,
each a good row or a `BadRow`; `corpus` alone decides what happens to either.
"""

from embedfarm.readers.corpus import CorpusOptions, read_corpus
from embedfarm.readers.corpus_digest import CorpusDigest, look_at
from embedfarm.readers.corpus_share import CorpusShare
from embedfarm.readers.items import BadRow, CorpusError, fail_on_bad_row
from embedfarm.readers.source import Cursor

__all__ = [
    "BadRow",
    "CorpusDigest",
    "CorpusError",
    "CorpusOptions",
    "CorpusShare",
    "Cursor",
    "fail_on_bad_row",
    "look_at",
    "read_corpus",
]
