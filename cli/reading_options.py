"""How a corpus is read, as flags."""

from typing import Annotated, Literal

import typer

Corpus = Annotated[
    list[str], typer.Argument(help="Files, directories, URLs, or - for standard input.")
]
TextField = Annotated[str, typer.Option(help="Field or column of the text; a.b is b inside a.")]
IdField = Annotated[str, typer.Option(help="Field or column of an id to keep.")]
InputFormat = Annotated[
    str, typer.Option(help="jsonl, json, csv, tsv, parquet or txt; default: by suffix.")
]
Encoding = Annotated[
    str, typer.Option(help="Encoding of files that are not UTF-8, such as cp1252 or utf-16.")
]
Glob = Annotated[str, typer.Option(help="Glob that chooses the files of a directory.")]
ChunkTokens = Annotated[int, typer.Option(min=1, help="Tokens per chunk of a directory's files.")]
ChunkOverlap = Annotated[int, typer.Option(min=0, help="Tokens that the next chunk repeats.")]
OnBadRow = Annotated[
    Literal["fail", "skip"], typer.Option(help="skip lists bad rows in _skipped.jsonl.")
]
