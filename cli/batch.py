"""`embedfarm batch`: a file of requests, as OpenAI's batch protocol has them."""

from collections.abc import Iterator
from contextlib import ExitStack, suppress
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import msgspec
import typer
from rich.console import Console

from embedfarm.cli.options import (
    INTERRUPTED,
    AsJson,
    RedisUrl,
    command_line,
    fail,
    farm_settings,
    plain_errors,
    print_json,
    stop_on_signals,
)
from embedfarm.contract.batch_requests import ENDS, PLAN, REQUESTS, Planned
from embedfarm.contract.job_spec import JobSpec
from embedfarm.contract.processes import watch_parent_pipe
from embedfarm.contract.settings import Settings

if TYPE_CHECKING:
    from embedfarm.collector.batch_answers import Chunk, Tally
    from embedfarm.collector.collect import JobCancelled
    from embedfarm.ingest.openai_batches import BatchPlan, Decode

CORPUS: Final = "corpus.jsonl"
VECTORS: Final = "vectors"
BYTES_PER_TOKEN: Final = 4  # where no tokenizer.json says it; so it is with null models
BATCH_ROWS: Final = 256

JobName = Annotated[str, typer.Option("--job-id", help="Id of the job on the farm.")]


def batch(  # noqa: PLR0913, PLR0917 -- each is a flag
    requests: Annotated[Path, typer.Argument(help="JSON Lines.")],
    out: Annotated[Path, typer.Option(help="Directory for output.jsonl and errors.jsonl.")],
    model: Annotated[str, typer.Option(help="Model; default: that of the first request.")] = "",
    job_id: JobName = "",
    redis: RedisUrl = "",
    as_json: AsJson = False,  # noqa: FBT002 -- a flag
) -> None:
    """Answer a file of OpenAI embedding requests on a shared farm; run it again to resume."""
    from embedfarm.ingest.openai_batches import find_model

    settings = farm_settings(redis)
    with plain_errors():
        out.mkdir(parents=True, exist_ok=True)
        model = model or find_model(requests, settings.models, settings.batch_requests_max)
        made = _plan(requests, out, model, settings)
        cancelled = _embed(out, model, job_id, settings)
        tally = _assemble(out, model, settings)
    counts = {"total": made.total, "bad": made.bad}
    report = counts | tally._asdict() | {"model": model, "out": str(out)}
    if as_json:
        print_json(report | {"cancelled": cancelled is not None})
    else:
        Console(highlight=False, soft_wrap=True).print(
            f"{tally.completed:,} answers in {out}/output.jsonl, {tally.failed:,} errors in "
            f"{out}/errors.jsonl"
        )
    if cancelled is not None:
        fail(str(cancelled), cancelled.exit_status)


def _plan(source: Path, out: Path, model: str, settings: Settings) -> "BatchPlan":
    """Make the corpus of the requests, unless an earlier run has.

    Raises:
        CorpusError: None of the requests can be done, or they are too many.
        OutputError: The earlier run was about another file, or another model.
    """
    from embedfarm.contract.durable_files import replacing
    from embedfarm.ingest.openai_batches import BatchPlan, Planner, plan, refuse_all_bad

    if (out / PLAN).exists():
        made = msgspec.json.decode((out / PLAN).read_bytes(), type=BatchPlan)
        _compare(made, source, out, model)
    else:
        decode = _decoder(model, settings)
        planner = Planner(model, settings.models, decode, settings.lane_texts_max)
        with (
            replacing(out / CORPUS) as corpus,
            replacing(out / REQUESTS) as planned,
            replacing(out / ENDS) as ends,
        ):
            made = plan(source, planner, (corpus, planned, ends), settings.batch_requests_max)
        with replacing(out / PLAN) as file:
            file.write(msgspec.json.encode(made))
    refuse_all_bad(made, out / REQUESTS)
    return made


def _compare(made: "BatchPlan", source: Path, out: Path, model: str) -> None:
    """Refuse a file or a model that is not the one of a plan, where the plan names them."""
    from embedfarm.collector.request_comparison import compare_requests
    from embedfarm.ingest.openai_batches import digest_of

    if made.sha256:
        planned = {"model": made.model, "sha256_of_the_requests": made.sha256}
        asked = {"model": model, "sha256_of_the_requests": digest_of(source)}
        compare_requests(out, planned, asked)


def _decoder(model: str, settings: Settings) -> "Decode":
    """Return a function from token ids to texts, by the model's tokenizer.json on this machine."""
    from tokenizers import Tokenizer

    from embedfarm.contract.model_files import find_local
    from embedfarm.contract.token_ids import FILE, TOKENS_REFUSED, decode_ids

    @cache
    def tokenizer() -> Tokenizer:
        if not settings.accept_token_ids:
            raise ValueError(TOKENS_REFUSED)
        directory = find_local(model, settings.model_cache)
        if directory is None or not (directory / FILE).is_file():
            raise ValueError(f"there is no {FILE} of {model} where batches are read")
        found = Tokenizer.from_file(str(directory / FILE))
        found.no_padding()
        found.no_truncation()
        return found

    return lambda rows: decode_ids(tokenizer(), rows)


def _embed(out: Path, model: str, job_id: str, settings: Settings) -> "JobCancelled | None":
    """Embed the corpus of the requests; return how it ended if the job was cancelled."""
    from embedfarm.cli.progress import View
    from embedfarm.collector.collect import JobCancelled
    from embedfarm.readers import CorpusOptions
    from embedfarm.runs.completion import complete
    from embedfarm.runs.place import Place
    from embedfarm.runs.request import Request
    from embedfarm.runs.run_failures import Interrupted

    spec = JobSpec(model=model, name=out.parent.name)
    request = Request(
        (str(out / CORPUS),), CorpusOptions(), skip_bad_rows=False, spec=spec, sink="parquet"
    )
    place = Place(out / VECTORS, settings, "all", 0, job_id, command_line())
    stop = stop_on_signals()
    watch_parent_pipe(stop.set)
    try:
        complete(request, place, stop, View(Console(stderr=True), lines=True))
    except JobCancelled as error:
        return error
    except Interrupted:
        fail("interrupted; the same command goes on from here", INTERRUPTED)
    return None


def _assemble(out: Path, model: str, settings: Settings) -> "Tally":
    """Write what has come of each request into one of two files."""
    from embedfarm.collector.batch_answers import assemble, read_chunks
    from embedfarm.collector.output_reader import NotBegun, OutputReader
    from embedfarm.contract.durable_files import replacing
    from embedfarm.runs.own_job import read_own_job

    with (
        (out / REQUESTS).open("rb") as file,
        replacing(out / "output.jsonl") as output,
        replacing(out / "errors.jsonl") as errors,
        ExitStack() as stack,
    ):
        own = read_own_job(out / VECTORS)
        chunks: Iterator[Chunk] = iter(())
        job = own.name if own is not None else ""
        with suppress(NotBegun):
            reader = stack.enter_context(OutputReader(out / VECTORS))
            job, chunks = reader.job or job, read_chunks(reader)
        planned = map(msgspec.json.Decoder(Planned).decode, file)
        lengths = _lengths(out / CORPUS, job, model, settings)
        return assemble(job, model, planned, chunks, lengths, (output, errors))


def _lengths(corpus: Path, job: str, model: str, settings: Settings) -> Iterator[int]:
    """Yield the tokens of each chunk, as the workers have counted and cut them."""
    from embedfarm.contract.broker import closing_client
    from embedfarm.contract.farm_client import FarmClient
    from embedfarm.contract.model_files import find_local
    from embedfarm.contract.token_ids import TokenEncoder
    from embedfarm.readers import CorpusOptions, fail_on_bad_row, read_corpus

    with closing_client(settings.redis_url) as client:
        tokenisation = FarmClient(client).reports.tokenisation(job)
    directory = find_local(model, settings.model_cache)
    encoder = TokenEncoder.open(directory, tokenisation) if directory and tokenisation else None
    for rows in read_corpus([str(corpus)], CorpusOptions(), fail_on_bad_row):
        for first in range(0, len(rows.texts), BATCH_ROWS):
            texts = rows.texts[first : first + BATCH_ROWS]
            if encoder is not None:
                yield from encoder.encode(texts)[1].tolist()
            else:
                yield from (max(1, len(text.encode()) // BYTES_PER_TOKEN) for text in texts)
