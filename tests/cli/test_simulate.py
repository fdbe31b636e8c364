"""Tests of `embedfarm simulate` and `embedfarm scheduler`, as people use them."""

import json
from pathlib import Path

import pytest
import redis

from embedfarm.contract.farm_client import FarmClient
from tests.farm.harness import role, run, texts_of, write_corpus
from tests.support import LiveServer, wait_until


def test_policies_side_by_side() -> None:
    """A comparison has a row for each scenario and policy, and the default one is the better."""
    done = run(
        "simulate", "--scenario", "short,drop", "--policies", "fair,fixed", "--seeds", "3", "--json"
    )
    rows = json.loads(done.stdout)
    assert [(row["scenario"], row["policy"]) for row in rows] == [
        ("short", "fair"), ("short", "fixed"), ("drop", "fair"), ("drop", "fixed"),
    ]  # fmt: skip
    assert rows[0]["efficiency_mean"] > rows[1]["efficiency_mean"]
    assert rows[2]["efficiency_mean"] > rows[3]["efficiency_mean"]


def test_a_table_and_a_picture(tmp_path: Path) -> None:
    """A report gets its table between the marks, and the same run gives the same picture."""
    report = tmp_path / "report.md"
    report.write_text("before\n<!-- 3 workers -->\nold\n<!-- end -->\nafter\n", encoding="utf-8")
    words = [
        "simulate",
        "--scenario",
        "short",
        "--policies",
        "fair",
        "--workers",
        "3",
        "--seeds",
        "1",
    ]
    for name in ("one.svg", "two.svg", "three.png"):
        done = run(*words, "--report", report, "--timeline", tmp_path / name)
        assert done.returncode == 0, done.stderr
    assert "short" in done.stdout
    text = report.read_text(encoding="utf-8")
    assert text.startswith("before\n<!-- 3 workers -->\n\n| scenario | fair |\n")
    assert text.endswith("<!-- end -->\nafter\n")
    assert "old" not in text
    assert (tmp_path / "one.svg").read_bytes() == (tmp_path / "two.svg").read_bytes()
    assert (tmp_path / "three.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--scenario", "rain"], "'rain' is none of cold"),
        (["--policies", "luck"], "'luck' is none of fair"),
        (["--speeds", "fast"], "--speeds"),
        (["--speeds", "nan,1"], "--speeds: each must be a number of more than 0"),
        (["--seconds", "1e9"], "--seconds"),
        (["--seeds", "1", "--scenario", "short", "--timeline", "run.bmp"], "neither .png nor .svg"),
    ],
)
def test_what_is_not_there_is_a_sentence(words: list[str], said: str) -> None:
    """A wrong word ends the command with status 2, and the error names what there is."""
    done = run("simulate", *words)
    assert done.returncode == 2
    assert said in done.stderr
    assert "Traceback" not in done.stderr


def test_a_farm_that_stands_still_is_told_of() -> None:
    """A simulation that comes to no end fails, and says how far it went."""
    done = run("simulate", "--speeds", "1e-300,1", "--scenario", "short", "--seeds", "1")
    assert done.returncode == 1
    assert "short: jobs are not done after" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_job_is_forecast(tmp_path: Path) -> None:
    """The speed of two workers is measured, and the forecast time follows from it."""
    corpus = write_corpus(tmp_path / "corpus.jsonl", list(texts_of(8000)))
    words = ["--plan", corpus, "--model", "null:16:20000", "--devices", "cpu", "--cpu-workers", "2"]
    done = run("simulate", *words, "--json")
    assert done.returncode == 0, done.stderr
    made = json.loads(done.stdout)
    assert (made["chunks"], made["workers"], made["source"]) == (8000, 2, "calibration")
    assert 20_000 < made["tokens_per_second"] < 44_000
    assert made["seconds"] == pytest.approx(made["tokens"] / made["tokens_per_second"], rel=0.2)
    assert made["seconds_p5"] < made["seconds"] < made["seconds_p95"]


def test_a_scheduler_explains_itself(
    server: LiveServer, client: redis.Redis, tmp_path: Path
) -> None:
    """`scheduler` lists, adds, removes and refuses passes, and shows figures and decisions."""
    url = ("--redis", server.url)
    assert run("scheduler", "stats", *url).returncode == 1
    with role(server, tmp_path, "schedule"):
        farm = FarmClient(client)
        wait_until(lambda: farm.plans.scheduler_stats() is not None, 30)
        assert "tail" in json.loads(run("scheduler", "passes", *url, "--json").stdout)["active"]
        assert run("scheduler", "add-pass", "sjf", "--before", "fair", *url).returncode == 0
        wait_until(lambda: "sjf" in farm.plans.decisions(1)[0].passes, 10)
        assert run("scheduler", "remove-pass", "sjf", *url).returncode == 0
        for words in (["add-pass", "luck"], ["remove-pass", "size"], ["use", "luck"]):
            done = run("scheduler", *words, *url)
            assert (done.returncode, done.stdout) == (2, "")
        assert (
            run("scheduler", "use", "sjf", *url).stdout.strip()
            == "defer → sjf → memory → size → tail"
        )
        assert "decided in" in run("scheduler", "explain", *url).stdout
        assert json.loads(run("scheduler", "stats", *url, "--json").stdout)["decisions"] > 0
