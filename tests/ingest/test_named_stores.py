"""Tests of jobs by RQ that fill a vector store, which they name without knowing where it is."""

import json
from pathlib import Path

import pytest

from embedfarm.contract.settings import NamedStore, Settings
from embedfarm.contract.stored_results import StorageRefused
from embedfarm.ingest.tasks import OptionRefused, option_words
from tests.farm.harness import null_vectors, texts_of, write_corpus
from tests.ingest.rq_farm import Door, returned, wait_for
from tests.stores.contents import assert_contents


def test_a_job_fills_a_store_by_its_name(door: Door, tmp_path: Path) -> None:
    """A program names a store; its job fills it, and nothing that RQ keeps says where it is."""
    texts = list(texts_of(200))
    ids = [f"id {n}" for n in range(200)]
    corpus = str(write_corpus(tmp_path / "corpus.jsonl", texts, ids))
    url = f"lancedb://{tmp_path}/hidden#documents"
    stores = json.dumps({"search": {"url": url}})
    words = (corpus, str(tmp_path / "out"))
    options = {"model": "null:16", "id_field": "id", "to": "search"}
    job = door.enqueue("embed_corpus", *words, **options)
    with door.ingest(stores=stores), door.work():
        wait_for(job, "finished")
        again = door.enqueue("retry_failed", *words, **options)
        wait_for(again, "finished")
    assert returned(job)["exported"] == {"sent": 200, "deleted": 0, "rows": 200, "exact": True}
    assert returned(again)["exported"]["sent"] == 0
    assert_contents(url, dict(zip(ids, null_vectors(texts, 16), strict=True)))
    kept = repr(door.connection.hgetall(job.key))
    assert "hidden" not in kept
    assert "hidden" not in door.log()


@pytest.mark.parametrize("to", ["none", "qdrant://evil.example#a", "lancedb:///etc#a", ["search"]])
def test_stores_that_the_operator_has_not_named(to: str | list[str]) -> None:
    """A URL is refused as a name that is none is, and its password is not in the refusal."""
    store = NamedStore.model_validate({"url": "lancedb:///a#b"})
    settings = Settings().model_copy(update={"stores": {"search": store}})
    assert option_words({"to": "search"}, settings) == ["--to=search"]
    with pytest.raises(OptionRefused) as refused:
        option_words({"to": to}, settings)
    assert "evil" not in str(refused.value)


def test_places_for_vectors_are_below_roots(tmp_path: Path) -> None:
    """A job by RQ has its vectors stored where the operator allows it, and nowhere else."""
    settings = Settings(stored_roots=(str(tmp_path),))
    assert option_words({"stored": f"{tmp_path}/a"}, settings) == [f"--stored={tmp_path}/a"]
    assert option_words({"stored": ""}, settings) == ["--stored="]
    with pytest.raises(StorageRefused, match="not below one of stored_roots"):
        option_words({"stored": "/elsewhere"}, settings)
