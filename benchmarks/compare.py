"""Comparison of the farm with what people would use instead: same texts, model and machine.

    python -m benchmarks.compare [--chunks N] [--rounds N] [--corpora A,B] [--contenders A,B]
                                 [--model NAME] [--device cpu|cuda] [--resume]

Writes build/bench.json, from which `benchmarks.report` and `benchmarks.chart` make the documents;
with `--resume` a run that was cut off goes on with the corpora that it has not there.
A contender that cannot run is in it with its reason. `encode` always runs: its float32 vectors are
what the others are compared with.
"""

import argparse
import json
import math
import os
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from benchmarks.corpora import CORPORA, MODEL, read_corpus, write_corpus
from benchmarks.processes import CommandFailed, Finished, run_watched
from benchmarks.results import (
    BARE_ENGINE,
    BASELINE,
    BEST_BATCH,
    FARM,
    Bench,
    Comparison,
    Outcome,
    Run,
    find_dtype,
)
from embedfarm.contract import model_files
from embedfarm.contract.job_spec import JobSpec
from embedfarm.contract.settings import Settings
from embedfarm.workers.engines.opening import open_engine

BUILD: Final = Path("build")
PEERS: Final = Path(__file__).parent / "peers"
# No model is fetched from the hub, and no usage is reported to anybody.
QUIET: Final = {"HF_HUB_OFFLINE": "1", "RAY_USAGE_STATS_ENABLED": "0", "DO_NOT_TRACK": "1"}
BATCH_SIZES: Final = {"cpu": (4, 8, 16, 32, 64, 128), "cuda": (32, 64, 128, 256, 512, 1024)}
SWEEP_CHUNKS: Final = 1000  # of few texts, large batches would pad more than they do
SLOW: Final = 2.0  # a contender that takes so many times as long as `encode` runs once


class Unavailable(RuntimeError):
    """Raised when a peer is not installed; the message says why."""


@dataclass(frozen=True)
class Contender:
    """A way to embed a corpus, one line of the table.

    Attributes:
        name: Name in the table.
        peer: Module below benchmarks.peers.
        size: Batch rows or workers, as `benchmarks.peers.protocol.Task.size`.
        dtype: Type in which the farm computes; other peers choose by themselves.
        sweeps: Whether the best `size` is looked for first.
    """

    name: str
    peer: str
    size: int = 0
    dtype: str = "auto"
    sweeps: bool = False


CONTENDERS: Final = (
    Contender(FARM, "farm"),
    Contender("farm, one worker", "farm", size=1),
    Contender("farm, int8", "farm", dtype="int8"),
    Contender(BARE_ENGINE, "engine"),
    Contender(BASELINE, "encode"),
    Contender(BEST_BATCH, "encode", sweeps=True),
    Contender("encode, process pool", "encode_pool"),
    Contender("infinity-emb", "infinity"),
    Contender("Ray Data", "ray_data"),
    Contender("fastembed", "fastembed"),
    Contender("EmbedAnything", "embed_anything"),
)


class Reply(msgspec.Struct):
    """Figures that a peer reports of its run, see `benchmarks.peers.protocol.report`."""

    seconds: float
    load_seconds: float
    version: str
    facts: dict[str, str]


@dataclass(frozen=True)
class Place:
    """Model, device and directories with which all contenders run.

    Attributes:
        model: Directory of the model.
        device: "cpu" or "cuda".
        build: Directory of environments, corpora and vectors.
    """

    model: Path
    device: str
    build: Path

    def vectors(self, contender: Contender) -> Path:
        """Return the path for a contender's vectors."""
        return self.build / "bench" / f"{contender.name.replace(', ', '-').replace(' ', '-')}.npy"

    def python(self, peer: str) -> str:
        """Return the interpreter of a peer's environment: the farm's own if it needs no other.

        Raises:
            Unavailable: The peer is not installed; the message is the end of what pip said.
        """
        if not (PEERS / f"{peer}.txt").exists():
            return sys.executable
        root = self.build.absolute() / "peers" / peer
        if (root / "installed").exists():
            return str(root / "bin" / "python")
        log = root.with_suffix(".log")
        said = log.read_text(encoding="utf-8").strip() if log.exists() else ""
        raise Unavailable(f"not installed: {said.splitlines()[-1] if said else 'not tried'}")


def run_once(contender: Contender, corpus: Path, place: Place) -> tuple[Run, Reply]:
    """Run a contender once, in processes of its own.

    Raises:
        Unavailable: The contender's peer is not installed.
        CommandFailed: The contender did not work.
    """
    out = place.vectors(contender)
    out.parent.mkdir(parents=True, exist_ok=True)
    words = [corpus, place.model, place.device, out.absolute()]
    words += ["--size", contender.size, "--dtype", contender.dtype]
    command = [place.python(contender.peer), "-m", f"benchmarks.peers.{contender.peer}"]
    finished = run_watched([*command, *map(str, words)], os.environ | QUIET)
    reply = msgspec.json.decode(_last_line(finished), type=Reply)
    run = Run(
        seconds=reply.seconds,
        load_seconds=reply.load_seconds,
        wall_seconds=finished.wall_seconds,
        rss_bytes_max=finished.rss_bytes_max,
    )
    return run, reply


def find_best_size(contender: Contender, corpus: Path, place: Place) -> Contender:
    """Find the batch size that is fastest on an evenly spaced part of a corpus.

    A size with which the contender fails, as when memory is too small, counts as the slowest.
    """

    def seconds(sized: Contender) -> float:
        try:
            return run_once(sized, sample, place)[0].seconds
        except CommandFailed as error:
            sys.stdout.write(f"{corpus.stem:16}{sized.name} {sized.size}: {error}\n")
            return math.inf

    lines = corpus.read_text(encoding="utf-8").splitlines(keepends=True)
    sample = place.build / "bench" / "sample.jsonl"
    sample.parent.mkdir(parents=True, exist_ok=True)
    sample.write_text("".join(lines[:: -(-len(lines) // SWEEP_CHUNKS)]), encoding="utf-8")
    sizes = [replace(contender, size=size) for size in BATCH_SIZES[place.device]]
    return min(sizes, key=seconds)


def run_rounds(
    contenders: Sequence[Contender], corpus: Path, rounds: int, place: Place
) -> tuple[list[Outcome], list[float]]:
    """Run all contenders in turn, again and again, and measure the device's peak once a round."""
    outcomes = [Outcome(contender=each.name) for each in contenders]
    peaks = []
    for turn in range(rounds):
        for place_in_turn in range(len(outcomes)):
            number = (turn + place_in_turn) % len(outcomes)  # nobody is always first
            outcome = outcomes[number]
            if not outcome.reason and not _is_slow(outcome, outcomes):
                _add_run(contenders[number], outcome, corpus, place)
        peaks.append(measure_peak(place, find_dtype(outcomes)))
    reference = next(each for each in contenders if each.name == BASELINE)
    exact = np.load(place.vectors(reference))
    for contender, outcome in zip(contenders, outcomes, strict=True):
        if outcome.runs:
            cosines = measure_cosines(np.load(place.vectors(contender)), exact)
            outcome.cosine_mean, outcome.cosine_min = float(cosines.mean()), float(cosines.min())
    return outcomes, peaks


def _is_slow(outcome: Outcome, outcomes: Sequence[Outcome]) -> bool:
    """Tell whether a contender is so slow that another round would be long and of no use."""
    baseline = next(each for each in outcomes if each.contender == BASELINE)
    if not (outcome.runs and baseline.runs):
        return False
    return outcome.seconds > SLOW * baseline.seconds


def _add_run(contender: Contender, outcome: Outcome, corpus: Path, place: Place) -> None:
    """Add one more run of a contender, or the reason why there is none."""
    try:
        run, reply = run_once(contender, corpus, place)
    except (Unavailable, CommandFailed) as error:
        outcome.runs.clear()
        outcome.reason = str(error)
        sys.stdout.write(f"{corpus.stem:16}{contender.name:22}{outcome.reason}\n")
        return
    outcome.runs.append(run)
    outcome.version, outcome.facts = reply.version, reply.facts
    if contender.sweeps:
        outcome.facts["batch size"] = str(contender.size)
    sys.stdout.write(f"{corpus.stem:16}{contender.name:22}{run.seconds:8.1f} s\n")
    sys.stdout.flush()


def measure_peak(place: Place, dtype: str) -> float:
    """Measure the device's peak in operations per second, in a process of its own.

    Raises:
        CommandFailed: The peak cannot be measured.
    """
    command = [sys.executable, "-m", "benchmarks.device_peak", place.device]
    answer = json.loads(_last_line(run_watched([*command, dtype])))
    return float(answer["flops_per_second"])


def measure_cosines(
    vectors: NDArray[np.float32], exact: NDArray[np.float32]
) -> NDArray[np.float64]:
    """Return the cosine of each row with that row of `exact`; NaN where a vector has no length."""
    ours, theirs = vectors.astype(np.float64), exact.astype(np.float64)
    norms = np.linalg.norm(ours, axis=1) * np.linalg.norm(theirs, axis=1)
    return np.asarray((ours * theirs).sum(axis=1) / norms)


def compare(
    name: str, contenders: Sequence[Contender], chunks: int, rounds: int, place: Place
) -> Comparison:
    """Run all contenders on one corpus.

    Raises:
        benchmarks.corpora.CorpusUnavailable: This machine has not got the texts.
    """
    corpus = write_corpus(name, place.build / "corpora", chunks)
    texts = read_corpus(corpus)
    spec = JobSpec(model=str(place.model), engine="torch", dtype="float32")
    engine = open_engine(spec, "cpu", Settings())
    lengths = engine.tokenise(texts).lengths
    ready = [find_best_size(each, corpus, place) if each.sweeps else each for each in contenders]
    outcomes, peaks = run_rounds(ready, corpus, rounds, place)
    return Comparison(
        corpus=name,
        about=" ".join((CORPORA[name][0].__doc__ or "").split("\n\n")[0].split()),
        chunks=len(texts),
        tokens=int(lengths.sum()),
        tokens_max=int(lengths.max()),
        flops=engine.flops(lengths),
        peaks=peaks,
        outcomes=outcomes,
    )


def _last_line(finished: Finished) -> str:
    """Return the last line of a process's output."""
    return finished.output.rstrip().rpartition("\n")[2]


def main() -> None:
    """Run the comparisons; what is done is saved after each corpus."""
    parser = argparse.ArgumentParser(description=__doc__)
    names = [each.name for each in CONTENDERS]
    parser.add_argument("--chunks", type=int, default=5_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--corpora", nargs="+", choices=tuple(CORPORA), default=list(CORPORA))
    parser.add_argument("--contenders", nargs="+", choices=names, default=names)
    parser.add_argument("--model", default=MODEL)
    parser.add_argument("--device", choices=tuple(BATCH_SIZES), default="cpu")
    parser.add_argument("--resume", action="store_true")
    arguments = parser.parse_args()
    chosen = {BASELINE, *arguments.contenders}
    contenders = [each for each in CONTENDERS if each.name in chosen]
    place = Place(model_files.resolve(arguments.model), arguments.device, BUILD)
    words = [word for word in sys.argv[1:] if word != "--resume"]
    command = f"python -m benchmarks.compare {shlex.join(words)}".strip()
    path = BUILD / "bench.json"
    bench = Bench.begin(command, arguments.model, arguments.device)
    if arguments.resume and path.exists():
        bench.resume(path)
    done = {each.corpus for each in bench.comparisons}
    for name in arguments.corpora:
        if name not in done:
            bench.add(compare(name, contenders, arguments.chunks, arguments.rounds, place))
            bench.save(path)


if __name__ == "__main__":
    main()
