"""The last lines that each process of a farm has logged, kept on the server for people."""

import atexit
import logging
import sys
import threading
import time
from collections import deque
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Final, cast

from embedfarm.contract import wire
from embedfarm.contract.broker import UNAVAILABLE, connect, if_allowed
from embedfarm.contract.farm_keys import FarmKeys
from embedfarm.contract.redaction import hiding_formatter

LINES_MAX: Final = 200  # of a process, on the server
LINE_CHARACTERS_MAX: Final = 4000  # of a line, which a traceback may be
WAITING_MAX: Final = 500  # lines, while the server is away; the oldest are dropped
LOG_SECONDS: Final = 86_400
SEND_SECONDS: Final = 1.0  # lines that come closer together are sent together
CLOSE_SECONDS_MAX: Final = 1.0


@dataclass(frozen=True)
class LogLine:
    """A line of a log: Unix time in ms at which it came, level as `logging` names it, and text."""

    time_ms: int
    level: str
    text: str


class LogSender(logging.Handler):
    """Handler that puts what a process logs on the server, from a thread of its own.

    It never blocks and never fails: while the server is away the newest lines wait. What a process
    logs in the second before it is killed may be lost; the log file of its supervisor has all.

    Args:
        url: URL of the server.
        process: Name of the process among those of the farm.
    """

    def __init__(self, url: str, process: str) -> None:
        super().__init__()
        self.setFormatter(hiding_formatter("%(message)s"))
        self._client = connect(url)
        self._process = process
        self._waiting: deque[dict[str, str]] = deque(maxlen=WAITING_MAX)
        self._news = threading.Event()
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._run, name="log-sender", daemon=True)
        self._thread.start()

    def emit(self, record: logging.LogRecord) -> None:
        """Take a record in; it is sent later."""
        text = self.format(record)[:LINE_CHARACTERS_MAX]
        self._waiting.append({"level": record.levelname, "text": text})
        self._news.set()

    def close(self) -> None:
        """Let what waits be sent, for a moment: a server that hangs does not hold the process.

        A second call does nothing.
        """
        self._ending.set()
        self._news.set()
        self._thread.join(CLOSE_SECONDS_MAX)
        super().close()

    def _run(self) -> None:
        """Send what comes, and once more after `close`."""
        while not self._ending.is_set():
            self._news.wait()
            self._news.clear()
            if not self._send():
                self._news.set()
            self._ending.wait(SEND_SECONDS)
        self._send()
        self._client.close()

    def _send(self) -> bool:
        """Send what waits; tell whether that could be done."""
        lines = [self._waiting.popleft() for _ in range(len(self._waiting))]
        if not lines:
            return True
        key = wire.log_key(self._process)
        try:
            with if_allowed():
                pipe = self._client.pipeline(transaction=False)
                for line in lines[-LINES_MAX:]:
                    pipe.xadd(key, cast("Any", line), maxlen=LINES_MAX, approximate=True)
                pipe.expire(key, LOG_SECONDS)
                pipe.zadd(wire.LOGS, {self._process: time.time()})
                pipe.zremrangebyscore(wire.LOGS, "-inf", time.time() - LOG_SECONDS)
                pipe.execute()
        except UNAVAILABLE:
            room = WAITING_MAX - len(self._waiting)
            self._waiting.extendleft(reversed(lines[-room:] if room else []))
            return False
        return True


def send_log(url: str, process: str) -> None:
    """Keep what this process logs on the server, too, an error that ends it included."""
    sender = LogSender(url, process)
    logging.getLogger().addHandler(sender)
    atexit.register(sender.close)
    sys.excepthook = _log_end


def _log_end(
    kind: type[BaseException], error: BaseException, traceback: TracebackType | None
) -> None:
    logging.getLogger(__name__).critical("ended by an error", exc_info=(kind, error, traceback))


@dataclass
class ProcessLogs(FarmKeys):
    """The logs of a farm's processes, on the server; an operator's, since they may name any job."""

    def processes(self) -> dict[str, float]:
        """Return the Unix time of each process's last line, by name."""
        rows = cast(
            "list[tuple[bytes, float]]", self.client.zrange(wire.LOGS, 0, -1, withscores=True)
        )
        return {name.decode(errors="replace"): at for name, at in rows}

    def tail(self, process: str, count: int) -> list[LogLine]:
        """Return the last `count` lines of a process, oldest first."""
        rows = cast("list[Any]", self.client.xrevrange(wire.log_key(process), count=count))
        return [
            LogLine(
                int(entry.partition(b"-")[0]),
                *(fields.get(name, b"").decode(errors="replace") for name in (b"level", b"text")),
            )
            for entry, fields in reversed(rows)
        ]
