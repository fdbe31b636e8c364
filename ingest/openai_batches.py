"""Files of requests, as OpenAI's batch protocol has them, made into a corpus."""

import hashlib
from codecs import BOM_UTF8
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count, islice
from pathlib import Path
from typing import Annotated, Any, BinaryIO, Final, Literal, NamedTuple

import msgspec
import numpy as np

from embedfarm.contract.batch_requests import ENDPOINT, Planned
from embedfarm.contract.unreadable_records import name_once
from embedfarm.readers.items import CorpusError

DIMENSIONS_MAX: Final = 1 << 16
LINE_BYTES_MAX: Final = 8 << 20  # twice what a request may have that comes by itself
LOOKED_BYTES_MAX: Final = 64 << 20  # for a model
END: Final = np.dtype("<u8")
_planned: Final = msgspec.json.Decoder(Planned)

Decode = Callable[[Sequence[Sequence[int]]], list[str]]
"""Texts of token ids; ValueError where no text has these."""


class _RequestLine(msgspec.Struct):
    """A line of the file, which is one request."""

    custom_id: Annotated[str, msgspec.Meta(max_length=512)]
    method: str
    url: str
    body: msgspec.Raw


class _Body(msgspec.Struct):
    """The body of a request: its model, its input, and how it wants the vectors."""

    model: str
    input: str | list[str | int | list[int]]
    dimensions: Annotated[int, msgspec.Meta(ge=1, le=DIMENSIONS_MAX)] | None = None
    encoding_format: Literal["float", "base64"] | None = None
    user: str | None = None


class _Model(msgspec.Struct):
    """The part of a request's body that names its model."""

    model: str


class BatchPlan(NamedTuple):
    """Numbers of the requests of a file, and of those that cannot be done; which file and model.

    A plan of an older release has neither the model nor the SHA-256 of the file: both are "".
    """

    total: int
    bad: int
    model: str = ""
    sha256: str = ""


class _Refused(ValueError):
    """Raised when a request cannot be done; the arguments are a code and a sentence."""


@dataclass
class Planner:
    """Reads requests of one model.

    Attributes:
        model: Model that the batch embeds with.
        models: Models that requests may name at all.
        decode: Makes texts of the token ids in requests.
        inputs_max: Most inputs of a request.
    """

    model: str
    models: Collection[str]
    decode: Decode
    inputs_max: int
    _seen: set[str] = field(default_factory=set)

    def read(self, line: bytes) -> tuple[Planned, list[str]]:
        """Parse a line into a planned request, or the reason why it is refused, and its texts."""
        custom_id = None
        try:
            request = _decode(line, _RequestLine, "invalid_json_line")
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

    def _check(self, request: _RequestLine) -> None:
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


def plan(
    source: Path, planner: Planner, files: tuple[BinaryIO, BinaryIO, BinaryIO], most: int
) -> BatchPlan:
    """Write the texts of all requests as JSON Lines, and what each request is.

    Blank lines are no requests.

    Args:
        source: File of the requests.
        planner: Reads each of them.
        files: Open files for the texts, for a `Planned` in each line, and for the ends: for each
            request that is not bad the index after its last chunk, in 64 bits, little-endian.
        most: Most requests of a batch.

    Raises:
        CorpusError: There is no request, or there are more than `most`.
        OSError: A file cannot be read or written.
    """
    corpus, planned, ends = files
    sha256 = digest_of(source)
    total = bad = 0
    chunks: list[int] = []
    for number, line in _lines(source):
        total += 1
        if total > most:
            raise CorpusError(f"a batch has at most {most:,} requests")
        request, texts = planner.read(line)
        if request.code:
            bad += 1
            request.line = number
        else:
            chunks.append(len(texts))
        planned.write(msgspec.json.encode(request) + b"\n")
        corpus.writelines(msgspec.json.encode({"text": text}) + b"\n" for text in texts)
    if not total:
        raise CorpusError("there is no request in the file")
    ends.write(np.cumsum(chunks, dtype=END).tobytes())
    return BatchPlan(total, bad, planner.model, sha256)


def digest_of(source: Path) -> str:
    """Return the hexadecimal SHA-256 of a file of requests.

    Raises:
        OSError: The file cannot be read.
    """
    with source.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def refuse_all_bad(made: BatchPlan, planned: Path) -> None:
    """Refuse a batch of which no request can be done.

    Raises:
        CorpusError: So it is; the message says what is wrong with the first one.
    """
    if made.bad == made.total:
        first = "".join(f"; line {one.line}: {one.message}" for one in read_bad(planned, 1))
        raise CorpusError(f"none of the {made.total:,} requests can be done{first}")


def read_bad(planned: Path, most: int) -> list[Planned]:
    """Return the first bad requests of a plan, up to `most`; a damaged plan is logged: none."""
    try:
        with planned.open("rb") as file:
            return list(islice((one for one in map(_planned.decode, file) if one.code), most))
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError) as error:
        name_once(str(planned), str(error))
        return []


def count_done(ends: Path, chunks: int) -> int:
    """Return how many requests have an answer once `chunks` are embedded, in their order.

    Where their ends cannot be read, as those of a batch of an older release, it is none.
    """
    try:
        return int(np.searchsorted(np.fromfile(ends, END), chunks, "right"))
    except OSError:
        return 0


def find_model(source: Path, models: Sequence[str], most: int) -> str:
    """Return the model of the first request that names one of `models`, else the first of them.

    Raises:
        CorpusError: A line is too long for a request.
        OSError: The file cannot be read.
    """
    size = 0
    for _, line in islice(_lines(source), most):
        size += len(line)
        if size > LOOKED_BYTES_MAX:
            break
        try:
            request = msgspec.json.decode(line, type=_RequestLine)
            model = msgspec.json.decode(request.body, type=_Model).model
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            continue
        if model in models:
            return model
    return models[0]


def _lines(source: Path) -> Iterator[tuple[int, bytes]]:
    """Yield each line that is not blank, with its number from 1 on."""
    with source.open("rb") as file:
        file.seek(len(BOM_UTF8) if file.read(len(BOM_UTF8)) == BOM_UTF8 else 0)
        for number in count(1):
            line = file.readline(LINE_BYTES_MAX + 1)
            if not line:
                return
            if len(line) > LINE_BYTES_MAX:
                detail = f"{source.name} line {number}: longer than {LINE_BYTES_MAX >> 20} MiB"
                raise CorpusError(detail)
            if not line.isspace():
                yield number, line
