"""Outputs in which some chunks have failed, as those of a farm with a faulty device."""

import shutil
from pathlib import Path

import msgspec
import pyarrow as pa

from embedfarm.collector.column_spool import ColumnSpool
from embedfarm.collector.manifest import About, read_manifest
from embedfarm.collector.output import Output
from embedfarm.contract.records import ChunkError, Result, text_checksums
from tests.collector.places import say_where
from tests.farm.harness import null_vectors


def fail_chunks(
    out: Path, texts: list[str], failed: set[int], table: pa.Table | None = None
) -> None:
    """Replace an output by one in which these chunks failed, as by a faulty device.

    It has the columns of `table` beside the vectors.
    """
    about = {
        name: getattr(read_manifest(out), name)
        for name in (field.name for field in msgspec.structs.fields(About))
    }
    about["sample"] = None
    settings = about["settings"]
    shutil.rmtree(out)
    say_where(out)
    spool = None
    if table is not None:
        spool = ColumnSpool(out / ".embedfarm" / "columns", table.schema)
        spool.begin(0, 0)
        for batch in table.to_batches():
            spool.put(batch)
    with Output(
        out, settings, sink=settings["format"], part_bytes_max=16 * 4 * 100, columns=spool
    ) as output:
        for start in range(0, len(texts), 50):
            chunks = texts[start : start + 50]
            ends = range(start, start + len(chunks))
            errors = [ChunkError(index=i, reason="odd") for i in ends if i in failed]
            output.add(
                Result(
                    start=start,
                    count=len(chunks),
                    dimensions=16,
                    dtype="<f4",
                    vectors=null_vectors(chunks, 16).tobytes(),
                    checksums=text_checksums(chunks),
                    errors=errors,
                )
            )
        output.finish(len(texts), About(**about))
    shutil.rmtree(out / ".embedfarm")
