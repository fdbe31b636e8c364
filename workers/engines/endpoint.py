"""A server that embeds, such as TEI, vLLM, infinity, llama.cpp or Ollama, in place of a device.

The same model here, in float32 on the CPU, makes the tokens by which texts are counted and cut, and
the reference vectors of a few texts. One of these goes with every request: a server behind which
the model has changed is noticed before any vector of that answer is used.
"""

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from copy import copy
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any, ClassVar, Final, Self

import msgspec
import numpy as np
from numpy.typing import NDArray
from sentence_transformers.base.modules import Transformer

from embedfarm.contract.canaries import COSINE_MIN, LENGTH_TOLERANCE
from embedfarm.contract.job_spec import JobSpec
from embedfarm.contract.model_files import ModelError
from embedfarm.contract.records import TokenisationSettings
from embedfarm.contract.settings import Settings
from embedfarm.contract.similarity import cosine
from embedfarm.workers.engines.endpoint_client import TEXTS_MAX, EndpointClient, RequestRefused
from embedfarm.workers.engines.engine import Chunk, DeviceAway, Finish, ModelUnavailable, Tokenised
from embedfarm.workers.engines.sentence_transformer import SentenceTransformerEngine
from embedfarm.workers.engines.tokenizer import Offsets, Tokenizer
from embedfarm.workers.engines.tokens import Tokens

REQUEST_TOKENS: Final = 4096  # of a device batch for each request at a time
LAUNCH_TOKENS: Final = 256  # what a request costs by itself, as tokens
LONG_TOKENS_MAX: Final = 1024  # of the long canary, so that the reference takes seconds at most
TAIL: Final = 8  # an n-th of a text is at its end, without which the text is sent once more
CUT_COSINE_MIN: Final = 0.99999  # of two texts of which the server has embedded the same part
FRAGMENTS_MAX: Final = 8  # tokens less that a cut text may have, so that it is cut between words
CANARIES: Final = (
    "a canary in the coal mine",
    "The quick brown fox jumps over the lazy dog.",
    "Vectors of the same text by the same model are the same.",
    "def add(a, b): return a + b",
    "Wie hoch ist der Mount Everest?",
    "Redis streams deliver each entry to one consumer of a group.",
    "Das Boot liegt am Ufer des Sees.",
    "3.14159 is close to the ratio of a circle's circumference to its diameter.",
)


@dataclass(frozen=True)
class TextTokens(Tokens):
    """Texts as tokens, and as the text that a server makes the same tokens of.

    Attributes:
        texts: What is sent for each text, prompt included.
    """

    texts: Sequence[str] = ()


@dataclass
class EndpointTokenizer(Tokenizer):
    """Cuts texts where the model's own tokenizer does, so that they need not be cut again.

    Attributes:
        own: The model's tokenizer.
        prompt: What stands before each text.
    """

    own: Tokenizer
    prompt: str

    tokenisation = None  # a server takes texts

    @property
    def limit(self) -> int:
        """Tokens that a text may have."""
        return self.own.limit

    def truncate(self, texts: Sequence[str]) -> Tokenised:
        """Tokenise texts, a row each, truncated; the features are `TextTokens`."""
        made = self.own.truncate(texts)
        full = np.flatnonzero(made.lengths >= self.limit).tolist()
        sent = list(texts)
        for place, offsets in zip(full, self.offsets([texts[p] for p in full]), strict=True):
            if len(offsets) > self._room:
                sent[place] = self._cut(texts[place], offsets)
        tokens = made.features
        whole = [self.prompt + text for text in sent]
        features = TextTokens(tokens.columns, tokens.ends, tokens.constants, whole)
        return replace(made, features=features)

    def _cut(self, text: str, offsets: Offsets) -> str:
        """Cut a text to the room that it has, at a place where its tokens stay what they were.

        A word that is cut within may be made of other tokens than its beginning was: then it goes
        as a whole, as far as that costs no more than `FRAGMENTS_MAX` tokens.
        """
        spans = [tuple(span) for span in offsets]
        for room in range(self._room, max(0, self._room - FRAGMENTS_MAX), -1):
            cut = text[: offsets[room - 1][1]]
            if [tuple(span) for span in self.offsets([cut])[0]] == spans[:room]:
                return cut
        return text[: offsets[self._room - 1][1]]

    def pair(self, tokens: int) -> list[str]:
        """Return a text of about so many tokens, as it is sent, and the same without its end."""
        room = self._room - (self.limit - tokens)
        parts = []
        for text, part in ((CANARIES[0], room - room // TAIL), (CANARIES[-1], room // TAIL)):
            repeated = f"{text} " * max(1, part)
            (spans,) = self.offsets([repeated])
            parts.append(repeated[: spans[max(0, part - FRAGMENTS_MAX)][1]])
        return [f"{self.prompt}{parts[0]} {parts[1]}", f"{self.prompt}{parts[0]}"]

    def pad(
        self, tokens: Tokens, lengths: NDArray[np.int64], rows: NDArray[np.intp]
    ) -> dict[str, Any]:
        """Return the features of some rows as one padded device batch, for the reference."""
        return self.own.pad(tokens, lengths, rows)

    def offsets(self, texts: Sequence[str]) -> Sequence[Offsets]:
        """Return where each token of each text begins and ends, in characters."""
        return self.own.offsets(texts)


@dataclass(eq=False)
class Endpoint:
    """A server, and what its model is known by.

    Attributes:
        client: Client of the server.
        texts: Texts of which the vectors are known, the canaries first.
        vectors: Their vectors by the model here, in float32, shape (texts, dimensions).
        cosine_min: Least cosine of the server's vectors to these.
        whole: Tokens up to which the server is known to embed the whole of a text.
        cuts: Tokens of a text of which it is known to embed a part only, 0 without any.
    """

    client: EndpointClient
    texts: Sequence[str]
    vectors: NDArray[np.float32]
    cosine_min: float
    whole: int = LONG_TOKENS_MAX
    cuts: int = 0
    _turns: "count[int]" = field(default_factory=count)
    _pool: ThreadPoolExecutor = field(init=False)

    def __post_init__(self) -> None:
        self._pool = ThreadPoolExecutor(self.client.requests_max, "endpoint")

    def submit(self, texts: Sequence[str]) -> "Future[NDArray[np.float32]]":
        """Begin to ask for the vectors of texts, in a request of their own, as `embed` does."""
        return self._pool.submit(self.embed, texts)

    def embed(self, texts: Sequence[str]) -> NDArray[np.float32]:
        """Return the vectors of texts, shape (texts, dimensions), from the model that is meant.

        Raises:
            DeviceAway: The server does not answer, or answers by another model.
            RequestRefused: It does not take these texts, while it takes a canary.
        """
        turn = next(self._turns) % len(CANARIES)
        canary = self.texts[turn]
        try:
            made = self.client.embed([*texts, canary])
        except RequestRefused as error:
            self._see(self._canary(canary, error), turn)
            raise
        self._see(made[-1:], turn)
        return made[:-1]

    def see_whole(self, tokens: int, tokenizer: EndpointTokenizer) -> None:
        """See that the server embeds the whole of texts of so many tokens, once for each doubling.

        No reference is needed for it: a text has another vector without its end, unless that is
        cut off anyway.

        Raises:
            DeviceAway: The server does not answer.
            RequestRefused: It would cut such texts.
        """
        while self.whole < tokens:
            size = min(2 * self.whole, tokenizer.limit)
            if not 0 < self.cuts <= size and not self._cuts(tokenizer.pair(size)):
                self.whole = size
                continue
            self.cuts = min(self.cuts or size, size)
            what = f"embeds texts of {self.whole:,} tokens, and cuts those of {self.cuts:,}"
            raise RequestRefused(f"{self.client.shown} {what}")

    def _cuts(self, pair: Sequence[str]) -> bool:
        """Tell whether the server makes the same vector of a text with its end and without."""
        try:
            made = self.client.embed(pair)
        except RequestRefused:
            return False  # it refuses what is too long for it
        return float(cosine(made[:1], made[1:])[0]) > CUT_COSINE_MIN

    def _canary(self, text: str, error: RequestRefused) -> NDArray[np.float32]:
        """Return the vector of a canary alone, to tell what a request was refused for."""
        try:
            return self.client.embed([text])
        except RequestRefused:
            raise DeviceAway(f"{self.client.shown} does not embed: {error}") from error

    def _see(self, vector: NDArray[np.float32], turn: int) -> None:
        reason = self.difference(vector, self.vectors[[turn]])
        if reason:
            raise DeviceAway(reason)

    def difference(self, made: NDArray[np.float32], known: NDArray[np.float32]) -> str:
        """Return in which way vectors of the server are not those of the model here, "" if in none.

        Args:
            made: The server's vectors, shape (n, its dimensions).
            known: Vectors of the same texts by the model here, shape (n, dimensions).
        """
        if made.shape != known.shape:
            sizes = f"{made.shape[1]:,} dimensions, and the model's have {known.shape[1]:,}"
            return f"{self.client.shown} gives vectors of {sizes}: is it another model?"
        least = float(cosine(made, known).min())
        if least >= self.cosine_min:
            return ""
        wanted = f"cosine {least:.4f}, and at least {self.cosine_min} is wanted"
        return (
            f"{self.client.shown} gives other vectors than the model here: {wanted}: is it "
            "another model, or cut or prompted in another way?"
        )

    def compare(self) -> bool:
        """See that the server gives all the known vectors; tell whether they are as long, too.

        Raises:
            ModelUnavailable: The server is away.
            ModelError: It does not.
        """
        try:
            made = self.client.embed(self.texts)
        except DeviceAway as error:
            raise ModelUnavailable(str(error)) from error
        except RequestRefused as error:
            raise ModelError(f"{self.client.shown} does not embed: {error}") from error
        reason = self.difference(made, self.vectors)
        if reason:
            raise ModelError(reason)
        lengths, known = (np.linalg.norm(vectors, axis=1) for vectors in (made, self.vectors))
        return bool(np.allclose(lengths, known, rtol=LENGTH_TOLERANCE))


@dataclass
class EndpointEngine:
    """A model on a server.

    Attributes:
        endpoint: The server.
        reference: The same model here, in float32 on the CPU.
        dtype: Type that the server computes in, as its operator says.
        keeps_lengths: Whether the server's vectors are as long as the model's.
    """

    endpoint: Endpoint
    reference: SentenceTransformerEngine
    dtype: str
    keeps_lengths: bool
    tokenizer: EndpointTokenizer = field(init=False)

    name: ClassVar[str] = "endpoint"
    padded: ClassVar[bool] = False
    asynchronous: ClassVar[bool] = True
    launch_tokens: ClassVar[int] = LAUNCH_TOKENS
    peak_flops_per_second: ClassVar[float] = 0.0
    tokenisation: ClassVar[TokenisationSettings | None] = None

    def __post_init__(self) -> None:
        own = self.reference
        if not (self.keeps_lengths or self.normalised):
            raise ModelError(
                "the server gives vectors of length 1, and the model's are not: it serves jobs "
                "that want them so (normalize), and all their dimensions"
            )
        if own.preprocessing.prompt and not own.keeps_prompt:
            raise ModelError(
                "its pooling leaves the prompt out, and a server does not know where the text "
                "begins: it serves jobs without a prompt"
            )
        self.tokenizer = EndpointTokenizer(own.spec, own.tokenizer, own.preprocessing.prompt)

    @property
    def dimensions(self) -> int:
        """Components of a vector."""
        return self.reference.dimensions

    @property
    def normalised(self) -> bool:
        """Whether all vectors have length 1."""
        return self.reference.normalised

    @property
    def batch_tokens(self) -> int:
        """Tokens in one device batch, which is several requests at a time."""
        return self.endpoint.client.requests_max * REQUEST_TOKENS

    @property
    def fingerprint(self) -> dict[str, str]:
        """Properties that must be equal for two vectors to be comparable."""
        return self.reference.fingerprint | {"dtype": self.dtype}

    @property
    def exact_twin(self) -> SentenceTransformerEngine:
        """The model here."""
        return self.reference

    def for_job(self, spec: JobSpec) -> Self | None:
        """Return the engine of another job on this server; None where the model here is another.

        Raises:
            ModelError: The model, or the server, cannot do what the job asks for.
        """
        reference = self.reference.for_job(_exact(spec))
        if reference is None:
            return None
        other = copy(self)
        other.reference = reference
        other.__post_init__()
        return other

    def flops(self, lengths: NDArray[np.int64]) -> float:  # noqa: ARG002 # the protocol's
        """Return 0: what the server's device is, and does, is not known."""
        return 0.0

    def tokenise(self, chunks: Sequence[Chunk]) -> Tokenised:
        """Tokenise texts, cut to the model's limit."""
        return self.tokenizer.tokenise(chunks)

    def start(self, batch: Tokenised, rows: NDArray[np.intp]) -> Finish:
        """Begin to ask for the vectors of some rows, in as many requests as may be at a time.

        Raises:
            DeviceAway: The server does not answer, or answers by another model.
            RequestRefused: It does not take these texts.
        """
        self.endpoint.see_whole(int(batch.lengths[rows].max(initial=0)), self.tokenizer)
        texts = [batch.features.texts[row] for row in rows.tolist()]
        requests = max(-(-len(texts) // (TEXTS_MAX - 1)), self.endpoint.client.requests_max)
        parts = np.array_split(np.arange(len(texts)), min(len(texts), requests))
        submit = self.endpoint.submit
        coming = [submit([texts[place] for place in part.tolist()]) for part in parts]
        return lambda: self._finish([each.result() for each in coming])

    def _finish(self, made: Sequence[NDArray[np.float32]]) -> NDArray[np.float32]:
        """Return vectors as the job wants them."""
        vectors = np.concatenate(made)[:, : self.dimensions]
        if not self.normalised:
            return vectors
        norms = np.linalg.norm(vectors, axis=1, keepdims=True)
        return np.asarray(vectors / np.where(norms > 0, norms, 1), np.float32)

    def forward(self, batch: Tokenised, rows: NDArray[np.intp]) -> NDArray[np.float32]:
        """Embed some rows, to vectors of shape (len(rows), dimensions).

        Raises:
            DeviceAway: The server does not answer, or answers by another model.
            RequestRefused: It does not take these texts.
        """
        return self.start(batch, rows)()


def open_endpoint(spec: JobSpec, settings: Settings) -> EndpointEngine:
    """Open the model of this worker's server, and see that it is that model.

    Args:
        spec: The job.
        settings: Settings, which say where the server is, and where models are kept.

    Raises:
        ModelUnavailable: The server is away.
        ModelError: It has not the model, or gives other vectors.
    """
    exact = _exact(spec)
    reference = SentenceTransformerEngine.open(exact, "cpu", settings.model_cache, measured=False)
    if not isinstance(reference.model[0], Transformer):
        raise ModelError("its texts are no tokens, by which they could be cut for a server")
    if not reference.preprocessing.keeps_start:
        raise ModelError("it cuts long texts at their beginnings; those for a server lose the end")
    client = EndpointClient(
        settings.endpoint_url,
        settings.endpoint_requests_max,
        settings.hang_seconds / 2,
        settings.endpoint_key.get_secret_value(),
    )
    client.model = client.find_model(settings.endpoint_served_model or spec.model)
    endpoint = _known_endpoint(client, reference, COSINE_MIN[settings.endpoint_dtype])
    return EndpointEngine(endpoint, reference, settings.endpoint_dtype, endpoint.compare())


def _exact(spec: JobSpec) -> JobSpec:
    return msgspec.structs.replace(spec, dtype="float32")


def _known_endpoint(
    client: EndpointClient, reference: SentenceTransformerEngine, cosine_min: float
) -> Endpoint:
    """Return the server with canaries, and one text that is as long as it may be."""
    own = reference.spec
    plain = reference.for_job(
        JobSpec(own.model, dtype=own.dtype, task=own.task, max_length=LONG_TOKENS_MAX)
    )
    if plain is None:
        raise TypeError("the reference has no engine for its own model")
    tokenizer = EndpointTokenizer(plain.spec, plain.tokenizer, plain.preprocessing.prompt)
    batch = tokenizer.tokenise([*CANARIES, "canary " * LONG_TOKENS_MAX])
    vectors = plain.forward(batch, np.arange(len(batch.lengths)))
    return Endpoint(client, batch.features.texts, vectors, cosine_min)
