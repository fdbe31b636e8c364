"""`embedfarm embed`: the main job."""

import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from msgspec import to_builtins
from rich.console import Console

from embedfarm.cli.job_options import with_job_fields
from embedfarm.cli.options import (
    FAILED_CHUNKS,
    FULL,
    INTERRUPTED,
    LIMITED,
    USAGE,
    AsJson,
    CpuWorkers,
    Devices,
    RedisUrl,
    command_line,
    fail,
    pin,
    plain_errors,
    print_json,
    read_settings,
    stop_on_signals,
)
from embedfarm.cli.reading_options import (
    ChunkOverlap,
    ChunkTokens,
    Corpus,
    Deduplicate,
    EmbedChanged,
    Encoding,
    Glob,
    IdField,
    InputFormat,
    Keep,
    OnBadRow,
    Reused,
    TextField,
    TextTemplate,
    check_template,
    split_names,
)
from embedfarm.cli.term_options import (
    Deadline,
    Labels,
    MaxCost,
    MaxHours,
    Priority,
    Tenant,
    Weight,
    read_terms,
)
from embedfarm.collector.sinks import sink_names
from embedfarm.contract import tracing
from embedfarm.contract.formatting import counted, describe_reuse
from embedfarm.contract.job_spec import JobSpec
from embedfarm.contract.processes import watch_parent_pipe
from embedfarm.contract.scheduling_terms import USUAL, Terms
from embedfarm.contract.settings import Settings

JOB_ID = re.compile(r"[\w.-]{1,128}", re.ASCII)

if TYPE_CHECKING:
    from embedfarm.collector.manifest import Changes, Manifest
    from embedfarm.runs.place import Place
    from embedfarm.runs.request import Request

EPILOG = (
    f"Ends with {FAILED_CHUNKS} when chunks failed, named in _errors.jsonl, with {LIMITED} when a "
    "private farm has done as much as --max-hours or --max-cost let it, with "
    f"{FULL} when the farm has no place for another job now, and with {INTERRUPTED} when "
    "interrupted."
)


def _check_job_id(name: str) -> str:
    """Check that keys can carry the name of a job; a usage error otherwise."""
    if name and not JOB_ID.fullmatch(name):
        raise typer.BadParameter("must be 1 to 128 letters, digits and . _ -")
    return name


Out = Annotated[Path, typer.Option(help="Output directory.")]
if TYPE_CHECKING:
    OutputFormat = str
else:  # the sinks that are installed
    OutputFormat = Annotated[
        Literal[sink_names()], typer.Option("--format", help="Format of the output.")
    ]
RetryFailed = Annotated[
    bool,
    typer.Option("--retry-failed", help="Embed the failed chunks of a finished output once more."),
]
JobName = Annotated[
    str, typer.Option("--job-id", callback=_check_job_id, help="Id of the job on a shared farm.")
]


@with_job_fields
def embed(  # noqa: PLR0913, PLR0917 -- each is a flag
    corpus: Corpus,
    out: Out,
    text_field: TextField = "text",
    text: TextTemplate = "",
    id_field: IdField = "",
    keep: Keep = [],  # noqa: B006 -- typer's
    input_format: InputFormat = "",
    encoding: Encoding = "utf-8",
    glob: Glob = "**/*",
    chunk_tokens: ChunkTokens = 200,
    chunk_overlap: ChunkOverlap = 20,
    on_bad_row: OnBadRow = "fail",
    output_format: OutputFormat = "parquet",
    workers: CpuWorkers = 0,
    devices: Devices = "all",
    redis: RedisUrl = "",
    priority: Priority = "normal",
    tenant: Tenant = "",
    weight: Weight = 1,
    deadline: Deadline = "",
    labels: Labels = "",
    max_hours: MaxHours = 0.0,
    max_cost: MaxCost = 0.0,
    job_id: JobName = "",
    retry_failed: RetryFailed = False,  # noqa: FBT002 -- a flag
    embed_changed: EmbedChanged = False,  # noqa: FBT002 -- a flag
    reuse: Reused = [],  # noqa: B006 -- typer's
    deduplicate: Deduplicate = False,  # noqa: FBT002 -- a flag
    as_json: AsJson = False,  # noqa: FBT002 -- a flag
    **fields: Any,  # noqa: ANN401 # those of a job, which the table types
) -> None:
    """Embed a corpus, without a server on a private farm; run it again to resume."""
    from embedfarm.producer.readers import CorpusOptions
    from embedfarm.runs.place import Place
    from embedfarm.runs.request import Request, tokenizer_file

    settings = read_settings(redis)
    tracing.start(settings.traces, "embed")
    terms = read_terms(priority, tenant, weight, deadline, labels, max_hours, max_cost)
    with plain_errors():
        options = CorpusOptions(
            text_field=text_field, template=check_template(text, text_field),
            id_field=id_field or None, format=input_format or None, encoding=encoding,
            keep=split_names(keep),
            tokenizer_file=tokenizer_file(corpus, fields["model"], settings, glob), glob=glob,
            chunk_tokens=chunk_tokens, chunk_overlap=chunk_overlap,
        )  # fmt: skip
        fields["ranges"] = _ranges(fields["vector_dtype"], fields["ranges"])
        spec = JobSpec(**fields, name=out.name)
        settings = pin(settings, [spec.model])  # on a private farm it is the one that is wanted
        request = Request(tuple(corpus), options, on_bad_row == "skip", spec, output_format)
        place = Place(out, settings, devices, workers, job_id, command_line(), embed_changed)
        run_to_end(
            request, place, terms, retry=retry_failed, reuse=reuse, deduplicate=deduplicate,
            as_json=as_json,
        )  # fmt: skip


def _ranges(vector_dtype: str, path: Path | None) -> bytes:
    """Read ranges as a job carries them; they come with "int8", and only with it."""
    from embedfarm.collector.ranges import read_ranges

    if (vector_dtype == "int8") != (path is not None):
        fail("int8 vectors need --ranges, and nothing else does", USAGE)
    return b"" if path is None else read_ranges(path).astype("<f4").tobytes()


def run_to_end(  # noqa: PLR0913 # three are said by name
    request: "Request",
    place: "Place",
    terms: Terms,
    *,
    retry: bool,
    reuse: Sequence[Path] = (),
    deduplicate: bool = False,
    as_json: bool,
) -> None:
    """Embed unless it is done already, report, and end with the status that says how it went."""
    from embedfarm.cli.progress import View
    from embedfarm.runs.completion import complete
    from embedfarm.runs.run import Interrupted

    stop = stop_on_signals()
    watch_parent_pipe(stop.set)
    view = View(Console(stderr=True), lines=as_json or not sys.stderr.isatty())
    try:
        manifest, before = complete(
            request, place, stop, view, terms, retry=retry, reuse=reuse, deduplicate=deduplicate
        )
    except Interrupted:
        fail("interrupted; the same command goes on from here", INTERRUPTED)
    report(manifest, place.out, before=before, as_json=as_json)
    if manifest.failed:
        raise typer.Exit(FAILED_CHUNKS)


def retry_output(out: Path, settings: Settings, *, as_json: bool) -> None:
    """Do with a finished output what `embed --retry-failed` would, on the farm of the settings."""
    from embedfarm.collector.manifest import read_manifest
    from embedfarm.runs.place import Place
    from embedfarm.runs.request import request_of

    with plain_errors():
        request = request_of(read_manifest(out), settings)
        place = Place(out, settings, "all", 0, "", command_line())
        run_to_end(request, place, USUAL, retry=True, as_json=as_json)


def report(manifest: "Manifest", out: Path, *, before: "Manifest | None", as_json: bool) -> None:
    """Print where the vectors are and how fast the run was; `before` is an earlier manifest."""
    repaired = before.failed - manifest.failed if before else 0
    embedded = sum(figures.chunks for figures in manifest.workers.values())
    rate = embedded / manifest.embed_seconds if manifest.embed_seconds else 0.0
    tokens = manifest.tokens / manifest.embed_seconds if manifest.embed_seconds else 0.0
    if as_json:
        print_json(
            {
                "out": str(out),
                "finished_before": before is not None,
                "repaired": repaired,
                "count": manifest.count,
                "failed": manifest.failed,
                "skipped": manifest.skipped,
                "reused": manifest.reused,
                "changes": manifest.changes and to_builtins(manifest.changes),
                "dimensions": manifest.dimensions,
                "tokens": manifest.tokens,
                "load_seconds": manifest.load_seconds,
                "embed_seconds": manifest.embed_seconds,
                "chunks_per_second": rate,
                "tokens_per_second": tokens,
                **manifest.spent._asdict(),
                "workers": {n: w.chunks for n, w in manifest.workers.items()},
                "accounts": manifest.accounts,
            }
        )
        return
    from embedfarm.collector.manifest import OWN

    console = Console(highlight=False, soft_wrap=True)
    if repaired:
        console.print(f"{repaired:,} chunks that had failed have their vectors now.")
    elif before is manifest:
        console.print(f"{out} is finished already; nothing to do.")
    console.print(
        f"[bold]{counted(manifest.count - manifest.failed, 'vector')}[/bold] of "
        f"{manifest.dimensions} dimensions in {out} "
        f"({counted(len(manifest.parts), 'part')}, {manifest.format})"
    )
    console.print(
        f"{manifest.embed_seconds:,.1f} s, {rate:,.0f} chunks/s, {tokens:,.0f} tokens/s; "
        f"model loaded in {manifest.load_seconds:,.1f} s; {manifest.spent.words}"
    )
    for directory, count in manifest.reused.items():
        whence = "the same text before" if directory == OWN else directory
        console.print(f"  {counted(count, 'chunk')} ({count / manifest.count:.0%}) from {whence}")
    if manifest.reused:
        reused = sum(manifest.reused.values())
        console.print(f"  {describe_reuse(reused, embedded, manifest.embed_seconds)}")
    if manifest.changes is not None:
        console.print(f"  {_describe_changes(manifest.changes, out)}")
    for name, figures in sorted(manifest.workers.items()):
        share = figures.chunks / max(1, embedded)
        account = describe_account(manifest.accounts.get(name, {}))
        console.print(f"  {name}: {counted(figures.chunks, 'chunk')} ({share:.0%}){account}")
    for remark in _remarks(manifest, out):
        console.print(remark)


def _describe_changes(changes: "Changes", out: Path) -> str:
    """Describe how many chunks are not what they were in another output."""
    from embedfarm.collector.manifest import CHANGES_FILE

    kinds = ("added", "changed", "moved", "removed")
    counts = ", ".join(f"{getattr(changes, kind):,} {kind}" for kind in kinds)
    return f"{counts} since {changes.since}: {out / CHANGES_FILE}"


def _remarks(manifest: "Manifest", out: Path) -> Iterator[str]:
    """Yield what people should know of an output beside its vectors, in rich's markup."""
    from embedfarm.collector.manifest import ERRORS_FILE, find_listing
    from embedfarm.runs.skipped_rows import SKIPPED_FILE

    if manifest.skipped:
        listing = find_listing(out, SKIPPED_FILE)
        yield f"[yellow]{counted(manifest.skipped, 'bad row')} skipped[/yellow]: {listing}"
    if manifest.repeated_ids is not None:
        repeated = manifest.repeated_ids
        yield (
            f"[yellow]{counted(repeated.count, 'chunk')} with the id of an earlier one[/yellow]: "
            f"the first is chunk {repeated.first:,}, with the id of chunk {repeated.earlier:,}"
        )
    full, empty = (
        sum(account.get(name, 0) for account in manifest.accounts.values())
        for name in ("texts_full", "texts_empty")
    )
    if empty:
        yield (
            f"[yellow]{counted(empty, 'chunk')} without a text[/yellow]: an empty one, or white "
            "space alone, has a vector as any other"
        )
    if full:
        yield (
            f"[yellow]{counted(full, 'chunk')} at the model's limit[/yellow]: what a text has "
            "beyond it is in no vector (--long windows takes it in, --long error names such texts)"
        )
    if manifest.failed:
        listing = find_listing(out, ERRORS_FILE)
        yield f"[red]{counted(manifest.failed, 'chunk')} failed[/red]: {listing}"


def describe_account(account: dict[str, Any]) -> str:
    """Describe in half a line what a worker's device did in this run; "" for nothing."""
    if not account.get("engine"):
        return ""
    words = [account["engine"]]
    names = {"busy_ratio": "busy", "padding_ratio": "padding", "peak_ratio": "of the device's peak"}
    words += [f"{account[key]:.0%} {name}" for key, name in names.items() if key in account]
    if account["parity"]:
        words.append(f"cosine with float32 at least {account['parity']['reference_least']:.5f}")
    return "; " + ", ".join(words)
