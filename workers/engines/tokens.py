"""Token ids of many texts in a few arrays, and device batches made of them."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class Tokens:
    """Texts as tokens, end to end in one array per feature: a list per text would cost more.

    Attributes:
        columns: Feature by name, such as "input_ids", shape (tokens of all texts,).
        ends: Where each text ends in them, shape (texts,).
        constants: Features of the whole batch, such as "prompt_length".
    """

    columns: Mapping[str, NDArray[np.int64]]
    ends: NDArray[np.int64]
    constants: Mapping[str, Any] = field(default_factory=dict)


class Padding(msgspec.Struct, frozen=True):
    """How a tokenizer makes the texts of a device batch equally long.

    Attributes:
        values: What stands for a token in each feature; 0 in a feature that is not named.
        left: Whether padding goes before a text instead of behind it.
    """

    values: dict[str, int]
    left: bool

    def pad(
        self, tokens: Tokens, lengths: NDArray[np.int64], rows: NDArray[np.intp]
    ) -> dict[str, Any]:
        """Return the features of some rows as one padded device batch.

        Args:
            tokens: Tokens of a micro-batch.
            lengths: Tokens of each row taken, shape (rows,).
            rows: The rows taken.

        Returns:
            Each column of `tokens`, shape (rows, longest length), and the constants.
        """
        places = np.arange(lengths.max())
        taken = (places[::-1] if self.left else places) < lengths[:, None]
        sources = _places(tokens, lengths, rows)
        features = dict(tokens.constants)
        for name, column in tokens.columns.items():
            padded = np.full(taken.shape, self.values.get(name, 0), dtype=np.int64)
            padded[taken] = column[sources]
            features[name] = padded
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
    bounds = np.append(0, ends).astype(np.int32)
    longest = int(lengths.max())
    return {
        **tokens.constants,
        **{name: column[None] for name, column in columns.items()},
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
