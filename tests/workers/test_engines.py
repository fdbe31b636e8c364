"""Conformance suite of all engines: the vectors are those of `SentenceTransformer.encode`."""

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, Final, TypeVar

import msgspec
import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file
from sentence_transformers import SentenceTransformer
from sentence_transformers.base.modules import Transformer
from transformers.cache_utils import DynamicLayer

from embedfarm.contract.job_spec import JobSpec
from embedfarm.contract.model_files import ModelError, resolve
from embedfarm.contract.settings import Settings
from embedfarm.contract.token_ids import TokenEncoder
from embedfarm.producer.docstrings import docstrings
from embedfarm.workers.engines import sentence_transformer
from embedfarm.workers.engines.engine import (
    Chunk,
    DeviceFailed,
    Engine,
    ModelUnavailable,
    OutOfMemory,
)
from embedfarm.workers.engines.opening import open_engine
from embedfarm.workers.engines.openvino import OpenVinoEngine
from embedfarm.workers.engines.sentence_transformer import SentenceTransformerEngine
from embedfarm.workers.engines.tokens import Tokens
from embedfarm.workers.engines.unpadded import unpad
from tests.workers.support import NULL
from tests.workers.tiny_models import KINDS, LENGTH_MAX, SENTENCES, build

T = TypeVar("T")

MINILM: Final = "sentence-transformers/all-MiniLM-L6-v2"
TEXTS: Final = (
    *SENTENCES,
    "one",
    "a",
    "",
    " \n\t ",
    SENTENCES[0],
    "same text, twice",
    "same text, twice",
    "zero \x00 byte",
    "emoji 🦊🦊 and 漢字 and combining e\u0301",
    "long " * 20_000,
    "x" * 2000,
    *(" ".join(SENTENCES[1].split()[:count]) for count in (2, 3, 5, 8)),
)
# Of these models a text without words has no vector of length 1 to compare, as of `encode` itself.
WORDLESS: Final = {"static", "bag_of_words"}
TRANSFORMERS: Final = ["minilm", *(kind for kind in KINDS if kind not in WORDLESS)]
PUBLISHED: Final = {"use_cache": True}  # what files of decoders say
CONVERTED: Final = [f"openvino {kind}" for kind in TRANSFORMERS]
UNPADDED: Final = [f"unpadded {kind}" for kind in TRANSFORMERS]


def some(models: Iterable[str]) -> Iterator[Any]:
    """Yield models as parameters: those with prompts and routes, and one of the others, are quick.

    The slow tests take all: what differs between the others is how they pool, and the real model
    takes ten times as long to open.
    """
    quick = ("prompted", "routed", next(iter(KINDS)))
    for model in models:
        yield model if model.endswith(quick) else pytest.param(model, marks=pytest.mark.slow)


@pytest.fixture(scope="session")
def directories(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The name or directory of each model; a null model has no files."""
    tiny = {kind: str(build(kind, tmp_path_factory.mktemp(kind))) for kind in KINDS}
    return {"null": NULL, "minilm": MINILM} | tiny


@pytest.fixture(scope="session")
def settings(tmp_path_factory: pytest.TempPathFactory) -> Settings:
    """Settings with a cache of the session's own for converted models."""
    return Settings(engine_cache=tmp_path_factory.mktemp("cache"))


class Made(dict[str, T]):
    """Things that are made for a kind of model when they are first asked for, and kept."""

    def __init__(self, make: Callable[[str], T]) -> None:
        self._make = make

    def __missing__(self, kind: str) -> T:
        self[kind] = self._make(kind)
        return self[kind]


@pytest.fixture(scope="session")
def engines(directories: dict[str, str], settings: Settings) -> Mapping[str, Engine]:
    """Every engine in float32, loaded once."""
    return Made(lambda model: open_like(directories, settings, model))


@pytest.fixture(scope="session")
def references(directories: dict[str, str]) -> Mapping[str, SentenceTransformer]:
    """Each model as sentence-transformers itself loads it, in float32."""

    def load(kind: str) -> SentenceTransformer:
        path, plain = str(resolve(directories[kind])), {"dtype": torch.float32}
        found = SentenceTransformer(path, device="cpu", model_kwargs=plain)
        if kind == "minilm":
            found.max_seq_length = LENGTH_MAX
        return found

    return Made(load)


@pytest.fixture(scope="session")
def expected(references: Mapping[str, SentenceTransformer]) -> Mapping[str, NDArray[np.float32]]:
    """The vectors that `encode` makes of each text by itself."""
    return Made(lambda kind: encode(references[kind], TEXTS))


@pytest.fixture(params=["null", "minilm", *KINDS, *CONVERTED, *UNPADDED])
def kind(request: pytest.FixtureRequest) -> str:
    """Each engine and each kind of model."""
    return str(request.param)


@pytest.fixture(params=KINDS)
def tiny(request: pytest.FixtureRequest) -> str:
    """Each kind of model, but none that takes long."""
    return str(request.param)


def run(
    engine: Engine, texts: Sequence[Chunk], order: Sequence[int] | None = None, rows: int = 5
) -> NDArray[np.float32]:
    """Vectors of all texts, embedded in this order, some rows at a time."""
    batch = engine.tokenise(texts)
    order = list(range(len(texts))) if order is None else order
    vectors = np.full((len(texts), engine.dimensions), np.nan, dtype=np.float32)
    for first in range(0, len(order), rows):
        chosen = np.asarray(order[first : first + rows], dtype=np.intp)
        vectors[chosen] = engine.forward(batch, chosen)
    return vectors


def encode(reference: SentenceTransformer, texts: Sequence[str], **options: Any) -> NDArray[Any]:  # noqa: ANN401 # any of encode's
    """The vectors of each text on its own, so that nothing depends on the rest of a batch.

    With a task they are the vectors of `encode_query` or `encode_document`.
    """
    task = options.pop("task", "")
    embed = getattr(reference, f"encode_{task}" if task else "encode")
    return np.concatenate([embed([t], show_progress_bar=False, **options) for t in texts])


def cosines(one: NDArray[Any], other: NDArray[Any]) -> NDArray[Any]:
    """Cosine of each pair of rows; 1 where both are zero."""
    norms = np.linalg.norm(one, axis=1) * np.linalg.norm(other, axis=1)
    products = np.einsum("ij,ij->i", one.astype(np.float64), other.astype(np.float64))
    both_zero = ~one.any(axis=1) & ~other.any(axis=1)
    return np.where(both_zero, 1.0, products / np.maximum(norms, 1e-30))


def spec_of(directories: dict[str, str], kind: str, **fields: Any) -> JobSpec:  # noqa: ANN401 # any field
    """A job's spec in float32; the large model is cut short, since it takes its time."""
    length = {"max_length": LENGTH_MAX} if kind == "minilm" else {}
    plain = {"dtype": "float32", "engine": "torch"}
    return JobSpec(model=directories[kind], **(plain | length | fields))


def open_one(directories: dict[str, str], kind: str, **fields: Any) -> Engine:  # noqa: ANN401 # same
    """An engine for a job with these fields."""
    return open_engine(spec_of(directories, kind, **fields), "cpu", Settings())


def open_like(
    directories: dict[str, str],
    settings: Settings,
    model: str,
    **fields: Any,  # noqa: ANN401 # same
) -> Engine:
    """An engine like that of `open_one`, but of `CONVERTED` and `UNPADDED` models, too."""
    engine = "openvino" if model in CONVERTED else "torch"
    opened = open_engine(
        spec_of(directories, kind_of(model), engine=engine, **fields), "cpu", settings
    )
    if model in UNPADDED:
        assert isinstance(opened, SentenceTransformerEngine)
        unpad(opened)
    return opened


def kind_of(model: str) -> str:
    """The kind of model that an engine was opened for."""
    return model.rpartition(" ")[2]


# All engines.


def test_shape_and_type(kind: str, engines: Mapping[str, Engine]) -> None:
    """Any text has a length and a finite float32 vector, whatever is in it."""
    engine = engines[kind]
    batch = engine.tokenise(TEXTS)
    assert batch.lengths.shape == (len(TEXTS),)
    vectors = run(engine, TEXTS)
    assert vectors.dtype == np.float32
    assert vectors.shape == (len(TEXTS), engine.dimensions)
    assert np.isfinite(vectors).all()


def test_vector_depends_on_the_text_alone(kind: str, engines: Mapping[str, Engine]) -> None:
    """A text has the same vector whatever it is batched with, and in whatever order."""
    engine = engines[kind]
    alone = run(engine, TEXTS, rows=1)
    random = np.random.default_rng(1)
    for rows in (2, 7, len(TEXTS)):
        order = random.permutation(len(TEXTS)).tolist()
        assert cosines(run(engine, TEXTS, order, rows), alone).min() > 0.999999
    assert cosines(alone[[9]], alone[[10]])[0] == pytest.approx(1)


def test_rows_can_be_any_subset(kind: str, engines: Mapping[str, Engine]) -> None:
    """A device batch takes rows of a micro-batch in any order, one of them, or one twice."""
    engine = engines[kind]
    batch = engine.tokenise(TEXTS)
    everything = run(engine, TEXTS)
    for rows in ([4], [7, 0, 4], [2, 2]):
        vectors = engine.forward(batch, np.asarray(rows))
        assert cosines(vectors, everything[rows]).min() > 0.999999


def test_two_threads_at_once(kind: str, engines: Mapping[str, Engine]) -> None:
    """Tokenising the next micro-batch does not disturb the forward pass of the current one."""
    engine = engines[kind]
    before = run(engine, SENTENCES)
    end = threading.Event()
    errors: list[BaseException] = []

    def tokenise() -> None:
        try:
            while not end.is_set():
                engine.tokenise(TEXTS[:5])
        except BaseException as error:  # noqa: BLE001 # the test raises it
            errors.append(error)

    thread = threading.Thread(target=tokenise)
    thread.start()
    try:
        vectors = [run(engine, SENTENCES, rows=2) for _ in range(10)]
    finally:
        end.set()
        thread.join()
    assert not errors
    assert all(cosines(each, before).min() > 0.999999 for each in vectors)


def test_budgets_make_sense(kind: str, engines: Mapping[str, Engine]) -> None:
    """A device batch holds more than one short text, and a launch costs less than a full one."""
    engine = engines[kind]
    assert engine.batch_tokens >= engine.launch_tokens > 0
    assert engine.batch_tokens >= 512


def test_fingerprint_tells_apart_what_changes_vectors(
    tiny: str, directories: dict[str, str], engines: Mapping[str, Engine]
) -> None:
    """Fingerprints are equal for the same files and settings, and differ where vectors would."""
    same = open_one(directories, tiny).fingerprint
    assert same == engines[tiny].fingerprint
    for fields in ({"prompt": "p: "}, {"task": "query"}, {"dimensions": 3}, {"normalize": True}):
        assert open_one(directories, tiny, **fields).fingerprint != same


# Models compared with sentence-transformers.


@pytest.mark.parametrize("model", ["minilm", *KINDS, *CONVERTED, *UNPADDED])
def test_equal_to_encode(
    model: str, engines: Mapping[str, Engine], expected: Mapping[str, NDArray[np.float32]]
) -> None:
    """Every vector has cosine 0.9999 at least, and the length, of `encode` of its own text."""
    vectors, theirs = run(engines[model], TEXTS), expected[kind_of(model)]
    assert cosines(vectors, theirs).min() >= 0.9999
    assert np.allclose(np.linalg.norm(vectors, axis=1), np.linalg.norm(theirs, axis=1), rtol=1e-3)
    assert theirs.any(axis=1).all() or model in WORDLESS


@pytest.mark.parametrize("model", ["minilm", *KINDS])
def test_device_batch_is_what_preprocessing_gives(
    model: str, engines: Mapping[str, Engine], references: Mapping[str, SentenceTransformer]
) -> None:
    """The engine pads exactly as the tokenizer does: side, filling, masks and token types."""
    engine, reference = engines[model], references[model]
    assert isinstance(engine, SentenceTransformerEngine)
    rows = np.asarray([13, 4, 0, 6])
    features = engine.features(engine.tokenise(TEXTS), rows)
    prompt = reference.prompts.get(reference.default_prompt_name or "")
    theirs = reference.preprocess([TEXTS[row] for row in rows], prompt=prompt)
    theirs.pop("task", None)  # only a router looks at it, and ours has gone its way
    assert features.keys() == theirs.keys()
    for name, value in theirs.items():
        same = torch.equal(features[name], value) if torch.is_tensor(value) else None
        assert same or features[name] == value, name


@pytest.mark.parametrize("model", ["minilm", *KINDS, *CONVERTED, *UNPADDED])
def test_half_precision_is_close(
    model: str,
    directories: dict[str, str],
    settings: Settings,
    expected: Mapping[str, NDArray[np.float32]],
) -> None:
    """Each vector in bfloat16 has cosine 0.999 at least, or the engine refuses to open.

    A decoder of random weights loses more than that on OpenVINO, where norms are in bfloat16 too.
    """
    try:
        engine = open_like(directories, settings, model, dtype="bfloat16")
    except ModelError:
        if model == "openvino last_token_pooled":
            return
        raise
    vectors = run(engine, TEXTS)
    assert cosines(vectors, expected[kind_of(model)]).min() >= 0.999


def test_auto_takes_what_the_device_computes_in(directories: dict[str, str]) -> None:
    """The fingerprint says which precision "auto" became, never "auto"."""
    engine = open_one(directories, "mean_pooled", dtype="auto")
    assert engine.fingerprint["dtype"] in {"float32", "bfloat16"}


@pytest.mark.parametrize("model", [*KINDS, *CONVERTED, *UNPADDED])
def test_prompt_goes_before_each_text(
    model: str,
    directories: dict[str, str],
    settings: Settings,
    references: Mapping[str, SentenceTransformer],
) -> None:
    """A job's prompt gives the vectors of `encode` with it, pooled with or without the prompt."""
    engine = open_like(directories, settings, model, dtype="float32", prompt="Passage: ")
    theirs = encode(references[kind_of(model)], TEXTS, prompt="Passage: ")
    assert cosines(run(engine, TEXTS), theirs).min() >= 0.9999


@pytest.mark.parametrize("task", ["query", "document"])
@pytest.mark.parametrize("model", [*some(KINDS), *some(CONVERTED), *some(UNPADDED)])
def test_task(
    model: str,
    task: str,
    directories: dict[str, str],
    settings: Settings,
    references: Mapping[str, SentenceTransformer],
) -> None:
    """A job's task gives what `encode_query` and `encode_document` give: prompt and route."""
    engine = open_like(directories, settings, model, dtype="float32", task=task)
    theirs = encode(references[kind_of(model)], TEXTS, task=task)
    assert cosines(run(engine, TEXTS), theirs).min() >= 0.9999


@pytest.mark.parametrize("model", ["prompted", "openvino prompted", "unpadded prompted"])
def test_prompt_by_its_name(
    model: str,
    directories: dict[str, str],
    settings: Settings,
    references: Mapping[str, SentenceTransformer],
) -> None:
    """A prompt that is chosen by its name is used whatever the task."""
    fields = {"dtype": "float32", "prompt_name": "topic", "task": "query"}
    engine = open_like(directories, settings, model, **fields)
    theirs = encode(references["prompted"], TEXTS, prompt_name="topic")
    assert cosines(run(engine, TEXTS), theirs).min() >= 0.9999


@pytest.mark.parametrize("model", ["prompted", "static", "null"])
def test_prompt_that_the_model_does_not_have(model: str, directories: dict[str, str]) -> None:
    """A prompt name that the model does not have is refused."""
    with pytest.raises(ModelError, match="no prompt 'other'"):
        open_one(directories, model, prompt_name="other")


# Fields that each job may change on the same weights.
CHANGES: Final[list[dict[str, Any]]] = [
    {"prompt": "A prompt: "},
    {"task": "query"},
    {"task": "document"},
    {"dimensions": 3},
    {"normalize": True},
    {"long": "windows", "long_overlap": 3},
    {"max_length": 7},
]


@pytest.mark.parametrize("model", ["null", *some(KINDS), *some(CONVERTED), *some(UNPADDED)])
def test_other_jobs_on_the_same_weights(
    model: str, directories: dict[str, str], settings: Settings, engines: Mapping[str, Engine]
) -> None:
    """An engine made for another job from a loaded one is the same as one opened for that job."""
    kind, made, loaded = kind_of(model), 0, engines[model]
    options = {"engine": "openvino" if model in CONVERTED else "torch", "dtype": "float32"}
    before = run(loaded, TEXTS[:6])
    changes = [each for each in CHANGES if kind not in WORDLESS or "max_length" not in each]
    for fields in changes:
        engine = loaded.for_job(spec_of(directories, kind, **options, **fields))
        if engine is None:
            continue
        made += 1
        opened = open_like(directories, settings, model, dtype="float32", **fields)
        assert engine.fingerprint == opened.fingerprint
        assert engine.tokenisation == opened.tokenisation
        assert engine.normalised == opened.normalised
        np.testing.assert_array_equal(run(engine, TEXTS[:6]), run(opened, TEXTS[:6]))
        np.testing.assert_array_equal(run(loaded, TEXTS[:6]), before)
    # Of a routed model other tasks are other weights, and a graph may have a prompt's length in it.
    fewer = {"routed": 5, "openvino routed": 5, "openvino prompted": 5, "unpadded routed": 5}
    assert made == fewer.get(model, len(changes))


@pytest.mark.parametrize("fields", [{"dtype": "bfloat16"}, {"model": "null:2"}])
def test_other_weights_are_another_engine(
    fields: dict[str, Any], engines: Mapping[str, Engine]
) -> None:
    """An engine is not shared with a job that needs its model loaded in another way."""
    for kind in ("mean_pooled", "openvino mean_pooled", "null"):
        engine = engines[kind]
        if kind == "null":
            assert engine.for_job(JobSpec(model="/models/other")) is None
            continue
        assert isinstance(engine, SentenceTransformerEngine | OpenVinoEngine)
        assert engine.for_job(msgspec.structs.replace(engine.spec, **fields)) is None


def test_tasks_differ(references: Mapping[str, SentenceTransformer]) -> None:
    """The test models with tasks make other vectors for another task, as other tests rely on."""
    for model in ("prompted", "routed"):
        both = [encode(references[model], ["one"], task=task) for task in ("query", "document")]
        assert cosines(*both)[0] < 0.999


def test_prompt_that_the_model_pools_without(references: Mapping[str, SentenceTransformer]) -> None:
    """The test model with a prompt leaves it out of the mean, as other tests rely on."""
    reference = references["prompted"]
    assert cosines(encode(reference, ["one"]), encode(reference, ["one"], prompt=""))[0] < 0.9999
    assert cosines(encode(reference, ["one"]), encode(reference, ["Query: one"], prompt=""))[0] < 1


@pytest.mark.parametrize("length", [5, 17])
def test_truncation(
    length: int, directories: dict[str, str], references: Mapping[str, SentenceTransformer]
) -> None:
    """`max_length` cuts a text where `encode` would, the frame of the tokenizer included."""
    for kind in ("mean_pooled", "last_token_pooled"):
        engine, reference = open_one(directories, kind, max_length=length), references[kind]
        assert engine.tokenise(TEXTS).lengths.max() == length
        before, reference.max_seq_length = reference.max_seq_length, length
        try:
            theirs = encode(reference, TEXTS)
        finally:
            reference.max_seq_length = before
        assert cosines(run(engine, TEXTS), theirs).min() >= 0.9999


@pytest.mark.parametrize("engine", ["torch", "openvino"])
def test_a_tokenizer_that_keeps_the_ends_of_texts(
    engine: str, tmp_path: Path, settings: Settings
) -> None:
    """A model that cuts long texts at their beginnings does so here, and in no producer."""
    directory = build("mean_pooled", tmp_path)
    file = directory / "tokenizer_config.json"
    ends = {"truncation_side": "left"}
    file.write_bytes(msgspec.json.encode(msgspec.json.decode(file.read_bytes()) | ends))
    spec = JobSpec(model=str(directory), engine=engine, dtype="float32")
    opened = open_engine(spec, "cpu", settings)
    assert opened.tokenisation is None
    texts = ["short", "one word, " * 60 + "and all others " * 60, " ".join(SENTENCES * 9)]
    expected = encode(SentenceTransformer(str(directory), device="cpu"), texts)
    assert cosines(run(opened, texts), expected).min() >= 0.9999


@pytest.mark.parametrize("engine", ["torch", "openvino"])
def test_files_that_change_while_they_are_loaded(
    engine: str, tmp_path: Path, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights that are replaced during a load are refused for now, and kept under no name."""
    weights = build("cls_pooled", tmp_path) / "model.safetensors"
    others = {name: tensor.roll(1, 0) for name, tensor in load_file(weights).items()}
    load = sentence_transformer.load_files

    def load_and_replace(*words: Any) -> SentenceTransformer:  # noqa: ANN401 # of `load_files`
        loaded = load(*words)
        save_file(others, weights.with_name("new"))
        weights.with_name("new").replace(weights)
        return loaded

    monkeypatch.setattr(sentence_transformer, "load_files", load_and_replace)
    spec = JobSpec(model=str(weights.parent), engine=engine, dtype="float32")
    with pytest.raises(ModelUnavailable, match="changed"):
        open_engine(spec, "cpu", settings)
    monkeypatch.undo()
    expected = encode(SentenceTransformer(spec.model, device="cpu"), SENTENCES)
    assert cosines(run(open_engine(spec, "cpu", settings), SENTENCES), expected).min() >= 0.9999


def test_a_decoder_keeps_nothing_for_a_next_token(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Keys and values of all tokens would fill a GPU, whatever sentence-transformers does."""
    since_6_2 = "_configure_use_cache"
    nothing = staticmethod(lambda *_: None)
    monkeypatch.setattr(Transformer, since_6_2, nothing, raising=False)
    config = build("last_token_pooled", tmp_path) / "config.json"
    config.write_bytes(msgspec.json.encode(msgspec.json.decode(config.read_bytes()) | PUBLISHED))
    engine = open_engine(JobSpec(model=str(config.parent), engine="torch"), "cpu", Settings())
    kept: list[object] = []
    monkeypatch.setattr(DynamicLayer, "update", lambda *_: kept.append(1))
    assert run(engine, TEXTS[:2]).any()
    assert not kept


@pytest.mark.parametrize("model", ["minilm", "mean_pooled", "last_token_pooled", "prompted"])
def test_huge_texts_are_cut_before_they_are_tokenised(
    model: str, engines: Mapping[str, Engine]
) -> None:
    """A huge text gives the tokens of the whole, though the tokenizer sees only a small part."""
    engine = engines[model]
    assert isinstance(engine, SentenceTransformerEngine)
    long = ["word, and " * 20_000, "\u3000漢字 " * 20_000, "tab\tand\nline " * 20_000]
    late = [" " * 90_000 + "late words", "a b" + " " * 90_000 + "c d e", "x" * 90_000]
    assert max(map(len, engine.preprocessing._cut(long))) <= 32 * LENGTH_MAX
    for texts in (long, [*long, *late]):
        whole = engine.preprocessing._preprocess(texts)
        ours = engine.tokenise(texts)
        assert isinstance(ours.features, Tokens)
        for name, column in ours.features.columns.items():
            assert column.tolist() == [token for row in whole[name] for token in row]


def test_models_own_limit_holds(directories: dict[str, str], engines: Mapping[str, Engine]) -> None:
    """A `max_length` above the model's own limit changes nothing."""
    assert engines["mean_pooled"].tokenise(TEXTS).lengths.max() == LENGTH_MAX
    longer = open_one(directories, "mean_pooled", max_length=10 * LENGTH_MAX)
    assert longer.tokenise(TEXTS).lengths.max() == LENGTH_MAX


def test_limit_that_a_model_cannot_keep_is_refused(directories: dict[str, str]) -> None:
    """A `max_length` is refused by a model that never truncates."""
    with pytest.raises(ModelError, match="maximum length"):
        open_one(directories, "static", max_length=5)


def test_dimensions_and_normalisation(
    tiny: str, directories: dict[str, str], references: Mapping[str, SentenceTransformer]
) -> None:
    """Cutting keeps the leading components, and normalising comes after it, as in `encode`."""
    options: dict[str, Any] = {"truncate_dim": 10, "normalize_embeddings": True}
    theirs = encode(references[tiny], SENTENCES, **options)
    vectors = run(open_one(directories, tiny, dimensions=10, normalize=True), SENTENCES)
    assert np.allclose(vectors, theirs, atol=1e-4)
    cut = run(open_one(directories, tiny, dimensions=10), SENTENCES)
    assert np.allclose(cut, encode(references[tiny], SENTENCES, truncate_dim=10), atol=1e-4)
    full = encode(references[tiny], SENTENCES).shape[1]
    assert open_one(directories, tiny, dimensions=10_000).dimensions == full


def test_missing_model_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A directory without a usable model is an error that names it."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ModelError, match=tmp_path.name):
        open_engine(JobSpec(model=str(tmp_path)), "cpu", Settings())


@pytest.mark.parametrize("name", ["null:", "null:x", "null:8:fast", "null:0"])
def test_null_model_checks_its_name(name: str) -> None:
    """A null model with an impossible name is a `ModelError`."""
    with pytest.raises(ModelError, match="null:<dimensions>"):
        open_engine(JobSpec(model=name), "cpu", Settings())


def test_null_models_differ_by_their_weights() -> None:
    """Weights of another name are another model: other vectors, and no engine serves both."""
    plain, one, same, other = (
        open_engine(JobSpec(model=f"null:8{name}"), "cpu", Settings())
        for name in ("", ":0:one", ":0:one", ":0:other")
    )
    made = [run(each, SENTENCES) for each in (plain, one, same, other)]
    assert np.array_equal(made[1], made[2])
    assert not any(np.array_equal(made[1], each) for each in (made[0], made[3]))
    assert one.for_job(JobSpec(model="null:8:0:one", prompt="a")) is not None
    assert one.for_job(JobSpec(model="null:8:0:other")) is None
    assert one.for_job(JobSpec(model="null:8")) is None


# Failures of the device.


@pytest.fixture
def engine(engines: Mapping[str, Engine]) -> Iterator[SentenceTransformerEngine]:
    """An engine whose first module can be made to fail."""
    found = engines["mean_pooled"]
    assert isinstance(found, SentenceTransformerEngine)
    yield found
    found.model[0]._forward_pre_hooks.clear()


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (torch.OutOfMemoryError("CUDA out of memory"), OutOfMemory),
        (RuntimeError("DefaultCPUAllocator: not enough memory: you tried"), OutOfMemory),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling"), OutOfMemory),
        (RuntimeError("CUDA error: device-side assert triggered"), DeviceFailed),
        (RuntimeError("shape mismatch"), RuntimeError),
    ],
)
def test_failures_are_told_apart(
    error: Exception, kind: type[Exception], engine: SentenceTransformerEngine
) -> None:
    """Too little memory, a device that is gone, and a defect are three different things."""

    def fail(*_: object) -> None:
        raise error

    engine.model[0].register_forward_pre_hook(fail)
    with pytest.raises(kind) as raised:
        run(engine, ["a"])
    assert raised.type is kind


ENCODED: Final = ("minilm", "mean_pooled", "cls_pooled", "last_token_pooled")


def test_ids_for_texts(
    kind: str, engines: Mapping[str, Engine], directories: dict[str, str]
) -> None:
    """Token ids made elsewhere give the vectors of their texts, bit for bit, also among texts."""
    engine = engines[kind]
    name = kind_of(kind)
    assert engine.tokenisation is not None or name not in ENCODED
    if engine.tokenisation is None:
        with pytest.raises(ValueError, match="takes texts"):
            engine.tokenise([np.asarray([1])])
        return
    encoder = TokenEncoder.open(resolve(directories[name]), engine.tokenisation)
    ids, lengths = encoder.encode(TEXTS)
    arrays = np.split(ids.astype(np.int64), np.cumsum(lengths)[:-1])
    mixed: list[Chunk] = [
        text if place % 3 else made
        for place, (text, made) in enumerate(zip(TEXTS, arrays, strict=True))
    ]
    np.testing.assert_array_equal(run(engine, arrays), run(engine, TEXTS))
    np.testing.assert_array_equal(run(engine, mixed), run(engine, TEXTS))


def test_foreign_ids_are_refused(engines: Mapping[str, Engine]) -> None:
    """Token ids beyond the vocabulary, or too many of them, are refused: they break the device."""
    for ids in (np.asarray([1 << 20]), np.ones(LENGTH_MAX + 1, np.int64)):
        with pytest.raises(ValueError, match="not the model's"):
            engines["mean_pooled"].tokenise([ids])


@pytest.mark.parametrize("kind", ENCODED)
def test_the_encoder_is_the_preprocessing(kind: str, engines: Mapping[str, Engine]) -> None:
    """The encoder gives all that the model's own preprocessing gives, of real texts too."""
    engine = engines[kind]
    assert isinstance(engine, SentenceTransformerEngine)
    texts = [*TEXTS, *(text for _, text in islice(docstrings(), 500))]
    plain, made = engine.preprocessing.truncate(texts), engine.tokenise(texts)
    np.testing.assert_array_equal(made.lengths, plain.lengths)
    assert made.features.columns.keys() == plain.features.columns.keys()
    for name, column in plain.features.columns.items():
        np.testing.assert_array_equal(made.features.columns[name], column)
    assert made.features.constants == plain.features.constants
