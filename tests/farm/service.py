"""A role as a service manager runs it: started, told to stop, and listened to."""

import os
import signal
import socket
import subprocess
import time
import uuid
from collections.abc import Sequence
from contextlib import suppress
from typing import Self

import psutil

from tests.support import LiveServer


class Service:
    """A process, with a socket on which it says how it is.

    Args:
        command: The program and its arguments.
        server: The Redis server that it uses.
        settings: The process's settings by name.
    """

    def __init__(self, command: Sequence[str], server: LiveServer, **settings: object) -> None:
        name = f"embedfarm-{uuid.uuid4().hex}"
        self.said: list[str] = []
        self._command = list(command)
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(f"\0{name}")
        environment = {f"EMBEDFARM_{key.upper()}": str(each) for key, each in settings.items()}
        environment["EMBEDFARM_REDIS_URL"] = server.url
        self.environment = os.environ | environment | {"NOTIFY_SOCKET": f"@{name}"}
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        """Process id of the process that was started last."""
        assert self._process is not None
        return self._process.pid

    def start(self) -> None:
        """Start the process, or start it again."""
        self.said = []
        self._process = subprocess.Popen(
            self._command, stdin=subprocess.DEVNULL, env=self.environment
        )

    def watch(self, seconds: float) -> None:
        """Ask the process, from its next start on, to say so often that it is alive."""
        self.environment["WATCHDOG_USEC"] = str(int(seconds * 1e6))

    def hears(self, word: str, seconds: float) -> bool:
        """Tell whether the process says a word, such as "READY=1", within some seconds."""
        deadline = time.monotonic() + seconds
        while (left := deadline - time.monotonic()) > 0:
            self._socket.settimeout(left)
            try:
                words = self._socket.recv(4096).decode().split("\n")
            except TimeoutError:
                break
            self.said += words
            if word in words:
                return True
        return False

    def ask_to_stop(self) -> None:
        """Send SIGTERM to the process."""
        os.kill(self.pid, signal.SIGTERM)

    def wait(self, seconds: float = 40.0) -> int:
        """Wait for the end of the process, and return its exit status."""
        assert self._process is not None
        return self._process.wait(seconds)

    def restart(self, status: int = 0) -> None:
        """Stop the process, which must exit with a status, and start it again."""
        self.ask_to_stop()
        assert self.wait() == status
        self.start()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._process is not None and self._process.poll() is None:
            children = psutil.Process(self.pid).children(recursive=True)
            self._process.kill()
            self._process.wait()
            for child in children:  # those of the last release do not notice it
                with suppress(psutil.NoSuchProcess):
                    child.kill()
        self._socket.close()
