"""`embedfarm verify | check | search | export`: what is in an output directory."""

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from msgspec import to_builtins
from rich.console import Console

from embedfarm.cli.options import (
    FAILED,
    USAGE,
    AsJson,
    fail,
    plain_errors,
    print_json,
    read_settings,
    stop_on_signals,
)
from embedfarm.cli.store_options import ExportLines, OthersInStore, To, print_export
from embedfarm.collector.sinks import holding_sinks
from embedfarm.contract.formatting import counted

if TYPE_CHECKING:
    from embedfarm.collector.store_export import Others

    ExportFormat = str
else:  # the sinks that are installed, but for those that list what is stored elsewhere
    ExportFormat = Annotated[
        Literal[holding_sinks()], typer.Option("--format", help="Format of the output.")
    ]

TEXT_WIDTH = 76


def verify(
    directory: Annotated[Path, typer.Argument(help="The output of `embedfarm embed`.")],
    against: Annotated[
        list[str], typer.Option(help="The corpus it was made from; may be given repeatedly.")
    ] = [],  # noqa: B006 -- typer copies it
    as_json: AsJson = False,  # noqa: FBT002 -- a flag
) -> None:
    """Check that an output is complete and undamaged, and that it belongs to its corpus."""
    from embedfarm.collector import verify as verification
    from embedfarm.collector.manifest import read_manifest
    from embedfarm.runs.request import read_again

    with plain_errors():
        source = None
        if against:
            source = read_again(read_manifest(directory).settings, against, read_settings())
        problems = verification.verify(directory, source)
        compared = None if problems else verification.comparison(read_manifest(directory))
    if as_json:
        listed = [{"file": p.file, "problem": p.sentence} for p in problems]
        print_json({"problems": listed, "compared": compared})
    else:
        console = Console(highlight=False, soft_wrap=True)
        for problem in problems:
            console.print(f"[red]{problem.file}[/red]: {problem.sentence}")
        if not problems:
            console.print(f"[green]{directory} is complete and undamaged[/green]")
            console.print(verification.describe_comparison(compared, against=bool(against)))
    if problems:
        raise typer.Exit(FAILED)


def check(  # noqa: PLR0913, PLR0917 -- each is a flag
    directory: Annotated[Path, typer.Argument(help="The output of `embedfarm embed`.")],
    model: Annotated[
        str,
        typer.Option(
            help="Directory or name of the model, if not the output's; with --endpoint the name "
            "that the server knows it by."
        ),
    ] = "",
    dtype: Annotated[str, typer.Option(help="Type to compute in, if not the output's.")] = "",
    device: Annotated[str, typer.Option(help="cpu, or cuda for the first GPU.")] = "cpu",
    endpoint: Annotated[
        str,
        typer.Option(
            help="A server that embeds, such as http://host:8080/v1, in place of a model here; its "
            "key is EMBEDFARM_ENDPOINT_KEY.",
            metavar="URL",
        ),
    ] = "",
    as_json: AsJson = False,  # noqa: FBT002 -- a flag
) -> None:
    """Tell whether a model still makes the vectors of an output, and what differs if not.

    The status is 0 if it does, and 1 if not or if nothing can be compared.
    """
    from embedfarm.outputs import open_output
    from embedfarm.runs.check import VERDICTS

    with plain_errors():
        read_settings()
        output = open_output(directory)
        report = output.check(model, dtype=dtype, device=device, endpoint=endpoint)
    if as_json:
        print_json({**asdict(report), "agrees": report.agrees, "says": VERDICTS[report.verdict]})
    else:
        console = Console(highlight=False, soft_wrap=True)
        colour = "green" if report.agrees else "red"
        console.print(f"[{colour}]{VERDICTS[report.verdict]}[/{colour}]: {report.reason}")
        if report.differing:
            console.print(f"of the fingerprint {', '.join(report.differing)} differ")
        if report.sample_least is not None:
            words = f"{report.sample} texts of the corpus: least cosine {report.sample_least:.5f}"
            if report.recall is not None:
                words += f", {report.recall:.1%} of their nearest neighbours are the same"
            console.print(words)
    if not report.agrees:
        raise typer.Exit(FAILED)


def export(  # noqa: PLR0913, PLR0917 -- each is a flag
    directory: Annotated[Path, typer.Argument(help="A finished output of `embedfarm embed`.")],
    out: Annotated[Path | None, typer.Option(help="Another output directory.")] = None,
    output_format: ExportFormat = "npy",
    add_column: Annotated[
        str,
        typer.Option(help="Copy the corpus, of Parquet or Arrow, with the vectors as this column."),
    ] = "",
    to: To = "",
    others: OthersInStore = "refuse",
    as_json: AsJson = False,  # noqa: FBT002 -- a flag
) -> None:
    """Write a finished output in another format, or to a store, with nothing embedded again."""
    from embedfarm.collector.export import export as write

    if (out is None) == (not to):
        fail("give --out DIRECTORY for another format, or --to URL for a vector store", USAGE)
    if add_column and out is not None:
        _copy(directory, out, add_column, as_json=as_json)
        return
    with plain_errors():
        if out is None:
            _export_to_store(directory, to, others, as_json=as_json)
            return
        manifest = write(directory, out, output_format)
    if as_json:
        print_json({"out": str(out), "count": manifest.count, "failed": manifest.failed})
    else:
        typer.echo(f"{manifest.count - manifest.failed:,} vectors in {out} ({manifest.format})")


def _copy(directory: Path, out: Path, column: str, *, as_json: bool) -> None:
    """Write the corpus of an output with its vectors as one more column, and say what is there."""
    from embedfarm.runs.dataset_copy import copy_with_vectors

    with plain_errors():
        files = copy_with_vectors(directory, out, column, read_settings()).files
    rows, vectors = sum(each.rows for each in files), sum(each.vectors for each in files)
    if as_json:
        print_json({"out": str(out), "files": len(files), "rows": rows, "vectors": vectors})
    else:
        whole = f"{counted(rows, 'row')} of {counted(len(files), 'file')}"
        typer.echo(f"{whole} in {out}, {vectors:,} of them with a vector in column {column!r}")


def _export_to_store(directory: Path, to: str, others: "Others", *, as_json: bool) -> None:
    """Bring a vector store up to a finished output."""
    from embedfarm.collector.manifest import read_manifest
    from embedfarm.runs.store_feed import exporting, find_destination

    manifest, settings = read_manifest(directory), read_settings()
    destination = find_destination(to, others, settings)
    lines = ExportLines(manifest.count)
    with exporting(directory, destination, settings, stop_on_signals(), lines.show) as export:
        report = export.finish(manifest)
    if as_json:
        print_json({"to": destination.shown} | to_builtins(report))
    else:
        print_export(report, destination.shown)


def search(
    directory: Annotated[Path, typer.Argument(help="The output of `embedfarm embed`.")],
    query: Annotated[str, typer.Argument(help="Text to look for.")],
    count: Annotated[int, typer.Option("--count", "-k", min=1, help="Number of hits.")] = 5,
    as_json: AsJson = False,  # noqa: FBT002 -- a flag
) -> None:
    """Find the chunks nearest to a query, by exact cosine over all vectors."""
    from embedfarm.collector.manifest import read_manifest
    from embedfarm.collector.search import search as nearest
    from embedfarm.runs.embedded_texts import read_texts
    from embedfarm.runs.query import embed_query

    with plain_errors():
        manifest = read_manifest(directory)
        if not manifest.count:
            fail(f"{directory} has no vectors")
        settings = read_settings()
        vector = embed_query(manifest, query, settings)
        hits = nearest(directory, vector, count)
        indices = [hit.index for hit in hits]
        texts = read_texts(directory, manifest.settings, indices, settings)
    if as_json:
        print_json(
            [
                {"index": h.index, "id": h.id, "score": h.score, "text": texts.get(h.index)}
                | ({"columns": dict(h.columns)} if h.columns else {})
                for h in hits
            ]
        )
        return
    console = Console(highlight=False, soft_wrap=True, markup=False)
    for hit in hits:
        name = hit.id if hit.id is not None else f"chunk {hit.index}"
        console.print(f"{hit.score:.3f}  {name}", style="bold")
        if hit.index in texts:
            console.print(f"       {_first_line(texts[hit.index])}")
        for column, value in hit.columns.items():
            if value != texts.get(hit.index):
                console.print(f"       {column}: {_first_line(str(value))}")


def _first_line(text: str) -> str:
    """Return the beginning of a text on one line."""
    line = " ".join(text.split())
    return line if len(line) <= TEXT_WIDTH else f"{line[: TEXT_WIDTH - 1]}…"
