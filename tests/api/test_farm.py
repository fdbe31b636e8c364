"""Tests of `embedfarm.Farm`: a warm farm that is asked for vectors, and given corpora."""

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np
import psutil
import pyarrow as pa
import pytest
import torch
from sentence_transformers import SentenceTransformer, util
from sentence_transformers.sentence_transformer.evaluation import InformationRetrievalEvaluator

import embedfarm
from embedfarm.contract.model_files import find_local
from embedfarm.contract.settings import DEFAULT_MODEL
from tests.support import wait_until

TEXTS: Final = [
    "How do I read a file line by line?",
    "Open the file and iterate over it.",
    "Parse a table of comma separated values.",
    "The csv module reads and writes tabular data.",
    "Wait for several threads to end.",
    "Call join on each of the threads.",
]
MANY: Final = [f"chunk number {index}" for index in range(5000)]


@pytest.fixture(scope="module")
def farm() -> Iterator[embedfarm.Farm]:
    """Keep a private farm of one worker warm, with the default model loaded.

    It may load for longer than a request waits: other tests load models meanwhile, or it is traced.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("EMBEDFARM_LANE_SECONDS_MAX", "600")
        with embedfarm.Farm(devices="cpu", workers=1, engine="openvino") as farm:
            farm.encode("warm up")
            yield farm


@pytest.fixture(scope="module")
def model() -> SentenceTransformer:
    """Load the default model as sentence-transformers does."""
    return SentenceTransformer(str(find_local(DEFAULT_MODEL, None)), device="cpu")


def test_encode(farm: embedfarm.Farm, model: SentenceTransformer) -> None:
    """Vectors are those of `SentenceTransformer.encode`, in the shapes that it has."""
    expected = model.encode(TEXTS)
    vectors = farm.encode(TEXTS)
    assert (vectors.shape, vectors.dtype) == (expected.shape, np.float32)
    assert util.pairwise_cos_sim(vectors, expected).min() > 0.999
    one = farm.encode(TEXTS[0])
    assert one.shape == model.encode(TEXTS[0]).shape
    np.testing.assert_allclose(one, vectors[0], atol=0.01)
    assert farm.encode([]).shape == (0, expected.shape[1])
    assert farm.get_embedding_dimension() == model.get_embedding_dimension()


def test_kinds_of_answers(farm: embedfarm.Farm) -> None:
    """Tensors, lists of tensors, normalised and shorter vectors come where they are asked for."""
    assert isinstance(farm.encode(TEXTS, convert_to_tensor=True), torch.Tensor)
    listed = farm.encode(TEXTS, convert_to_numpy=False)
    assert [type(each) for each in listed] == [torch.Tensor] * len(TEXTS)
    assert farm.encode(TEXTS, truncate_dim=64).shape == (len(TEXTS), 64)
    lengths = np.linalg.norm(farm.encode(TEXTS, normalize_embeddings=True), axis=1)
    np.testing.assert_allclose(lengths, 1.0, rtol=1e-5)
    with pytest.raises(ValueError, match="float32"):
        farm.encode(TEXTS, precision="int8")


def test_many_texts(farm: embedfarm.Farm) -> None:
    """More texts than a request may have are embedded by a job, to the same vectors."""
    vectors = farm.encode(MANY)
    assert vectors.shape == (len(MANY), farm.get_embedding_dimension())
    some = [0, 1234, len(MANY) - 1]
    cosines = util.pairwise_cos_sim(vectors[some], farm.encode([MANY[place] for place in some]))
    assert cosines.min() > 0.999


def test_code_of_others(farm: embedfarm.Farm, model: SentenceTransformer) -> None:
    """Code that was written for a SentenceTransformer takes a farm for one."""
    queries: dict[str, Any] = {str(place): TEXTS[place] for place in (0, 2, 4)}
    corpus: dict[str, Any] = {str(place): TEXTS[place] for place in (1, 3, 5)}
    relevant = {str(place): {str(place + 1)} for place in (0, 2, 4)}
    either: list[Any] = [farm, model]
    measures: list[dict[str, Any]] = [
        InformationRetrievalEvaluator(
            queries, corpus, relevant, accuracy_at_k=[1], precision_recall_at_k=[1],
            mrr_at_k=[1], ndcg_at_k=[1], map_at_k=[1], main_score_function="cosine",
            score_functions={"cosine": util.cos_sim},
        ).compute_metrices(each)
        for each in either
    ]  # fmt: skip
    assert measures[0] == measures[1]
    assert measures[0]["cosine"]["accuracy@k"][1] == 1.0
    pairs = [util.paraphrase_mining(each, TEXTS)[0][1:] for each in either]
    assert pairs[0] == pairs[1]


def test_submissions(tmp_path: Path) -> None:
    """A submitted corpus is seen, steered, read while it is embedded, and waited for."""
    with embedfarm.Farm(model="null:8:5000", devices="cpu", workers=1) as farm:
        submission = farm.submit(MANY, out=tmp_path / "out", job_id="nightly")
        wait_until(lambda: any(job.job == "nightly" for job in farm.jobs()))
        farm.job("nightly").pause()
        assert farm.status("nightly").state == "paused"
        with pytest.raises(TimeoutError):
            submission.wait(0.01)
        assert not submission.done
        farm.job("nightly").resume()
        table = pa.Table.from_batches(submission.results())
        embeddings = submission.wait()
    assert table["index"].to_pylist() == list(range(len(MANY)))
    found = np.array(table["embedding"].to_pylist(), np.float32)
    np.testing.assert_array_equal(found, embeddings.matrix)


def test_a_submission_that_fails(tmp_path: Path) -> None:
    """The error of a run is raised by whoever waits for it, or reads its results."""
    with embedfarm.Farm(model="null:8", devices="cpu", workers=1) as farm:
        numbers: Any = [1, 2]
        submission = farm.submit(numbers, out=tmp_path / "out")
        with pytest.raises(embedfarm.EmbedfarmError, match="no string"):
            submission.wait()
        with pytest.raises(embedfarm.EmbedfarmError, match="no string"):
            list(submission.results())


def test_closing(tmp_path: Path) -> None:
    """A closed farm leaves no process, and starts again when it is used again."""
    farm = embedfarm.Farm(model="null:8", devices="cpu", workers=1, directory=tmp_path / "farm")
    before = {child.pid for child in psutil.Process().children(recursive=True)}

    def ours() -> list[Any]:
        children = psutil.Process().children(recursive=True)
        return [child for child in children if child.pid not in before]

    vectors = farm.encode("a")
    assert len(ours()) >= 3
    farm.close()
    assert not ours()
    farm.close()
    np.testing.assert_array_equal(farm.encode("a"), vectors)
    farm.close()
    assert not ours()


def test_a_farm_of_threads() -> None:
    """A farm outlives the thread that has used it first, and serves several at once."""
    with embedfarm.Farm(model="null:8", devices="cpu", workers=1) as farm:
        first = threading.Thread(target=farm.encode, args=("a",))
        first.start()
        first.join()
        answers: list[Any] = []
        threads = [
            threading.Thread(target=lambda: answers.append(farm.encode(["a", "b"])))
            for _ in range(4)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(answers) == 4
        assert all((each == answers[0]).all() for each in answers)


def test_no_device() -> None:
    """A farm without the devices that it was told to use says so."""
    farm = embedfarm.Farm(devices="GPU-0")
    with pytest.raises(embedfarm.EmbedfarmError):
        farm.encode("a")
    farm.close()
