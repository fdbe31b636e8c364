"""Tests of layers that are compiled beside the work: when, for whom, and when not.

The compiler of a GPU is tried in `test_cuda.py`; here graphs are run as they were traced.
"""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch._dynamo.utils import counters
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from embedfarm.contract.job_spec import JobSpec
from embedfarm.workers.engines import calibration
from embedfarm.workers.engines.compiled import (
    TURN_BATCHES,
    TURNS,
    USED_SECONDS,
    Compiler,
    LateCompiling,
    SideBySide,
)
from embedfarm.workers.engines.sentence_transformer import SentenceTransformerEngine
from embedfarm.workers.engines.unpadded import NAME, unpad
from embedfarm.workers.packing import STARTED_MAX
from tests.workers.tiny_models import SENTENCES, build

BATCHES = (list(SENTENCES), ["one"], ["some words", "x y " * 20], ["a", "b", "c d"] * 9)


def attend_by_mask(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: None,
    **options: Any,  # noqa: ANN401 # a protocol of transformers
) -> tuple[torch.Tensor, None]:
    """Attend as a GPU does, in one call for all texts; ours for CPUs goes text by text."""
    del attention_mask
    places = torch.arange(query.shape[2])
    texts = torch.bucketize(places, options["cu_seq_lens_q"], right=True)
    seen = texts[:, None] == texts
    if getattr(module, "is_causal", False):
        seen &= places[:, None] >= places
    grouped = query.shape[1] != key.shape[1]
    attended = scaled_dot_product_attention(
        query, key, value, attn_mask=seen, scale=options["scaling"], enable_gqa=grouped
    )
    return attended.transpose(1, 2), None


@pytest.fixture(autouse=True)
def attention(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Attention that can be traced whole, few texts to try with, and no graphs of other tests."""
    interface = AttentionInterface()
    before = interface[NAME]
    AttentionInterface.register(NAME, attend_by_mask)
    monkeypatch.setattr(calibration, "calibration_texts", lambda: list(SENTENCES))
    torch._dynamo.reset()
    counters.clear()
    yield
    AttentionInterface.register(NAME, before)


def open_kind(kind: str, directory: Path) -> SentenceTransformerEngine:
    """A tiny model of a kind in float32, without padding."""
    spec = JobSpec(model=str(build(kind, directory)), dtype="float32", engine="torch")
    engine = SentenceTransformerEngine.open(spec, "cpu", None)
    unpad(engine)
    return engine


def embed(engine: SentenceTransformerEngine) -> list[NDArray[np.float32]]:
    """The vectors of some device batches of all shapes."""
    batches = [engine.tokenise(texts) for texts in BATCHES]
    return [engine.forward(batch, np.arange(len(batch.lengths))) for batch in batches]


def is_compiled(engine: SentenceTransformerEngine) -> bool:
    """Tell whether an engine's layers are compiled."""
    modules = engine.model[0].modules()
    return any(each._compiled_call_impl is not None for each in modules)


@dataclass
class Using:
    """Somebody who embeds with an engine all the time, and who compiles its layers.

    Attributes:
        late: What compiles them.
        clock: Seconds that have passed.
    """

    late: LateCompiling
    clock: float = 0.0

    def use(self, seconds: float) -> None:
        """Embed one device batch."""
        self.late.note_use(100, self.clock, self.clock + seconds)
        self.clock += seconds

    def compile(self) -> None:
        """Use the model until it is compiled."""
        self.use(USED_SECONDS)
        compiling = self.late._compiling
        assert compiling is not None
        compiling.join()

    def compare(self, seconds: float, compiled_seconds: float) -> None:
        """Embed with both forms in turns, until one stays."""
        for _ in range(TURNS * (STARTED_MAX + TURN_BATCHES)):
            self.use(compiled_seconds if is_compiled(self.late.engine) else seconds)


def using(engine: SentenceTransformerEngine, backend: Compiler) -> Using:
    """Begin to use an engine."""
    return Using(LateCompiling(engine, backend))


def as_traced(graph: torch.fx.GraphModule, _inputs: object) -> Callable[..., Any]:
    """Compile nothing: a graph runs as it was traced."""
    return graph.forward


def wrong(graph: torch.fx.GraphModule, _inputs: object) -> Callable[..., Any]:
    """Compile to something that computes something else."""
    return lambda *inputs: [each.flip(-1) for each in graph.forward(*inputs)]


def raising(_graph: object, _inputs: object) -> Callable[..., Any]:
    """Fail to compile."""
    raise RuntimeError("no C compiler here")


@pytest.mark.parametrize("kind", ["mean_pooled", "roberta_pooled", "last_token_pooled", "shared"])
def test_compiled_layers_serve_all_jobs(kind: str, tmp_path: Path) -> None:
    """Where they are faster all jobs have compiled layers; shapes that come need no other form."""
    engine = open_kind(kind, tmp_path)
    job = engine.for_job(msgspec.structs.replace(engine.spec, dimensions=3))
    assert job is not None
    before, shortened = embed(engine), embed(job)
    user = using(engine, as_traced)
    user.compile()
    assert not is_compiled(engine), "before it is known to be faster"
    made = dict(counters["stats"])
    assert made["unique_graphs"] >= 1
    assert not counters["graph_break"]
    user.compare(0.02, 0.01)
    for now, then in zip((*embed(engine), *embed(job)), (*before, *shortened), strict=True):
        np.testing.assert_allclose(now, then, atol=1e-5)
    assert is_compiled(engine)
    assert is_compiled(job)
    assert dict(counters["stats"]) == made, "whoever embeds would wait for the compiler"


@pytest.mark.parametrize(
    ("compiler", "said"),
    [
        (as_traced, r"cosine 1.00000(.|\n)*0.91 times as fast"),
        (wrong, r"cosine -?0\.\d+ at least"),
        (raising, "are not compiled: .*no C compiler here"),
    ],
)
def test_layers_stay_where_compiling_does_not_help(
    compiler: Compiler, said: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Layers stay as they were where compiled ones are slower, compute otherwise, or fail."""
    engine = open_kind("mean_pooled", tmp_path)
    before = embed(engine)
    caplog.set_level("INFO")
    user = using(engine, compiler)
    user.compile()
    user.compare(0.010, 0.011)
    assert not is_compiled(engine)
    for now, then in zip(embed(engine), before, strict=True):
        np.testing.assert_array_equal(now, then)
    assert re.search(said, caplog.text)


def test_models_with_padding_are_left(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A model that is padded is not compiled: each kind of shape would take a form of its own."""
    spec = JobSpec(model=str(build("mean_pooled", tmp_path)), dtype="float32", engine="torch")
    engine = SentenceTransformerEngine.open(spec, "cpu", None)
    caplog.set_level("INFO")
    using(engine, as_traced).compile()
    assert not is_compiled(engine)
    assert "are not compiled: texts are padded" in caplog.text


def test_compiling_waits_until_it_pays(tmp_path: Path) -> None:
    """A model is compiled once, when it has been used for as long as that takes, and not before."""
    late = LateCompiling(open_kind("mean_pooled", tmp_path), raising)
    late.note_use(100, 0, USED_SECONDS / 2)
    late.note_use(100, 1, USED_SECONDS / 2 + 0.1)  # most of it was counted with the one before
    late.note_use(100, 1000, 1000 + USED_SECONDS / 4)
    assert late._compiling is None
    late.note_use(100, 2000, 2000 + USED_SECONDS / 4)
    first = late._compiling
    assert first is not None
    first.join()
    late.note_use(100, 3000, 3000 + USED_SECONDS)
    assert late._compiling is first


def test_turns_count_what_they_began() -> None:
    """A form is not judged by device batches that were begun in the other one's turn."""
    used = [0]
    trial = SideBySide("m", used.append)
    for _ in range(TURNS):
        form = used[-1]
        for seconds in (*[(0.001, 1.0)[form]] * STARTED_MAX, *[(0.02, 0.01)[form]] * TURN_BATCHES):
            assert not trial.ended
            trial.note(100, seconds)
    assert trial.ended
    assert used == [*[0, 1] * (TURNS // 2), 0, 1]
