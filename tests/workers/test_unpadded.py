"""Tests of attention without padding: its input, when it is used, and what it changes.

The conformance suite tests that its vectors are those of `encode`.
"""

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np
import pytest
import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.base.modules import Transformer
from sentence_transformers.sentence_transformer.modules import Pooling
from transformers import AttentionInterface, DataCollatorWithFlattening, MPNetConfig, MPNetModel

from embedfarm.contract.job_spec import JobSpec
from embedfarm.contract.model_files import ModelError
from embedfarm.workers.embedder import Embedder
from embedfarm.workers.engines import calibration
from embedfarm.workers.engines.sentence_transformer import SentenceTransformerEngine
from embedfarm.workers.engines.tokens import Tokens, lay_end_to_end
from embedfarm.workers.engines.unpadded import NAME, attend, unpad, unpad_if_faster
from tests.workers.support import block_of, micro_batch
from tests.workers.tiny_models import DIMENSIONS, LENGTH_MAX, SENTENCES, bert_tokenizer, build

LATE_SECONDS: Final = 0.03


def open_kind(kind: str, directory: Path) -> SentenceTransformerEngine:
    """A tiny model of a kind in float32, opened with torch."""
    spec = JobSpec(model=str(build(kind, directory)), dtype="float32", engine="torch")
    return SentenceTransformerEngine.open(spec, "cpu", None)


@pytest.fixture
def engine(tmp_path: Path) -> SentenceTransformerEngine:
    """A tiny BERT with mean pooling."""
    return open_kind("mean_pooled", tmp_path)


def embed(engine: SentenceTransformerEngine) -> np.ndarray[Any, Any]:
    """The vectors of some texts of different lengths."""
    texts = [*SENTENCES, "one", "", "two words"]
    return engine.forward(engine.tokenise(texts), np.arange(len(texts)))


@pytest.fixture(autouse=True)
def few_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let attentions be tried on few texts."""
    monkeypatch.setattr(calibration, "calibration_texts", lambda: list(SENTENCES))


@pytest.fixture
def attentions() -> Iterator[AttentionInterface]:
    """Attentions that a test may replace."""
    interface = AttentionInterface()
    before = {name: interface[name] for name in (NAME, "sdpa")}
    yield interface
    for name, function in before.items():
        AttentionInterface.register(name, function)


def slow_down(interface: AttentionInterface, name: str) -> None:
    """Make an attention slow."""
    function = interface[name]

    def late(*inputs: Any, **options: Any) -> Any:  # noqa: ANN401 # whatever the other takes
        threading.Event().wait(LATE_SECONDS)
        return function(*inputs, **options)

    AttentionInterface.register(name, late)


def test_it_is_taken_where_it_is_faster(
    engine: SentenceTransformerEngine, attentions: AttentionInterface
) -> None:
    """Attention without padding is used where it is faster, with the same vectors, for all jobs."""
    before = embed(engine)
    slow_down(attentions, "sdpa")
    unpad_if_faster(engine)
    assert not engine.padded
    np.testing.assert_allclose(embed(engine), before, atol=1e-5)
    other = engine.for_job(msgspec.structs.replace(engine.spec, dimensions=3))
    assert other is not None
    assert not other.padded


def test_it_is_not_taken_where_it_is_slower(
    engine: SentenceTransformerEngine, attentions: AttentionInterface
) -> None:
    """Attention without padding is not used where it is slower, and vectors stay the same."""
    before = embed(engine)
    slow_down(attentions, NAME)
    unpad_if_faster(engine)
    assert engine.padded
    np.testing.assert_array_equal(embed(engine), before)


@pytest.mark.parametrize("error", [None, RuntimeError("no kernel for this"), KeyError("scaling")])
def test_it_is_not_taken_where_it_is_wrong(
    error: Exception | None, engine: SentenceTransformerEngine, attentions: AttentionInterface
) -> None:
    """Attention without padding is not used where its vectors differ or its kernel fails."""

    def wrong(*inputs: Any, **options: Any) -> Any:  # noqa: ANN401 # whatever the other takes
        if error is not None:
            raise error
        bounds = options.pop("cu_seq_lens_q")
        return attend(*inputs, **options, cu_seq_lens_q=bounds[[0, -1]])

    before = embed(engine)
    slow_down(attentions, "sdpa")
    AttentionInterface.register(NAME, wrong)
    unpad_if_faster(engine)
    assert engine.padded
    np.testing.assert_array_equal(embed(engine), before)


def test_models_whose_attention_is_their_own(tmp_path: Path) -> None:
    """A model with relative positions, or without attention, cannot be unpadded and stays as is."""
    tokenizer = bert_tokenizer()
    config = MPNetConfig(
        vocab_size=len(tokenizer), hidden_size=DIMENSIONS, num_hidden_layers=1,
        num_attention_heads=4, intermediate_size=64, max_position_embeddings=LENGTH_MAX + 2,
        pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    files = tmp_path / "transformer"
    MPNetModel(config).save_pretrained(files)
    tokenizer.save_pretrained(files)
    modules = [Transformer(str(files)), Pooling(DIMENSIONS, "mean")]
    model = tmp_path / "mpnet"
    SentenceTransformer(modules=modules, device="cpu").save(str(model))
    spec = JobSpec(model=str(model), dtype="float32", engine="torch")
    for engine in (
        SentenceTransformerEngine.open(spec, "cpu", None),
        open_kind("static", tmp_path / "static"),
    ):
        before = embed(engine)
        with pytest.raises(ModelError, match="cannot be replaced"):
            unpad(engine)
        unpad_if_faster(engine)
        assert engine.padded
        np.testing.assert_array_equal(embed(engine), before)


def test_texts_lie_as_transformers_lays_them() -> None:
    """The layout of texts end to end equals that of transformers' own collator."""
    texts = [[5, 6, 7], [8], [9, 10], [11, 12, 13, 14]]
    ids = np.asarray([each for text in texts for each in text])
    ends = np.cumsum([len(text) for text in texts])
    tokens = Tokens(
        {"input_ids": ids, "attention_mask": np.ones_like(ids)}, ends, {"modality": "text"}
    )
    rows = np.asarray([3, 0, 1])
    lengths = np.asarray([len(texts[row]) for row in rows])
    ours = lay_end_to_end(tokens, lengths, rows, first_position=0)
    collate = DataCollatorWithFlattening(
        return_position_ids=True, return_seq_idx=True, return_flash_attn_kwargs=True
    )
    theirs = collate([{"input_ids": texts[row]} for row in rows])
    del theirs["labels"]
    assert ours.pop("modality") == "text"
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        if torch.is_tensor(value):
            laid = torch.from_numpy(ours[name])
            assert laid.dtype == value.dtype, name
            assert torch.equal(laid, value), name
        else:
            assert ours[name] == value, name


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window", [None, 3])
def test_the_kernel_takes_what_it_is_given(window: int | None, *, causal: bool) -> None:
    """The GPU's kernel takes the given shapes and options, also with fewer heads of keys."""
    query = torch.empty((1, 8, 20, 64), device="meta", dtype=torch.bfloat16)
    key = torch.empty((1, 4, 20, 64), device="meta", dtype=torch.bfloat16)
    attended, weights = attend(
        *(torch.nn.Module(), query, key, key, None),
        cu_seq_lens_q=torch.empty(4, device="meta", dtype=torch.int32),
        max_length_q=9,
        scaling=0.125,
        sliding_window=window,
        is_causal=causal,
    )
    assert attended.shape == (1, 20, 8, 64)
    assert attended.dtype == torch.bfloat16
    assert weights is None


def test_attention_with_something_more_is_refused() -> None:
    """Attention with an option that the kernel does not have is refused."""
    states = torch.ones((1, 1, 2, 4))
    bounds = torch.tensor([0, 2], dtype=torch.int32)
    with pytest.raises(ModelError, match="softcap"):
        attend(torch.nn.Module(), states, states, states, None, cu_seq_lens_q=bounds, softcap=1.0)


def test_account_has_no_padding(engine: SentenceTransformerEngine) -> None:
    """The account of a job without padding has as many padded tokens as real ones."""
    unpad(engine)
    batch = micro_batch([block_of(0, 50), block_of(50, 10, "much longer chunk")], engine)
    embedder = Embedder()
    embedder.embed(batch)
    assert batch.account.real_tokens == batch.account.padded_tokens > 0
