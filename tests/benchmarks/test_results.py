"""Tests of the figures of a comparison, and of the document that states them."""

from pathlib import Path

import pytest

from benchmarks.report import render
from benchmarks.results import BARE_ENGINE, BASELINE, FARM, Bench, Comparison, Outcome, Run

MEBIBYTE = 1 << 20


def outcome(contender: str, *seconds: float, cosine: float = 1.0, reason: str = "") -> Outcome:
    """The outcome of a contender whose runs took so many seconds."""
    runs = [
        Run(seconds=each, load_seconds=2.0, wall_seconds=each + 3, rss_bytes_max=512 * MEBIBYTE)
        for each in seconds
    ]
    return Outcome(
        contender=contender,
        runs=runs,
        reason=reason,
        version=f"{contender} 1.0",
        cosine_mean=cosine,
        cosine_min=cosine,
    )


def bench(*outcomes: Outcome, chunks: int = 5_000) -> Bench:
    """A benchmark of one corpus of chunks of 100 tokens, on a device of 10 TFLOP/s."""
    comparison = Comparison(
        corpus="mixed",
        about="Text of all kinds.",
        chunks=chunks,
        tokens=chunks * 100,
        tokens_max=256,
        flops=1e14,
        peaks=[9e12, 10e12, 30e12],
        outcomes=list(outcomes),
    )
    return Bench(
        created="2026-11-21",
        command="python -m benchmarks.compare",
        model="some/model",
        device="cpu",
        dtype="float32",
        hardware={"Processor": "Some processor", "Cores": "2"},
        comparisons=[comparison],
    )


FULL = bench(
    outcome(FARM, 20.0, 10.0, 50.0, cosine=0.99997),
    outcome(BARE_ENGINE, 19.0, 9.0, 45.0),
    outcome(BASELINE, 100.0, 60.0, 100.0),
    outcome("other", reason="It says:\nno wheel | for this"),
)


def test_a_run_that_was_cut_off_goes_on(tmp_path: Path) -> None:
    """A resume keeps what the same command found on this machine, and nothing else."""
    path = tmp_path / "bench.json"
    earlier = Bench.begin("compare --rounds 3", "some/model", "cpu")
    earlier.created = "2026-11-21"
    earlier.add(FULL.comparisons[0])
    earlier.save(path)
    later = Bench.begin("compare --rounds 3", "some/model", "cpu")
    later.resume(path)
    assert later == earlier
    other = Bench.begin("compare --rounds 1", "some/model", "cpu")
    other.resume(path)
    assert not other.comparisons
    earlier.hardware["Processor"] = "Some processor"
    earlier.save(path)
    elsewhere = Bench.begin("compare --rounds 3", "some/model", "cpu")
    elsewhere.resume(path)
    assert not elsewhere.comparisons


def test_a_ratio_is_the_median_of_paired_rounds() -> None:
    """Rounds that are 5, 6 and 2 times as fast have the ratio 5, the median of the rounds."""
    farm, _, baseline, _ = FULL.comparisons[0].outcomes
    assert farm.speedup(baseline) == pytest.approx(5.0)
    assert baseline.speedup(farm) == pytest.approx(1 / 5.0)
    assert farm.seconds == pytest.approx(20.0)


def test_share_of_peak_is_of_the_median_peak() -> None:
    """The share of peak is of the median peak: 1e14 operations in 20 s of 10 TFLOP/s are half."""
    comparison = FULL.comparisons[0]
    assert comparison.peak_share(comparison.outcomes[0]) == pytest.approx(0.5)


def test_int8_is_no_share_of_a_peak() -> None:
    """The line of int8 has no share of peak, since the peak is that of another type."""
    eight = outcome("farm, int8", 20.0)
    eight.facts["dtype"] = "int8"
    text = render(bench(eight, outcome(BASELINE, 40.0)))
    (line,) = [row for row in text.splitlines() if row.startswith("| farm, int8 |")]
    assert "%" not in line


def test_what_did_not_run_is_not_found() -> None:
    """An outcome without runs is not found, so that nothing is compared with it."""
    comparison = FULL.comparisons[0]
    assert comparison.find("other") is None
    assert comparison.find(FARM) is comparison.outcomes[0]


def test_results_come_back_from_their_file(tmp_path: Path) -> None:
    """Results that are saved and loaded are the same."""
    path = tmp_path / "build" / "bench.json"
    FULL.save(path)
    assert Bench.load(path) == FULL


def test_the_document_has_a_line_for_each_contender_fastest_first() -> None:
    """Each contender that ran is in the table with its figures, the fastest first."""
    lines = render(FULL).splitlines()
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    ran = [row for row in cells if row[0] in {FARM, BARE_ENGINE, BASELINE}]
    assert [row[0] for row in ran] == [BARE_ENGINE, FARM, BASELINE]
    assert ran[1][1:5] == ["250", "25,000", "5.00", ""]
    assert ran[1][5:10] == ["50.0%", "0.999970", "0.999970", "512", "2.0"]


def test_the_document_states_the_farms_ratios() -> None:
    """The document says in words how fast the farm is beside `encode` and the bare engine."""
    assert "The farm reached 5.00 times encode as it comes, 0.90 times the bare engine" in render(
        FULL
    )


def test_the_document_says_why_something_did_not_run() -> None:
    """The document gives the end of the reason why a contender did not run, fit for a table."""
    assert "| other | mixed | no wheel \\| for this |" in render(FULL)


def test_the_document_names_the_hardware_and_versions() -> None:
    """The document names the processor, the versions of contenders, and the device."""
    document = render(FULL)
    assert "| Processor | Some processor |" in document
    assert f"{FARM} 1.0" in document
    assert "on cpu" in document


@pytest.mark.parametrize(("chunks", "rounds"), [(200, 3), (5_000, 1)])
def test_a_short_form_says_that_it_is_one(chunks: int, rounds: int) -> None:
    """A document of too few chunks or rounds says that it is a short form; a full one does not."""
    small = bench(outcome(BASELINE, *[10.0] * rounds), chunks=chunks)
    small.comparisons[0].peaks = small.comparisons[0].peaks[:rounds]
    assert "short form" in render(small)
    assert "short form" not in render(FULL)
