"""Tests of texts that are longer than the model takes."""

import re
import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sentence_transformers import SentenceTransformer

from embedfarm.contract.job_spec import JobSpec
from embedfarm.contract.model_files import ModelError, own_limit
from embedfarm.contract.records import Block
from embedfarm.contract.settings import Settings
from embedfarm.contract.token_counter import FRAMING, TokenCounter
from embedfarm.workers.embedder import Embedder
from embedfarm.workers.engines.engine import Finish, Tokenised
from embedfarm.workers.engines.opening import open_engine
from embedfarm.workers.engines.sentence_transformer import SentenceTransformerEngine
from embedfarm.workers.engines.windows import cut_windows, pool_windows
from tests.workers.support import micro_batch
from tests.workers.tiny_models import KINDS, LENGTH_MAX, build

LONG = "The quick brown fox jumps over the lazy dog near the river bank. " * 20
TEXTS = ["short one", LONG, "another", LONG[:700] + "and farms", LONG]
MODELS = ["mean_pooled", "cls_pooled", "last_token_pooled", "dense_headed", "prompted"]


def offsets_of(text: str) -> list[tuple[int, int]]:
    """Offsets of a text's tokens, which have at most three characters and no blank."""
    return [match.span() for match in re.finditer(r"\S{1,3}", text)]


@given(
    st.lists(st.text("ab", min_size=1, max_size=12), min_size=1, max_size=60),
    st.integers(5, 20),
    st.integers(0, 2),
)
def test_windows_hold_the_whole_text(words: list[str], room: int, overlap: int) -> None:
    """Every window fits, every token is in one, overlaps repeat some, and cuts are at blanks.

    A cut is within a word only if the word is longer than half a window.
    """
    text = " ".join(words)
    offsets = offsets_of(text)
    spans = list(cut_windows(text, offsets, room, overlap))
    assert all(1 <= len(offsets_of(text[start:end])) <= room for start, end in spans)
    assert (spans[0][0], spans[-1][1]) == (0, len(text))
    for (_, end), (start, _) in pairwise(spans):
        assert start < end if overlap else not text[end:start].strip()
    if max(map(len, words)) <= 3:
        assert not any(text[start - 1 : start].strip() for start, _ in spans)
        assert not any(text[end : end + 1].strip() for _, end in spans)


@given(st.integers(1, 300), st.integers(5, 20), st.integers(0, 2))
def test_windows_are_counted_before_they_are_cut(count: int, room: int, overlap: int) -> None:
    """The tokens of all windows are known from the length of the text, wherever they are cut."""
    text = "a" * count  # each a token
    spans = cut_windows(text, [(place, place + 1) for place in range(count)], room, overlap)
    counter = TokenCounter(room + FRAMING, overlap, bytes_per_token=1)
    assert counter.estimate(np.asarray([count])).tolist() == [
        sum(end - start + FRAMING for start, end in spans)
    ]


@pytest.mark.parametrize("kind", KINDS)
def test_limits_are_read_without_the_model(kind: str, models: Callable[[str], Path]) -> None:
    """The limit that a model's files say is that of the model when it is loaded."""
    limit = SentenceTransformer(str(models(kind)), device="cpu").max_seq_length
    assert own_limit(models(kind)) == min(limit or sys.maxsize, sys.maxsize)


def test_windows_are_pooled_by_tokens() -> None:
    """A text's vector is the mean of its windows' by tokens; a single window's stays as it is."""
    batch = Tokenised(np.asarray([3, 1, 5]), None, np.asarray([0, 0, 1]))
    assert batch.text_lengths.tolist() == [4, 5]
    assert batch.rows_of(np.asarray([0])).tolist() == [0, 1]
    assert batch.texts_of(np.asarray([2, 1])).tolist() == [1, 0]
    vectors = np.asarray([[1, 0], [0, 1], [0.1, 0.7]], np.float32)
    mean = pool_windows(batch, vectors, normalised=False)
    np.testing.assert_allclose(mean[0], [0.75, 0.25])
    assert mean[1].tobytes() == vectors[2].tobytes()
    unit = pool_windows(batch, vectors, normalised=True)
    np.testing.assert_allclose(np.linalg.norm(unit[0]), 1, rtol=1e-6)
    assert pool_windows(Tokenised(batch.lengths, None), vectors, normalised=True) is vectors


def open_tiny(kind: str, folder: Path, **fields: object) -> SentenceTransformerEngine:
    """A tiny model for a job with long texts."""
    folder.mkdir(exist_ok=True)
    spec = JobSpec(model=str(build(kind, folder)), dtype="float32", engine="torch", **fields)  # type: ignore[arg-type] # any of its fields
    engine = open_engine(spec, "cpu", Settings())
    assert isinstance(engine, SentenceTransformerEngine)
    return engine


@pytest.mark.parametrize("kind", MODELS)
def test_windows_are_those_of_encode(kind: str, tmp_path: Path) -> None:
    """A long text's vector is the mean of `encode` of its windows, weighted by tokens.

    No window is truncated, prompts and the tokenizer's frame included.
    """
    engine = open_tiny(kind, tmp_path, long="windows", long_overlap=5)
    reference = SentenceTransformer(engine.spec.model, device="cpu")
    batch = micro_batch([Block(start=0, texts=TEXTS)], engine, engine.spec)
    vectors = Embedder().embed(batch)
    owners = batch.tokenised.owners
    assert owners is not None
    assert np.bincount(owners)[[0, 2]].tolist() == [1, 1]
    assert np.bincount(owners)[[1, 3, 4]].min() > 1
    cut = engine.tokenizer
    long = cut._too_long(TEXTS, np.arange(len(TEXTS)))
    assert set(long) == {1, 3, 4}
    for place, text in enumerate(TEXTS):
        parts = cut._windows(text, long[place]) if place in long else [text]
        lengths = engine.tokenizer.truncate(parts).lengths
        assert lengths.max() <= LENGTH_MAX
        exact = np.average(reference.encode(parts), axis=0, weights=lengths)
        if engine.normalised:
            exact /= np.linalg.norm(exact)
        np.testing.assert_allclose(vectors[place], exact, atol=2e-5)
    assert not batch.reasons


@pytest.mark.parametrize("long_overlap", [5, LENGTH_MAX - 2, LENGTH_MAX])
def test_a_long_text_can_be_an_error(tmp_path: Path, long_overlap: int) -> None:
    """A job with long="error" names the texts that would be truncated, and only those.

    No window is cut, so that it does not matter what windows would repeat.
    """
    engine = open_tiny("mean_pooled", tmp_path, long="error", long_overlap=long_overlap)
    tokenised = engine.tokenise(TEXTS)
    assert set(tokenised.reasons) == {1, 3, 4}
    assert f"longer than the {LENGTH_MAX} tokens" in tokenised.reasons[1]
    assert (tokenised.owners, tokenised.lengths.max()) == (None, LENGTH_MAX)


def test_one_bad_window_fails_its_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A text of which one window fails has no vector: it is embedded whole or not at all."""
    engine = open_tiny("mean_pooled", tmp_path, long="windows", long_overlap=5)
    batch = micro_batch([Block(start=0, texts=TEXTS[:4])], engine, engine.spec)
    assert batch.tokenised.owners is not None
    bad = int(np.flatnonzero(batch.tokenised.owners == 1)[2])
    start = engine.start

    def fail(tokenised: Tokenised, rows: np.ndarray) -> Finish:
        if bad in rows:
            raise ValueError("cannot be")
        return start(tokenised, rows)

    monkeypatch.setattr(engine, "start", fail)
    vectors = Embedder().embed(batch)
    assert list(batch.reasons) == [1]
    assert not vectors[1].any()
    assert vectors[[0, 2, 3]].any(axis=1).all()


def test_windows_must_leave_room(tmp_path: Path) -> None:
    """An overlap that leaves no room for new tokens is refused when the model is loaded."""
    with pytest.raises(ModelError, match="repeat 31"):
        open_tiny("mean_pooled", tmp_path, long="windows", long_overlap=31)
