"""A proxy in front of the real server that loses, stalls, cuts and slows what passes.

    with Proxy(server.socket) as proxy:
        proxy.aim("commit", Fault("drop"))   # the next commit is done, and its caller never knows
        ... Farm(connect(proxy.url)) ...

The proxy counts requests and replies, and knows the farm's scripts by name.
"""

import asyncio
import contextlib
import random
import socket
import struct
import threading
from collections import Counter, defaultdict, deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Literal, Self

from tests.faults.resp import asks_for, take_frames
from tests.support import wait_until

READ_BYTES: Final = 1 << 16
TRICKLED_BYTES: Final = 500  # sent one by one; the rest of a long frame follows at once
SUBSCRIPTIONS: Final = {"SUBSCRIBE", "PSUBSCRIBE"}  # after these, replies come by themselves


@dataclass(frozen=True)
class Fault:
    """A fault that hits a request or its reply.

    Attributes:
        what: "drop" loses a frame and closes the connection; "stall" loses it and all that follows,
            but leaves the connection half-open; "reset" loses it by a TCP reset; "delay" holds it
            back for `seconds`; "trickle" passes it byte by byte.
        where: "request" for a fault on the way to the server, "reply" for one on the way back.
        seconds: Length of a delay.
    """

    what: Literal["drop", "stall", "reset", "delay", "trickle"]
    where: Literal["request", "reply"] = "reply"
    seconds: float = 1.0


class Lost(Exception):
    """Raised when a fault has ended the connection."""


@dataclass
class Rain:
    """A seeded plan: each request meets one of some faults, with a probability."""

    seed: int
    share: float
    faults: tuple[Fault, ...]
    _random: random.Random = field(init=False)

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)

    def draw(self) -> Fault | None:
        """Return the fault of the next request, if it meets one."""
        return self._random.choice(self.faults) if self._random.random() < self.share else None


class Proxy:
    """Proxy that listens from `__enter__` to `__exit__`, in a thread of its own.

    Args:
        upstream: Address of the server: a unix socket, or a host and a port.
        listen: A unix socket to listen at; without it, a free port of loopback.

    Attributes:
        requests: Complete requests so far, by command or script.
        replies: Complete replies that were passed on unharmed, by command or script.
        hits: Faults that have happened, with the command that each hit.
        rain: Seeded plan of faults beside those that are aimed.
    """

    def __init__(self, upstream: Path | tuple[str, int], listen: Path | None = None) -> None:
        self.requests = Counter[str]()
        self.replies = Counter[str]()
        self.hits: list[tuple[str, Fault]] = []
        self.rain: Rain | None = None
        self.url = ""
        self._upstream = upstream
        self._listen = listen
        self._aims = defaultdict[str, deque[Fault]](deque)
        self._aimed = Counter[str]()
        self._ready = threading.Event()
        self._loop: asyncio.AbstractEventLoop  # while it listens
        self._flowing = asyncio.Event()
        self._ended = asyncio.Event()
        self._links = set[asyncio.Task[None]]()
        self._thread = threading.Thread(target=self._run, name="proxy")

    def aim(self, command: str, *faults: Fault) -> None:
        """Let the next requests for a command, or a script of that name, meet these faults."""
        self._aimed[command] += len(faults)
        self._loop.call_soon_threadsafe(self._aims[command].extend, faults)

    def wait_hit(self, command: str, seconds: float = 30.0) -> None:
        """Wait until as many faults have hit a command as were aimed at it.

        Raises:
            TimeoutError: The command was not sent so often within `seconds`.
        """
        try:
            wait_until(
                lambda: sum(hit == command for hit, _ in self.hits) >= self._aimed[command], seconds
            )
        except TimeoutError as error:
            raise TimeoutError(f"{command}: {error}; {self.requests}") from error

    def freeze(self) -> None:
        """Let nothing pass from now on, and close nothing."""
        self._loop.call_soon_threadsafe(self._flowing.clear)

    def thaw(self) -> None:
        """Go on, and pass all that was held back."""
        self._loop.call_soon_threadsafe(self._flowing.set)

    def __enter__(self) -> Self:
        self._thread.start()
        assert self._ready.wait(10), "the proxy does not listen"
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._ended.set)
        self._thread.join()

    def _run(self) -> None:
        with asyncio.Runner() as runner:
            self._loop = runner.get_loop()
            runner.run(self._serve())

    async def _serve(self) -> None:
        self._flowing.set()
        if self._listen is not None:
            server = await asyncio.start_unix_server(self._accept, self._listen)
            self.url = f"unix://{self._listen}"
        else:
            server = await asyncio.start_server(self._accept, "127.0.0.1")
            self.url = f"redis://127.0.0.1:{server.sockets[0].getsockname()[1]}/0"
        self._ready.set()
        await self._ended.wait()
        server.close()
        for link in self._links:
            link.cancel()
        await asyncio.gather(*self._links, return_exceptions=True)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        link = asyncio.current_task()
        assert link is not None
        self._links.add(link)
        link.add_done_callback(self._links.discard)
        try:
            if isinstance(self._upstream, Path):
                server = await asyncio.open_unix_connection(self._upstream)
            else:
                server = await asyncio.open_connection(*self._upstream)
        except (OSError, asyncio.CancelledError):  # it is down, or the proxy ends: so are we
            writer.transport.abort()
            return
        with contextlib.suppress(asyncio.CancelledError):  # the proxy ends
            await Link(self, (reader, writer), server).run()

    # Methods for links.

    async def flow(self) -> None:
        """Wait until frames may pass."""
        await self._flowing.wait()

    def fault_of(self, command: str) -> Fault | None:
        """Count a request, and return the fault that it meets, if any."""
        self.requests[command] += 1
        aims = self._aims[command]
        if aims:
            return aims.popleft()
        return None if self.rain is None else self.rain.draw()

    def spare(self, command: str, fault: Fault) -> None:
        """Let the next request for a command meet a fault in place of this one."""
        self._aims[command].appendleft(fault)

    def note(self, command: str, fault: Fault) -> None:
        """Record that a fault has hit a command."""
        self.hits.append((command, fault))


Stream = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class Link:
    """Connection of a client, with the one to the server that belongs to it."""

    def __init__(self, proxy: Proxy, client: Stream, server: Stream) -> None:
        self._proxy = proxy
        self._client = client
        self._server = server
        self._asked = deque[tuple[str, Fault | None]]()
        self._subscribed = False
        self._stalled = False

    async def run(self) -> None:
        """Pass frames on until one side, or a fault, ends the link."""
        ways = [asyncio.ensure_future(way) for way in (self._requests(), self._replies())]
        try:
            await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for way in ways:
                way.cancel()
            for _, writer in (self._client, self._server):
                writer.close()  # before any waiting, which may be cancelled
            for command, fault in self._asked:
                if fault is not None:  # it has hit nobody
                    self._proxy.spare(command, fault)
            await asyncio.gather(*ways, return_exceptions=True)
            for _, writer in (self._client, self._server):
                with contextlib.suppress(ConnectionError):
                    await writer.wait_closed()

    async def _requests(self) -> None:
        reader, _ = self._client
        buffer = bytearray()
        with contextlib.suppress(Lost, ConnectionError):
            while data := await reader.read(READ_BYTES):
                buffer += data
                for frame in take_frames(buffer):
                    await self._ask(frame)

    async def _ask(self, frame: bytes) -> None:
        """Pass a request on, unless a fault hits it."""
        await self._proxy.flow()
        if self._stalled:
            return
        command = asks_for(frame)
        self._subscribed |= command in SUBSCRIPTIONS
        fault = self._proxy.fault_of(command)
        if fault is None or fault.where == "reply":
            self._asked.append((command, fault))
            await self._pass(frame, self._server[1])
        else:
            self._asked.append((command, None))
            await self._harm(command, fault, frame, self._server[1])

    async def _replies(self) -> None:
        reader, client = self._server[0], self._client[1]
        buffer = bytearray()
        with contextlib.suppress(Lost, ConnectionError):
            while data := await reader.read(READ_BYTES):
                buffer += data
                for frame in take_frames(buffer):
                    await self._proxy.flow()
                    await self._answer(frame, client)

    async def _answer(self, frame: bytes, client: asyncio.StreamWriter) -> None:
        """Pass a reply on, unless a fault hits it."""
        if self._stalled:
            return
        if frame[:1] in {b">", b"|"} or self._subscribed:
            await self._pass(frame, client)
            return
        command, fault = self._asked.popleft()
        if fault is not None and frame.startswith(b"-NOSCRIPT"):  # it comes again, with its text
            self._proxy.spare(command, fault)
            fault = None
        if fault is None:
            self._proxy.replies[command] += 1
            await self._pass(frame, client)
        else:
            await self._harm(command, fault, frame, client)

    async def _pass(self, frame: bytes, writer: asyncio.StreamWriter) -> None:
        writer.write(frame)
        await writer.drain()

    async def _harm(
        self, command: str, fault: Fault, frame: bytes, writer: asyncio.StreamWriter
    ) -> None:
        """Do to a frame what a fault says."""
        self._proxy.note(command, fault)
        match fault.what:
            case "drop":
                raise Lost
            case "reset":
                self._reset()
                raise Lost
            case "stall":
                self._stalled = True
                return
            case "delay":
                await asyncio.sleep(fault.seconds)
            case "trickle":
                for place in range(len(frame[:TRICKLED_BYTES])):
                    await self._pass(frame[place : place + 1], writer)
                    await asyncio.sleep(0)
                frame = frame[TRICKLED_BYTES:]
        await self._pass(frame, writer)

    def _reset(self) -> None:
        """Close the client's connection so that its system answers with a reset."""
        end = self._client[1].get_extra_info("socket")
        if end.family != socket.AF_UNIX:  # which knows no reset, and is only closed
            end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self._client[1].transport.abort()
