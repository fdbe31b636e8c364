"""Tests that MTEB's own code takes a farm for the model that it evaluates."""

from typing import cast

import pytest
from sentence_transformers import SentenceTransformer

import embedfarm
from embedfarm.contract.model_files import find_local
from embedfarm.contract.settings import DEFAULT_MODEL


# MTEB's own use of what it, and sentence-transformers, have renamed.
@pytest.mark.filterwarnings("ignore:The fill_missing parameter:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:The `get_sentence_embedding_dimension`:FutureWarning")
@pytest.mark.farm
@pytest.mark.timeout(300)  # so that it begins early
def test_mteb() -> None:
    """MTEB gives a farm the scores of the SentenceTransformer in the same precision."""
    # Two seconds in each process of the tests, were it imported above.
    from tests.api.mteb_task import scores  # noqa: PLC0415

    path = find_local(DEFAULT_MODEL, None)
    model = SentenceTransformer(str(path), device="cpu")
    model.model_card_data.model_name = DEFAULT_MODEL
    by_model = scores(model)
    # The engine is given, since a trial takes half a minute.
    with embedfarm.Farm(devices="cpu", workers=1, dtype="float32", engine="openvino") as farm:
        by_farm = scores(cast("SentenceTransformer", farm))
    assert by_farm == pytest.approx(by_model, abs=1e-4)
    assert by_model["ndcg_at_10"] > 0.5
