"""Corpora for side-by-side runs: short, mixed, long and repeated texts, the same on every run.

    python -m benchmarks.corpora DIRECTORY [--chunks N]

Nothing is random but the order of the repeated texts, which has a seed. Corpora are evenly spaced
picks, so that a small one looks like a large one.
"""

import argparse
import json
import random
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from itertools import accumulate
from pathlib import Path
from typing import Final, TypeAlias

from embedfarm.contract import model_files
from embedfarm.producer.docstrings import docstrings
from embedfarm.readers.chunker import cut, load_tokenizer, token_spans

MODEL: Final = "sentence-transformers/all-MiniLM-L6-v2"
WORDNET: Final = "wordnet-base"  # Debian's package of Princeton's WordNet 3.0
PARTS_OF_SPEECH: Final = ("noun", "verb", "adj", "adv")
WINDOW_TOKENS: Final = 510  # 512 with the two that the model puts around a text
SEED: Final = 0

Make: TypeAlias = Callable[[Path, int], list[str]]


class CorpusUnavailable(RuntimeError):
    """Raised when this machine cannot make a corpus; the message says why."""


def pick(texts: Sequence[str], count: int) -> list[str]:
    """Pick `count` distinct texts, evenly spaced; if they are too few, repeats get a number."""
    if count > len(texts):
        return [*texts, *numbered(texts, count - len(texts))]
    return [texts[index * len(texts) // count] for index in range(count)]


def numbered(texts: Sequence[str], count: int) -> list[str]:
    """Repeat texts up to `count`, each with the number of its round before it, from 2 on."""
    rounds = range(2, 2 + -(-count // len(texts)))
    return [f"{number}. {text}" for number in rounds for text in texts][:count]


def short(directory: Path, count: int) -> list[str]:
    """Glosses of WordNet: definitions of a dozen words."""
    return pick(glosses(wordnet(directory)), count)


def mixed(_directory: Path, count: int) -> list[str]:
    """Docstrings of this Python's standard library, 10 to 2,000 characters."""
    return pick(documentation(), count)


def long(_directory: Path, count: int) -> list[str]:
    """Docstrings end to end, cut into windows of 512 tokens as MiniLM counts them."""
    text = "\n\n".join(documentation())
    tokenizer = load_tokenizer(model_files.resolve(MODEL) / "tokenizer.json")
    return pick(list(cut(text, partial(token_spans, tokenizer), WINDOW_TOKENS, 0)), count)


def repeated(directory: Path, count: int) -> list[str]:
    """The mixed corpus, half of it repeats of the other half, in no order.

    How often a text repeats falls with its rank, as words do in a language: the k-th text is
    repeated in proportion to 1 / k (Zipf's law).
    """
    chooser = random.Random(SEED)  # noqa: S311 # no secret: the same corpus each time
    distinct = mixed(directory, count - count // 2)
    chooser.shuffle(distinct)
    weights = list(accumulate(1 / rank for rank in range(1, len(distinct) + 1)))
    texts = distinct + chooser.choices(distinct, cum_weights=weights, k=count // 2)
    chooser.shuffle(texts)
    return texts


# Name, function that makes it, and share of `--chunks`; a long text takes about six times as long.
CORPORA: Final[dict[str, tuple[Make, float]]] = {
    "short": (short, 1.0),
    "mixed": (mixed, 1.0),
    "long": (long, 0.06),
    "repeated": (repeated, 0.5),
}


def write_corpus(name: str, directory: Path, chunks: int) -> Path:
    """Write JSON Lines with the field "text" below `directory`, unless they are there.

    Raises:
        CorpusUnavailable: The texts are not on this machine and cannot be fetched.
    """
    make, share = CORPORA[name]
    count = max(1, int(chunks * share))
    path = directory / f"{name}-{count}.jsonl"
    if not path.exists():
        directory.mkdir(parents=True, exist_ok=True)
        lines = (json.dumps({"text": text}) + "\n" for text in make(directory, count))
        temporary = path.with_suffix(".part")
        temporary.write_text("".join(lines), encoding="utf-8")
        temporary.rename(path)
    return path


def read_corpus(path: Path) -> list[str]:
    """Read the texts of a corpus in order."""
    with path.open(encoding="utf-8") as file:
        return [json.loads(line)["text"] for line in file]


def glosses(dictionary: Path) -> list[str]:
    """Return the gloss of each of WordNet's meanings, by part of speech, in order of the files."""
    return [gloss for part in PARTS_OF_SPEECH for gloss in _glosses(dictionary / f"data.{part}")]


def _glosses(path: Path) -> Iterator[str]:
    """Yield the glosses of one file, which follow a bar; the licence's lines begin with a space."""
    for line in path.read_text(encoding="utf-8").splitlines():
        _, bar, gloss = line.partition(" | ")
        if bar and not line.startswith(" "):
            yield gloss.strip()


@cache
def documentation() -> list[str]:
    """Return all docstrings of the standard library; parsing it takes seconds."""
    return [text for _, text in docstrings()]


def wordnet(directory: Path) -> Path:
    """Return the directory of WordNet's data files, fetched and unpacked at the first call."""
    root = directory.absolute() / "wordnet"
    dictionary = root / "usr" / "share" / "wordnet"
    if not dictionary.exists():
        root.mkdir(parents=True, exist_ok=True)
        try:
            _command(["apt-get", "download", WORDNET], root)
            _command(["dpkg", "-x", str(next(root.glob("*.deb"))), str(root)], root)
        except (OSError, subprocess.CalledProcessError) as error:
            raise CorpusUnavailable(f"Debian's package {WORDNET} is not to be had: {error}") from (
                error
            )
    return dictionary


def _command(command: Sequence[str], directory: Path) -> None:
    """Run a command in a directory; its output is kept for the error, if there is one."""
    subprocess.run(command, cwd=directory, check=True, capture_output=True)


def main() -> None:
    """Write all corpora."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--chunks", type=int, default=5_000)
    arguments = parser.parse_args()
    for name in CORPORA:
        path = write_corpus(name, arguments.directory, arguments.chunks)
        texts = read_corpus(path)
        mean = sum(map(len, texts)) / len(texts)
        sys.stdout.write(f"{path}: {len(texts):,} texts of {mean:.0f} characters on average\n")


if __name__ == "__main__":
    main()
