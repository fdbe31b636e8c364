"""Tests of every page as it looks, in both themes and on a phone, and of markup as text."""

import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Final, Literal

import msgspec
import pytest
import redis
from playwright.sync_api import Browser, Page, expect

from embedfarm.contract import wire
from embedfarm.contract.encoding import encode
from embedfarm.contract.farm_client import FarmClient
from embedfarm.contract.job_spec import JobSpec
from embedfarm.contract.jobs import Job
from embedfarm.contract.model_states import ModelState
from embedfarm.contract.records import Completion, Decision, Heartbeat, Rate, Sample
from embedfarm.contract.scheduling_terms import Terms
from embedfarm.contract.settings import Settings
from embedfarm.contract.usage import Account
from embedfarm.web.auth.keys import make_key
from tests.browser.conftest import SCREENSHOTS, SECONDS, Watched
from tests.contract.little_job import CHUNKS, STATS, embed, heartbeat, push
from tests.support import LiveServer, wait_until
from tests.web.test_gate import served
from tests.web.test_pages import ODD

pytestmark = pytest.mark.system

# The stamp is gone from a page as soon as an event has changed the page.
STAMP: Final = (
    "(document.querySelector('[data-live]')?.firstElementChild ?? {dataset: {}}).dataset.old"
)

AXE: Final = Path(__file__).parent / "node_modules" / "axe-core" / "axe.min.js"
SIZES: Final = {"desktop": (1280, 800), "phone": (390, 844)}
PAGES: Final = {
    "jobs": "/jobs",
    "docs": "/docs",
    "overview": "/",
    "job": "/jobs/handbook",
    "limited": "/jobs/limited",
    "ended": "/jobs/old-0",
    "new": "/jobs/new",
    "upload": "/jobs/new?of=file",
    "workers": "/workers",
    "scheduler": "/scheduler",
    "logs": "/logs",
    "confirm": "/jobs/handbook/cancel",
    "many": "/steer?verb=cancel&every=yes",
    "failure": "/jobs/handbook/errors/0",
    "missing": "/jobs/none",
}
MODEL: Final = "sentence-transformers/all-MiniLM-L6-v2"
DRAWN: Final = "[...document.images].every(each => each.complete && each.naturalWidth)"
GIBIBYTE: Final = 1 << 30


def fill(client: redis.Redis) -> None:
    """Fill a farm in the middle of its work: jobs, workers, a lost one, an hour of samples."""
    farm, now = FarmClient(client), time.time()
    add_workers(farm)
    for place in range(360):
        rate = 40_000 + 9_000 * ((place * 37) % 11) / 11 - (30_000 if 150 < place < 170 else 0)
        done = (int(10 * rate), int(10 * rate / 120))
        sample = Sample(
            seconds=10.0,
            workers={"gpu:cuda-0": done},
            jobs={"handbook": done} if place > 200 else {"old-1": done},
            backlog_tokens=9_000_000 - 20_000 * place,
            workers_alive=3,
            job_workers={
                "handbook" if place > 200 else "old-1": {
                    "gpu:cuda-0": int(done[0] * 0.6),
                    "gpu:cuda-1": int(done[0] * (0.3 if place % 60 > 9 else 0)),
                    "box:cpu-0": done[0] // 10,
                }
            },
        )
        client.xadd(
            wire.SAMPLES,
            {"sample": encode(sample)},
            id=f"{int(1000 * (now - 3600 + 10 * place))}-0",
        )
    for place in range(120):
        worker, seconds = [("gpu:cuda-0", 0.9), ("gpu:cuda-1", 1.1), ("box:cpu-0", 2.6)][place % 3]
        completion = Completion(
            worker=worker,
            model=f"{MODEL}|auto|0|auto",
            job="handbook" if place % 7 else "wiki",
            chunks=300,
            tokens=36_000,
            padded_tokens=38_000,
            real_tokens=36_000,
            seconds=seconds + 0.1 * (place % 5),
            overhead_seconds=0.01,
        )
        client.xadd(
            wire.EVENTS,
            {"done": encode(completion)},
            id=f"{int(1000 * (now - 58 + place / 2.1))}-0",
        )
    add_jobs(client)


def add_workers(farm: FarmClient) -> None:
    """Add two GPUs, a CPU, and a worker that died."""
    for name, speed in (("gpu:cuda-0", 41_000.0), ("gpu:cuda-1", 36_000.0), ("box:cpu-0", 3_000.0)):
        gpu = "cuda" in name
        beat = Heartbeat(
            worker=name,
            incarnation="1",
            host=name.partition(":")[0],
            pid=4711,
            device="cuda-GPU-6f8e" if gpu else "cpu-0",
            state="busy",
            model=f"{MODEL}|auto|0|auto",
            job="handbook",
            tokens_per_second=speed,
            tokens_done=int(900 * speed),
            chunks_done=int(8 * speed),
            load_seconds=4.2,
            device_facts={
                "memory_used_bytes": 31.5 * GIBIBYTE,
                "memory_total_bytes": 80.0 * GIBIBYTE,
                "temperature_celsius": 61.0,
            }
            if gpu
            else {"rss_bytes": 2.1 * GIBIBYTE},
            where={"forward": 900.0, "queue": 40.0, "lane": 12.0},
            models=[
                ModelState(
                    model=f"{MODEL}|auto|0|auto",
                    state="ready",
                    since=time.time() - 400,
                    bytes=45_000_000,
                    load_seconds=4.2,
                ),
                ModelState(
                    model="intfloat/e5-mistral-7b-instruct|auto|0|auto",
                    state="loading" if gpu else "failed",
                    since=time.time() - 20,
                    reason="" if gpu else "it takes 26.5 GiB, and 9.1 GiB of memory are free",
                ),
            ],
        )
        farm.beat(beat, 600)
        rate = Rate(
            tokens_per_second=speed, overhead_seconds=0.02, updated=time.time(), samples=140
        )
        farm.statistics.remember(
            {f"{name}|{MODEL}|auto|0|auto|{size}": rate for size in (5, 6)}, []
        )
    farm.client.zadd(wire.WORKERS, {"gpu:cuda-2": time.time() - 75})


def add_jobs(client: redis.Redis) -> None:
    """Add three jobs in work, and some that have ended."""
    farm = FarmClient(client)
    notes = {
        "out": "/data/vectors/handbook",
        "command": "embedfarm embed handbook.parquet --out vectors",
    }
    for name, terms, done in (
        ("handbook", Terms(), 6),
        ("wiki", Terms(priority=1, tenant="search team"), 3),
        ("tickets", Terms(tenant="support"), 0),
    ):
        job = Job(client, name)
        job.create(JobSpec(model=MODEL, name=f"{name}, autumn edition"), 0, terms, notes)
        push(job, *range(0, 10 * CHUNKS, CHUNKS))
        entries = job.stream.read("gpu:cuda-0", done) if done else []
        failed = {0, 4} if name == "handbook" else set()
        for place, entry in enumerate(entries):
            job.stream.commit([embed(entry, *({place * CHUNKS} if place in failed else ()))])
        job.close(10 * CHUNKS)
        account = Account(
            engine="torch bfloat16", device="NVIDIA H100 80GB HBM3", chunks=4200,
            real_tokens=500_000, padded_tokens=520_000, flops=3e15, peak_flops_per_second=6e14,
            seconds={"forward": 12.0, "queue": 0.4},
        )  # fmt: skip
        farm.reports.account("gpu:cuda-0", "1", {(name, ""): account})
    Job(client, "tickets").pause()
    add_limited_job(client)
    for place in range(25):
        job = Job(client, f"old-{place}")
        job.create(JobSpec(model=MODEL, name=f"nightly export {place}"), 0, notes=notes)
        state, reason = (
            ("failed", "corpus.jsonl:17: no field 'text'") if place % 9 == 4 else ("finished", "")
        )
        counts = {"chunk_count": 40_000, "chunks_done": 40_000, "drained_upto": 40_000}
        farm.end(job.id, state, reason, Settings(), **counts)  # type: ignore[arg-type] # one of two words
    fence = farm.plans.elect("scheduler", 600)
    assert fence
    farm.plans.tell(
        Decision(
            time=time.time(), seconds=0.0004, passes=["defer", "size"],
            notes=[
                ("defer", "tickets is paused"),
                ("size", "gpu:cuda-0 may lease 36000 tokens of handbook"),
            ],
        ),
        STATS,
    )  # fmt: skip


def add_limited_job(client: redis.Redis) -> None:
    """Add a job that has paused itself, since it has taken its device-hours."""
    job = Job(client, "limited")
    terms = Terms(max_hours=1.5, max_cost=20)
    job.create(JobSpec(model=MODEL, name="archive, first half"), 0, terms)
    push(job, 0, CHUNKS)
    entry, result = embed(job.stream.read("gpu:cuda-0", 1)[0])
    job.stream.commit([(entry, msgspec.structs.replace(result, seconds=5460.0, cost=12.5))])


@pytest.fixture
def site(server: LiveServer, client: redis.Redis, tmp_path: Path) -> Iterator[tuple[str, str]]:
    """A farm at work behind keys: the URL of its pages, and a key."""
    fill(client)
    secret, key = make_key("anna", ["admin"])
    keys = tmp_path / "keys"
    keys.write_text(key.line(), encoding="utf-8")
    state = str(tmp_path / "state")
    with served(server, keys_file=keys, state_directory=state) as ((host, port), _):
        yield f"http://{host}:{port}", secret


def sign_in(page: Page, base: str, secret: str) -> None:
    """Sign in with a key, as a person does."""
    page.goto(base)
    page.get_by_label("API key").fill(secret)
    page.get_by_role("button", name="Sign in").click()
    expect(page.get_by_role("button", name="Log out anna")).to_be_visible()


def grave(page: Page) -> list[str]:
    """The faults of accessibility on a page that axe calls serious or critical."""
    page.evaluate(AXE.read_text(encoding="utf-8"))
    found = page.evaluate("axe.run().then(found => found.violations)")
    return [
        f"{each['id']}: {node['html'][:200]}"
        for each in found
        if each["impact"] in {"serious", "critical"}
        for node in each["nodes"]
    ]


@pytest.mark.parametrize(
    ("theme", "size"),
    [
        ("light", "desktop"),
        ("dark", "phone"),
        # Colours are the theme's and places the size's: the other two repeat these.
        pytest.param("light", "phone", marks=pytest.mark.slow),
        pytest.param("dark", "desktop", marks=pytest.mark.slow),
    ],
)
def test_everybody_can_use_every_page(
    browser: Browser, site: tuple[str, str], theme: Literal["light", "dark"], size: str
) -> None:
    """Each page has no serious fault of accessibility, and is no wider than a phone."""
    assert AXE.exists(), "run `make test`, which installs it"
    base, secret = site
    SCREENSHOTS.mkdir(parents=True, exist_ok=True)
    width, height = SIZES[size]
    context = browser.new_context(color_scheme=theme, viewport={"width": width, "height": height})
    watched = Watched(context)
    page = watched.page
    page.goto(base)
    assert not grave(page)
    page.screenshot(path=SCREENSHOTS / f"login-{theme}-{size}.png", full_page=True)
    sign_in(page, base, secret)
    for name, path in PAGES.items():
        page.goto(base + path)
        wait_until(partial(page.evaluate, DRAWN), SECONDS)
        assert watched.overflow() <= 0, (name, size)
        assert not grave(page), (name, size)
        page.screenshot(path=SCREENSHOTS / f"{name}-{theme}-{size}.png", full_page=True)
    assert not watched.faults
    context.close()


def test_nothing_that_others_wrote_comes_alive(
    browser: Browser, server: LiveServer, client: redis.Redis
) -> None:
    """Markup in names, reasons, paths and commands is text on each page, also after an event."""
    farm = FarmClient(client)
    job = Job(client, "odd")
    notes = {"out": f"/data/{ODD}", "command": f"embed {ODD}"}
    job.create(
        JobSpec(model=f"null:2{ODD}", name=ODD, prompt=ODD), 0, Terms(tenant=ODD[:60]), notes
    )
    push(job, 0)
    entry, result = embed(job.stream.read(ODD, 1)[0], 0)
    result.errors[0].reason = ODD
    job.stream.commit([(entry, result)])
    farm.reports.refuse("odd", ODD, ODD)
    farm.beat(heartbeat(ODD), 600)
    client.zadd(wire.WORKERS, {f"lost {ODD}": time.time() - 60})
    ended = Job(client, "ended")
    ended.create(JobSpec(model="null:2", name=ODD), 0, notes=notes)
    farm.end("ended", "failed", ODD, Settings())
    farm.statistics.report(Completion(
        worker=ODD, model=ODD, job="odd", chunks=1, tokens=9, padded_tokens=9, real_tokens=9,
        seconds=1.0, overhead_seconds=0.0,
    ), 100)  # fmt: skip
    with served(server) as ((host, port), _):
        watched = Watched(browser.new_context())
        page = watched.page
        # The first event, which comes after this, takes the stamp away again.
        page.add_init_script(
            f"document.addEventListener('DOMContentLoaded', () => {{ {STAMP} = 'yes' }})"
        )
        for path in ("/", "/jobs/odd", "/jobs/ended", "/jobs/odd/cancel", "/workers", "/scheduler"):
            page.goto(f"http://{host}:{port}{path}")
            if path != "/scheduler":
                expect(page.get_by_text("<script>alert(1)").first).to_be_visible()
            if page.locator("[data-live]").count():
                wait_until(partial(page.evaluate, f"{STAMP} === undefined"), SECONDS)
            assert page.locator("img[src=x]").count() == 0
            assert page.locator("script:not([src])").count() == 0
        assert not watched.faults
