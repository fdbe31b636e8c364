"""Benchmark on a GPU: MiniLM, and known architectures with random weights, beside `encode`.

    python -m benchmarks.gpu [--models A B] [--corpora A B] [--chunks N] [--rounds N]
                             [--device cuda|cpu] [--build DIRECTORY] [--report FILE.md]

Each model has a file of its own, BUILD/gpu/NAME.json, as `benchmarks.compare` makes it, so that
models can be measured one at a time; the report is of all that are there.
"""

import argparse
import shlex
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from benchmarks.compare import BATCH_SIZES, BUILD, CONTENDERS, Place, compare
from benchmarks.corpora import CORPORA, MODEL
from benchmarks.random_models import architectures, build
from benchmarks.report import one_line, render_hardware, table
from benchmarks.results import BARE_ENGINE, BASELINE, BEST_BATCH, FARM, Bench, Comparison
from embedfarm.contract import model_files
from embedfarm.workers.devices import describe_devices

MINILM: Final = MODEL.rpartition("/")[2]
# Chunks of the mixed corpus: seconds of work for the farm, and for `encode` not many minutes.
CHUNKS: Final = {
    MINILM: 300_000,
    "bge-base": 150_000,
    "bge-large": 60_000,
    "modernbert-base": 100_000,
    "qwen3-embedding-0.6b": 60_000,
}
SHOWN: Final = (FARM, BARE_ENGINE, BASELINE, BEST_BATCH)
INTRODUCTION: Final = """\
# On a GPU

Made by `make bench-gpu`; do not edit. The farm is whole: Redis, scheduler, collector, Parquet on
the disk. All models but {minilm} have the published architecture and random weights, and the tokens
of {minilm}. Ratios are medians of those within each round. Share of peak is what the model has to
compute for these texts without padding, per second, over the best rate that torch reached when it
multiplied large square matrices of the same type. Idle is the device's part of the time from the
first block to the last result; tokenise is the worker's, beside the device.
"""
HEADS: Final = (
    *("model", "corpus", "chunks", "tokens/s", "of encode", "of best batch", "of bare engine"),
    *("share of peak", "padding", "idle", "tokenise", "least cosine", "type", "peak TFLOP/s"),
)


def find_model(name: str, directory: Path) -> Path:
    """Return the directory of a model; one with random weights is made at the first call."""
    if name == MINILM:
        return model_files.resolve(MODEL)
    made = directory / "models" / name
    if not made.exists():
        unfinished = made.with_suffix(".part")
        build(architectures()[name], unfinished)
        unfinished.rename(made)
    return made / "model"


def render(benches: Sequence[Bench]) -> str:
    """Render the whole document in Markdown."""
    rows = [_row(bench, each) for bench in benches for each in bench.comparisons]
    commands = [f"- {bench.model}, {bench.created}: `{bench.command}`" for bench in benches]
    parts = [INTRODUCTION.format(minilm=MINILM), table(HEADS, rows)]
    return "\n".join([*parts, *commands, "", render_hardware(benches[0])])


def _row(bench: Bench, comparison: Comparison) -> list[str]:
    """Make the line of a model and a corpus: what the farm reached, else why it did not."""
    name = bench.model
    farm = comparison.find(FARM)
    if farm is None:
        reasons = [each.reason for each in comparison.outcomes if each.contender == FARM]
        return [name, comparison.corpus, *map(one_line, reasons), *[""] * (len(HEADS) - 3)]
    others = (comparison.find(each) for each in (BASELINE, BEST_BATCH, BARE_ENGINE))
    return [
        name,
        comparison.corpus,
        f"{comparison.chunks:,}",
        f"{comparison.tokens / farm.seconds:,.0f}",
        *(f"{farm.speedup(other):.2f}" if other else "" for other in others),
        f"{comparison.peak_share(farm):.1%}",
        *(farm.facts[each] for each in ("padding", "device idle", "tokenise")),
        f"{farm.cosine_min:.5f}",
        farm.facts["dtype"],
        f"{statistics.median(comparison.peaks) / 1e12:,.1f}",
    ]


def main() -> None:
    """Measure some models, and write the report of all that were measured."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="+", choices=tuple(CHUNKS), default=list(CHUNKS))
    parser.add_argument("--corpora", nargs="+", choices=tuple(CORPORA), default=["mixed"])
    parser.add_argument("--chunks", type=int, default=0, help="default: as many as fit a model")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--device", choices=tuple(BATCH_SIZES), default="cuda")
    parser.add_argument("--build", type=Path, default=BUILD)
    parser.add_argument("--report", type=Path, default=BUILD / "gpu" / "report.md")
    arguments = parser.parse_args()
    if arguments.device == "cuda" and not describe_devices().gpus:
        sys.exit("there is no GPU here; --device cpu measures the processors instead")
    contenders = [each for each in CONTENDERS if each.name in SHOWN]
    files = arguments.build / "gpu"
    for name in arguments.models:
        place = Place(find_model(name, arguments.build), arguments.device, arguments.build)
        command = f"python -m benchmarks.gpu {shlex.join(sys.argv[1:])}".strip()
        bench = Bench.begin(command, name, arguments.device)
        for corpus in arguments.corpora:
            chunks = arguments.chunks or CHUNKS[name]
            bench.add(compare(corpus, contenders, chunks, arguments.rounds, place))
            bench.save(files / f"{name}.json")
    benches = [Bench.load(path) for name in CHUNKS if (path := files / f"{name}.json").exists()]
    arguments.report.write_text(render(benches), encoding="utf-8")
    sys.stdout.write(f"{arguments.report}\n")


if __name__ == "__main__":
    main()
