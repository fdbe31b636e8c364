"""Report of a run of chaos, in words and figures."""

from collections import Counter, defaultdict

import numpy as np

from tests.chaos.outcome import Outcome
from tests.chaos.run import IDS, Orders


def _count(counts: Counter[str]) -> str:
    return ", ".join(f"{name} {count:,}" for name, count in sorted(counts.items())) or "none"


def to_markdown(orders: Orders, outcome: Outcome) -> str:
    """Return the figures of a run, and a row for each kind of fault, as tables in Markdown."""
    p50, p99, most = (outcome.recovery(percentile) for percentile in (50, 99, 100))
    by_name = defaultdict[str, list[float]](list)
    for name, seconds in outcome.recoveries:
        by_name[name].append(seconds)
    facts = {
        "minutes under faults": f"{orders.seconds / 60:.0f}",
        "seed": str(orders.seed),
        "model": f"`{orders.model}`, 2 CPU workers",
        "jobs that ended complete": f"{outcome.runs}, of {outcome.chunks:,} chunks in all, under "
        f"{IDS} ids in turn",
        "faults": str(len(outcome.recoveries)),
        "chunks lost": str(outcome.lost),
        "chunks doubled": str(outcome.doubled),
        "least cosine with the quiet run": f"{outcome.cosine_min:.5f}",
        "recovery": f"P50 {p50:.1f} s, P99 {p99:.1f} s, most {most:.1f} s",
        "throughput": f"{outcome.rate:.0f} chunks/s, {outcome.share:.0%} of the quiet "
        f"{outcome.quiet_rate:.0f}",
        "commits by those who had lost the lease, refused": str(outcome.duplicates),
        "most deliveries of a block": str(outcome.deliveries_max),
        "longest time that a lease was not renewed": f"{outcome.idle_seconds_max:.0f} s",
        "vectors by HTTP": f"{outcome.answered} right, {outcome.wrong} wrong, "
        f"{outcome.unanswered} without an answer, {outcome.refused} asked again",
        "`embed` refused, as it should": _count(outcome.refusals),
        "small jobs of tenants, complete": _count(outcome.small_jobs),
        "small jobs asked for again": str(outcome.again),
        "answers that readers looked through": _count(outcome.read),
        "words of one tenant read by another": str(outcome.leaks),
        "other findings": "; ".join(outcome.problems) or "none",
    }
    lines = ["| what | |", "|---|---|", *(f"| {name} | {fact} |" for name, fact in facts.items())]
    lines += ["", "| fault | times | recovered after, median | most |", "|---|---|---|---|"]
    lines += [
        f"| {name} | {len(each)} | {np.median(each):.1f} s | {max(each):.1f} s |"
        for name, each in sorted(by_name.items())
    ]
    return "\n".join(lines) + "\n"
