"""Bodies of `POST /v1/jobs` in their three forms: texts, a file, or the path or URL of a corpus."""

from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import PurePosixPath, PureWindowsPath
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, Self

import msgspec
from fastapi import HTTPException, Request
from fastapi.exceptions import RequestValidationError
from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    StringConstraints,
    ValidationError,
    create_model,
    model_validator,
)
from starlette.concurrency import run_in_threadpool

from embedfarm.collector.sinks import sink_names
from embedfarm.contract.formatting import one_line
from embedfarm.contract.job_spec import (
    CHARACTERS_MAX,
    JOB_DEFAULTS,
    JOB_FIELDS,
    JOB_TYPES,
    JobField,
    JobSpec,
    job_choices,
)
from embedfarm.contract.scheduling_terms import (
    DEADLINE_MS_MAX,
    LABEL_PATTERN,
    LABELS_MAX,
    LIMIT_MAX,
    TENANT_CHARACTERS_MAX,
    WEIGHT_MAX,
    Terms,
    read_deadline,
    read_labels,
)
from embedfarm.readers.corpus import FORMATS, SUFFIXES
from embedfarm.readers.fields import parse_template
from embedfarm.readers.recoded import UTF_8, is_encoding
from embedfarm.readers.source import COMPRESSIONS, split_compression
from embedfarm.web.http.bodies import media_type, read_json
from embedfarm.web.http.schemas import TEXTS, TEXTS_WITH_IDS, WHOLE, Many, shapes
from embedfarm.web.jobs.uploads import Upload, receive_file, receive_form, receiving
from embedfarm.web.services import Services

REUSED_MAX: Final = 16  # jobs whose vectors another one may take
NO_NUL: Final = r"^[^\x00]*$"
NOT_IN_BODIES: Final = frozenset({"ranges"})  # which are a file of the command line's
REFUSED_WORDS: Final = {"vector_dtype": ("int8",)}  # they need ranges
JSON: Final = "application/json"
FORM: Final = "multipart/form-data"
FILE_TYPES: Final = {
    "application/octet-stream": "",
    "application/jsonl": "jsonl",
    "application/x-ndjson": "jsonl",
    "text/csv": "csv",
    "text/tab-separated-values": "tsv",
    "text/plain": "txt",
    "application/vnd.apache.parquet": "parquet",
    "application/vnd.apache.arrow.file": "arrow",
    "application/vnd.apache.arrow.stream": "arrow",
}
"""Media types of a body that is a corpus, and the format that each of them means."""

if TYPE_CHECKING:
    SinkName = str
else:  # the sinks that are installed
    SinkName = Literal[sink_names()]

_ENCODINGS: Final = {"": "", "identity": ""} | {name: end for end, name in COMPRESSIONS.items()}

Words = Annotated[str, StringConstraints(max_length=CHARACTERS_MAX, pattern=NO_NUL)]
Tenant = Annotated[str, StringConstraints(max_length=TENANT_CHARACTERS_MAX)]

Label = Annotated[str, StringConstraints(pattern=rf"^{LABEL_PATTERN}$")]
JobIds = Annotated[
    str,
    StringConstraints(pattern=rf"^([0-9a-f]{{32}}(,[0-9a-f]{{32}}){{0,{REUSED_MAX - 1}}})?$"),
]
Labels = Annotated[
    str,
    StringConstraints(pattern=rf"^({LABEL_PATTERN}(,{LABEL_PATTERN}){{0,{LABELS_MAX - 1}}})?$"),
]


class TermsGiven(BaseModel):
    """Terms on which a job shares the farm with others."""

    model_config = ConfigDict(extra="forbid")

    priority: Annotated[
        int, Field(ge=0, le=2, description="0 normal, 1 high, 2 urgent."), WHOLE
    ] = 0
    tenant: Tenant = Field(default="", description="For whom it is done.")
    weight: Annotated[
        int, Field(ge=1, le=WEIGHT_MAX, description="Beside the tenant's others."), WHOLE
    ] = 1
    deadline_ms: Annotated[
        int, Field(ge=0, le=DEADLINE_MS_MAX, description="Unix time in ms; 0: none."), WHOLE
    ] = 0

    labels: Labels = Field(default="", description="Labels to find it by, with commas between.")
    max_hours: float = Field(
        default=0.0, ge=0, le=LIMIT_MAX, description="Device-hours until it pauses itself; 0: any."
    )
    max_cost: float = Field(
        default=0.0, ge=0, le=LIMIT_MAX, description="Cost at which it pauses itself; 0: any."
    )

    @model_validator(mode="after")
    def _check_terms(self) -> Self:
        """Refuse terms that no scheduler could use."""
        self.terms()
        return self

    def terms(self) -> Terms:
        """Convert them to the farm's `Terms`."""
        return Terms(**self.model_dump(include=set(TermsGiven.model_fields)))


def choices_in_bodies(name: str) -> tuple[str, ...]:
    """Return what a field of a job may say in a body; () if anything."""
    return tuple(word for word in job_choices(name) if word not in REFUSED_WORDS.get(name, ()))


def _given(name: str, field: JobField) -> Any:  # noqa: ANN401 # a type
    """Return the type of a job's field in a body, with its limits and what it says."""
    about = Field(description=field.sentence)
    choices = choices_in_bodies(name)
    if choices:
        return Annotated[Literal[choices], about]
    if JOB_TYPES[name] is int:
        limits = Field(ge=field.least, le=field.most, multiple_of=field.step)
        return Annotated[int, limits, WHOLE, about]
    if JOB_TYPES[name] is str:
        pattern = None if name == "name" else NO_NUL  # which no command is given
        return Annotated[str, StringConstraints(max_length=field.most, pattern=pattern), about]
    return Annotated[JOB_TYPES[name], about]


_GIVEN: Final[dict[str, Any]] = {
    name: (_given(name, field), JOB_DEFAULTS.get(name, ""))
    for name, field in JOB_FIELDS.items()
    if name not in NOT_IN_BODIES
}
Given: Any = create_model("Given", __base__=TermsGiven, **_GIVEN)
"""The fields of a job as a body has them; without a model, it is the first one that is served."""


def _known_encoding(name: str) -> str:
    """Refuse an encoding that is unknown."""
    if not is_encoding(name):
        raise ValueError(f"{name!r} is no encoding of files")
    return name


def _known_template(template: str) -> str:
    """Refuse a text that cannot be made of fields."""
    if template:
        parse_template(template)
    return template


class EmbeddingOptions(Given):  # type: ignore[misc] # it is made of the table of fields
    """Options that say which vectors are wanted."""

    @model_validator(mode="after")
    def _check_prompt(self) -> Self:
        """Refuse two prompts."""
        if self.prompt and self.prompt_name:
            raise ValueError("prompt and prompt_name are two ways to say the same")
        return self

    def spec(self, model: str) -> JobSpec:
        """Convert the options to the `JobSpec` of a farm's job."""
        known = {each.name for each in msgspec.structs.fields(JobSpec)} - {"model"}
        return JobSpec(model=model, **self.model_dump(include=known))


class Options(EmbeddingOptions):
    """Options by which a corpus is read, embedded and stored, as `embedfarm embed` has them."""

    format: SinkName = Field(default="parquet", description="Of the output.")
    input_format: Literal["", "jsonl", "csv", "tsv", "parquet", "arrow", "txt"] = Field(
        default="", description="By default as the name or the type of the file says."
    )
    encoding: Annotated[Words, AfterValidator(_known_encoding)] = Field(
        default=UTF_8, description="Of files that are not UTF-8, such as cp1252 or utf-16."
    )
    text_field: Words = "text"
    text: Annotated[Words, AfterValidator(_known_template)] = Field(
        default="", description="Text made of several fields, such as '{title}: {body}'."
    )
    id_field: Words = ""
    keep: Words = Field(
        default="",
        description="Columns to keep beside the vectors, with commas, or all; year:int64 is typed.",
    )
    on_bad_row: Literal["fail", "skip"] = "fail"
    reuse: JobIds = Field(
        default="",
        description="Ids of finished jobs whose vectors are taken, with commas between.",
    )
    by_reference: bool = Field(default=False, description="Link unchanged parts of the first.")
    deduplicate: bool = Field(default=False, description="Embed each distinct text once.")
    to: Words = Field(default="", description="Vector store to fill, by its name on the farm.")
    others: Literal["refuse", "keep", "delete"] = Field(
        default="refuse", description="What becomes of rows in it that are not of this job."
    )
    webhook: Words = Field(default="", description="URL that is told how the job ended.")

    @model_validator(mode="after")
    def _check_fields(self) -> Self:
        """Refuse options that contradict one another."""
        if self.by_reference and not self.reuse:
            raise ValueError("by_reference takes parts of a job that reuse names")
        if self.text and self.text_field != "text":
            raise ValueError("text and text_field are two ways to say the same")
        if not self.text and self.text_field == self.id_field:
            raise ValueError(f"field {self.text_field!r} cannot be text and id at once")
        return self

    def merge(self, others: Mapping[str, Any]) -> Self:
        """Return these options, overruled by others.

        Raises:
            RequestValidationError: The others are no valid options.
        """
        given = self.model_dump(exclude_unset=True) | dict(others)
        try:
            merged: Self = type(self).model_validate(given)
        except ValidationError as error:
            raise RequestValidationError(error.errors()) from error
        return merged

    def for_task(self) -> dict[str, Any]:
        """Return the options for `producer.tasks.embed_corpus`, without those left at defaults."""
        others = {*TermsGiven.model_fields, "name", "model", "reuse"}
        options: dict[str, Any] = self.model_dump(exclude=others, exclude_defaults=True)
        return options


class TextWithId(BaseModel):
    """A text, and an id to keep with its vector."""

    model_config = ConfigDict(extra="forbid")

    text: str
    id: str


Texts = Annotated[
    Annotated[Many[str], Field(min_length=1), TEXTS]
    | Annotated[Many[TextWithId], Field(min_length=1), TEXTS_WITH_IDS],
    shapes("must be a list of texts, or of objects with a text and an id"),
]


def _drop_default(schema: dict[str, Any]) -> None:
    schema.pop("default", None)


NO_DEFAULT: Final = Field(json_schema_extra=_drop_default)
"""For a field that has to be given or left out: the value that it has then cannot be sent."""


class Submission(Options):
    """A corpus in JSON: texts, or the path or URL of a corpus that the farm may read."""

    model_config = ConfigDict(extra="forbid")

    texts: Annotated[Texts, NO_DEFAULT] = Field(default=[])
    source: Annotated[
        Words,
        Field(min_length=1, description="Below `ingest_roots`, or one of `ingest_urls`."),
        NO_DEFAULT,
    ] = ""

    @model_validator(mode="after")
    def _check_source(self) -> Self:
        """Refuse both texts and a source, and neither."""
        if ("texts" in self.model_fields_set) == ("source" in self.model_fields_set):
            raise ValueError("give texts or a source, and not both")
        return self

    def lines(self) -> Iterator[bytes]:
        """Yield the texts as JSON Lines."""
        for each in self.texts:
            row = {"text": each} if isinstance(each, str) else {"text": each.text, "id": each.id}
            yield msgspec.json.encode(row) + b"\n"


@dataclass(frozen=True)
class Order:
    """A job that is asked for, whatever form the request came in.

    Attributes:
        options: All options that were given.
        corpus: Path on the farm or URL of the corpus, or the name that an upload is to have.
        upload: The corpus that came with the request; None where `corpus` was there before.
        deadline: The deadline as a form has it, which may count from now; "" for none.
    """

    options: Options
    corpus: str
    upload: Upload | None
    deadline: str = ""

    def identity(self) -> list[Any]:
        """Return all in which one order differs from another: options, corpus and content.

        A deadline that counts from now is the same one later.
        """
        said = self.options.model_dump() | ({"deadline_ms": self.deadline} if self.deadline else {})
        return [said, self.corpus, "" if self.upload is None else self.upload.sha256]


@asynccontextmanager
async def reading(request: Request, services: Services, options: Options) -> AsyncIterator[Order]:
    """Give the order that a request makes; an upload that is not moved away in it is removed.

    Raises:
        HTTPException, RequestValidationError: The request makes no valid order.
    """
    media = media_type(request.headers)
    if media not in {JSON, FORM, *FILE_TYPES}:
        raise HTTPException(415, f"send {JSON}, {FORM}, or a file as {', '.join(FILE_TYPES)}")
    async with receiving(request, services) as upload:
        if media == JSON:
            yield await _read_json(request, upload, options)
        elif media == FORM:
            given = await receive_form(request, upload)
            options = options.merge(_read_fields(given, upload.filename))
            corpus = name_corpus(upload.filename, options.input_format)
            yield Order(options, corpus, upload, given.get("deadline", ""))
        else:
            corpus = _name_body(request, options.input_format or FILE_TYPES[media])
            await receive_file(request, upload)
            yield Order(options, corpus, upload)


def _read_fields(given: Mapping[str, str], filename: str) -> dict[str, str]:
    """Return the options in the fields of a form.

    A file's name becomes the job's where the form has none, and a deadline may be one for people,
    such as 2h.

    Raises:
        HTTPException: The deadline is none, or a label is.
    """
    fields = {name: value for name, value in given.items() if name != "deadline"}
    try:
        if given.get("deadline"):
            fields["deadline_ms"] = str(read_deadline(given["deadline"]))
        if "labels" in fields:
            fields["labels"] = read_labels(fields["labels"])
    except ValueError as error:
        raise HTTPException(422, str(error)) from error
    if not fields.get("name"):
        fields["name"] = one_line(PureWindowsPath(filename).name, JOB_FIELDS["name"].most)
    return fields


async def _read_json(request: Request, upload: Upload, options: Options) -> Order:
    asked = await read_json(request, _check)
    given = asked.model_dump(exclude_unset=True, exclude={"texts", "source"})
    options = options.merge(given)
    if asked.source:
        return Order(options, asked.source, None)
    ids = {"id_field": "id"} if isinstance(asked.texts[0], TextWithId) else {"id_field": ""}
    await run_in_threadpool(_write, asked, upload)
    return Order(
        options.merge({"text_field": "text", "encoding": UTF_8, **ids}), "input.jsonl", upload
    )


def _check(value: object) -> tuple[Submission | None, list[Any]]:
    try:
        return Submission.model_validate(value, strict=True), []
    except ValidationError as error:
        return None, error.errors()


def _write(asked: Submission, upload: Upload) -> None:
    for line in asked.lines():
        upload.write(line)
    upload.close()


def _name_body(request: Request, chosen: str) -> str:
    """Name a body that is a file by its format and its Content-Encoding."""
    encoding = request.headers.get("content-encoding", "").lower()
    if encoding not in _ENCODINGS:
        raise HTTPException(
            415, f"content-encoding is one of {', '.join(filter(None, _ENCODINGS))}"
        )
    return name_corpus(f"input{_ENCODINGS[encoding]}", chosen)


def name_corpus(name: str, chosen: str) -> str:
    """Name an upload so that readers know its format; nothing of the sender's name stays in it.

    Args:
        name: Name that the sender gave it.
        chosen: Format of the upload, "" to go by the name; without an ending it is JSON Lines.

    Raises:
        HTTPException: The ending of the name is not read, or it is Parquet that was compressed.
    """
    stem, compression = split_compression(name.lower())
    suffix = PurePosixPath(stem).suffix
    kind = chosen or SUFFIXES.get(suffix, "" if suffix else "jsonl")
    if not kind:
        raise HTTPException(415, f"{suffix} is not read, but {', '.join(FORMATS)}")
    if kind == "parquet" and compression:
        raise HTTPException(415, "Parquet is read as it is, not compressed once more")
    ends = {name: end for end, name in COMPRESSIONS.items()}
    return f"input.{kind}{ends.get(compression or '', '')}"
