"""Tests of a group at work: several processes that compute one model together, on CPUs."""

import gc
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

import numpy as np
import psutil
import pytest

from embedfarm.contract.job_spec import JobSpec
from embedfarm.contract.model_files import ModelError
from embedfarm.contract.settings import Settings
from embedfarm.contract.similarity import cosine
from embedfarm.workers.engines import sentence_transformer, tensor_parallel
from embedfarm.workers.engines.group import Group
from embedfarm.workers.engines.opening import engine_name
from embedfarm.workers.engines.tensor_parallel import LayeredEngine, find_obstacle
from tests.workers.groups import alone, embed, formed, open_model
from tests.workers.tiny_models import build

LOADS: Final = 4


@pytest.fixture(scope="module")
def group() -> Iterator[Group]:
    """A group of two ranks that must outlive the module's tests."""
    with formed(2) as (group, ends):
        yield group
        assert not ends


@pytest.mark.usefixtures("group")
def test_heads_with_a_bias_are_shared(models: Callable[[str], Path]) -> None:
    """Qwen2, whose matrices have a bias, gives the same vectors as well."""
    single = embed(alone(models("last_token_pooled")))
    assert cosine(embed(open_model(models("last_token_pooled"))), single).min() >= 0.9999


@pytest.mark.usefixtures("group")
def test_half_precision_is_added_up(models: Callable[[str], Path]) -> None:
    """Vectors made in bfloat16 are near those of float32."""
    half = embed(open_model(models("shared"), dtype="bfloat16"))
    assert cosine(half, embed(alone(models("shared")))).min() >= 0.99


@pytest.mark.usefixtures("group")
def test_two_models_take_turns(models: Callable[[str], Path]) -> None:
    """Each of several loaded models has its own vectors, whatever ran before it."""
    paths = [models("shared"), models("last_token_pooled")]
    engines, expected = [open_model(each) for each in paths], [embed(alone(each)) for each in paths]
    for _ in range(2):
        for engine, vectors in zip(engines, expected, strict=True):
            assert cosine(embed(engine), vectors).min() >= 0.9999


@pytest.mark.usefixtures("group")
def test_what_has_no_plan_is_refused(models: Callable[[str], Path]) -> None:
    """A model whose layers CPUs cannot share is refused, with the reason."""
    with pytest.raises(ModelError, match=r"no plan to share layers of bert.*worker of one device"):
        open_model(models("mean_pooled"))
    with pytest.raises(ModelError, match="no transformer"):
        open_model(models("static"))
    assert find_obstacle(models("last_token_pooled"), 2) == ""
    assert find_obstacle(models("last_token_pooled"), 4) == "its 2 key value heads are not 4"


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("job", [{"engine": "openvino"}, {"dtype": "int8"}, {"engine": "mine"}])
def test_other_engines_are_refused(job: dict[str, str], models: Callable[[str], Path]) -> None:
    """What torch does not do, a group does not."""
    with pytest.raises(ModelError, match="runs on a single device"):
        open_model(models("shared"), **job)


@pytest.mark.usefixtures("group")
def test_a_group_takes_null_models() -> None:
    """A null model needs one rank only."""
    assert open_model("null:8").name == "null"
    assert engine_name(JobSpec(model="null:8"), "cpu", Settings()) == "null"


@pytest.mark.usefixtures("group")
def test_a_model_that_does_not_load_costs_itself(
    models: Callable[[str], Path], tmp_path: Path
) -> None:
    """A model that no rank can load does not keep the group from others."""
    broken = build("shared", tmp_path)
    path = broken / "config.json"
    settings = json.loads(path.read_text())
    path.write_text(json.dumps(settings | {"hidden_size": 32}))
    with pytest.raises(ModelError, match="does not load"):
        open_model(broken)
    assert np.isfinite(embed(open_model(models("shared")))).all()


def test_a_model_that_another_rank_cannot_load_costs_itself(
    group: Group, models: Callable[[str], Path]
) -> None:
    """What fails on another rank alone is the model's failure, and the group goes on."""
    with pytest.raises(ModelError, match="nowhere"):
        group.load("/nowhere", "float32", "", lambda: "loaded")
    assert np.isfinite(embed(open_model(models("shared")))).all()


def test_ranks_listen_on_loopback_only(group: Group, models: Callable[[str], Path]) -> None:
    """Nobody on another host can connect to a rank."""
    embed(open_model(models("shared")))
    processes = [psutil.Process(), *map(psutil.Process, group.pids)]
    found = [each for process in processes for each in process.net_connections("inet")]
    listening = {each.laddr.ip for each in found if each.status == psutil.CONN_LISTEN}
    assert listening <= {"127.0.0.1", "::ffff:127.0.0.1"}  # the same address, by either protocol
    assert listening


def test_unused_models_leave_nothing(group: Group, models: Callable[[str], Path]) -> None:
    """A model that this rank lets go is freed by the others; neither keeps files open for it."""
    processes = [psutil.Process(), *map(psutil.Process, group.pids)]
    open_files: list[list[int]] = []
    for _ in range(LOADS):
        engine = open_model(models("shared"))
        embed(engine)
        del engine
        gc.collect()
        group.free()
        open_files.append([process.num_fds() for process in processes])
    assert open_files[-1] == open_files[1]


@pytest.mark.usefixtures("group")
def test_layers_may_lie_in_several_places(
    models: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model whose layers are spread, here half of them on the disk, has the same vectors."""
    places = {"embeddings": "cpu", "encoder.layer.0": "cpu", "encoder.layer.1": "disk"}
    options = {"device_map": places | {"pooler": "cpu"}, "offload_folder": str(tmp_path)}
    load = sentence_transformer.load_files
    monkeypatch.setattr(
        tensor_parallel,
        "load_files",
        lambda directory, device, dtype, wanted: (
            load(directory, device, dtype, options) if wanted == {"device_map": "auto"} else None
        ),
    )
    spec = JobSpec(model=str(models("mean_pooled")), dtype="float32")
    engine = LayeredEngine.open(spec, "cpu", None)
    assert {each.device.type for each in engine.model.parameters()} == {"cpu", "meta"}
    assert engine.name == "torch, layers on 2"
    assert cosine(embed(engine), embed(alone(models("mean_pooled")))).min() >= 0.9999
