"""A corpus as a forecast sees it: the length of each chunk, and a sample from all over it."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from embedfarm.contract import model_files
from embedfarm.contract.settings import Settings
from embedfarm.contract.token_counter import TokenCounter
from embedfarm.readers import fail_on_bad_row, read_corpus
from embedfarm.runs.request import Request

RUN_CHUNKS: Final = 64  # chunks that follow one another in a sample, alike as neighbours are
SAMPLE_CHUNKS_MAX: Final = 1 << 17
SAMPLE_BYTES_MAX: Final = 64 << 20
TOKENISED: Final = 1000  # chunks, to know how many bytes a token has


class CorpusSample(NamedTuple):
    """CorpusSample of a corpus: runs of neighbouring chunks from all over it, in random order.

    Attributes:
        lengths: Estimated tokens of each chunk of the corpus, shape (n,).
        texts: The chunks of the sample.
        indices: Their indices in the corpus.
    """

    lengths: NDArray[np.int64]
    texts: list[str]
    indices: list[int]


def take_sample(request: Request, settings: Settings) -> CorpusSample:
    """Read a corpus twice: for the sizes of its chunks, and for a sample of them.

    How many bytes a token has is found out from the sample, if the model's tokenizer is at hand,
    and how many tokens the model keeps of a chunk from its files.

    Raises:
        CorpusError: The corpus cannot be read.
    """
    sizes = np.fromiter((len(text.encode()) for text in _texts(request)), np.int64)
    starts = _starts(sizes)
    runs: list[list[str]] = [[] for _ in starts]
    places = {start // RUN_CHUNKS: place for place, start in enumerate(starts)}
    for index, text in enumerate(_texts(request)):
        if (place := places.get(index // RUN_CHUNKS)) is not None:
            runs[place].append(text)
    texts = [text for run in runs for text in run]
    indices = [
        start + step for start, run in zip(starts, runs, strict=True) for step in range(len(run))
    ]
    spec, cache = request.spec, settings.model_cache
    directory = None if model_files.is_null(spec.model) else model_files.resolve(spec.model, cache)
    bytes_per_token = _bytes_per_token(texts[:TOKENISED], directory) if directory else None
    counter = TokenCounter.of_job(spec, directory, bytes_per_token)
    return CorpusSample(counter.estimate(sizes), texts, indices)


def _starts(sizes: NDArray[np.int64]) -> list[int]:
    """Return where the runs of a sample begin, in random order; as many as may be taken."""
    total = -(-len(sizes) // RUN_CHUNKS)
    share = min(1.0, SAMPLE_CHUNKS_MAX / max(1, len(sizes)), SAMPLE_BYTES_MAX / max(1, sizes.sum()))
    count = max(1, int(total * share)) if total else 0
    chosen = np.unique(np.linspace(0, max(0, total - 1), count).astype(np.int64))
    starts = RUN_CHUNKS * np.random.default_rng(0).permutation(chosen)
    return [int(start) for start in starts]


def _texts(request: Request) -> Iterator[str]:
    on_bad_row = (lambda _: None) if request.skip_bad_rows else fail_on_bad_row
    for rows in read_corpus(request.sources, request.options, on_bad_row):
        yield from rows.texts


def _bytes_per_token(texts: Sequence[str], directory: Path) -> float | None:
    """Return the bytes per token of these texts, without the tokens that frame each of them.

    None without the model's tokenizer.
    """
    from tokenizers import Tokenizer  # noqa: PLC0415 # only where it is needed

    path = directory / "tokenizer.json"
    if not path.exists():
        return None
    tokenizer = Tokenizer.from_file(str(path))
    tokenizer.no_truncation()
    encoded = tokenizer.encode_batch_fast(texts, add_special_tokens=False)
    return sum(len(text.encode()) for text in texts) / max(1, sum(len(e.ids) for e in encoded))
