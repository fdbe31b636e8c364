"""Bodies that are files: written to the disk as they come, and never held in memory."""

import hashlib
import shutil
import sys
import uuid
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, Final

from fastapi import HTTPException, Request
from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header
from starlette.concurrency import run_in_threadpool
from starlette.requests import ClientDisconnect

from embedfarm.contract.durable_files import sync
from embedfarm.contract.private_directories import make_private
from embedfarm.contract.settings.profiles import MEBIBYTE
from embedfarm.ingest.job_directories import UPLOADS
from embedfarm.ingest.tenant_storage import upload_suffix
from embedfarm.web.services import Services

FIELDS_MAX: Final = 64
FIELD_BYTES_MAX: Final = 16_384
LOOK_BYTES: Final = 64 * MEBIBYTE  # between looks at the room on the disk


@dataclass
class Upload:
    """A file that is being received, or has been.

    Attributes:
        path: Where the file is; whoever wants to keep it moves it away.
        free_bytes_min: Bytes that must stay free on the disk.
        find_room: Function that returns how many bytes the sender may still have, or raises an
            HTTPException if these are fewer than its argument.
        filename: Name that the sender gave it, "" if there is none; never used as a path here.
        size_bytes: Bytes received so far.
    """

    path: Path
    free_bytes_min: int
    find_room: Callable[[int], int] = field(default=lambda _: sys.maxsize)
    filename: str = ""
    size_bytes: int = 0
    _digest: Any = field(default_factory=hashlib.sha256)
    _file: BinaryIO | None = None
    _granted: int = 0

    @property
    def sha256(self) -> str:
        """SHA-256 of the bytes that came so far, in hexadecimal."""
        return str(self._digest.hexdigest())

    def write(self, data: bytes) -> None:
        """Take the next bytes.

        Raises:
            HTTPException: The disk is too full, or its sender has too much on it.
        """
        if self._file is None:
            make_private(self.path.parent)
            self._file = self.path.open("xb")
        if self.size_bytes + len(data) > self._granted:
            room = min(LOOK_BYTES, self.need(len(data)))
            self._granted = self.size_bytes + max(room, len(data))
        self._digest.update(data)
        self._file.write(data)
        self.size_bytes += len(data)

    def need(self, count: int) -> int:
        """Make sure that so many bytes have room; return how many bytes the sender may still have.

        Raises:
            HTTPException: There is no room for them.
        """
        room = self.find_room(count)
        make_private(self.path.parent)
        if shutil.disk_usage(self.path.parent).free - count < self.free_bytes_min:
            raise HTTPException(507, "there is no room for it on the disk")
        return room

    def close(self) -> None:
        """Write all to the disk and close the file; an upload of no bytes is an empty file."""
        self.write(b"")
        assert self._file is not None  # noqa: S101 -- `write` opens it
        sync(self._file)
        self._file.close()

    def discard(self) -> None:
        """Remove the file, unless it was moved away."""
        if self._file is not None:
            self._file.close()
        self.path.unlink(missing_ok=True)


@asynccontextmanager
async def receiving(request: Request, services: Services) -> AsyncIterator[Upload]:
    """Give an upload to receive; a file that is not moved away in the block is removed.

    Raises:
        HTTPException: There is no room for what is announced, or the sender went away.
    """
    settings, name = services.settings, uuid.uuid4().hex
    if services.caller.tenant is not None:
        name += upload_suffix(services.caller.tenant)
    path = settings.jobs_path / UPLOADS / name
    upload = Upload(path, settings.http_disk_bytes_min, services.find_room)
    size = request.headers.get("content-length", "")
    try:
        await run_in_threadpool(upload.need, int(size) if size.isdecimal() else 1)
        yield upload
    except ClientDisconnect as error:
        raise HTTPException(400, "the upload broke off") from error
    finally:
        await run_in_threadpool(upload.discard)


async def receive_file(request: Request, upload: Upload) -> None:
    """Take the body as a file."""
    async for data in request.stream():
        await run_in_threadpool(upload.write, data)
    await run_in_threadpool(upload.close)


async def receive_form(request: Request, upload: Upload) -> dict[str, str]:
    """Take a multipart form with one file, in the field "file", and return its other fields.

    Raises:
        HTTPException: The body is no such form, or has too much in its fields.
    """
    _, options = parse_options_header(request.headers.get("content-type"))
    form = _Form(upload)
    try:
        parser = MultipartParser(options.get(b"boundary", b""), form.callbacks())
        async for data in request.stream():
            await run_in_threadpool(parser.write, data)
        parser.finalize()
    except FormParserError as error:
        raise HTTPException(422, f"not multipart/form-data: {error}") from error
    if not form.whole or not form.has_file:
        raise HTTPException(422, "the form has no file, in a field `file`, or no end")
    await run_in_threadpool(upload.close)
    return form.fields


@dataclass
class _Form:
    """Receiver for the parts of a form, as the parser finds them."""

    upload: Upload
    fields: dict[str, str] = field(default_factory=dict)
    has_file: bool = False
    whole: bool = False
    _header: tuple[bytes, bytes] = (b"", b"")
    _disposition: bytes = b""
    _name: str = ""
    _in_file: bool = False
    _value: bytearray = field(default_factory=bytearray)

    def callbacks(self) -> Any:  # noqa: ANN401 -- a type that the library has for checkers only
        """Return the callbacks for `MultipartParser`."""
        names = (
            "part_begin", "header_field", "header_value", "header_end", "headers_finished",
            "part_data", "part_end", "end",
        )  # fmt: skip
        return {f"on_{name}": getattr(self, f"_{name}") for name in names}

    def _part_begin(self) -> None:
        self._disposition, self._value = b"", bytearray()

    def _header_field(self, data: bytes, start: int, end: int) -> None:
        self._header = (self._header[0] + data[start:end], b"")

    def _header_value(self, data: bytes, start: int, end: int) -> None:
        self._header = (self._header[0], self._header[1] + data[start:end])

    def _header_end(self) -> None:
        name, value = self._header
        if name.lower() == b"content-disposition":
            self._disposition = value
        self._header = (b"", b"")

    def _headers_finished(self) -> None:
        _, options = parse_options_header(self._disposition)
        self._name = options.get(b"name", b"").decode(errors="replace")
        self._in_file = self._name == "file"
        if self._in_file and self.has_file:
            raise HTTPException(422, "the form has two files")
        if len(self.fields) == FIELDS_MAX:
            raise HTTPException(422, f"the form has more than {FIELDS_MAX} fields")
        if self._in_file:
            self.has_file = True
            self.upload.filename = options.get(b"filename", b"").decode(errors="replace")

    def _part_data(self, data: bytes, start: int, end: int) -> None:
        if self._in_file:
            self.upload.write(data[start:end])
            return
        self._value += data[start:end]
        if len(self._value) > FIELD_BYTES_MAX:
            raise HTTPException(413, f"{self._name!r} has more than {FIELD_BYTES_MAX} bytes")

    def _part_end(self) -> None:
        if not self._in_file:
            self.fields[self._name] = self._value.decode(errors="replace")

    def _end(self) -> None:
        self.whole = True
