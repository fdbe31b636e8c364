"""A corpus that changes: what another output has is taken from it, beside a full run.

    python -m benchmarks.reuse [--corpus short|mixed] [--chunks 100000] [--kills 10] [--model M]
                               [--duplicates] [--rounds 1]

Glosses of WordNet, or docstrings, are embedded. Then one of twenty is changed, one of fifty goes,
and the order is another one; that is embedded as a whole, with `--reuse`, and with `--reuse` by a
command that is killed at random moments. Every vector is compared.

With `--duplicates` half of the corpus repeats the other half, anywhere, and it is embedded with
`--deduplicate` and without: in turns, as often as `--rounds` says.
"""

import argparse
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import numpy as np

import embedfarm
from benchmarks.corpora import MODEL, mixed, short

CHANGED: Final = 20  # one in so many texts
GONE: Final = 50
COSINE_MIN: Final = 0.9999
COMMAND: Final = [sys.executable, "-m", "embedfarm", "embed"]
SEED: Final = 0
CORPORA: Final = {"short": short, "mixed": mixed}


def change(texts: Sequence[str]) -> list[str]:
    """Return a corpus of which some texts are others, some are gone, and all are elsewhere."""
    generator = random.Random(SEED)  # noqa: S311 # no secret: the same corpus each time
    left = [n for n in range(len(texts)) if n % GONE != 1]
    generator.shuffle(left)
    return [f"changed: {texts[n]}" if n % CHANGED == 0 else texts[n] for n in left]


def write(path: Path, texts: Sequence[str]) -> Path:
    """Write a corpus of JSON Lines."""
    with path.open("w", encoding="utf-8") as file:
        file.writelines(json.dumps({"text": text}) + "\n" for text in texts)
    return path


def embed(corpus: Path, out: Path, model: str, *words: str, seconds_max: float = 1e6) -> float:
    """Embed a corpus, and return the seconds that it took; kill the command when they are over."""
    began = time.monotonic()
    command = [*COMMAND, str(corpus), "--out", str(out), "--model", model, *words]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) as process:
        try:
            _, said = process.communicate(timeout=seconds_max)
        except subprocess.TimeoutExpired:
            process.kill()
            return time.monotonic() - began
    if process.returncode:
        raise SystemExit(said.decode())
    return time.monotonic() - began


def forward_seconds(out: Path) -> float:
    """Return the seconds that devices spent on forward passes for an output, all together."""
    accounts = embedfarm.open(out).manifest.accounts.values()
    return float(sum(each["seconds"]["forward"] for each in accounts))


def measure_duplicates(home: Path, texts: Sequence[str], model: str, rounds: int) -> None:
    """Embed a corpus of which each text stands twice, with --deduplicate and without."""
    doubled = [*texts[: len(texts) // 2]] * 2
    random.Random(SEED).shuffle(doubled)  # noqa: S311 # as above
    corpus = write(home / "doubled.jsonl", doubled)
    ratios = []
    for turn in range(rounds):
        outs = [home / f"all {turn}", home / f"once {turn}"]
        spent = [
            (embed(corpus, out, model, *words), forward_seconds(out))
            for out, words in zip(outs, ((), ("--deduplicate",)), strict=True)
        ]
        ratios.append([once / every for every, once in zip(*spent, strict=True)])
        sys.stdout.write(
            f"{len(doubled):,} texts, each twice: {spent[0][0]:.1f} s and {spent[1][0]:.1f} s with "
            f"--deduplicate; forward passes {spent[0][1]:.1f} s and {spent[1][1]:.1f} s\n"
        )
        compare([outs[1], outs[0], outs[1]], doubled, doubled)
    wall, forward = (statistics.median(each) for each in zip(*ratios, strict=True))
    sys.stdout.write(
        f"with --deduplicate: {wall:.3f} of the time, {forward:.3f} of forward passes\n"
    )


def compare(outputs: Sequence[Path], before: Sequence[str], now: Sequence[str]) -> None:
    """Compare an output with that of a full run, and what it took with where it took it from.

    Args:
        outputs: The output, that of a full run, and the one that was reused.
        before: The texts of the last one.
        now: The texts of the others.

    Raises:
        SystemExit: A vector is another one.
    """
    out, (made, whole, old) = outputs[0], (embedfarm.open(each).matrix for each in outputs)
    rows = {text: row for row, text in reversed(list(enumerate(before)))}  # the first of each text
    kept = [(place, rows[text]) for place, text in enumerate(now) if text in rows]
    if any(not np.array_equal(made[place], old[row]) for place, row in kept):
        raise SystemExit(f"{out}: a vector that was taken has other bits")
    lengths = np.linalg.norm(made, axis=1) * np.linalg.norm(whole, axis=1)
    cosines = np.einsum("cd,cd->c", made, whole) / lengths
    sys.stdout.write(f"{out.name}: least cosine with a full run {cosines.min():.6f}\n")
    if cosines.min() < COSINE_MIN:
        raise SystemExit(f"{out}: a vector is another one")


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--corpus", choices=CORPORA, default="short")
    parser.add_argument("--chunks", type=int, default=100_000)
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--model", default=MODEL)
    parser.add_argument("--duplicates", action="store_true")
    parser.add_argument("--rounds", type=int, default=1)
    options = parser.parse_args()
    generator = random.Random(SEED)  # noqa: S311 # as above
    with tempfile.TemporaryDirectory(prefix="embedfarm-reuse-") as home:
        texts = CORPORA[options.corpus](Path(home), options.chunks)
        if options.duplicates:
            measure_duplicates(Path(home), texts, options.model, options.rounds)
            return
        changed = change(texts)
        first = write(Path(home) / "first.jsonl", texts)
        second = write(Path(home) / "second.jsonl", changed)
        old, full, reused, killed = (Path(home) / n for n in ("old", "full", "reused", "killed"))
        embed(first, old, options.model, "--format", "npy")
        whole = embed(second, full, options.model)
        part = embed(second, reused, options.model, "--reuse", str(old))
        facts = embedfarm.open(reused).manifest
        embedded = sum(each.chunks for each in facts.workers.values())
        new = len(set(changed) - set(texts))
        sys.stdout.write(
            f"{len(texts):,} texts, then {len(changed):,}, {new:,} of them new, {embedded:,} "
            f"embedded; full run {whole:.1f} s, with --reuse {part:.1f} s: {part / whole:.3f}\n"
        )
        compare([reused, full, old], texts, changed)
        for _ in range(options.kills):
            seconds = generator.uniform(0.2, 1.0) * part
            embed(second, killed, options.model, "--reuse", str(old), seconds_max=seconds)
        embed(second, killed, options.model, "--reuse", str(old))
        compare([killed, full, old], texts, changed)
        if embedded != new:
            raise SystemExit(f"{embedded} chunks were embedded, and {new} texts are new")


if __name__ == "__main__":
    main()
