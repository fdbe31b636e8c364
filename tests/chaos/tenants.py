"""Two tenants, each with a key: what one of them is answered never has a word of the other."""

import json
import re
import threading
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, NamedTuple

import httpx

from embedfarm.web.auth.keys import make_key
from tests.chaos.tally import Tally

NAMES: Final = ("quokka", "narwhal")  # in all that a tenant names or writes, and nowhere else
OPERATOR: Final = "osprey"  # in the names of the operator's jobs
TEXTS: Final = 96  # of each tenant
IDS_MAX: Final = 3  # newest ids of each that a reader asks for
ANSWER_SECONDS_MAX: Final = 60.0
EVENTS_SECONDS: Final = 2.0  # of a stream of events that does not end
PAUSE_SECONDS: Final = 0.2  # between two requests of a reader
WRONG: Final = {401, 500, 502, 504}
HIDDEN: Final = {404}
REFUSALS: Final = {429, 503}
NOBODY_SERVES: Final = (httpx.NetworkError, httpx.RemoteProtocolError)  # refused, or cut off
PAGES: Final = (
    "/", "/jobs/{job}", "/jobs/{job}/results.jsonl", "/charts/farm.svg",
    "/charts/jobs/{job}/speed.svg", "/charts/jobs/{job}/workers.svg",
    "/charts/jobs/{job}/lanes.svg", "/jobs/{job}/cancel",
)  # fmt: skip
EVENTS: Final = "text/event-stream"


@dataclass
class Tenant:
    """A tenant with a key, whose name is in all that it names or writes.

    Attributes:
        name: A word that stands nowhere else.
        secret: The secret of its key.
        texts: The texts of its jobs, each with its name.
        ids: The ids of what it has made, by their parameter's name in paths; the newest last.
    """

    name: str
    secret: str
    texts: list[str]
    ids: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))

    def add(self, kind: str, name: str) -> None:
        """Remember an id as this tenant's from now on."""
        if name not in self.ids[kind]:
            self.ids[kind].append(name)

    @property
    def words(self) -> list[str]:
        """Words that no other tenant may read: the name, and the ids of what it has made."""
        return [self.name, *(each for kind in list(self.ids) for each in list(self.ids[kind]))]


def make_tenants(texts: Sequence[str], keys: Path) -> list[Tenant]:
    """Make tenants with texts of their own, and write the file of their keys."""
    made = {name: make_key(f"of-{name}", ["submit", "read"], name) for name in NAMES}
    keys.write_text("".join(key.line() + "\n" for _, key in made.values()))
    return [
        Tenant(name, secret, [f"{name} {n}: {texts[n % len(texts)]}" for n in range(TEXTS)])
        for name, (secret, _) in made.items()
    ]


class Answer(NamedTuple):
    """The status, the headers and the body of an answer."""

    status: int
    head: httpx.Headers
    body: str


@dataclass
class Door:
    """The farm's HTTP as one tenant meets it; each answer is searched for words of others.

    Attributes:
        port: The TCP port on loopback.
        tally: Counts the answers.
        tenant: The tenant whose key is shown; None where no key is asked for.
        others: The tenants whose words must not come.
    """

    port: int
    tally: Tally
    tenant: Tenant | None = None
    others: Sequence[Tenant] = ()

    def ask(self, verb: str, path: str, hidden: str = "", **request: Any) -> Answer | None:  # noqa: ANN401 # as httpx has them
        """Ask for something; return None if told to come again, met nobody, or waited in vain.

        Args:
            verb: HTTP method, such as POST.
            path: Path of the URL.
            hidden: A word of another tenant that is in the question, and so may be in the answer.
            request: Further arguments of the request, as httpx has them.
        """
        began = time.monotonic()
        try:
            answer = self._ask(verb, path, request)
        except NOBODY_SERVES:
            self.tally.refused += 1
            return None
        except httpx.HTTPError as error:
            seconds = time.monotonic() - began
            self.tally.unanswered.append(f"{verb} {path}, after {seconds:.0f} s: {error!r}")
            return None
        self._look_through(f"{verb} {path}", answer, hidden)
        if answer.status in REFUSALS:
            self.tally.refused += 1
            return None
        return answer

    def _ask(self, verb: str, path: str, request: dict[str, Any]) -> Answer:
        url = f"http://127.0.0.1:{self.port}{path}"
        key = {"authorization": f"Bearer {self.tenant.secret}"} if self.tenant else {}
        headers = key | request.pop("headers", {})
        with httpx.stream(
            verb, url, headers=headers, timeout=ANSWER_SECONDS_MAX, **request
        ) as answer:
            body = b"".join(_pieces(answer))
            return Answer(answer.status_code, answer.headers, body.decode(errors="replace"))

    def _look_through(self, what: str, answer: Answer, hidden: str) -> None:
        """Note words of others in an answer, unless they were in the question."""
        told = str(answer.head) + answer.body
        text = told.replace(hidden, "ID") if hidden else told
        for word in (OPERATOR, *(word for other in self.others for word in other.words)):
            if word in text:
                name = self.tenant.name if self.tenant else "nobody"
                self.tally.leaks.append(f"{name} reads {word!r} from {what}: {text[:500]}")
                return


def _pieces(answer: httpx.Response) -> Iterator[bytes]:
    """Yield the body of an answer; a stream of events ends after some seconds."""
    events = answer.headers.get("content-type", "").startswith(EVENTS)
    deadline = time.monotonic() + EVENTS_SECONDS
    for piece in answer.iter_bytes():
        yield piece
        if events and time.monotonic() > deadline:
            return


@dataclass
class Reader:
    """A caller that reads all that a tenant may ask for, and what it may not.

    Attributes:
        door: The door of the tenant.
        model: The model whose facts it asks for.
    """

    door: Door
    model: str
    _paths: list[str] = field(default_factory=list)

    def read(self, ended: threading.Event) -> None:
        """Walk through all routes, again and again."""
        while not ended.is_set():
            for path, hidden in self.questions():
                if ended.wait(PAUSE_SECONDS):
                    return
                self.look(path, hidden)

    def questions(self) -> Iterator[tuple[str, str]]:
        """Yield paths to ask for, and the id of another tenant that is in them, "" for none."""
        self._learn()
        for path in (*self._paths, *PAGES):
            yield from self._fill(path)

    def _learn(self) -> None:
        """Read the paths that the farm offers from its API's document, once."""
        if self._paths:
            return
        answer = self.door.ask("GET", "/openapi.json")
        if answer is not None and answer.status == httpx.codes.OK:
            paths = json.loads(answer.body)["paths"]
            self._paths = [path for path, verbs in paths.items() if "get" in verbs]

    def _fill(self, path: str) -> Iterator[tuple[str, str]]:
        """Yield a path with each id that may stand in it, and the id if it is another tenant's."""
        [*names] = re.findall(r"{(\w+)(?::path)?}", path)
        if not names:
            yield path, ""
        for name in names[:1]:
            for each, hidden in self._ids(name):
                yield re.sub(r"{\w+(?::path)?}", each, path, count=1), each if hidden else ""

    def _ids(self, name: str) -> Iterator[tuple[str, bool]]:
        """Yield what may stand for a parameter of a path, and whether it is another tenant's."""
        if name == "model":
            yield self.model, False
        for owner in (self.door.tenant, *self.door.others):
            for each in [] if owner is None else owner.ids[name][-IDS_MAX:]:
                yield each, owner is not self.door.tenant

    def look(self, path: str, hidden: str) -> None:
        """Ask once, and judge the answer; the door looks for words of others."""
        tenant, tally = self.door.tenant, self.door.tally
        answer = self.door.ask("GET", path, hidden)
        if tenant is None or answer is None:
            return
        if answer.status in WRONG or (hidden and answer.status not in HIDDEN):
            tally.wrong.append(f"{tenant.name}: {path}: {answer.status} {answer.body[:300]}")
        tally.read[tenant.name] += 1
        tally.own[tenant.name] += not hidden and tenant.name in answer.body
