"""Tests of the corpora: they are the same on every run, and what they say they are."""

from collections import Counter
from pathlib import Path

import pytest

from benchmarks import corpora
from benchmarks.corpora import CORPORA, glosses, pick, read_corpus, write_corpus
from embedfarm.contract import model_files
from embedfarm.readers.chunker import load_tokenizer, token_spans

WITHOUT_NETWORK = sorted(CORPORA.keys() - {"short"})


@pytest.mark.parametrize("name", WITHOUT_NETWORK)
def test_a_corpus_is_the_same_each_time(name: str, tmp_path: Path) -> None:
    """Two directories get the same bytes, with as many texts as were asked for."""
    first = write_corpus(name, tmp_path / "one", 300)
    second = write_corpus(name, tmp_path / "other", 300)
    assert first.read_bytes() == second.read_bytes()
    assert len(read_corpus(first)) == int(300 * CORPORA[name][1])


def test_half_of_the_repeated_corpus_repeats(tmp_path: Path) -> None:
    """Half of the repeated corpus are distinct texts, and some repeat more often than others."""
    counts = Counter(corpora.repeated(tmp_path, 200))
    assert counts.total() == 200
    assert len(counts) == 100
    assert max(counts.values()) > 5


def test_long_texts_fill_the_window(tmp_path: Path) -> None:
    """Long texts have at most 510 tokens, and most of them nearly as many."""
    tokenizer = load_tokenizer(model_files.resolve(corpora.MODEL) / "tokenizer.json")
    lengths = [len(token_spans(tokenizer, text)) for text in corpora.long(tmp_path, 30)]
    assert max(lengths) <= corpora.WINDOW_TOKENS
    assert sum(lengths) / len(lengths) > 400


@pytest.mark.parametrize("count", [1, 3, 5, 10, 23])
def test_picked_texts_are_distinct(count: int) -> None:
    """Picked texts are in order and distinct: when there are too few, repeats get a number."""
    texts = [f"text {index}" for index in range(5)]
    picked = pick(texts, count)
    assert len(picked) == len(set(picked)) == count
    assert picked[:5] == [text for text in texts if text in picked]


def test_a_gloss_is_what_follows_the_bar(tmp_path: Path) -> None:
    """Glosses follow a bar in WordNet's files, by part of speech; the licence above is none."""
    for part in corpora.PARTS_OF_SPEECH:
        (tmp_path / f"data.{part}").write_text(
            f'  1 This software | is provided as it is\n0001 03 n 01 thing 0 | a {part}; "two"  \n'
        )
    assert glosses(tmp_path) == [f'a {part}; "two"' for part in corpora.PARTS_OF_SPEECH]
