"""Texts as a model's tokens by its own preprocessing, which needs torch."""

import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from sentence_transformers import SentenceTransformer

from embedfarm.contract.model_files import ModelError
from embedfarm.contract.token_ids import CHARACTERS_PER_TOKEN_MAX, FILE, TokenEncoder, cut_texts
from embedfarm.workers.engines.encoder_tokenizer import EncoderTokenizer
from embedfarm.workers.engines.engine import Tokenised
from embedfarm.workers.engines.tokenizer import Offsets, Tokenizer, find_prompt
from embedfarm.workers.engines.tokens import Padding, Tokens

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


@dataclass
class ModelTokenizer(Tokenizer):
    """The preprocessing of a model that begins with a transformer, for one job.

    Attributes:
        model: The model.
        turn: Held while the model's tokenizer works: it cuts the texts of all its users where the
            latest one has set it to.
    """

    model: SentenceTransformer
    turn: threading.Lock = field(default_factory=threading.Lock)

    tokenisation = None  # its tokens cannot be made elsewhere

    @cached_property
    def prompt(self) -> str:
        """The prompt, "" without one.

        Raises:
            ModelError: The model has no prompt of the name that the job gives.
        """
        return find_prompt(self.spec, self.prompts, self.model.default_prompt_name or "")

    @property
    def prompts(self) -> dict[str, str]:
        """The model's prompts by name."""
        return {name: prompt or "" for name, prompt in self.model.prompts.items()}

    @property
    def own_limit(self) -> int:
        """Tokens that a text may have if the job says nothing; a very large number for any."""
        return min(self.model.max_seq_length or sys.maxsize, sys.maxsize)

    @property
    def limit(self) -> int:
        """Tokens that a text may have; a very large number without a limit."""
        return min(self.spec.max_length or self.own_limit, self.own_limit)

    @property
    def keeps_start(self) -> bool:
        """Whether the beginning of a long text is kept, and not its end."""
        return bool(self.model.tokenizer.truncation_side == "right")

    @cached_property
    def padding(self) -> Padding:
        """How the tokenizer pads the texts of a device batch."""
        tokenizer = self.model.tokenizer
        values = {
            "input_ids": tokenizer.pad_token_id or 0,
            "token_type_ids": tokenizer.pad_token_type_id,
        }
        return Padding(values, tokenizer.padding_side == "left")

    def check(self) -> None:
        """Refuse a job whose long texts cannot be recognised or cut.

        Raises:
            ModelError: The message says why.
        """
        if self.spec.long != "truncate" and not self.model.tokenizer.is_fast:
            raise ModelError("its tokenizer does not tell where tokens are in a text")
        super().check()

    def find_encoder(self, directory: Path) -> EncoderTokenizer | None:
        """Return tokenizer.json as a tokenizer, if it makes the same tokens of the probes.

        Args:
            directory: Directory of the model's files.
        """
        fast = self.model.tokenizer.is_fast  # one that is not tells no offsets
        usable = fast and self.keeps_start  # as an encoder does
        if self.limit == sys.maxsize or not usable or not (directory / FILE).exists():
            return None
        long = "first " * self.limit + "last " * self.limit
        probes = [*PROBES, long, "\t" * CHARACTERS_PER_TOKEN_MAX * self.limit]
        plain = self.truncate(probes)
        encoder = TokenEncoder.describe(directory, self.prompt, self.limit)
        ids, lengths = encoder.encode(probes)
        columns = dict(plain.features.columns)
        same = np.array_equal(lengths, plain.lengths)
        if not same or not np.array_equal(ids, columns.pop("input_ids")):
            return None
        if self.offsets(probes) != encoder.offsets(probes):
            return None
        frame = {name: np.unique(column) for name, column in columns.items()}
        if any(len(values) != 1 for values in frame.values()):
            return None
        values = {name: int(column[0]) for name, column in frame.items()}
        constants = plain.features.constants
        return EncoderTokenizer(self.spec, encoder, values, self.padding, constants)

    def truncate(self, texts: Sequence[str]) -> Tokenised:
        """Tokenise texts, a row each, truncated."""
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
        tokens = Tokens(columns, np.cumsum(lengths), constants)
        return Tokenised(lengths, tokens, limit=self.limit)

    def pad(
        self, tokens: Tokens, lengths: NDArray[np.int64], rows: NDArray[np.intp]
    ) -> dict[str, Any]:
        """Return the features of some rows as one padded device batch."""
        return self.padding.pad(tokens, lengths, rows)

    def offsets(self, texts: Sequence[str]) -> Sequence[Offsets]:
        """Return where each token of each text begins and ends, in characters."""
        if not texts:
            return []
        with self.turn:
            encoded = self.model.tokenizer(
                list(texts),
                add_special_tokens=False,
                truncation=False,
                return_offsets_mapping=True,
                verbose=False,
            )
        return list(encoded["offset_mapping"])

    def _preprocess(self, texts: Sequence[str]) -> dict[str, Any]:
        """Run the model's own preprocessing, without padding: a list of tokens for each text."""
        ours: dict[str, Any] = {"padding": False}
        if self.limit < self.own_limit:
            ours["max_length"] = self.limit
        with self.turn:
            return self.model.preprocess(
                list(texts),
                prompt=self.prompt or None,
                processing_kwargs={"text": ours, "common": {"return_tensors": None}},
            )

    def _cut(self, texts: Sequence[str]) -> list[str]:
        """Cut off most of what is truncated anyway, where that is at the ends of texts."""
        return cut_texts(texts, self.limit) if self.keeps_start else list(texts)


def _lengths(features: dict[str, Any]) -> NDArray[np.int64]:
    """Count the tokens of each text."""
    rows = features["input_ids"]
    return np.fromiter(map(len, rows), dtype=np.int64, count=len(rows))
