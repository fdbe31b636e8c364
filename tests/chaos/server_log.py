"""The log of a server, cut where it cannot be read, as `valkey-check-aof --fix` cuts it."""

from pathlib import Path
from typing import BinaryIO, Final

LOGS: Final = "appendonlydir/*.incr.aof"


def cut_unreadable(directory: Path) -> int:
    """Cut a stopped server's log before the first command that cannot be read.

    A server that has written half a command on a full disk cuts its log, but goes on writing where
    the half ended, so that zeros stay there; it does not start on them. A command that is cut off
    at the end of a log, or a transaction without its end, is cut off like them.

    Args:
        directory: Directory of the server's data.

    Returns:
        Number of bytes that were cut off.
    """
    lost = 0
    for path in directory.glob(LOGS):
        with path.open("r+b") as log:
            readable = _readable(log)
            size = path.stat().st_size
            lost += size - readable
            if readable < size:
                log.truncate(readable)
    return lost


def _readable(log: BinaryIO) -> int:
    """Return the number of bytes up to which a log consists of whole commands."""
    upto, open_transaction = 0, False
    while (words := _read_command(log)) is not None:
        if words[:1] == [b"MULTI"]:
            open_transaction = True
        elif words[:1] == [b"EXEC"]:
            open_transaction = False
        if not open_transaction:
            upto = log.tell()
    return upto


def _read_command(log: BinaryIO) -> list[bytes] | None:
    """Read the next command, or a note, which has no words; None where neither can be read."""
    line = log.readline(1 << 10)
    if line.startswith(b"#") and line.endswith(b"\r\n"):
        return []
    count = _number(line, b"*")
    if count is None:
        return None
    words: list[bytes] = []
    for _ in range(count):
        length = _number(log.readline(1 << 10), b"$")
        if length is None:
            return None
        word = log.read(length)
        if len(word) < length or log.read(2) != b"\r\n":
            return None
        words.append(word)
    return words


def _number(line: bytes, sign: bytes) -> int | None:
    """Return the number of a line of the protocol that begins with `sign`; None for another."""
    digits = line[1:-2]
    return int(digits) if line[:1] == sign and line[-2:] == b"\r\n" and digits.isdigit() else None
