"""Tests of OpenVINO's conversion, cache, precision and refusals; vectors are in test_engines."""

import errno
import faulthandler
import gc
import multiprocessing
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from numpy.typing import NDArray

from embedfarm.contract.job_spec import JobSpec
from embedfarm.contract.model_files import ModelError
from embedfarm.contract.settings import Settings
from embedfarm.workers.engines import graph, openvino
from embedfarm.workers.engines.calibration import TEXTS_MAX, calibration_texts
from embedfarm.workers.engines.engine import Engine
from embedfarm.workers.engines.graph import COSINES_MIN
from embedfarm.workers.engines.opening import open_engine, open_reference
from embedfarm.workers.engines.openvino import OpenVinoEngine
from tests.workers.tiny_models import SENTENCES, build

MINILM = "sentence-transformers/all-MiniLM-L6-v2"


def embed(engine: Engine) -> NDArray[np.float32]:
    """The vectors of a few sentences."""
    return engine.forward(engine.tokenise(SENTENCES), np.arange(len(SENTENCES)))


def graphs(cache: Path) -> dict[Path, int]:
    """The files of the cache, with the times when they were written."""
    return {path: path.stat().st_mtime_ns for path in cache.rglob("*") if path.is_file()}


def test_a_graph_is_converted_once(tmp_path: Path) -> None:
    """A second start reads the converted graph from the cache, also with other options."""
    settings = Settings(engine_cache=tmp_path / "cache")
    model = str(build("mean_pooled", tmp_path))
    spec = JobSpec(model=model, dtype="float32", engine="openvino")
    first = embed(open_engine(spec, "cpu", settings))
    written = graphs(tmp_path / "cache")
    assert len(written) == 4  # graph, weights, sample, and what is known of the model
    np.testing.assert_array_equal(embed(open_engine(spec, "cpu", settings)), first)
    options: dict[str, Any] = {
        "max_length": 8,
        "normalize": True,
        "dimensions": 4,
        "long": "windows",
        "long_overlap": 1,
        "prompt": "p: ",
        "task": "query",
    }
    open_engine(msgspec.structs.replace(spec, **options), "cpu", settings)
    again = graphs(tmp_path / "cache")
    assert {path for path in written if again[path] != written[path]} == {
        path for path in again if path.suffix == ".json"
    }
    assert again.keys() == written.keys()


@pytest.mark.parametrize(
    ("kind", "fields"),
    [("prompted", {"prompt": "a longer prompt: "}), ("routed", {"task": "query"})],
)
def test_what_changes_the_graph_makes_another(
    kind: str, fields: dict[str, str], tmp_path: Path
) -> None:
    """A prompt that the pooling leaves out, or another task, needs a graph of its own."""
    settings = Settings(engine_cache=tmp_path / "cache")
    spec = JobSpec(model=str(build(kind, tmp_path)), dtype="float32", engine="openvino")
    for each in (spec, msgspec.structs.replace(spec, **fields)):
        open_engine(each, "cpu", settings)
    assert len([path for path in graphs(tmp_path / "cache") if path.name == "graph.xml"]) == 2


def test_a_graph_that_is_off_is_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph that loses too much accuracy is refused each time, and not kept in the cache."""
    monkeypatch.setitem(COSINES_MIN, "float32", 1.01)
    spec = JobSpec(model=str(build("mean_pooled", tmp_path)), dtype="float32", engine="openvino")
    for _ in range(2):
        with pytest.raises(ModelError, match="is off"):
            open_engine(spec, "cpu", Settings(engine_cache=tmp_path / "cache"))
        assert not graphs(tmp_path / "cache")


def test_a_graph_is_known_by_its_weights(tmp_path: Path) -> None:
    """A model with other weights under the same name does not get the graph of the old ones."""
    settings = Settings(engine_cache=tmp_path / "cache")
    place = tmp_path / "model"
    vectors = []
    for seed in (1, 2):
        (tmp_path / str(seed)).mkdir()
        build("mean_pooled", tmp_path / str(seed), seed).rename(place)
        spec = JobSpec(model=str(place), dtype="float32", engine="openvino")
        vectors.append(embed(open_engine(spec, "cpu", settings)))
        place.rename(tmp_path / str(seed) / "used")
    assert not np.allclose(vectors[0], vectors[1], atol=1e-3)


@pytest.mark.parametrize("dtype", ["bfloat16", "int8"])
def test_the_exact_twin_is_the_model_in_float32(
    dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A small model keeps its graph in float32 at hand; a large one compiles it again each time."""
    settings = Settings(engine_cache=tmp_path / "cache")
    spec = JobSpec(model=str(build("mean_pooled", tmp_path)), dtype=dtype, engine="openvino")
    engine = open_engine(spec, "cpu", settings)
    exact = open_engine(msgspec.structs.replace(spec, dtype="float32"), "cpu", settings)
    assert exact.exact_twin is exact
    torch = open_reference(engine, spec, settings)
    assert torch is not None
    assert isinstance(engine, OpenVinoEngine)
    np.testing.assert_array_equal(embed(engine.exact_twin), embed(exact))
    np.testing.assert_allclose(embed(engine.exact_twin), embed(torch), atol=1e-4)
    other = engine.for_job(msgspec.structs.replace(spec, dimensions=4))
    assert other is not None
    twins = engine.exact_twin, other.exact_twin
    assert twins[0].graphs["float32"] is twins[1].graphs["float32"]
    assert embed(twins[1]).shape[1] == 4
    monkeypatch.setattr(openvino, "TWIN_BYTES_MAX", 0)
    del engine.graphs["float32"]
    assert engine.exact_twin.graphs["float32"] is not other.exact_twin.graphs["float32"]


START = """
import sys
import numpy as np
from msgspec.structs import replace
from embedfarm.contract.job_spec import JobSpec
from embedfarm.contract.settings import Settings
from embedfarm.workers.engines.opening import open_engine
from embedfarm.workers.parity import check_parity

model, cache, place = sys.argv[1:]
texts = ["a text", "another text that is longer", "as long a text as there is " * 50]
spec = JobSpec(model=model, dtype="bfloat16", engine="openvino")
vectors = []
engine = open_engine(spec, "cpu", Settings(engine_cache=cache))
for fields in ({}, {"long": "windows", "long_overlap": 1}, {"dimensions": 4, "normalize": True}):
    other = engine.for_job(replace(spec, **fields))
    batch = other.tokenise(texts)
    rows = np.arange(len(batch.lengths))
    made = other.forward(batch, rows)
    assert check_parity(other, lambda: None, batch, rows, made).reference == "openvino float32"
    vectors.append(made.ravel())
np.save(place, np.concatenate(vectors))
print(*sorted({"torch", "transformers", "sentence_transformers"} & set(sys.modules)))
"""


def test_a_model_that_is_known_starts_without_torch(tmp_path: Path) -> None:
    """The second process that opens a model imports no torch for it, and makes the same vectors.

    Neither do its other jobs, and the receipt of its parity.
    """
    model = str(build("mean_pooled", tmp_path))
    (tmp_path / "start.py").write_text(START)
    imported, made = [], []
    for run in ("first", "second"):
        words = [model, str(tmp_path / "cache"), str(tmp_path / f"{run}.npy")]
        command = [sys.executable, str(tmp_path / "start.py"), *words]
        imported.append(subprocess.check_output(command, text=True).split())
        made.append(np.load(tmp_path / f"{run}.npy"))
    assert imported == [["sentence_transformers", "torch", "transformers"], []]
    np.testing.assert_array_equal(*made)


@pytest.mark.parametrize("name", ["graph.xml", "graph.bin", "sample.npz"])
@pytest.mark.parametrize("share", [0.0, 0.5])
@pytest.mark.parametrize("known", [True, False])
def test_a_damaged_graph_is_made_anew(
    name: str, share: float, tmp_path: Path, *, known: bool
) -> None:
    """A file of a kept graph of which only a part is left costs another conversion, and no vector.

    That holds also where what is known of the model is lost with it.
    """
    settings = Settings(engine_cache=tmp_path / "cache")
    spec = JobSpec(model=str(build("mean_pooled", tmp_path)), dtype="float32", engine="openvino")
    first = embed(open_engine(spec, "cpu", settings))
    (file,) = (tmp_path / "cache").rglob(name)
    data = bytearray(file.read_bytes())
    left = int(share * len(data))
    data[left:] = bytes(len(data) - left) if share else b""
    file.write_bytes(data)
    if not known:
        for description in (tmp_path / "cache").rglob("*.json"):
            description.unlink()
    np.testing.assert_array_equal(embed(open_engine(spec, "cpu", settings)), first)
    (file,) = (tmp_path / "cache").rglob(name)
    assert file.read_bytes() != data


def test_a_graph_of_another_model_is_not_taken(tmp_path: Path) -> None:
    """A kept graph is used only if it makes what torch makes of the model, whatever its name.

    Files that no digest covers, or another version of a library, may be what has changed.
    """
    settings = Settings(engine_cache=tmp_path / "cache")
    places = []
    for seed in (1, 2):
        (tmp_path / str(seed)).mkdir()
        spec = JobSpec(str(build("mean_pooled", tmp_path / str(seed), seed)), engine="openvino")
        spec = msgspec.structs.replace(spec, dtype="float32")
        engine = open_engine(spec, "cpu", settings)
        assert isinstance(engine, OpenVinoEngine)
        places.append(engine.prepared.graph)
    expected = embed(engine)
    shutil.copytree(places[0], places[1], dirs_exist_ok=True)
    for description in (tmp_path / "cache").rglob("*.json"):
        description.unlink()
    np.testing.assert_array_equal(embed(open_engine(spec, "cpu", settings)), expected)


def test_what_is_known_of_a_model_may_be_lost(tmp_path: Path) -> None:
    """A description that cannot be read, or is of a graph that has gone, is made again."""
    settings = Settings(engine_cache=tmp_path / "cache")
    spec = JobSpec(model=str(build("mean_pooled", tmp_path)), dtype="float32", engine="openvino")
    first = embed(open_engine(spec, "cpu", settings))
    (description,) = (tmp_path / "cache").rglob("*.json")
    kept = description.read_bytes()
    description.write_bytes(kept[:-1])
    np.testing.assert_array_equal(embed(open_engine(spec, "cpu", settings)), first)
    assert description.read_bytes() == kept
    (graph,) = (tmp_path / "cache").rglob("graph.xml")
    shutil.rmtree(graph.parent)
    np.testing.assert_array_equal(embed(open_engine(spec, "cpu", settings)), first)
    assert graph.exists()


@pytest.mark.parametrize("refused", ["directory", "graph", "sample", "description"])
def test_a_cache_that_cannot_be_written_costs_only_time(
    refused: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A model runs as ever though its graph, or its description, cannot be kept; people are told.

    So do its exact twin and its other jobs, and all is kept once there is room again.
    """

    def run_full(model: Any, path: Path, **_: object) -> None:  # noqa: ANN401 # a graph
        path.parent.mkdir()
        path.write_text(str(model)[:100])
        raise RuntimeError("basic_ios::clear: iostream error")

    def refuse(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    kept, cache = Settings(engine_cache=tmp_path / "kept"), tmp_path / "cache"
    spec = JobSpec(str(build("mean_pooled", tmp_path)), dtype="bfloat16", engine="openvino")
    other = msgspec.structs.replace(spec, dimensions=4)
    expected = open_engine(spec, "cpu", kept)
    settings = Settings(engine_cache=cache)
    with monkeypatch.context() as full:
        if refused == "directory":
            cache.touch()
        elif refused == "graph":
            full.setattr("openvino.save_model", run_full)
        elif refused == "sample":
            full.setattr(graph.TorchSample, "write", refuse)
        else:
            full.setattr(Path, "write_bytes", refuse)
        engine = open_engine(spec, "cpu", settings)
        assert isinstance(engine, OpenVinoEngine)
        np.testing.assert_allclose(embed(engine), embed(expected), atol=1e-6)
        assert expected.exact_twin is not None
        exact = embed(expected.exact_twin)
        np.testing.assert_allclose(embed(engine.exact_twin), exact, atol=1e-6)
        variant = engine.for_job(other)
        assert variant is not None
        assert embed(variant).shape[1] == 4
    assert "it cannot be kept" in caplog.text
    if refused == "directory":
        cache.unlink()
    open_engine(spec, "cpu", settings)
    assert len(graphs(cache)) >= 4
    assert not list(cache.rglob("*.partial"))


def test_a_graph_of_no_use_may_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A damaged graph that cannot be thrown away, as on a read-only disk, is not used either."""

    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    settings = Settings(engine_cache=tmp_path / "cache")
    spec = JobSpec(model=str(build("mean_pooled", tmp_path)), dtype="float32", engine="openvino")
    first = embed(open_engine(spec, "cpu", settings))
    (file,) = (tmp_path / "cache").rglob("graph.bin")
    file.write_bytes(b"")
    written = graphs(tmp_path / "cache")
    for change in ("mkdir", "rename", "write_bytes"):
        monkeypatch.setattr(Path, change, refuse)
    again = embed(open_engine(spec, "cpu", settings))
    np.testing.assert_allclose(again, first, atol=1e-6)
    assert graphs(tmp_path / "cache") == written


def test_int8_is_close(tmp_path: Path) -> None:
    """Vectors in int8 stay near those in float32 of a real model, and the fingerprint says int8."""
    settings = Settings(engine_cache=tmp_path)
    exact = open_engine(JobSpec(model=MINILM, dtype="float32", max_length=64), "cpu", settings)
    spec = JobSpec(model=MINILM, dtype="int8", max_length=64)
    quantised = open_engine(spec, "cpu", settings)
    cosines = (embed(exact) * embed(quantised)).sum(axis=1)
    assert 0.995 < cosines.min() < 0.99999
    assert quantised.fingerprint["dtype"] == "int8"
    np.testing.assert_array_equal(embed(open_engine(spec, "cpu", settings)), embed(quantised))


@pytest.mark.parametrize(
    ("kind", "fields", "device", "message"),
    [
        ("mean_pooled", {"engine": "openvino"}, "cuda:0", "CPUs only"),
        ("mean_pooled", {"engine": "openvino", "dtype": "float16"}, "cpu", "float16"),
        ("mean_pooled", {"engine": "torch", "dtype": "int8"}, "cpu", "int8"),
        ("static", {"engine": "openvino"}, "cpu", "another module"),
    ],
)
def test_what_cannot_be_is_refused(
    tmp_path: Path, kind: str, fields: dict[str, str], device: str, message: str
) -> None:
    """A device, precision or model that does not go with the engine is refused by name."""
    spec = JobSpec(model=str(build(kind, tmp_path)), **fields)  # type: ignore[arg-type] # all are texts
    with pytest.raises(ModelError, match=message):
        open_engine(spec, device, Settings(engine_cache=tmp_path / "cache"))


def test_nothing_reports_home() -> None:
    """Workers import OpenVINO in one place, behind the line that keeps it from reporting home."""
    room = Path(graph.__file__).parents[1]
    imports = re.compile(r"^\s*(import|from) openvino\b", re.MULTILINE)
    found = [path.name for path in room.rglob("*.py") if imports.search(path.read_text())]
    assert found == [Path(graph.__file__).name]
    assert sys.modules["openvino_telemetry"] is None


def test_calibration_texts_are_real_and_the_same() -> None:
    """Calibration texts are distinct, of many lengths, and in the same order each time."""
    texts = calibration_texts()
    assert texts == calibration_texts()
    assert TEXTS_MAX / 2 < len(set(texts)) == len(texts) <= TEXTS_MAX
    assert len(texts[0]) < 60
    assert len(texts[-1]) > 1000


def open_and_signal(model: str, cache: Path) -> None:
    """Open a model twice, free the first engine and then the second, and raise a signal."""
    faulthandler.enable()
    spec, settings = JobSpec(model=model, engine="openvino"), Settings(engine_cache=cache)
    engines = [open_engine(spec, "cpu", settings) for _ in range(2)]
    while engines:
        del engines[0]
        gc.collect()
    signal.signal(signal.SIGUSR1, lambda *_: None)
    signal.raise_signal(signal.SIGUSR1)


def test_signals_are_handled_when_models_have_gone(tmp_path: Path) -> None:
    """A process that had two OpenVINO models and freed them still handles signals."""
    process = multiprocessing.get_context("spawn").Process(
        target=open_and_signal, args=(str(build("mean_pooled", tmp_path)), tmp_path / "cache")
    )
    process.start()
    process.join()
    assert process.exitcode == 0
