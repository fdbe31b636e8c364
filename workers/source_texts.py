"""Texts that blocks only refer to, read where they lie."""

import logging
import threading
import zlib
from collections.abc import Sequence
from itertools import compress
from typing import Final

from msgspec.structs import replace

from embedfarm.contract.errors import EmbedfarmError
from embedfarm.contract.records import Block, text_checksums
from embedfarm.contract.source_places import SourceReference
from embedfarm.contract.stored_results import check_place
from embedfarm.workers.engines.engine import ModelUnavailable
from embedfarm.workers.leases import Lease

PAUSES_SECONDS: Final = (0.1, 0.3, 1.0, 3.0)  # between attempts, while a source is away

_LASTING: Final = (FileNotFoundError, NotADirectoryError, PermissionError)

log = logging.getLogger(__name__)


class SourceRefused(EmbedfarmError, ValueError):
    """Raised when a worker cannot read the texts of blocks, or finds others than were sent."""


def read_texts(leases: Sequence[Lease], roots: Sequence[str], stop: threading.Event) -> None:
    """Give the leased blocks of a job the texts that they refer to, as `with_texts` does.

    Raises:
        SourceRefused, StorageRefused, ModelUnavailable: They cannot be read here, or not now.
    """
    read = with_texts([lease.block for lease in leases], roots, stop)
    for lease, block in zip(leases, read, strict=True):
        lease.block = block


def with_texts(
    blocks: Sequence[Block], roots: Sequence[str], stop: threading.Event
) -> Sequence[Block]:
    """Return blocks with their texts, which are read for those that only refer to them.

    Args:
        blocks: Blocks of one job, in order.
        roots: Directories and URLs below which texts may be read (`source_roots`).
        stop: Event that ends all waiting for a source that is away.

    Raises:
        SourceRefused: A file is not there, or has other rows than were sent.
        embedfarm.contract.stored_results.StorageRefused: A file is not below one of the roots.
        ModelUnavailable: A source is away, and may come back.
    """
    wanted = [block.reference for block in blocks if block.reference is not None]
    if not wanted:
        return blocks
    for file in {each.file for each in wanted}:
        check_place(file, roots, "source")
    texts = iter(_read(wanted, stop))
    return [
        block if block.reference is None else _fill(block, block.reference, next(texts))
        for block in blocks
    ]


def _read(wanted: Sequence[SourceReference], stop: threading.Event) -> list[list[str]]:
    """Read the texts of references; a source that is away is tried again a few times."""
    from embedfarm.readers.items import CorpusError  # noqa: PLC0415 # Arrow with it; few need it
    from embedfarm.readers.references import texts_of  # noqa: PLC0415

    for pause in (*PAUSES_SECONDS, None):
        try:
            return list(texts_of(wanted))
        except CorpusError as error:
            cause = error.__cause__
            if cause is None or isinstance(cause, _LASTING):
                raise SourceRefused(str(error)) from error
            if pause is None or stop.wait(pause):
                raise ModelUnavailable(str(error)) from error
            log.warning("a source cannot be read, trying again: %s", error)
    raise AssertionError


def _fill(block: Block, reference: SourceReference, texts: Sequence[str]) -> Block:
    """Return a block with the texts that were read for it.

    Raises:
        SourceRefused: They are not those that were sent.
    """
    found = len(texts)
    if block.known:
        texts = list(compress(texts, (not known for known in block.known)))
    if found != reference.rows or zlib.crc32(text_checksums(texts)) != reference.checksum:
        raise SourceRefused(
            f"{reference.file} has other rows {block.start} to {block.end - 1} than when they were "
            "sent"
        )
    return replace(block, texts=list(texts), reference=None)
