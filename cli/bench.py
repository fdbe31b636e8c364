"""`embedfarm bench`: engines and precisions side by side on this machine."""

from collections.abc import Iterator
from dataclasses import asdict
from itertools import chain, islice
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.console import Console
from rich.table import Table

from embedfarm.cli.job_options import annotation_of
from embedfarm.cli.options import USAGE, AsJson, fail, plain_errors, print_json, read_settings
from embedfarm.cli.reading_options import TextField
from embedfarm.contract.job_spec import JobSpec
from embedfarm.contract.settings import DEFAULT_MODEL

if TYPE_CHECKING:
    from embedfarm.readers import CorpusOptions

CHUNKS_MIN = 2  # a chunk has no neighbours by itself
COLUMNS = ("engine", "tokens/s", "of first", "of peak", "cosine", "least", "recall@10")

Corpus = Annotated[
    list[str] | None,
    typer.Argument(help="Corpus, as for `embed`; default: this Python's own documentation."),
]
if TYPE_CHECKING:
    MODEL = str
    MAX_LENGTH = int
else:  # as the table of fields has them
    MODEL = annotation_of("model")
    MAX_LENGTH = annotation_of("max_length")
Device = Annotated[
    Literal["cpu", "cuda"], typer.Option(help="Device to run on; cuda is the first GPU.")
]
Chunks = Annotated[
    int, typer.Option(min=CHUNKS_MIN, help="Chunks to take from the start of the corpus.")
]
Rounds = Annotated[
    int, typer.Option(min=1, help="Runs of each engine, in turn; medians are shown.")
]


def bench(  # noqa: PLR0913, PLR0917 -- each is a flag
    corpus: Corpus = None,
    model: MODEL = DEFAULT_MODEL,
    text_field: TextField = "text",
    max_length: MAX_LENGTH = 0,
    device: Device = "cpu",
    chunks: Chunks = 1000,
    rounds: Rounds = 3,
    as_json: AsJson = False,  # noqa: FBT002 -- a flag
) -> None:
    """Try engines and precisions on some texts: how fast each is, and what it loses.

    Each computes with all cores, in the device batches of a worker. Cosines are with the vectors of
    the first, and recall is the share of each chunk's ten nearest neighbours that stays. Which
    engine workers take for the model is tried anew when they load it next.
    """
    from embedfarm.readers import CorpusOptions
    from embedfarm.runs.request import tokenizer_file
    from embedfarm.workers.engines.kept_choices import forget_choices

    settings = read_settings()
    with plain_errors():
        tokenizer = tokenizer_file(corpus or [], model, settings)
        options = CorpusOptions(text_field=text_field, tokenizer_file=tokenizer)
        texts = list(islice(_texts(corpus or [], options), chunks))
        if len(texts) < CHUNKS_MIN:
            fail(f"{CHUNKS_MIN} chunks are needed at least", USAGE)
        from embedfarm.workers.engines.comparison import compare_engines

        spec = JobSpec(model=model, max_length=max_length)
        place = "cpu" if device == "cpu" else "cuda:0"
        found = [asdict(each) for each in compare_engines(spec, place, texts, rounds, settings)]
    forget_choices(model, settings)
    if as_json:
        print_json({"model": model, "chunks": len(texts), "contenders": found})
        return
    table = Table(box=None, pad_edge=False)
    for column in COLUMNS:
        table.add_column(column, justify="left" if column == "engine" else "right")
    for each in found:
        table.add_row(f"{each['engine']} {each['dtype']}", *_cells(each))
    console = Console(highlight=False, soft_wrap=True)
    console.print(f"{len(texts):,} chunks, {model}")
    console.print(table)
    for each in found:
        if each["reason"]:
            console.print(f"{each['engine']} {each['dtype']}: {each['reason']}")


def _texts(sources: list[str], options: "CorpusOptions") -> Iterator[str]:
    """Return the texts of a corpus; without one, docstrings that every machine has."""
    if not sources:
        from embedfarm.producer.docstrings import docstrings

        return (text for _, text in docstrings())
    from embedfarm.readers import fail_on_bad_row, read_corpus

    rows = read_corpus(tuple(sources), options, fail_on_bad_row)
    return chain.from_iterable(each.texts for each in rows)


def _cells(each: dict[str, Any]) -> list[str]:
    """Return the figures of one line, as dashes where the engine did not run."""
    if each["reason"]:
        return ["-"] * (len(COLUMNS) - 1)
    return [
        f"{each['tokens_per_second']:,.0f}",
        f"{each['times_first']:.2f}",
        f"{each['peak_ratio']:.0%}" if each["peak_ratio"] else "-",
        f"{each['cosine_mean']:.5f}",
        f"{each['cosine_least']:.5f}",
        f"{each['recall']:.3f}",
    ]
