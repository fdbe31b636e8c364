"""Tests of `embedfarm check`: what it says of models that made an output, and of others."""

import json
import shutil
import struct
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from threading import Thread
from typing import Any

import msgspec
import numpy as np
import pytest
from numpy.typing import NDArray
from sentence_transformers import SentenceTransformer
from typer.testing import CliRunner

import embedfarm
from embedfarm.cli.app import app
from embedfarm.collector.export import export
from embedfarm.collector.manifest import OutputError, read_manifest, write_manifest
from embedfarm.collector.sample_list import read_sample, write_table
from embedfarm.contract import model_files
from embedfarm.contract.farm_client import FarmClient
from embedfarm.contract.job_spec import JobSpec
from embedfarm.contract.model_files import ModelError
from embedfarm.contract.settings import Settings
from embedfarm.contract.status import JobStatus
from embedfarm.runs.check import recall_of_neighbours
from embedfarm.runs.fingerprint import check_files
from embedfarm.runs.own_job import OwnJob
from embedfarm.runs.query import embed_query
from embedfarm.runs.run import Run
from tests.workers.embedding_server import Embed, EmbeddingServer
from tests.workers.tiny_models import SENTENCES, build

WORDS = " ".join(SENTENCES).split()
TEXTS = [f"{WORDS[n % len(WORDS)]} {WORDS[n * n % len(WORDS)]} {n}" for n in range(120)]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a model, and what it made of a corpus."""
    home = tmp_path_factory.mktemp("home")
    model = build("mean_pooled", home)
    embedfarm.embed(TEXTS, out=home / "out", model=str(model), dtype="float32", progress=False)
    return home


@pytest.fixture
def out(home: Path) -> Path:
    """The output of the model."""
    return home / "out"


def changed(home: Path, tmp_path: Path) -> Path:
    """A copy of the model, to be changed."""
    return Path(shutil.copytree(home / "model", tmp_path / "changed"))


def add_noise(model: Path, share: float) -> None:
    """Change each weight by about this share of it."""
    (file,) = model.glob("**/*.safetensors")
    data = bytearray(file.read_bytes())
    begin = 8 + struct.unpack("<Q", data[:8])[0]
    weights = np.frombuffer(data, "<f4", offset=begin)
    noise = np.random.default_rng(0).standard_normal(len(weights)).astype("<f4")
    file.write_bytes(bytes(data[:begin]) + (weights * (1 + share * noise)).tobytes())


def test_a_finished_output_whose_model_has_changed(
    home: Path, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A command is not told that all is done already where its model has other files now.

    A farm's workers have those of a hub's model each for itself, and share a directory.
    """
    model = home / "model"
    (file,) = model.glob("**/*.safetensors")
    again = partial(
        embedfarm.embed, TEXTS, out=out, model=str(model), dtype="float32", progress=False
    )
    before, was = file.read_bytes(), read_manifest(out)
    again()
    add_noise(model, 0.01)
    try:
        with pytest.raises(OutputError, match=r"/model have changed since \(weights\)"):
            again()
        monkeypatch.setattr(model_files, "find_local", lambda *_: model)
        hub = JobSpec(model="some/model")
        with pytest.raises(OutputError, match="weights"):
            check_files(out, was, hub, Settings())
        check_files(out, was, hub, Settings(redis_url="redis://farm"))
        with pytest.raises(OutputError, match="weights"):
            check_files(out, was, JobSpec(model=str(model)), Settings(redis_url="redis://farm"))
        check_files(out, msgspec.structs.replace(was, fingerprint={}), hub, Settings())
    finally:
        file.write_bytes(before)
    again()


def test_the_model_itself_agrees(out: Path) -> None:
    """The model that made an output makes its canaries and the vectors of its sample."""
    report = embedfarm.open(out).check()
    assert report.agrees, report
    assert (report.verdict, report.differing) == ("same", [])
    assert (report.canaries, report.sample) == (7, 32)
    assert min(report.least or 0, report.sample_least or 0) > 0.9999
    assert (report.recall or 0) > 0.98  # of neighbours that are as near, another one may come first


@pytest.mark.parametrize("dtype", ["bfloat16", "int8"])
def test_another_precision(out: Path, dtype: str) -> None:
    """Weights that compute in another precision are named so, with nearly the same vectors."""
    report = embedfarm.open(out).check(dtype=dtype)
    assert (report.verdict, report.differing, report.agrees) == ("precision", ["dtype"], False)
    assert report.recall is not None
    assert report.recall > 0.5


def test_noise_on_the_weights(home: Path, out: Path, tmp_path: Path) -> None:
    """Weights that are changed by one per cent are other weights, however alike the vectors are."""
    model = changed(home, tmp_path)
    add_noise(model, 0.01)
    report = embedfarm.open(out).check(str(model))
    assert (report.verdict, report.differing) == ("weights", ["weights"])
    assert 0.98 < (report.least or 0) < 0.99999


def test_another_tokenizer(home: Path, out: Path, tmp_path: Path) -> None:
    """A tokenizer with two words of its vocabulary exchanged is another one."""
    model = changed(home, tmp_path)
    file = next(model.glob("**/tokenizer.json"))
    said = json.loads(file.read_text())
    words = said["model"]["vocab"]
    words["the"], words["."] = words["."], words["the"]
    file.write_text(json.dumps(said))
    report = embedfarm.open(out).check(str(model))
    assert report.verdict == "tokenizer"
    assert report.differing[-1] == "tokenizer"
    assert (report.least or 0) < 0.9999


def test_another_prompt(home: Path, out: Path, tmp_path: Path) -> None:
    """A model that puts a prompt before each text by default has another configuration."""
    model = changed(home, tmp_path)
    file = model / "config_sentence_transformers.json"
    prompts = {"prompts": {"query": "query: "}, "default_prompt_name": "query"}
    file.write_text(json.dumps(json.loads(file.read_text()) | prompts))
    report = embedfarm.open(out).check(str(model))
    assert (report.verdict, report.differing) == ("configuration", ["configuration"])
    assert (report.least or 0) < 0.9999


def test_another_model_of_the_same_size(out: Path, tmp_path: Path) -> None:
    """Other weights of the same architecture are another model."""
    model = build("mean_pooled", tmp_path, seed=1)
    report = embedfarm.open(out).check(str(model))
    assert report.verdict == "other"
    assert "weights" in report.differing


def test_vectors_of_the_corpus_count(out: Path, tmp_path: Path) -> None:
    """Where the canaries agree and texts of the corpus do not, the verdict is not that all is well.

    So it is where a device lied for a while, or another program has changed the vectors.
    """
    other = Path(shutil.copytree(out, tmp_path / "out"))
    manifest = read_manifest(other)
    assert manifest.sample is not None
    sample = read_sample(other, manifest.sample)
    listed = write_table(other, list(range(32)), sample.texts, sample.matrix[::-1].copy())
    write_manifest(other, msgspec.structs.replace(manifest, sample=listed))
    report = embedfarm.open(other).check()
    assert report.verdict == "device"
    assert "texts of the corpus have other vectors" in report.reason


@pytest.mark.parametrize(
    "stored",
    [{"vector_dtype": "float16"}, {"vector_dtype": "ubinary"}, {"vector_dtype": "lsh"}],
    ids=lambda stored: stored["vector_dtype"],
)
def test_however_vectors_are_stored(home: Path, tmp_path: Path, stored: dict[str, Any]) -> None:
    """Canaries are those of the model, and the sample is compared as it is stored; exports too."""
    model = str(home / "model")
    embedfarm.embed(TEXTS[:50], out=tmp_path / "o", model=model, progress=False, **stored)
    export(tmp_path / "o", tmp_path / "npy", "npy")
    for place in ("o", "npy"):
        report = embedfarm.open(tmp_path / place).check()
        assert (report.verdict, report.sample) == ("same", 32), report
        assert (report.sample_least or 0) > 0.9


def test_an_output_without_canaries(out: Path, tmp_path: Path) -> None:
    """An earlier version's output cannot be compared, and everything else of it still works."""
    old = Path(shutil.copytree(out, tmp_path / "old"))
    (old / "_sample.parquet").unlink()
    facts = json.loads((old / "_manifest.json").read_text())
    for name in ("canaries", "sample", "manifest_sha256"):
        del facts[name]
    (old / "_manifest.json").write_text(json.dumps(facts))
    output = embedfarm.open(old)
    report = output.check()
    assert (report.verdict, report.agrees, report.least) == ("unknown", False, None)
    assert "an earlier version made it" in report.reason
    assert not output.verify()
    assert output.search(TEXTS[3], 1)[0].index == 3


# Servers.


@pytest.fixture
def server(home: Path) -> Iterator[EmbeddingServer]:
    """A server that has the model of the output."""
    model = SentenceTransformer(str(home / "model"), device="cpu")
    server = EmbeddingServer(model.encode)
    server.start()
    yield server
    server.stop()


def test_a_server_with_the_model(out: Path, server: EmbeddingServer) -> None:
    """A server that has the model agrees; what it may cut off is left out."""
    report = embedfarm.open(out).check(endpoint=server.url)
    assert (report.verdict, report.differing, report.canaries) == ("same", [], 6)


def test_servers_with_something_else(
    home: Path, out: Path, server: EmbeddingServer, tmp_path: Path
) -> None:
    """A server is told apart by its vectors: noise, a prompt, another model or dimensions."""
    noisy, other = changed(home, tmp_path), build("mean_pooled", tmp_path, seed=1)
    add_noise(noisy, 0.01)
    models = [SentenceTransformer(str(each), device="cpu") for each in (noisy, other)]
    true = server.embed

    def prompted(texts: Sequence[str]) -> NDArray[np.float32]:
        return true([f"Passage, as it is: {text}" for text in texts])

    def short(texts: Sequence[str]) -> NDArray[np.float32]:
        return true(texts)[:, :16]

    noisy_embed, other_embed = (model.encode for model in models)
    output = embedfarm.open(out)
    wanted: list[tuple[str, Embed]] = [
        ("close", noisy_embed), ("related", prompted), ("other", other_embed), ("other", short),
    ]  # fmt: skip
    for verdict, embed in wanted:
        server.embed = embed
        assert output.check(endpoint=server.url).verdict == verdict
    server.stop()
    settings = {"EMBEDFARM_HANG_SECONDS": "0.2"}
    done = CliRunner().invoke(app, ["check", str(out), "--endpoint", server.url], env=settings)
    assert done.exit_code == 2
    assert "does not embed" in done.output


# The command, and what else looks at canaries.


def test_the_command_says_it_for_people_and_programs(home: Path, out: Path, tmp_path: Path) -> None:
    """The status is 0 for agreement alone; the sentence and the JSON say what differs."""
    good = CliRunner().invoke(app, ["check", str(out)])
    assert good.exit_code == 0, good.output
    assert "this model makes the vectors of this output" in good.output
    model = changed(home, tmp_path)
    add_noise(model, 0.01)
    bad = CliRunner().invoke(app, ["check", str(out), "--model", str(model)])
    assert bad.exit_code == 1
    assert "other weights" in bad.output
    machine = CliRunner().invoke(app, ["check", str(out), "--model", str(model), "--json"])
    said = json.loads(machine.output)
    assert (said["verdict"], said["agrees"], said["differing"]) == ("weights", False, ["weights"])


def test_a_search_refuses_another_model(home: Path, out: Path, tmp_path: Path) -> None:
    """A query is not embedded by a model that makes other vectors than the output's."""
    model = tmp_path / "model"
    shutil.copytree(home / "model", model)
    manifest = msgspec.structs.replace(read_manifest(out), model=str(model))
    assert len(embed_query(manifest, "a query", Settings())) == 32
    add_noise(model, 0.2)
    with pytest.raises(ModelError, match="makes other vectors here"):
        embed_query(manifest, "a query", Settings())
    untold = msgspec.structs.replace(manifest, canaries=None)
    assert len(embed_query(untold, "a query", Settings())) == 32


def test_neighbours() -> None:
    """Recall is 1 for the same directions and what is shared for others; few texts have none."""
    matrix = np.random.default_rng(0).standard_normal((40, 8)).astype(np.float32)
    other = np.random.default_rng(1).standard_normal((40, 8)).astype(np.float32)
    assert recall_of_neighbours(matrix, 3 * matrix) == 1
    assert 0 < (recall_of_neighbours(matrix, other) or 0) < 0.6
    assert recall_of_neighbours(matrix[:2], matrix[:2]) is None


def test_a_source_that_is_read_again_at_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a server asks for while the manifest is written takes no text out of the sample."""
    begun: list[Thread] = []

    def last_status(run: Run, farm: FarmClient, own: OwnJob) -> JobStatus:
        begun.append(Thread(target=run._sending.source.begin, args=([],)))
        begun[0].start()
        begun[0].join(0.2)
        return truth(run, farm, own)

    truth = Run._last_status
    monkeypatch.setattr(Run, "_last_status", last_status)
    embedfarm.embed(TEXTS, out=tmp_path / "out", model="null:8", progress=False)
    begun[0].join()
    sample = read_manifest(tmp_path / "out").sample
    assert sample is not None
    assert sample.texts == 32
