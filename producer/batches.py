"""Files of requests, as OpenAI's batch protocol has them, made into a corpus."""

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, BinaryIO, Final, Literal, NamedTuple

import msgspec

from embedfarm.batches import ENDPOINT, Planned
from producer.readers.items import CorpusError
from producer.readers.source import number_lines

DIMENSIONS_MAX: Final = 1 << 16

Decode = Callable[[Sequence[Sequence[int]]], list[str]]
"""Texts of token ids; ValueError where no text has these."""


class _Line(msgspec.Struct):
    """A request."""

    custom_id: Annotated[str, msgspec.Meta(max_length=512)]
    method: str
    url: str
    body: msgspec.Raw


class _Body(msgspec.Struct):
    """What it asks for."""

    model: str
    input: str | list[str | int | list[Annotated[int, msgspec.Meta(ge=0)]]]
    dimensions: Annotated[int, msgspec.Meta(ge=1, le=DIMENSIONS_MAX)] | None = None
    encoding_format: Literal["float", "base64"] = "float"
    user: str | None = None


class _Model(msgspec.Struct):
    """No more of a body than its model."""

    model: str


class Counts(NamedTuple):
    """Requests of a file, and those of them that cannot be done."""

    total: int
    bad: int


class _Refused(ValueError):
    """A request that cannot be done; its arguments are a code and a sentence."""


@dataclass
class Planner:
    """Reads requests of one model.

    Attributes:
        model: What the batch embeds with.
        models: What requests may name at all.
        decode: For requests of token ids.
        inputs_max: Most inputs of a request.
    """

    model: str
    models: Collection[str]
    decode: Decode
    inputs_max: int
    _seen: set[str] = field(default_factory=set)

    def read(self, line: bytes) -> tuple[Planned, list[str]]:
        """What a line asks for, or what is wrong with it, and its texts."""
        custom_id = None
        try:
            request = _decode(line, _Line, "invalid_json_line")
            custom_id = request.custom_id
            self._check(request)
            body = _decode(request.body, _Body, "invalid_request")
            texts = self._texts(body)
        except _Refused as error:
            code, message = error.args
            return Planned(custom_id=custom_id, code=code, message=message), []
        return Planned(
            custom_id=custom_id,
            chunks=len(texts),
            dimensions=body.dimensions or 0,
            base64=body.encoding_format == "base64",
        ), texts

    def _check(self, request: _Line) -> None:
        if request.custom_id in self._seen:
            raise _Refused("duplicate_custom_id", "another line has this custom_id")
        self._seen.add(request.custom_id)
        if (request.method, request.url) != ("POST", ENDPOINT):
            raise _Refused("invalid_url", f"a request of this batch is POST {ENDPOINT}")

    def _texts(self, body: _Body) -> list[str]:
        if body.model not in self.models:
            raise _Refused("model_not_found", f"model {body.model!r} is not served here")
        if body.model != self.model:
            raise _Refused("mismatched_model", f"the model of this batch is {self.model}")
        given: Any = [body.input] if isinstance(body.input, str) else body.input
        if given and all(isinstance(each, int) for each in given):
            given = [given]
        if not 0 < len(given) <= self.inputs_max:
            raise _Refused("invalid_request", f"input: 1 to {self.inputs_max} are taken")
        kinds = {type(each) for each in given}
        if kinds == {str}:
            return list(given)
        if kinds != {list}:
            raise _Refused("invalid_request", "input: texts or token ids, and not both")
        try:
            return self.decode(given)
        except ValueError as error:
            raise _Refused("invalid_request", str(error)) from error


def _decode(data: bytes | msgspec.Raw, kind: type[Any], code: str) -> Any:  # noqa: ANN401 -- one of that kind
    try:
        return msgspec.json.decode(data, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise _Refused(code, str(error)) from error


def plan(source: Path, planner: Planner, corpus: BinaryIO, planned: BinaryIO, most: int) -> Counts:
    """Write the texts of all requests as JSON Lines, and what each request is.

    Blank lines are no requests.

    Raises:
        CorpusError: There is no request, or there are more than `most`.
        OSError: A file cannot be read or written.
    """
    total = bad = 0
    for line in _lines(source):
        total += 1
        if total > most:
            raise CorpusError(f"a batch has at most {most:,} requests")
        request, texts = planner.read(line)
        bad += bool(request.code)
        planned.write(msgspec.json.encode(request) + b"\n")
        corpus.writelines(msgspec.json.encode({"text": text}) + b"\n" for text in texts)
    if not total:
        raise CorpusError("there is no request in the file")
    return Counts(total, bad)


def find_model(source: Path, models: Sequence[str], most: int) -> str:
    """The model of a batch: that of the first request which names one of these, else the first.

    Raises:
        CorpusError: A line has no end.
        OSError: The file cannot be read.
    """
    for _, line in zip(range(most), _lines(source), strict=False):
        try:
            request = msgspec.json.decode(line, type=_Line)
            model = msgspec.json.decode(request.body, type=_Model).model
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            continue
        if model in models:
            return model
    return models[0]


def _lines(source: Path) -> Iterator[bytes]:
    with source.open("rb") as file:
        for _, line in number_lines(file, source.name):
            if not line.isspace():
                yield line
