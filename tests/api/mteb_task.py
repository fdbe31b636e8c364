"""A task for MTEB out of what is installed, and what MTEB says of a model on it."""

from collections.abc import Iterator
from itertools import islice
from typing import Final

import mteb
from datasets import Dataset
from mteb.abstasks.retrieval import AbsTaskRetrieval
from mteb.abstasks.retrieval_dataset_loaders import RetrievalSplitData
from mteb.abstasks.task_metadata import TaskMetadata
from mteb.models import SentenceTransformerEncoderWrapper
from sentence_transformers import SentenceTransformer

from embedfarm.contract.settings import DEFAULT_MODEL
from embedfarm.producer.docstrings import docstrings

DOCUMENTS: Final = 100
MEASURES: Final = ("ndcg_at_10", "map_at_10", "recall_at_1", "recall_at_10", "mrr_at_10")


def halves() -> Iterator[tuple[str, str, str]]:
    """Yield name, first paragraph and the rest of docstrings that have both."""
    for name, text in docstrings():
        first, _, rest = text.partition("\n\n")
        if len(rest) > 100:
            yield name, first, rest


class Docstrings(AbsTaskRetrieval):
    """The rest of a docstring is to be found by its first paragraph, among those of others."""

    metadata = TaskMetadata(
        name="Docstrings", description="First paragraphs of docstrings find the rest of them.",
        dataset={"path": "none", "revision": "none"}, type="Retrieval", category="t2t",
        modalities=["text"], eval_splits=["test"], eval_langs=["eng-Latn"],
        main_score="ndcg_at_10",
    )  # fmt: skip

    def load_data(self, num_proc: int | None = None, **_: object) -> None:
        """Make the task of what is installed, where MTEB would fetch it."""
        del num_proc
        rows = list(islice(halves(), DOCUMENTS))
        queries = [{"id": f"q-{name}", "text": first} for name, first, _ in rows]
        corpus = [{"id": name, "title": "", "text": rest} for name, _, rest in rows]
        split = RetrievalSplitData(
            queries=Dataset.from_list(queries), corpus=Dataset.from_list(corpus),
            relevant_docs={f"q-{name}": {name: 1} for name, _, _ in rows}, top_ranked=None,
        )  # fmt: skip
        self.dataset = {"default": {"test": split}}
        self.data_loaded = True


def scores(model: SentenceTransformer) -> dict[str, float]:
    """Evaluate a model by MTEB, as its wrapper of sentence-transformers has it."""
    wrapped = SentenceTransformerEncoderWrapper(model)
    result = mteb.evaluate(wrapped, Docstrings(), cache=None, show_progress_bar=False)
    assert result.model_name == DEFAULT_MODEL
    (found,) = result.task_results[0].scores["test"]
    return {name: found[name] for name in MEASURES}
