"""`embedfarm embed`: the main job."""

import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
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
    read_settings,
    stop_on_signals,
)
from embedfarm.cli.output_report import report
from embedfarm.cli.plan import plan_job
from embedfarm.cli.reading_options import (
    ByReference,
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
    Query,
    Reused,
    TextField,
    TextTemplate,
    check_template,
    split_names,
)
from embedfarm.cli.store_options import OthersInStore, To, destination_of, print_export
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
from embedfarm.contract.job_spec import JobSpec
from embedfarm.contract.processes import watch_parent_pipe
from embedfarm.contract.scheduling_terms import Terms
from embedfarm.contract.settings import Settings
from embedfarm.contract.status import JobStatus

JOB_ID = re.compile(r"[\w.-]{1,128}", re.ASCII)

if TYPE_CHECKING:
    from embedfarm.runs.place import Place
    from embedfarm.runs.request import Request
    from embedfarm.runs.store_feed import Destination

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
Plan = Annotated[
    bool,
    typer.Option(
        "--plan", help="Say how long it will take and what it will cost, and embed nothing."
    ),
]


@with_job_fields
def embed(  # noqa: PLR0913, PLR0917 -- each is a flag
    corpus: Corpus,
    out: Out,
    text_field: TextField = "text",
    text: TextTemplate = "",
    id_field: IdField = "",
    query: Query = "",
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
    by_reference: ByReference = False,  # noqa: FBT002 -- a flag
    deduplicate: Deduplicate = False,  # noqa: FBT002 -- a flag
    plan: Plan = False,  # noqa: FBT002 -- a flag
    to: To = "",
    others: OthersInStore = "refuse",
    as_json: AsJson = False,  # noqa: FBT002 -- a flag
    **fields: Any,  # noqa: ANN401 # those of a job, which the table types
) -> None:
    """Embed a corpus, without a server on a private farm; run it again to resume."""
    from embedfarm.readers import CorpusOptions
    from embedfarm.runs.request import Request, tokenizer_file

    settings = pin(read_settings(redis), [fields["model"]])  # wanted on a private farm
    tracing.start(settings.traces, "embed")
    terms = read_terms(priority, tenant, weight, deadline, labels, max_hours, max_cost)
    with plain_errors():
        options = CorpusOptions(
            text_field=text_field, template=check_template(text, text_field), query=query or None,
            id_field=id_field or None, keep=split_names(keep), format=input_format or None,
            encoding=encoding, glob=glob, chunk_tokens=chunk_tokens, chunk_overlap=chunk_overlap,
            tokenizer_file=tokenizer_file(corpus, fields["model"], settings, glob),
        )  # fmt: skip
        spec = JobSpec(**fields | _read_ranges(**fields), name=out.name)
        request = Request(tuple(corpus), options, on_bad_row == "skip", spec, output_format)
        place = _place(out, settings, devices, workers, job_id, embed_changed, by_reference)
        if plan:
            plan_job(request, place, as_json=as_json)
            return
        run_to_end(
            request, place, terms, retry=retry_failed, reuse=reuse, deduplicate=deduplicate,
            to=destination_of(to, others, settings), as_json=as_json,
        )  # fmt: skip


def _place(  # noqa: PLR0913, PLR0917 -- each is a flag
    out: Path,
    settings: Settings,
    devices: str,
    workers: int,
    job_id: str,
    embed_changed: bool,  # noqa: FBT001 -- a flag
    by_reference: bool,  # noqa: FBT001 -- a flag
) -> "Place":
    """Return the place of a run that flags describe."""
    from embedfarm.runs.place import Place

    return Place(
        out, settings, devices, workers, job_id, command_line(), embed_changed,
        by_reference=by_reference,
    )  # fmt: skip


def _read_ranges(
    model: str, vector_dtype: str, ranges: Path | None, **_: object
) -> dict[str, bytes]:
    """Read ranges as a job carries them; they come with "int8", and only with it."""
    from embedfarm.collector.ranges import read_ranges

    if (vector_dtype == "int8") != (ranges is not None):
        fail("int8 vectors need --ranges, and nothing else does", USAGE)
    said = b"" if ranges is None else read_ranges(ranges, model).astype("<f4").tobytes()
    return {"ranges": said}


def run_to_end(  # noqa: PLR0913 # three are said by name
    request: "Request",
    place: "Place",
    terms: Terms,
    *,
    retry: bool,
    reuse: Sequence[Path] = (),
    deduplicate: bool = False,
    to: "Destination | None" = None,
    as_json: bool,
) -> None:
    """Embed unless it is done already, report, and end with the status that says how it went."""
    from embedfarm.cli.progress import View
    from embedfarm.runs.completion import complete
    from embedfarm.runs.run_failures import Interrupted

    stop = stop_on_signals()
    watch_parent_pipe(stop.set)
    view = View(Console(stderr=True), lines=as_json or not sys.stderr.isatty())
    try:
        manifest, before, exported = complete(
            request, place, stop, view, terms, retry=retry, reuse=reuse, deduplicate=deduplicate,
            to=to,
        )  # fmt: skip
    except Interrupted:
        fail("interrupted; the same command goes on from here", INTERRUPTED)
    report(manifest, place.out, before=before, exported=exported, as_json=as_json)
    if to is not None and exported is not None and not as_json:
        print_export(exported, to.shown)
    if manifest.failed:
        raise typer.Exit(FAILED_CHUNKS)


def retry_output(facts: JobStatus, settings: Settings, *, as_json: bool) -> None:
    """Do with a finished job's output what `embed --retry-failed` would, on the job's terms."""
    from embedfarm.collector.manifest import read_manifest
    from embedfarm.runs.place import Place
    from embedfarm.runs.request import request_of

    out = Path(facts.out)
    with plain_errors():
        request = request_of(read_manifest(out), settings)
        place = Place(out, settings, "all", 0, "", command_line())
        run_to_end(request, place, facts.terms, retry=True, as_json=as_json)
