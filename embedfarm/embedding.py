"""`embedfarm.embed`: a corpus in, vectors in order out, from Python."""

import contextlib
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, Protocol, TypeAlias, TypedDict, TypeVar, Unpack

from embedfarm.collector.output_directory import State, read_state
from embedfarm.collector.store_export import Others
from embedfarm.collector.stores.store import StoreError
from embedfarm.contract.job_spec import JobSpec
from embedfarm.contract.outlook import OutlookReader
from embedfarm.contract.records import Heartbeat
from embedfarm.contract.scheduling_terms import TermChanges, Terms
from embedfarm.contract.settings import DEFAULT_MODEL, Settings
from embedfarm.contract.status import JobStatus
from embedfarm.corpora import CORPUS_FILE, Corpus, as_sources
from embedfarm.outputs import Embeddings
from embedfarm.readers import CorpusOptions
from embedfarm.runs.completion import CompletedOutput, complete
from embedfarm.runs.own_job import JOB_ID_FILE
from embedfarm.runs.place import Place
from embedfarm.runs.request import Request, tokenizer_file
from embedfarm.runs.run import Show
from embedfarm.runs.store_feed import Destination, find_destination

T = TypeVar("T")
Progress: TypeAlias = Callable[[JobStatus, Sequence[Heartbeat]], object]


class WarmFarm(Protocol):
    """A farm that is used again and again, such as `embedfarm.Farm`."""

    devices: str
    workers: int

    @property
    def settings(self) -> Settings:
        """The settings of the environment, with the farm's server."""


class JobFields(TypedDict, total=False):
    """Fields of a job beside its model; `embedfarm embed --help` says what each of them does."""

    dtype: str
    vector_dtype: str
    prompt: str
    prompt_name: str
    task: str
    max_length: int
    normalize: bool
    dimensions: int
    engine: str
    long: str
    long_overlap: int
    lsh_bits: int
    ranges: bytes
    stored: str
    texts_from: str


class OutputOptions(TypedDict, total=False):
    """What an output takes from another one, and where its vectors go beside the files.

    Attributes:
        by_reference: Whether parts of the first output that is reused are taken as links to their
            files, where the corpus has the same rows.
        to: URL of the collection, such as "qdrant://localhost:6333#documents", or a name in the
            setting `stores`.
        others: What becomes of rows in the collection that are not of the output.
    """

    by_reference: bool
    to: str
    others: Others


class JobOptions(JobFields, TermChanges, OutputOptions, total=False):
    """Fields of a job, its terms (`contract.scheduling_terms.Terms`), and options of its output."""


@dataclass(frozen=True)
class Reading:
    """How a corpus is read.

    Attributes:
        text_field: Column or key of the text.
        text: Text made of several fields, such as "{title}: {body}", in place of that of one field.
        id_field: Column or key of the id; None for a corpus without ids.
        query: Query that gives the rows of a database; they come in the order of `id_field`.
        keep: Columns that stay beside the vectors in the output, ("all",) for every one: of a
            table, of rows, or of files; of JSON and CSV "year:int64" is a number, "year" a string.
        format: Format of files, None to go by their names.
        encoding: Encoding of files that are not UTF-8, such as "cp1252" or "utf-16".
        on_bad_row: "fail" ends the run over a row that cannot be read, "skip" lists it.
    """

    text_field: str = "text"
    text: str | None = None
    id_field: str | None = None
    query: str | None = None
    keep: Sequence[str] = ()
    format: str | None = None
    encoding: str = "utf-8"
    on_bad_row: Literal["fail", "skip"] = "fail"


def embed(  # noqa: PLR0913 # all but the corpus are options, by name
    corpus: Corpus,
    *,
    out: str | Path | None = None,
    model: str = DEFAULT_MODEL,
    farm: "WarmFarm | str | None" = None,
    reading: Reading = Reading(),  # it cannot change
    output_format: str = "parquet",
    job_id: str = "",
    embed_changed: bool = False,
    retry_failed: bool = False,
    reuse: Sequence[str | Path] = (),
    deduplicate: bool = False,
    progress: bool | Progress = True,
    **fields: Unpack[JobOptions],
) -> Embeddings:
    """Embed a corpus, and return its vectors in the order of the corpus.

    This is what `embedfarm embed` does. It blocks until the output is finished. An interrupted call
    (Ctrl-C, in a notebook too) stops cleanly, and the same call with the same `out` goes on from
    there; of a finished output it only opens what is there.

    Args:
        corpus: A path, URL or glob, or several paths; a table (pandas, polars, Arrow) or a data set
            of Hugging Face with a column of texts; or texts, or rows as mappings, from any
            iterable.
        out: Directory of the output; None for a temporary one that goes with the answer.
        model: Name or path of a sentence-transformers model.
        farm: A farm, or the URL of the server of one; None for a private one as long as this takes.
        reading: How the corpus is read.
        output_format: "parquet", "npy", "jsonl", "stored" for lists of what is stored past the
            server, or a sink that an installed package brings.
        job_id: Id of the job on the farm, "" for a new one.
        embed_changed: Whether to drop what is on disk from the first part on of which the corpus
            has other rows now.
        retry_failed: Whether the failed chunks of a finished output are tried again.
        reuse: Finished outputs whose vectors are taken for the texts that they have: those first
            that are preferred. Each other text is embedded once.
        deduplicate: Whether each text is embedded once without such outputs, too.
        progress: Whether to draw a progress bar (in a notebook, too), or a function that is called
            about twice a second with the job's status and the workers' heartbeats.
        fields: Other fields of the job; its terms, such as `labels`, or `max_hours` and `max_cost`,
            at which it pauses itself (on a private farm: this ends with LimitReached); and
            `OutputOptions`: `by_reference` beside `reuse`, and `to`, a vector store that gets the
            vectors as well, with `others`. What it got is in `exported` of the answer.

    Raises:
        CorpusError: The corpus cannot be read.
        OutputError: `out` has another corpus or other settings, or is finished and of other files
            of the model; SourceChanged: rows have changed.
        ModelRefused: No worker can embed the job.
        FarmFull: The farm takes no new job now.
        StoreError: The store refuses or stays away. If that is not before anything is embedded, the
            output is finished, and the same call goes on with the store.
        KeyboardInterrupt: Somebody interrupted it; the output can be resumed.
        EmbedfarmError: Something else that somebody can mend; all of these are one.
        redis.RedisError, OSError: The server, or the disk, refused.
    """
    temporary = tempfile.TemporaryDirectory(prefix="embedfarm-") if out is None else None
    try:
        path = Path(temporary.name if temporary is not None else str(out))
        settings, devices, workers = _place_of(farm)
        to = _destination_of(fields, out, settings)
        options = CorpusOptions(
            text_field=reading.text_field,
            template=reading.text,
            query=reading.query,
            id_field=reading.id_field,
            keep=(reading.keep,) if isinstance(reading.keep, str) else tuple(reading.keep),
            format=reading.format,
            encoding=reading.encoding,
        )
        path.mkdir(parents=True, exist_ok=True)
        sources, options = as_sources(corpus, path, options)
        tokenizer = tokenizer_file(sources, model, settings)
        options = replace(options, tokenizer_file=tokenizer)
        spec, terms = _spec_and_terms(model, path.name, fields)
        request = Request(sources, options, reading.on_bad_row == "skip", spec, output_format)
        place = Place(
            path, settings, devices, workers, job_id, "", embed_changed,
            by_reference=fields.get("by_reference", False),
        )  # fmt: skip

        def run(stop: threading.Event) -> CompletedOutput:
            return complete(
                request, place, stop, _shown(progress), terms, retry=retry_failed,
                reuse=[Path(each) for each in reuse], deduplicate=deduplicate, to=to,
            )  # fmt: skip

        try:
            completed = interruptible(run)
        finally:
            _remove_corpus(path)
        return Embeddings(path, temporary, completed.exported)
    except BaseException:
        if temporary is not None:
            temporary.cleanup()
        raise


def _spec_and_terms(model: str, name: str, given: JobOptions) -> tuple[JobSpec, Terms]:
    """Return the specification of a job and its terms, out of what the caller gave together."""
    known = Terms.__dataclass_fields__
    others = known.keys() | OutputOptions.__annotations__.keys()
    fields: dict[str, Any] = {key: each for key, each in given.items() if key not in others}
    terms: dict[str, Any] = {key: each for key, each in given.items() if key in known}
    return JobSpec(model=model, name=name, **fields), Terms(**terms)


def _destination_of(
    given: OutputOptions, out: str | Path | None, settings: Settings
) -> Destination | None:
    """Return where vectors go beside their output; None where they go nowhere else.

    Raises:
        StoreError: The setting `stores` has no such name, or the output would go with the answer.
    """
    if not (to := given.get("to", "")):
        return None
    if out is None:
        raise StoreError(
            "a store is filled from the files of an output, which note what it has: give out, too"
        )
    return find_destination(to, given.get("others", "refuse"), settings)


def interruptible(work: Callable[[threading.Event], T]) -> T:
    """Do work in a thread, and stop it cleanly when the caller is interrupted.

    Whatever thread calls this, only what the work does itself is in the way of an interrupt.

    Raises:
        KeyboardInterrupt: The caller was interrupted; the work has stopped.
    """
    stop, ended = threading.Event(), threading.Event()
    answers: list[T] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            answers.append(work(stop))
        except BaseException as error:  # noqa: BLE001 # raised below, in the caller's thread
            errors.append(error)
        ended.set()

    threading.Thread(target=run, name="embedfarm", daemon=True).start()
    try:
        ended.wait()
    except KeyboardInterrupt:
        stop.set()
        ended.wait()
        raise
    for error in errors:
        raise error
    return answers[0]


def _place_of(farm: "WarmFarm | str | None") -> tuple[Settings, str, int]:
    """Return the settings with the server's URL, and the devices and workers of a private farm."""
    if farm is None:
        return Settings(redis_url=""), "all", 0
    if isinstance(farm, str):
        return Settings(redis_url=farm), "all", 0
    return farm.settings, farm.devices, farm.workers


def _shown(progress: bool | Progress) -> AbstractContextManager[Show]:  # noqa: FBT001 # as `embed` has it
    """Return what shows a run: a progress bar, a function of the caller's, or nothing."""
    if callable(progress):
        return contextlib.nullcontext(lambda status, workers, _: progress(status, workers))
    return _progress_bar() if progress else contextlib.nullcontext(_show_nothing)


def _show_nothing(*_news: object) -> None:
    """Take the news of a run, and show nothing of it."""


@contextlib.contextmanager
def _progress_bar() -> Iterator[Show]:
    """Draw chunks that are done, as a widget where there are any."""
    from tqdm.auto import tqdm  # noqa: PLC0415 # a notebook's widgets take their time to import

    with tqdm(unit=" chunks", desc="embedding") as bar:

        def show(status: JobStatus, workers: Sequence[Heartbeat], _: OutlookReader) -> None:
            if status.chunk_count >= 0:
                bar.total = status.chunk_count
            bar.n = status.done
            bar.set_postfix(workers=len(workers), failed=status.chunks_failed, refresh=False)
            bar.refresh()

        yield show


def _remove_corpus(out: Path) -> None:
    """Remove a corpus that was written beside an output that had been finished before."""
    if read_state(out) is State.FINISHED and not (out / JOB_ID_FILE).exists():
        with contextlib.suppress(OSError):
            (out / CORPUS_FILE).unlink()
            (out / CORPUS_FILE).parent.rmdir()
