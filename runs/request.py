"""Requests of `embedfarm embed`, and how their corpus is found and read again later."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from embedfarm.collector.column_check import ColumnCheck
from embedfarm.collector.manifest import (
    Manifest,
    OutputError,
    Part,
    read_manifest,
)
from embedfarm.collector.output_directory import State, check_sizes, read_state
from embedfarm.collector.request_comparison import compare_requests
from embedfarm.collector.sinks import ColumnSink, open_sink
from embedfarm.collector.source_check import PrefixCheck, SourceChanged
from embedfarm.contract import model_files
from embedfarm.contract.formatting import counted
from embedfarm.contract.job_spec import JOB_DEFAULTS, JOB_FIELDS, Decides, JobSpec, decided_by
from embedfarm.contract.records import Rows, text_checksums
from embedfarm.contract.redaction import HIDDEN, is_hidden, name_source
from embedfarm.contract.settings import Settings
from embedfarm.readers import BadRow, CorpusOptions, fail_on_bad_row, read_corpus
from embedfarm.readers.directory import locate
from embedfarm.readers.fields import ColumnQueue
from embedfarm.readers.lance import split_version
from embedfarm.readers.recoded import UTF_8, canonical
from embedfarm.readers.source import is_lance


@dataclass(frozen=True)
class Request:
    """What to embed and how; each output directory belongs to one request.

    Attributes:
        sources: Files, directories, URLs, or "-".
        options: How the sources are read.
        skip_bad_rows: Whether a bad row is listed and left out, instead of ending the run.
        spec: What the job asks for.
        sink: "parquet", "npy", "jsonl", "stored", or a sink that an installed package brings.
    """

    sources: tuple[str, ...]
    options: CorpusOptions
    skip_bad_rows: bool
    spec: JobSpec
    sink: str

    def identity(self) -> dict[str, Any]:
        """Return everything that decides about the output, for comparison with another run.

        This is kept, and has no secrets: a URL that has some cannot be read by it.
        """
        spec, said = self.spec, decided_by(self.spec, Decides.STORAGE)
        left_out = {
            name
            for name, field in JOB_FIELDS.items()
            if field.later and said.get(name) == JOB_DEFAULTS[name]
        }
        return {
            **{name: value for name, value in said.items() if name not in left_out},
            "sources": [_absolute(source) for source in self.sources],
            **{f"read_{name}": value for name, value in self._reading().items()},
            "skip_bad_rows": self.skip_bad_rows,
            "ranges": np.frombuffer(spec.ranges, "<f4").reshape(2, -1).tolist(),
            "lsh_bits": spec.lsh_bits if spec.vector_dtype == "lsh" else 0,
            "format": self.sink,
        }

    @property
    def corpora(self) -> list[str]:
        """The sources, whichever version of them is read."""
        return [split_version(source)[0] for source in self.sources]

    def of_texts(self, corpus: Path, text_field: str, keep: Sequence[str]) -> "Request":
        """Return a request that does the same with texts in a file, beside columns to keep."""
        suffix = corpus.suffix.removeprefix(".")
        options = CorpusOptions(text_field=text_field, keep=tuple(keep), format=suffix)
        return Request((str(corpus),), options, skip_bad_rows=False, spec=self.spec, sink="parquet")

    def _reading(self) -> dict[str, Any]:
        """Return the options that decide what is read; the tokenizer follows from the model.

        Outputs of before there were encodings are those of requests for UTF-8; and likewise for a
        template, and columns to keep.
        """
        encoding = canonical(self.options.encoding)
        reading = asdict(self.options) | {"encoding": encoding}
        left_out = {"tokenizer_file"}
        left_out |= {"encoding"} if encoding == UTF_8 else set()
        left_out |= {name for name in ("template", "query", "keep") if not reading[name]}
        return {k: v for k, v in reading.items() if k not in left_out}


def read_again(
    identity: Mapping[str, Any], sources: Sequence[str], settings: Settings
) -> Iterator[Rows]:
    """Read the rows of a corpus as for the output that has this `Request.identity`.

    A Lance dataset without a version is read in that of the output.
    """
    sources = [same_version(each, identity["sources"]) for each in sources]
    options = options_of(identity, sources, settings)
    return read_corpus(
        sources, options, (lambda _: None) if identity["skip_bad_rows"] else fail_on_bad_row
    )


def request_of(manifest: Manifest, settings: Settings) -> Request:
    """Return the request that a finished output was made for, to be done by the fastest engine.

    Raises:
        ModelError: The model has no tokenizer, by which its sources must be cut.
    """
    said = manifest.settings
    options = options_of(said, said["sources"], settings)
    sources, spec = tuple(said["sources"]), spec_of(manifest)
    return Request(sources, options, said["skip_bad_rows"], spec, said["format"])


def spec_of(manifest: Manifest) -> JobSpec:
    """Return the specification that a finished output was made by, for the fastest engine."""
    said = manifest.settings
    same = {name: said[name] for name in JobSpec.__struct_fields__ if name in said}
    same |= {"ranges": np.asarray(said["ranges"], "<f4").tobytes()}
    if not said["lsh_bits"]:
        del same["lsh_bits"]
    return JobSpec(**same)


def options_of(
    identity: Mapping[str, Any], sources: Sequence[str], settings: Settings
) -> CorpusOptions:
    """Return how the sources of an output are read.

    Raises:
        OutputError: A source was a URL with secrets, which are not kept.
    """
    for source in filter(is_hidden, sources):
        raise OutputError(
            f"{source} cannot be read again, since {HIDDEN} stands for what is not kept: "
            "give the command that made the output the whole URL"
        )
    reading = {
        name.removeprefix("read_"): value
        for name, value in identity.items()
        if name.startswith("read_")
    }
    options = CorpusOptions(**reading | {"keep": tuple(reading.get("keep", ()))})
    tokenizer = tokenizer_file(sources, identity["model"], settings, options.glob)
    return replace(options, tokenizer_file=tokenizer)


def same_rows(rows: Iterable[Rows], parts: Iterable[Part]) -> Iterator[Rows]:
    """Yield the rows of a source from its first one on, as long as the parts were made of them.

    Raises:
        SourceChanged: A part was made from other texts.
    """
    check = PrefixCheck(parts)
    for each in rows:
        check.feed(text_checksums(each.texts), each.ids)
        yield each


def tokenizer_file(
    sources: Sequence[str], model: str, settings: Settings, glob: str = CorpusOptions.glob
) -> str | None:
    """Return the path of the model's tokenizer.json if a source is a directory of documents.

    Raises:
        ModelError: The model has no tokenizer.json.
    """
    directories = [source for source in sources if Path(source).is_dir()]
    if not any(each.is_directory for source in directories for each in locate(source, glob)):
        return None
    if model_files.is_null(model):
        raise model_files.ModelError("a null model has no tokenizer to cut a directory's files by")
    path = model_files.resolve(model, settings.model_cache) / "tokenizer.json"
    if not path.exists():
        raise model_files.ModelError(f"{path}, by which a directory's files are cut, is missing")
    return str(path)


def check_finished(request: Request, out: Path) -> Manifest | None:
    """Return the manifest of an output that is finished already; None when there is work to do.

    Raises:
        OutputError: The output is of another request, has lost a file, or its source has changed
            since.
    """
    if read_state(out) is not State.FINISHED:
        return None
    manifest = read_manifest(out)
    check_sizes(out, (span for part in manifest.parts for span in part.spans(out)))
    compare_requests(out, manifest.settings, request.identity())
    if manifest.source["files"] != file_facts(request.sources) or not manifest.source["files"]:
        _compare(request, out, manifest)
    return manifest


def _compare(request: Request, out: Path, manifest: Manifest) -> None:
    """Compare the rows of the source with those that a finished output was made from.

    Bad rows may have been taken away: each row that is left has its vector.
    """
    check, bad_rows, where = PrefixCheck(manifest.parts), 0, ""
    columns, held = columns_of_output(out, manifest), ColumnQueue()

    def count_bad(_: BadRow) -> None:
        nonlocal bad_rows
        bad_rows += 1

    try:
        for rows in read_corpus(
            request.sources,
            request.options,
            count_bad,
            columns=None if columns is None else held,
        ):
            if columns is not None:
                columns.feed_all(held)
            check.feed(text_checksums(rows.texts), rows.ids)
        if check.finish() != manifest.count:
            where = f"more rows than {manifest.count:,}"
        elif bad_rows > manifest.skipped:
            where = f"{counted(bad_rows, 'bad row')} instead of {manifest.skipped:,}"
    except SourceChanged as error:
        where = "other texts, ids or columns" if columns else "other texts or ids"
        if error.part is not None:
            where += f" in rows {error.part.start} to {error.part.end - 1}"
    if where:
        raise SourceChanged(
            f"{out} is finished, and the source has {where} now: embed it into another directory "
            "(--out), or restore it"
        )


def columns_of_output(out: Path, manifest: Manifest) -> ColumnCheck | None:
    """Return what compares columns with those that a finished output has; None if it has none."""
    sink = open_sink(manifest.format, out)
    if not (manifest.settings.get("read_keep") and isinstance(sink, ColumnSink)):
        return None
    return ColumnCheck(lambda part: sink.read_columns(part, manifest.layout), manifest.parts)


def same_version(source: str, before: Sequence[str]) -> str:
    """Return a Lance dataset with the version that it has among the sources of an output.

    A source that names a version, is not among them, or is none of Lance's is returned as it is.

    Args:
        source: Path or URL.
        before: Sources by their names in records (`Request.identity`).
    """
    if not is_lance(source) or split_version(source)[1] is not None:
        return source
    place = source.rstrip("/")
    versions = [split_version(each) for each in before]
    said = [version for each, version in versions if each == _absolute(place)]
    return f"{place}@v{said[0]}" if said and said[0] is not None else source


def _absolute(source: str) -> str:
    place = split_version(source)[0]
    if not Path(place).exists():
        return name_source(source)
    return f"{Path(place).resolve()}{source.removeprefix(place)}"


def file_facts(sources: Sequence[str]) -> dict[str, list[int]]:
    """Return size in bytes, times of change in ns and inode of the sources, if all are local files.

    Nothing is known of a directory, a glob or a URL: with one of them there are no facts at all.
    """
    files = [Path(source).resolve() for source in sources]
    if not all(file.is_file() for file in files):
        return {}
    found = {str(file): file.stat() for file in files}
    return {
        name: [each.st_size, each.st_mtime_ns, each.st_ctime_ns, each.st_ino]
        for name, each in found.items()
    }
