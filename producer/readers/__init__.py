"""Readers: files, directories and pipes -> batches of chunks.

`read_corpus` is the door. Behind it every format is one pure function from an open file to items,
each a good row or a `BadRow`; `corpus` alone decides what happens to either.
"""

from producer.readers.corpus import CorpusOptions, read_corpus
from producer.readers.items import BadRow, CorpusError, fail_on_bad_row

__all__ = ["BadRow", "CorpusError", "CorpusOptions", "fail_on_bad_row", "read_corpus"]
