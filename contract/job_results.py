"""The results of a job: taken in order of their start index, and then forgotten."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

from embedfarm.contract.encoding import decode
from embedfarm.contract.entries import read_number
from embedfarm.contract.job_handle import JobHandle
from embedfarm.contract.records import ChunkError, Result


@dataclass
class JobResults(JobHandle):
    """The results of one job that are not collected yet, and the chunks that were given up on."""

    def at(self, start: int) -> Result | None:
        """Return the result that begins at chunk `start`, None if it is not there."""
        pipe = self.client.pipeline(transaction=False)
        pipe.hget(self.keys.results, str(start))
        if self.owner:
            pipe.hget(self.keys.meta, "owner")
        data, owner = cast("list[bytes | None]", [*pipe.execute(), None][:2])
        return None if data is None or not self._is_ours(owner) else decode(Result, data)

    def starts(self) -> list[int]:
        """Return the start indices of all uncollected results, unordered."""
        names = cast("list[bytes]", self.client.hkeys(self.keys.results))
        return [int(name) for name in names if name.isdigit()]

    def checksum(self, index: int) -> bytes | None:
        """Return the checksum (`text_checksums`) of a chunk's text; None without its result."""
        start = max((each for each in self.starts() if each <= index), default=None)
        result = None if start is None else self.at(start)
        if result is None or not 0 <= (row := index - result.start) < result.count:
            return None
        return result.checksums[4 * row : 4 * row + 4]

    def failures(self, count: int, after: str = "") -> tuple[str, list[ChunkError]]:
        """Return chunks that were given up on, in the order of their failures.

        The server keeps the newest 10,000 of a job.

        Args:
            count: Most chunks to return.
            after: Position that the last call returned; "" for the first call.

        Returns:
            The position to go on from, and the chunks.
        """
        first = f"({after}" if after else "-"
        rows = cast("list[Any]", self.client.xrange(self.keys.failed, first, count=count))
        failures = [
            ChunkError(
                index=read_number(fields[b"index"], 0),
                reason=fields.get(b"reason", b"").decode(errors="replace"),
                attempts=read_number(fields.get(b"attempts"), 1),
            )
            for _, fields in rows
            if b"index" in fields
        ]
        return rows[-1][0].decode() if rows else after, failures

    def drain(self, upto: int, starts: Sequence[int]) -> str:
        """Delete collected results; everything below chunk `upto` is on disk.

        Returns:
            "drained"; "gone" after deletion; "behind", and nothing changes, if more has been
            drained than is on disk: `lose` the rest.
        """
        keys = self.keys
        answer = self._script("drain")(
            keys=[keys.results, keys.meta, keys.room], args=[upto, self.owner, *starts]
        )
        return str(answer, "ascii")

    def lose(self, upto: int) -> str:
        """Forget all from chunk `upto` on: its producer finds it lost, and sends it again.

        Returns:
            The job's state, "gone" after deletion; a job that has ended loses nothing.
        """
        keys = self.keys
        answer = self._script("lose")(
            keys=[keys.blocks, keys.retry, keys.results, keys.meta], args=[upto, self.owner]
        )
        return str(answer, "ascii")
