"""Texts as a model's tokens: truncated, cut into windows, and padded as its tokenizer would."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from sentence_transformers import SentenceTransformer

from embedfarm.contract.job_spec import JobSpec
from embedfarm.contract.model_files import ModelError
from embedfarm.contract.records import TokenisationSettings
from embedfarm.contract.token_ids import CHARACTERS_PER_TOKEN_MAX, FILE, TokenEncoder, cut_texts
from embedfarm.workers.engines.engine import Chunk, Tokenised, only_texts
from embedfarm.workers.engines.windows import cut_windows

# What tokenizers disagree about, if they do: blanks, case, accents, scripts, symbols, marks of
# their own, control characters and length.
PROBES: Final = (
    "",
    " ",
    "A plain sentence, with 3.14 and 1,000,000 in it.",
    "  blanks  around   and within\t\ttabs\n\nlines\r\n ",
    "Ünïcödé ÀÉÎ ß İstanbul ﬁ ½ ① e\u0301",
    "日本語の文。 中文句子 한국어 문장 ไทย हिन्दी עברית العربية Ελληνικά Русский",
    "🙂🏽 👩\u200d👩\u200d👧 → ≤ € © \u200b \ufeff \u00a0 \u2028",
    "a\x00b\x1b[0m\x7f",
    "[CLS] [SEP] [MASK] [PAD] [UNK] <s> </s> <pad> <unk> <mask> <|endoftext|> <|im_end|>",
    "def f(x): return x**2  # don't, can't; e.g. snake_case and CamelCase",
    "https://example.org/a?b=c&d=%20 name@example.org",
    "x" * 500,
    "supercalifragilisticexpialidocious " * 20,
)
# Of a model's prompts, those for each task; the first that there is counts.
PROMPT_NAMES: Final = {"": (), "query": ("query",), "document": ("document", "passage", "corpus")}


@dataclass(frozen=True)
class Tokens:
    """Texts as tokens, end to end in one array per feature: a list per text would cost more.

    Attributes:
        columns: Feature by name, such as "input_ids", shape (tokens of all texts,).
        ends: Where each text ends in them, shape (texts,).
        constants: Features of the whole batch, such as "prompt_length".
    """

    columns: dict[str, NDArray[np.int64]]
    ends: NDArray[np.int64]
    constants: dict[str, Any]


@dataclass
class Tokenizer:
    """The preprocessing of a model that begins with a transformer, for one job.

    Attributes:
        model: The model.
        spec: Prompt, and what becomes of long texts.
    """

    model: SentenceTransformer
    spec: JobSpec
    _encoder: TokenEncoder | None = None
    _frame: dict[str, int] = field(default_factory=dict)
    _constants: dict[str, Any] = field(default_factory=dict)

    @cached_property
    def prompt(self) -> str | None:
        """The prompt: the job's, else the model's for its task or by default, as in `encode`.

        Raises:
            ModelError: The model has no prompt of the name that the job says.
        """
        spec, prompts = self.spec, self.model.prompts
        if spec.prompt:
            return spec.prompt
        if spec.prompt_name and spec.prompt_name not in prompts:
            names = ", ".join(sorted(prompts)) or "none at all"
            raise ModelError(f"it has no prompt {spec.prompt_name!r}, but {names}")
        wanted = [spec.prompt_name] if spec.prompt_name else PROMPT_NAMES[spec.task]
        names_by_rank = (*wanted, self.model.default_prompt_name or "")
        return next((prompts[name] for name in names_by_rank if name in prompts), None)

    @property
    def limit(self) -> int:
        """Tokens that a text may have; a very large number without a limit."""
        return self.model.max_seq_length or sys.maxsize

    def check(self) -> None:
        """Refuse a job whose long texts cannot be recognised or cut.

        Raises:
            ModelError: The message says why.
        """
        if self.spec.long != "truncate" and not self.model.tokenizer.is_fast:
            raise ModelError("its tokenizer does not tell where tokens are in a text")
        if self.spec.long == "windows" and self._room <= 2 * self.spec.long_overlap:
            raise ModelError(
                f"windows of {self._room} tokens cannot repeat {self.spec.long_overlap} each time"
            )

    @property
    def tokenisation(self) -> TokenisationSettings | None:
        """Settings by which token ids are made elsewhere; None where only the text will do."""
        if self._encoder is None or self.spec.long != "truncate":
            return None
        return self._encoder.tokenisation

    def adopt(self, directory: Path) -> None:
        """Take tokenizer.json instead of the model's preprocessing, if they agree on the probes."""
        if self.limit == sys.maxsize or not (directory / FILE).exists():
            return
        probes = [*PROBES, "word " * 2 * self.limit, "\t" * CHARACTERS_PER_TOKEN_MAX * self.limit]
        plain = self.truncate(probes)
        encoder = TokenEncoder.describe(directory, self.prompt or "", self.limit)
        ids, lengths = encoder.encode(probes)
        columns = dict(plain.features.columns)
        same = np.array_equal(lengths, plain.lengths)
        if not same or not np.array_equal(ids, columns.pop("input_ids")):
            return
        frame = {name: np.unique(column) for name, column in columns.items()}
        if all(len(values) == 1 for values in frame.values()):
            self._encoder = encoder
            self._frame = {name: int(values[0]) for name, values in frame.items()}
            self._constants = plain.features.constants

    def tokenise(self, chunks: Sequence[Chunk]) -> Tokenised:
        """Tokenise the chunks, a row each, or one for each window of a long text.

        Raises:
            ValueError: A chunk's ids are not the model's, or it should be a text.
        """
        if self._encoder is not None and self.spec.long == "truncate":
            return self._encode(self._encoder, chunks)
        texts = only_texts(chunks)
        plain = self.truncate(texts)
        if self.spec.long == "truncate":
            return plain
        windows = self._windows(texts, np.flatnonzero(plain.lengths >= self.limit))
        if self.spec.long == "error":
            reason = f"longer than the {self.limit} tokens that the model takes"
            return replace(plain, reasons=dict.fromkeys(windows, reason))
        if not windows:
            return plain
        rows = [windows.get(text, [texts[text]]) for text in range(len(texts))]
        owners = np.repeat(np.arange(len(texts)), list(map(len, rows)))
        return replace(self.truncate(list(chain.from_iterable(rows))), owners=owners)

    def _encode(self, encoder: TokenEncoder, chunks: Sequence[Chunk]) -> Tokenised:
        """Encode chunks that are texts, and take the token ids of the others, a row each."""
        ids, lengths = encoder.encode([chunk for chunk in chunks if isinstance(chunk, str)])
        if len(lengths) < len(chunks):
            made = iter(np.split(ids, np.cumsum(lengths)[:-1]))
            rows = [next(made) if isinstance(chunk, str) else self._own(chunk) for chunk in chunks]
            lengths = np.fromiter(map(len, rows), dtype=np.int64, count=len(rows))
            ids = np.concatenate(rows)
        columns = {"input_ids": ids.astype(np.int64)}
        columns |= {name: np.full(len(ids), value) for name, value in self._frame.items()}
        return Tokenised(lengths, Tokens(columns, np.cumsum(lengths), dict(self._constants)))

    def _own(self, ids: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return token ids if they are the model's: others would break the device."""
        if len(ids) > self.limit or ids.max(initial=0) >= self._vocabulary:
            raise ValueError("token ids that are not the model's")
        return ids

    @cached_property
    def _vocabulary(self) -> int:
        return len(self.model.tokenizer)

    def truncate(self, texts: Sequence[str]) -> Tokenised:
        """Tokenise texts by the model's own preprocessing, a row each, truncated."""
        cut = self._cut(texts)
        features = self._preprocess(cut)
        lengths = _lengths(features)
        # What was cut and is not full now would have more tokens: blanks make none.
        short = (len(after) < len(text) for after, text in zip(cut, texts, strict=True))
        if any(lengths[row] < self.limit for row, was_cut in enumerate(short) if was_cut):
            features = self._preprocess(texts)
            lengths = _lengths(features)
        columns = {
            name: np.fromiter(chain.from_iterable(rows), dtype=np.int64, count=int(lengths.sum()))
            for name, rows in features.items()
            if isinstance(rows, list)
        }
        constants = {name: value for name, value in features.items() if name not in columns}
        return Tokenised(lengths, Tokens(columns, np.cumsum(lengths), constants))

    def _windows(self, texts: Sequence[str], full: NDArray[np.intp]) -> dict[int, list[str]]:
        """Return by text the windows of those of the `full` texts that would be truncated.

        They are cut from the text, not from its tokens, so that each has the model's whole frame
        around it, prompts included: its vector is that of `encode` of the window.
        """
        if not len(full):
            return {}
        encoded = self.model.tokenizer(
            [texts[text] for text in full],
            add_special_tokens=False,
            truncation=False,
            return_offsets_mapping=True,
            verbose=False,
        )
        found = {}
        for place, offsets in zip(full.tolist(), encoded["offset_mapping"], strict=True):
            if len(offsets) > self._room:
                text = texts[place]
                spans = cut_windows(text, offsets, self._room, self.spec.long_overlap)
                found[place] = [text[start:end] for start, end in spans]
        return found

    @cached_property
    def _room(self) -> int:
        """Tokens of its own that a text may have, beside the frame and the prompt."""
        return int(self.limit - self.truncate([""]).lengths[0])

    def _preprocess(self, texts: Sequence[str]) -> dict[str, Any]:
        """Run the model's own preprocessing, without padding: a list of tokens for each text."""
        return self.model.preprocess(
            list(texts),
            prompt=self.prompt,
            processing_kwargs={"text": {"padding": False}, "common": {"return_tensors": None}},
        )

    def _cut(self, texts: Sequence[str]) -> list[str]:
        """Cut off most of what is truncated anyway, where that is at the ends of texts."""
        keeps_start = self.model.tokenizer.truncation_side == "right"
        return cut_texts(texts, self.limit) if keeps_start else list(texts)

    def pad(
        self, tokens: Tokens, lengths: NDArray[np.int64], rows: NDArray[np.intp]
    ) -> dict[str, Any]:
        """Return the features of some rows, padded as the tokenizer would pad them."""
        tokenizer = self.model.tokenizer
        fill = {
            "input_ids": tokenizer.pad_token_id or 0,
            "token_type_ids": tokenizer.pad_token_type_id,
        }
        places = np.arange(lengths.max())
        if tokenizer.padding_side == "left":
            places = places[::-1]
        taken = places < lengths[:, None]
        sources = _places(tokens, lengths, rows)
        features = dict(tokens.constants)
        for name, column in tokens.columns.items():
            padded = np.full(taken.shape, fill.get(name, 0), dtype=np.int64)
            padded[taken] = column[sources]
            features[name] = torch.from_numpy(padded)
        return features


def lay_end_to_end(
    tokens: Tokens, lengths: NDArray[np.int64], rows: NDArray[np.intp], first_position: int
) -> dict[str, Any]:
    """Lay texts end to end in one row, as sentence-transformers has them for flash attention.

    Args:
        tokens: Tokens of a micro-batch.
        lengths: Tokens of each text taken, shape (rows,).
        rows: The texts taken.
        first_position: Where the model begins to count a text's tokens.

    Returns:
        The columns of `tokens` but "attention_mask", with "position_ids" and "seq_idx", the text of
        each token, all of shape (1, tokens); where texts begin and the last one ends, shape
        (rows + 1,), as "cu_seq_lens_q" and "cu_seq_lens_k"; and the tokens of the longest one, as
        "max_length_q" and "max_length_k".
    """
    places = _places(tokens, lengths, rows)
    ends = np.cumsum(lengths)
    columns = {name: column[places] for name, column in tokens.columns.items()}
    columns.pop("attention_mask", None)
    columns["position_ids"] = (
        first_position + np.arange(len(places)) - np.repeat(ends - lengths, lengths)
    )
    columns["seq_idx"] = np.repeat(np.arange(len(lengths), dtype=np.int32), lengths)
    bounds = torch.from_numpy(np.append(0, ends).astype(np.int32))
    longest = int(lengths.max())
    return {
        **tokens.constants,
        **{name: torch.from_numpy(column[None]) for name, column in columns.items()},
        "cu_seq_lens_q": bounds,
        "cu_seq_lens_k": bounds,
        "max_length_q": longest,
        "max_length_k": longest,
    }


def _places(
    tokens: Tokens, lengths: NDArray[np.int64], rows: NDArray[np.intp]
) -> NDArray[np.int64]:
    """Return where the tokens of some texts are, one text after the other."""
    # A text's tokens lie as far from their places among these as its end does.
    shifts = np.repeat(tokens.ends[rows] - np.cumsum(lengths), lengths)
    return np.asarray(shifts + np.arange(len(shifts)))


def _lengths(features: dict[str, Any]) -> NDArray[np.int64]:
    """Count the tokens of each text."""
    rows = features["input_ids"]
    return np.fromiter(map(len, rows), dtype=np.int64, count=len(rows))
