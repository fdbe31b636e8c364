"""How a corpus is read, what of it stays beside the vectors, and what is known of it, as flags."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from embedfarm.cli.options import USAGE, fail

Corpus = Annotated[
    list[str], typer.Argument(help="Files, directories, URLs, or - for standard input.")
]
TextField = Annotated[str, typer.Option(help="Field or column of the text; a.b is b inside a.")]
IdField = Annotated[str, typer.Option(help="Field or column of an id to keep.")]
InputFormat = Annotated[
    str, typer.Option(help="jsonl, json, csv, tsv, parquet, arrow or txt; default: by suffix.")
]
Encoding = Annotated[
    str, typer.Option(help="Encoding of files that are not UTF-8, such as cp1252 or utf-16.")
]
TextTemplate = Annotated[
    str,
    typer.Option(
        "--text",
        help=r"Text made of several fields, such as 'title: {title}\n{body}'; {{ is a brace.",
    ),
]
Query = Annotated[
    str, typer.Option(help="Query for the rows of a database, which come in the order of their id.")
]
Keep = Annotated[
    list[str],
    typer.Option(
        help="Columns to keep beside the vectors, with commas between, or all; those of JSON and "
        "CSV are strings, or declared, as in year:int64 (float64, bool)."
    ),
]
Glob = Annotated[str, typer.Option(help="Glob that chooses the files of a directory.")]
ChunkTokens = Annotated[int, typer.Option(min=1, help="Tokens per chunk of a directory's files.")]
ChunkOverlap = Annotated[int, typer.Option(min=0, help="Tokens that the next chunk repeats.")]
OnBadRow = Annotated[
    Literal["fail", "skip"], typer.Option(help="skip lists bad rows in _skipped.jsonl.")
]
Reused = Annotated[
    list[Path],
    typer.Option(
        "--reuse",
        help="Finished output whose vectors are taken for the texts that it has; may be repeated.",
    ),
]
ByReference = Annotated[
    bool,
    typer.Option(
        "--by-reference",
        help="Take parts of the first --reuse as links to its files, where all rows are the same.",
    ),
]
Deduplicate = Annotated[
    bool,
    typer.Option("--deduplicate", help="Embed each distinct text once, wherever it stands."),
]
EmbedChanged = Annotated[
    bool,
    typer.Option(
        "--embed-changed",
        help="Embed the rows again that have changed in the corpus of an unfinished output.",
    ),
]


def check_template(text: str, text_field: str) -> str | None:
    """Return a template, None for ""; a field of the text beside it is a usage error."""
    if text and text_field != "text":
        fail("--text and --text-field are two ways to say the same", USAGE)
    return text or None


def split_names(given: list[str]) -> tuple[str, ...]:
    """Return the names of columns, of which an option may have several with commas between."""
    return tuple(name for each in given for name in each.split(",") if name)
