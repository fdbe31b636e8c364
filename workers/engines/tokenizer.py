"""The protocol of tokenizers, and what becomes of texts that are too long, whoever tokenises."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from embedfarm.contract.job_spec import JobSpec
from embedfarm.contract.model_files import ModelError
from embedfarm.contract.records import TokenisationSettings
from embedfarm.workers.engines.engine import Chunk, Tokenised, only_texts
from embedfarm.workers.engines.tokens import Tokens
from embedfarm.workers.engines.windows import cut_windows

# Of a model's prompts, those for each task; the first that there is counts.
PROMPT_NAMES: Final = {"": (), "query": ("query",), "document": ("document", "passage", "corpus")}

Offsets = Sequence[tuple[int, int]]


def find_prompt(spec: JobSpec, prompts: Mapping[str, str], default: str) -> str:
    """Return the prompt of a job: its own, else the model's for its task or by default.

    `SentenceTransformer.encode` takes them in this order.

    Args:
        spec: The job.
        prompts: The model's prompts by name.
        default: Name of the prompt that the model has by default, "" without one.

    Raises:
        ModelError: The model has no prompt of the name that the job gives.
    """
    if spec.prompt:
        return spec.prompt
    if spec.prompt_name and spec.prompt_name not in prompts:
        names = ", ".join(sorted(prompts)) or "none at all"
        raise ModelError(f"it has no prompt {spec.prompt_name!r}, but {names}")
    wanted = [spec.prompt_name] if spec.prompt_name else PROMPT_NAMES[spec.task]
    return next((prompts[name] for name in (*wanted, default) if name in prompts), "")


@dataclass
class Tokenizer(ABC):
    """Makes a model's tokens of the texts of one job.

    Attributes:
        spec: Says what becomes of long texts.
    """

    spec: JobSpec

    @property
    @abstractmethod
    def limit(self) -> int:
        """Tokens that a text may have; a very large number without a limit."""

    @property
    @abstractmethod
    def tokenisation(self) -> TokenisationSettings | None:
        """Settings to make the same token ids elsewhere; None where only the text will do."""

    @abstractmethod
    def truncate(self, texts: Sequence[str]) -> Tokenised:
        """Tokenise texts, a row each, truncated; the features are `Tokens`."""

    @abstractmethod
    def pad(
        self, tokens: Tokens, lengths: NDArray[np.int64], rows: NDArray[np.intp]
    ) -> dict[str, Any]:
        """Return the features of some rows as one device batch, as `Padding.pad` does."""

    @abstractmethod
    def offsets(self, texts: Sequence[str]) -> Sequence[Offsets]:
        """Return where each token of each text begins and ends, in characters.

        The text is neither truncated nor framed by tokens that are not its own.
        """

    def check(self) -> None:
        """Refuse a job whose long texts cannot be cut.

        Raises:
            ModelError: The message says why.
        """
        if self.spec.long == "windows" and self._room <= 2 * self.spec.long_overlap:
            raise ModelError(
                f"windows of {self._room} tokens cannot repeat {self.spec.long_overlap} each time"
            )

    def tokenise(self, chunks: Sequence[Chunk]) -> Tokenised:
        """Tokenise the chunks, a row each, or one for each window of a long text.

        Raises:
            ValueError: A chunk is no text.
        """
        texts = only_texts(chunks)
        plain = self.truncate(texts)
        if self.spec.long == "truncate":
            return plain
        long = self._too_long(texts, np.flatnonzero(plain.lengths >= self.limit))
        if self.spec.long == "error":
            reason = f"longer than the {self.limit} tokens that the model takes"
            return replace(plain, reasons=dict.fromkeys(long, reason))
        if not long:
            return plain
        rows = [
            self._windows(text, long[place]) if place in long else [text]
            for place, text in enumerate(texts)
        ]
        owners = np.repeat(np.arange(len(texts)), list(map(len, rows)))
        return replace(self.truncate(list(chain.from_iterable(rows))), owners=owners)

    def _too_long(self, texts: Sequence[str], full: NDArray[np.intp]) -> dict[int, Offsets]:
        """Return by text where the tokens are of those `full` texts that would be truncated."""
        places = full.tolist()
        offsets = self.offsets([texts[place] for place in places])
        found = zip(places, offsets, strict=True)
        return {place: tokens for place, tokens in found if len(tokens) > self._room}

    def _windows(self, text: str, offsets: Offsets) -> list[str]:
        """Cut a text into windows.

        They are cut from the text, not from its tokens, so that each has the model's whole frame
        around it, prompts included: its vector is that of `encode` of the window.
        """
        spans = cut_windows(text, offsets, self._room, self.spec.long_overlap)
        return [text[start:end] for start, end in spans]

    @cached_property
    def _room(self) -> int:
        """Tokens of its own that a text may have, beside the frame and the prompt."""
        return int(self.limit - self.truncate([""]).lengths[0])
