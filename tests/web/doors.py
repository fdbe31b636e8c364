"""What each door says of the jobs of a farm, in the same terms."""

import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from fastapi.testclient import TestClient
from prometheus_client.parser import text_string_to_metric_families
from typer.testing import CliRunner

from embedfarm.cli.app import app
from embedfarm.collector.manifest import STATE_DIRECTORY, read_manifest
from embedfarm.contract.farm_client import FarmClient
from embedfarm.contract.status import OVER_STATES
from embedfarm.watch.overview import read_jobs
from embedfarm.watch.view import FarmReader
from tests.cli.test_top import screen
from tests.support import LiveServer

BROWSER = {"accept": "text/html"}
TAGS = re.compile(r"<[^>]+>|\s+")
ROW = re.compile(r'<tr id="job-([0-9a-f]+)".*?</tr>', re.DOTALL)
BADGE = re.compile(r'<span class="badge[^"]*">(\w+)</span>')
PROGRESS = re.compile(r"([\d,]+) of ([\d,]+)")


class Seen(NamedTuple):
    """A job as a door shows it; None for what the door does not say."""

    state: str | None = None
    done: int | None = None
    known: int | None = None
    failed: int | None = None
    skipped: int | None = None
    on_disk: int | None = None


class Sums(NamedTuple):
    """All jobs and workers together, as a door shows them; None for what the door does not say.

    Attributes:
        jobs: Jobs that are there, those that have ended too.
        in_work: Those of them of which more is to be embedded.
        states: Number of those that have not ended, by state.
        backlog: Chunks that are known and not embedded, of jobs that are wanted.
        failed: Chunks that failed of jobs in work.
        workers: Live workers.
    """

    jobs: int | None = None
    in_work: int | None = None
    states: frozenset[tuple[str, int]] | None = None
    backlog: int | None = None
    failed: int | None = None
    workers: int | None = None


Jobs = Mapping[str, Seen]


def plain(markup: str) -> str:
    """Return the words of a piece of HTML."""
    return " ".join(TAGS.sub(" ", markup).split())


def count(text: str) -> int:
    """Read a number as people write it."""
    return int(text.replace(",", ""))


def progress_of(text: str) -> tuple[int, int]:
    """Read how much is done, and of how much, from words about it."""
    found = PROGRESS.search(text)
    return (count(found[1]), count(found[2])) if found else (0, 0)


def of_facts(facts: Mapping[str, Any]) -> Seen:
    """Read a job from its facts, as JSON has them."""
    read = facts["first_chunk"] + facts["chunks_in"]
    return Seen(
        facts["state"],
        facts["first_chunk"] + facts["chunks_done"],
        facts["chunk_count"] if facts["chunk_count"] >= 0 else read,
        facts["chunks_failed"],
        facts["rows_skipped"],
        facts["drained_upto"],
    )


@dataclass
class Doors:
    """All doors of a farm."""

    server: LiveServer
    web: TestClient
    farm: FarmClient

    def truth(self) -> Jobs:
        """The jobs as the server has them."""
        ids = [*self.farm.job_ids(), *self.farm.ended_ids(1000)]
        return {
            each.job: Seen(
                each.state,
                each.done,
                each.known,
                each.chunks_failed,
                each.rows_skipped,
                each.drained_upto,
            )
            for each in read_jobs(self.farm, ids)
        }

    def all(self, jobs: Jobs) -> Iterator[tuple[str, Jobs]]:
        """Yield the name of each door that shows single jobs, and what it shows."""
        yield "GET /v1/jobs", self.listed()
        yield "GET /v1/jobs/{job}", {job: found for job in jobs if (found := self.asked(job))}
        yield "jobs ls", self.ls()
        yield "jobs show", {job: found for job in jobs if (found := self.show(job))}
        yield "top --json", {each["job"]: of_facts(each) for each in self.top()["jobs"]}
        yield "/jobs", self.page_of_jobs()
        yield "/jobs/{job}", {job: found for job in jobs if (found := self.page_of_job(job))}
        yield "/", self.rows(self.web.get("/", headers=BROWSER).text)
        yield "manifest", dict(self.manifests())

    # By HTTP.

    def listed(self) -> Jobs:
        """All jobs of the list."""
        return {
            each["job"]: of_facts(each)
            for each in self.web.get("/v1/jobs", params={"limit": 1000}).json()["jobs"]
        }

    def asked(self, job: str) -> Seen | None:
        """One job, None if it is gone."""
        answer = self.web.get(f"/v1/jobs/{job}")
        return of_facts(answer.json()) if answer.is_success else None

    def metrics(self) -> dict[tuple[str, ...], float]:
        """All figures, by name and labels."""
        text = self.web.get("/metrics").text
        return {
            (sample.name, *sample.labels.values()): sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
        }

    # At the command line.

    def run(self, *words: str) -> str:
        """Run a command to its end, and return what it prints; "" if it finds nothing."""
        done = CliRunner().invoke(app, [*words, "--redis", self.server.url])
        return done.stdout if done.exit_code == 0 else ""

    def ls(self) -> Jobs:
        """All jobs of the two lists, as their tables have them."""
        found = {}
        for words in ((), ("--ended",)):
            for each in json.loads(self.run("jobs", "ls", "--json", *words)):
                found[each["job"]] = of_facts(each)
        return found

    def show(self, job: str) -> Seen | None:
        """One job in lines of text, None if it is gone."""
        lines = dict(
            line.split(maxsplit=1)
            for line in self.run("jobs", "show", job).splitlines()
            if len(line.split(maxsplit=1)) == 2
        )
        if not lines:
            return None
        numbers = {name: int(text) for name, text in lines.items() if re.fullmatch(r"-?\d+", text)}
        return of_facts(numbers | {"state": lines["state"]})

    def top(self) -> dict[str, Any]:
        """The whole farm."""
        found: dict[str, Any] = json.loads(self.run("top", "--json"))
        return found

    # On pages.

    def rows(self, text: str) -> Jobs:
        """The jobs of a table."""
        found = {}
        for row in ROW.finditer(text):
            badge, cells = BADGE.search(row[0]), plain(row[0])
            assert badge is not None, cells
            done, known = progress_of(cells)
            failed = re.search(r'data-label="failed">(.*?)</td>', row[0], re.DOTALL)
            found[row[1]] = Seen(
                badge[1], done, known, count(plain(failed[1]).strip()) if failed else None
            )
        return found

    def page_of_jobs(self) -> Jobs:
        """The jobs of all pages of the list."""
        found: dict[str, Seen] = {}
        for page in range(1, 100):
            text = self.web.get("/jobs", params={"page": page}, headers=BROWSER).text
            found |= self.rows(text)
            if ">Next<" not in text:
                return found
        raise AssertionError("there is no last page")

    def page_of_job(self, job: str) -> Seen | None:
        """One job, None if it is gone."""
        answer = self.web.get(f"/jobs/{job}", headers=BROWSER)
        if not answer.is_success:
            return None
        badge, words = BADGE.search(answer.text), plain(answer.text)
        assert badge is not None
        done, known = progress_of(words)
        tiles = re.search(r"On disk ([\d,]+) chunks .*? Failed ([\d,]+) chunks", words)
        assert tiles is not None, words
        skipped = re.search(r"have no index: ([\d,]+)", words)
        return Seen(
            badge[1],
            done,
            known,
            count(tiles[2]),
            count(skipped[1]) if skipped else 0,
            count(tiles[1]),
        )

    # What is on the disk, and what is said of all jobs together.

    def manifests(self) -> Iterator[tuple[str, Seen]]:
        """Yield the jobs that have finished, as their outputs tell them."""
        for each in read_jobs(self.farm, self.farm.ended_ids(1000)):
            # What a retry fills lies in the output that it mends, and goes when it is done.
            if each.state == "finished" and STATE_DIRECTORY not in Path(each.out).parts:
                manifest = read_manifest(Path(each.out))
                known = manifest.count
                workers = sum(account.chunks for account in manifest.workers.values())
                assert workers == known, (each.job, manifest.workers)
                yield (
                    each.job,
                    Seen("finished", known, known, manifest.failed, manifest.skipped, known),
                )

    def sums(self) -> Sums:
        """All jobs and workers as the server has them."""
        ids, ended = self.farm.job_ids(), self.farm.ended_ids(1000)
        in_work = read_jobs(self.farm, ids)
        wanted = [each for each in in_work if not each.over]
        return Sums(
            len(in_work) + len(read_jobs(self.farm, ended)),
            len(wanted),
            frozenset(Counter(each.state for each in in_work).items()),
            sum(each.chunks_in - each.chunks_done for each in wanted),
            sum(each.chunks_failed for each in wanted),
            len(self.farm.workers()),
        )

    def all_sums(self) -> Iterator[tuple[str, Sums]]:
        """Yield the name of each door that shows all together, and what it shows."""
        figures = self.metrics()
        states = {
            (key[1], int(value))
            for key, value in figures.items()
            if key[0] == "embedfarm_jobs" and value
        }
        workers = sum(v for key, v in figures.items() if key[0] == "embedfarm_workers")
        yield (
            "/metrics",
            Sums(
                in_work=sum(number for state, number in states if state not in OVER_STATES),
                states=frozenset(states),
                backlog=int(figures["embedfarm_backlog_chunks",]),
                failed=int(figures["embedfarm_failed_chunks",]),
                workers=int(workers),
            ),
        )
        top = self.top()
        yield (
            "top --json",
            Sums(
                in_work=top["jobs_total"],
                backlog=top["backlog_chunks"],
                failed=top["chunks_failed"],
                workers=len(top["workers"]),
            ),
        )
        first, second, *_ = screen(FarmReader(self.farm).read(), 160, None)
        head = re.search(r"(\d+) jobs?  (\d+) workers?", first)
        backlog = re.match(r"backlog ([\d,]+) chunks", second)
        assert head is not None, first
        assert backlog is not None, second
        yield (
            "top",
            Sums(in_work=int(head[1]), backlog=count(backlog[1]), workers=int(head[2])),
        )
        page = plain(self.web.get("/", headers=BROWSER).text)
        tiles = re.search(r" Backlog ([\d,]+) chunks .*? Failed ([\d,]+) chunks", page)
        assert tiles is not None, page
        yield "/", Sums(backlog=count(tiles[1]), failed=count(tiles[2]))
        listed = re.search(
            r"([\d,]+) jobs? (?:all|,)", plain(self.web.get("/jobs", headers=BROWSER).text)
        )
        yield "/jobs", Sums(jobs=count(listed[1]) if listed else 0)
