"""Texts as a model's tokens by its tokenizer.json alone, without torch."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from embedfarm.contract.records import TokenisationSettings
from embedfarm.contract.token_ids import TokenEncoder
from embedfarm.workers.engines.engine import Chunk, Tokenised
from embedfarm.workers.engines.tokenizer import Offsets, Tokenizer
from embedfarm.workers.engines.tokens import Padding, Tokens


@dataclass
class EncoderTokenizer(Tokenizer):
    """A tokenizer of which it is known that the model's own preprocessing gives the same tokens.

    Attributes:
        encoder: Makes the token ids.
        frame: What all tokens have in each other feature of the model, such as "attention_mask".
        padding: How the texts of a device batch are padded.
        constants: Features of the whole batch, such as "prompt_length".
    """

    encoder: TokenEncoder
    frame: Mapping[str, int]
    padding: Padding
    constants: Mapping[str, Any] = field(default_factory=dict)

    @property
    def limit(self) -> int:
        """Tokens that a text may have."""
        return self.encoder.tokenisation.tokens_max

    @property
    def tokenisation(self) -> TokenisationSettings | None:
        """Settings to make the same token ids elsewhere; None where texts may become windows."""
        return self.encoder.tokenisation if self.spec.long == "truncate" else None

    def tokenise(self, chunks: Sequence[Chunk]) -> Tokenised:
        """Tokenise the chunks that are texts, and take the token ids of the others, a row each.

        Raises:
            ValueError: A chunk's ids are not the model's, or must be a text.
        """
        texts = [chunk for chunk in chunks if isinstance(chunk, str)]
        if self.tokenisation is None or len(texts) == len(chunks):
            return super().tokenise(chunks)
        ids, lengths = self.encoder.encode(texts)
        made = iter(np.split(ids, np.cumsum(lengths)[:-1]))
        rows = [next(made) if isinstance(chunk, str) else chunk for chunk in chunks]
        lengths = np.fromiter(map(len, rows), dtype=np.int64, count=len(rows))
        ids = np.concatenate(rows)
        if lengths.max() > self.limit or ids.max(initial=0) >= self.encoder.vocabulary:
            raise ValueError("token ids that are not the model's")  # they would break the device
        return self._framed(ids, lengths)

    def truncate(self, texts: Sequence[str]) -> Tokenised:
        """Tokenise texts, a row each, truncated."""
        return self._framed(*self.encoder.encode(texts))

    def pad(
        self, tokens: Tokens, lengths: NDArray[np.int64], rows: NDArray[np.intp]
    ) -> dict[str, Any]:
        """Return the features of some rows as one padded device batch."""
        return self.padding.pad(tokens, lengths, rows)

    def offsets(self, texts: Sequence[str]) -> Sequence[Offsets]:
        """Return where each token of each text begins and ends, in characters."""
        return self.encoder.offsets(texts)

    def _framed(self, ids: NDArray[np.integer], lengths: NDArray[np.int64]) -> Tokenised:
        """Return token ids of some rows with the other features of the model."""
        columns = {"input_ids": ids.astype(np.int64)}
        columns |= {name: np.full(len(ids), value) for name, value in self.frame.items()}
        tokens = Tokens(columns, np.cumsum(lengths), self.constants)
        return Tokenised(lengths, tokens, limit=self.limit)
