"""Tests of corpora that are fetched from a URL."""

import fcntl
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from embedfarm.contract.settings import Settings
from embedfarm.ingest.allow_list import allow_url
from embedfarm.ingest.downloads import fetch, fetch_aside, places_of
from embedfarm.ingest.outbound import RequestFailed, Url, UrlRefused, parse_url
from tests.ingest.loopback_server import Neighbour, Reply, Request

BODY = b"a river\n" * 30_000


class Library:
    """A server with a corpus, and a farm's side that fetches it."""

    def __init__(self, neighbour: Neighbour, out: Path) -> None:
        self.neighbour = neighbour
        self.out = out
        self.sizes = list[int]()

    def fetch(self, path: str = "/data/corpus.jsonl", **limits: Any) -> Path:  # noqa: ANN401 -- what a setting takes
        """Fetch a path of the server, and return where the file is."""
        url, settings = self.url(path, **limits)
        place = places_of([url], self.out)[url]
        return fetch(url, place, settings, self.sizes.append)

    def url(self, path: str, **limits: Any) -> tuple[Url, Settings]:  # noqa: ANN401 -- as above
        """Return the URL of a path of the server, and settings that allow it."""
        chosen = {"ingest_urls": [f"{self.neighbour.url}/data"], "outbound_hosts": ["127.0.0.1"]}
        settings = Settings.model_validate(chosen | limits)
        return allow_url(self.neighbour.url + path, settings.ingest_urls), settings

    def asked(self) -> list[str]:
        """Return the paths that were asked for since the last call."""
        paths = [request.path for request in self.neighbour.requests]
        self.neighbour.requests.clear()
        return paths


@pytest.fixture
def library(tmp_path: Path) -> Iterator[Library]:
    """A library whose server answers with `BODY`."""
    with Neighbour().running() as neighbour:
        neighbour.answer = lambda _: Reply(body=BODY)
        yield Library(neighbour, tmp_path / "out")


def test_a_file_of_its_own(library: Library) -> None:
    """Each URL is fetched to a file of its own with its bytes and suffix, and progress is seen."""
    first = library.fetch("/data/a%20corpus.jsonl?part=1")
    second = library.fetch("/data/a%20corpus.jsonl?part=2")
    assert (first.read_bytes(), first.name) == (BODY, "a_20corpus.jsonl")
    assert first != second == library.fetch("/data/a%20corpus.jsonl?part=2")
    assert library.sizes[-1] == len(BODY)
    assert {name.name for name in first.parent.iterdir()} == {first.name, ".facts.json", ".lock"}
    assert library.neighbour.requests[0].headers["accept-encoding"] == "identity"


def test_places_of_one_job(tmp_path: Path) -> None:
    """URLs that differ only in what may be a credential have places of their own, in their order.

    Signed anew they have the same places, and so has a URL that is named twice.
    """

    def places(*queries: str) -> list[Path]:
        urls = [parse_url(f"https://h/a.jsonl?{query}") for query in queries]
        found = places_of(urls, tmp_path)
        return [found[url] for url in urls]

    first, second, third = places("author=alice", "author=bob", "part=2")
    assert len({first, second, third}) == 3
    assert {each.name for each in (first, second, third)} == {"a.jsonl"}
    assert places("author=alice") == [first]
    assert places("author=c", "author=d", "part=2") == [first, second, third]
    assert places("author=alice", "author=bob", "author=alice") == [first, second, first]


@pytest.mark.parametrize("heeded", [True, False])
@pytest.mark.parametrize("name", ["etag", "last-modified", ""])
def test_only_what_is_new(library: Library, name: str, *, heeded: bool) -> None:
    """A corpus that has not changed is not replaced, and one that has changed is.

    Where the server sends neither ETag nor Last-Modified, its bytes tell, whatever their number.
    """
    reply = Reply(headers={name: "Sat, 21 Nov 2026 10:00:00 GMT"} if name else {}, body=BODY)

    def answer(request: Request) -> Reply:
        known = {request.headers.get("if-none-match"), request.headers.get("if-modified-since")}
        same = heeded and not known.isdisjoint(reply.headers.values())
        return Reply(304) if same else reply

    library.neighbour.answer = answer
    place = library.fetch()
    before = place.stat().st_ino
    assert library.fetch() == place
    assert place.stat().st_ino == before
    for day, body in enumerate((BODY[::-1], b"another"), 22):
        headers = {name: f"Sun, {day} Nov 2026 10:00:00 GMT"} if name else {}
        reply = Reply(headers=headers, body=body)
        assert library.fetch().read_bytes() == reply.body


def test_a_copy_stays_while_it_is_compared(library: Library) -> None:
    """What a URL has now lies aside until it was looked at; a copy that is missing is fetched."""
    url, settings = library.url("/data/corpus.jsonl")
    library.neighbour.answer = lambda _: Reply(headers={"etag": '"one"'}, body=BODY)
    kept = library.fetch()
    with fetch_aside(url, kept, settings, library.sizes.append) as same:
        assert same == kept
    library.neighbour.answer = lambda _: Reply(body=b"another")
    for _ in range(2):
        with fetch_aside(url, kept, settings, library.sizes.append) as other:
            assert (other.name, other.read_bytes()) == (kept.name, b"another")
            with (
                pytest.raises(RequestFailed, match="already"),
                fetch_aside(url, kept, settings, library.sizes.append),
            ):
                pass
        assert not other.exists()
        assert kept.read_bytes() == BODY
    kept.unlink()
    with fetch_aside(url, kept, settings, library.sizes.append) as now:
        assert now == kept
    assert kept.read_bytes() == b"another"


def test_what_was_cut_off_is_fetched_again(library: Library) -> None:
    """A body shorter than promised is an error and leaves no file; the next fetch takes all."""
    promise = {"content-length": str(len(BODY)), "etag": '"one"'}
    library.neighbour.answer = lambda _: Reply(headers=promise, body=BODY[:1000])
    with pytest.raises(RequestFailed, match="closed"):
        library.fetch()
    library.neighbour.answer = lambda request: Reply(
        304 if "if-none-match" in request.headers else 200, {"etag": '"one"'}, BODY
    )
    assert library.fetch().read_bytes() == BODY
    assert [name.name for name in (library.out / ".corpus").glob("*/.partial")] == []


def test_redirects_within_what_is_allowed(library: Library) -> None:
    """Redirects are followed below the allowed URLs, at most five, and never elsewhere."""
    places = {"/data/a": "b", "/data/b": "/data/c", "/data/out": "../secret",
              "/data/evil": "//evil.example/data/c", "/data/loop": "/data/loop",
              "/data/private": f"http://localhost:{library.neighbour.port}/data/c"}  # fmt: skip
    library.neighbour.answer = lambda request: (
        Reply(302, {"location": places[request.path]})
        if request.path in places
        else Reply(body=request.path.encode())
    )
    assert library.fetch("/data/a").read_bytes() == b"/data/c"
    assert library.asked() == ["/data/a", "/data/b", "/data/c"]
    for name in ("out", "evil", "private"):
        with pytest.raises(UrlRefused, match="not below one of ingest_urls"):
            library.fetch(f"/data/{name}")
        assert library.asked() == [f"/data/{name}"]
    with pytest.raises(RequestFailed, match="more than 5 redirects"):
        library.fetch("/data/loop")
    assert len(library.asked()) == 6


@pytest.mark.parametrize(
    ("reply", "limits", "reason"),
    [
        (Reply(404), {}, "answers 404"),
        (Reply(304), {}, "answers 304"),
        (Reply(206, body=b"part"), {}, "answers 206"),
        (Reply(headers={"content-encoding": "gzip"}, body=b"packed"), {}, "packs it"),
        (Reply(body=BODY), {"fetch_bytes_max": 1000}, "240,000 bytes"),
        (Reply(headers={"content-length": "99999999999999"}), {}, "99,999,999,999,999 bytes"),
        (Reply(body=BODY), {"outbound_hosts": []}, "not public"),
        (Reply(body=BODY), {"fetch_seconds_max": 1e-9}, "time is up"),
    ],
)
def test_what_is_not_taken(
    library: Library, reply: Reply, limits: dict[str, Any], reason: str
) -> None:
    """A reply that is no whole file, too large, packed or late, or a forbidden host is refused."""
    library.neighbour.answer = lambda _: reply
    with pytest.raises((RequestFailed, UrlRefused), match=reason):
        library.fetch(**limits)


def test_a_size_that_nobody_promised(library: Library) -> None:
    """A body of unknown size is counted as it comes; one that is too large leaves no file."""
    library.neighbour.answer = lambda _: Reply(headers={"content-length": ""}, body=BODY)
    assert library.fetch().read_bytes() == BODY
    with pytest.raises(RequestFailed, match="more bytes than fetch_bytes_max"):
        library.fetch("/data/other.jsonl", fetch_bytes_max=1000)
    assert not list(library.out.glob("**/other.jsonl"))
    assert not list(library.out.glob("**/.partial"))


def test_one_at_a_time(library: Library) -> None:
    """A fetch to a place to which another one is writing is refused."""
    place = library.fetch()
    with (place.parent / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(RequestFailed, match="being fetched"):
            library.fetch()
