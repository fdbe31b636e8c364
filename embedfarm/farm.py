"""`embedfarm.Farm`: a farm to work with, a private one that stays warm or one that runs already."""

import tempfile
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, wait
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Self, Unpack

import numpy as np
import pyarrow as pa
import redis
from numpy.typing import NDArray

from embedfarm.collector.output_reader import Chunks, NotBegun, OutputReader
from embedfarm.contract.broker import connect
from embedfarm.contract.errors import EmbedfarmError
from embedfarm.contract.farm_client import FarmClient
from embedfarm.contract.job_spec import JobSpec
from embedfarm.contract.jobs import Job
from embedfarm.contract.lane import Lane
from embedfarm.contract.settings import DEFAULT_MODEL, Settings
from embedfarm.contract.status import JobStatus
from embedfarm.corpora import Corpus
from embedfarm.embedding import JobFields, embed
from embedfarm.outputs import Embeddings, record_batch
from embedfarm.runs.private_farm import run_local_farm
from embedfarm.watch.overview import JobFacts, read_jobs

if TYPE_CHECKING:
    from sentence_transformers import SentenceTransformerModelCardData

BATCH_CHUNKS: Final = 4096
ENDED_MAX: Final = 100  # jobs that are over, of those that are listed
POLL_SECONDS: Final = 0.1


class Farm:
    """A farm to work with; use it in a `with` block, or `close` it.

    Without a URL it is a private one on this machine, which starts when it is first needed and
    stays warm until it is closed. Calls from several threads are safe.

    Attributes:
        model: Name or path of the model of `encode` and the methods like it.
        devices: Devices of a private farm, as `embedfarm work --devices` names them.
        workers: CPU workers of a private farm, 0 for the default.
        fields: Other fields of the spec of `encode` and the methods like it.
        similarity_fn_name: Name of what `similarity` computes, as sentence-transformers has it.
    """

    similarity_fn_name: Final = "cosine"

    def __init__(
        self,
        url: str = "",
        *,
        model: str = DEFAULT_MODEL,
        devices: str = "all",
        workers: int = 0,
        directory: str | Path | None = None,
        **fields: Unpack[JobFields],
    ) -> None:
        """Make a handle; nothing is started or asked yet.

        Args:
            url: URL of the farm's server; "" for a private farm.
            model: Model of `encode` and the methods like it.
            devices: Devices of a private farm.
            workers: CPU workers of a private farm.
            directory: Directory of a private farm's state and logs; None for a temporary one.
            fields: Other fields of the spec of `encode` and the methods like it.
        """
        self.model, self.devices, self.workers, self.fields = model, devices, workers, fields
        self._given = url
        self._directory = directory
        self._lock = threading.Lock()
        self._private: _PrivateFarm | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop a private farm; jobs in work can be resumed, their outputs are on disk."""
        with self._lock:
            if self._private is not None:
                self._private.close()
            self._private = None
            if "_client" in self.__dict__:
                self._client.close()
                del self._client  # a farm that is used again has another server

    @property
    def url(self) -> str:
        """URL of the farm's server; a private farm is started for it.

        Raises:
            DeviceError: There are no such devices.
            ServerError: The private server does not start.
        """
        if self._given:
            return self._given
        with self._lock:
            if self._private is None:
                self._private = _PrivateFarm(self._directory, self.devices, self.workers)
            return self._private.url

    @property
    def settings(self) -> Settings:
        """The settings of the environment, with this farm's server."""
        return Settings(redis_url=self.url)

    # Corpora.

    def embed(self, corpus: Corpus, **options: Any) -> Embeddings:  # noqa: ANN401 # those of `embed`
        """Embed a corpus on this farm; the arguments are those of `embedfarm.embed`."""
        words: dict[str, Any] = {"model": self.model, **self.fields} | options
        return embed(corpus, farm=self, **words)

    def submit(self, corpus: Corpus, *, out: str | Path, **options: Any) -> "EmbeddingsFuture":  # noqa: ANN401 # those of `embed`
        """Begin to embed a corpus, and return at once; other arguments are those of `embed`."""
        options = {"progress": False} | options
        answer: Future[Embeddings] = Future()

        def run() -> None:
            try:
                answer.set_result(self.embed(corpus, out=out, **options))
            except BaseException as error:  # noqa: BLE001 # `wait` raises it
                answer.set_exception(error)

        threading.Thread(target=run, name="embedfarm-submission", daemon=True).start()
        return EmbeddingsFuture(Path(out), answer)

    def jobs(self) -> list[JobFacts]:
        """Return the jobs that are not over, oldest first, and then the last ones that are."""
        farm = FarmClient(self._client)
        return read_jobs(farm, [*farm.job_ids(), *farm.ended_ids(ENDED_MAX)])

    def job(self, job: str) -> Job:
        """Return a handle on a job, to pause, resume or cancel it or to change its terms."""
        return FarmClient(self._client).job(job)

    def status(self, job: str) -> JobStatus:
        """Return how a job goes.

        Raises:
            JobGone: There is no such job.
        """
        return self.job(job).status()

    # A few texts, as sentence-transformers has it.

    def encode(  # noqa: PLR0913, PLR0917 # as `SentenceTransformer.encode` has them
        self,
        inputs: str | Sequence[str],
        prompt_name: str | None = None,
        prompt: str | None = None,
        batch_size: int = 32,
        show_progress_bar: bool | None = None,  # noqa: FBT001 # as in the original
        output_value: str = "sentence_embedding",
        precision: str = "float32",
        convert_to_numpy: bool = True,  # noqa: FBT001, FBT002 # as in the original
        convert_to_tensor: bool = False,  # noqa: FBT001, FBT002 # as in the original
        device: object = None,
        normalize_embeddings: bool = False,  # noqa: FBT001, FBT002 # as in the original
        truncate_dim: int | None = None,
        **others: object,
    ) -> Any:  # noqa: ANN401 # an array, a tensor, or a list of tensors
        """Embed some texts as `SentenceTransformer.encode` does, with the same arguments.

        Batches and devices are the farm's to choose, so that `batch_size` and `device` say nothing.

        Returns:
            Vectors in float32, shape (texts, dimensions), or (dimensions,) for a single text: an
            array; with `convert_to_tensor` a tensor; without `convert_to_numpy` a list of tensors.

        Raises:
            ValueError: Something other than vectors of texts in float32 is asked for.
            LaneError: The farm gives no vectors.
        """
        del batch_size, device, show_progress_bar
        if (output_value, precision) != ("sentence_embedding", "float32"):
            raise ValueError("a farm gives sentence embeddings in float32, and nothing else here")
        fields: dict[str, Any] = {**self.fields, **_named(prompt=prompt, prompt_name=prompt_name)}
        if normalize_embeddings:
            fields["normalize"] = True
        if truncate_dim:
            fields["dimensions"] = truncate_dim
        if "task" in others:
            fields["task"] = others["task"]
        spec = JobSpec(model=self.model, **fields)
        texts = [inputs] if isinstance(inputs, str) else list(inputs)
        vectors = self._vectors(spec, texts)
        vectors = vectors[0] if isinstance(inputs, str) else vectors
        if convert_to_tensor or not convert_to_numpy:
            import torch  # noqa: PLC0415 # only whoever wants tensors needs it

            tensor = torch.from_numpy(vectors)
            return tensor if convert_to_tensor or isinstance(inputs, str) else list(tensor)
        return vectors

    def encode_query(self, inputs: str | Sequence[str], *arguments: Any, **options: Any) -> Any:  # noqa: ANN401 # those of `encode`
        """Embed queries as `encode_query` of SentenceTransformer does."""
        return self.encode(inputs, *arguments, **({"task": "query"} | options))

    def encode_document(self, inputs: str | Sequence[str], *arguments: Any, **options: Any) -> Any:  # noqa: ANN401 # those of `encode`
        """Embed documents as `encode_document` of SentenceTransformer does."""
        return self.encode(inputs, *arguments, **({"task": "document"} | options))

    @cached_property
    def _client(self) -> redis.Redis:
        return connect(self.url)

    def get_embedding_dimension(self) -> int:
        """Return the components of a vector; a text is embedded to know it."""
        return int(self.encode("dimension").shape[-1])

    get_sentence_embedding_dimension = get_embedding_dimension  # its name before version 6

    @property
    def max_seq_length(self) -> int | None:
        """Tokens that a text is cut to, or None for as many as the model takes."""
        return self.fields.get("max_length")

    @property
    def model_card_data(self) -> "SentenceTransformerModelCardData":
        """What results of a benchmark are filed under: the name of the model."""
        from sentence_transformers import (  # noqa: PLC0415 # it imports torch
            SentenceTransformerModelCardData,
        )

        return SentenceTransformerModelCardData(model_name=self.model)

    def similarity(self, one: Any, other: Any) -> Any:  # noqa: ANN401 # tensors, or arrays
        """Return the cosine of each vector of `one` with each of `other`, as a tensor."""
        from sentence_transformers.util import cos_sim  # noqa: PLC0415 # it imports torch

        return cos_sim(one, other)

    def _vectors(self, spec: JobSpec, texts: list[str]) -> NDArray[np.float32]:
        """Return vectors of texts, shape (n, dimensions): a few by the lane, many by a job."""
        limits = self.settings
        size = sum(len(text.encode()) for text in texts)
        if not texts:
            return np.empty((0, self.get_embedding_dimension()), np.float32)
        if len(texts) <= limits.lane_texts_max and size <= limits.lane_bytes_max:
            vectors = Lane(self._client, limits).embed(spec, texts, limits.lane_seconds_max)
            return np.array(vectors)  # the caller's own
        said = {name: getattr(spec, name) for name in JobFields.__annotations__}
        with embed(texts, farm=self, model=spec.model, progress=False, **said) as embeddings:
            for failure in embeddings.failures:
                raise EmbedfarmError(f"text {failure.index} has no vector: {failure.reason}")
            return np.array(embeddings.matrix, np.float32)


class EmbeddingsFuture:
    """A corpus that is being embedded.

    Attributes:
        out: Directory of the output.
    """

    def __init__(self, out: Path, answer: "Future[Embeddings]") -> None:
        self.out = out
        self._answer = answer

    @property
    def done(self) -> bool:
        """Whether the output is finished, or the run has failed."""
        return self._answer.done()

    def wait(self, timeout_seconds: float | None = None) -> Embeddings:
        """Wait for the end, and return the vectors.

        Raises:
            TimeoutError: The output is not finished in time; it goes on.
            EmbedfarmError: The run has failed, as `embed` says.
        """
        return self._answer.result(timeout_seconds)

    def results(self) -> Iterator[pa.RecordBatch]:
        """Yield the vectors in order as they come, with columns `index`, `id` and `embedding`.

        Raises:
            EmbedfarmError: The run has failed; what is on disk has been yielded.
        """
        upto = 0
        while True:
            done = self.done
            for chunks in _read_from(self.out, upto):
                yield record_batch(chunks.batch.vectors())
                upto = chunks.end
            if done:
                self.wait()
                return
            wait([self._answer], POLL_SECONDS)


class _PrivateFarm:
    """A private farm in a thread of its own: processes end with the thread that starts them."""

    def __init__(self, directory: str | Path | None, devices: str, workers: int) -> None:
        self.url = ""
        self._closed, self._ready = threading.Event(), threading.Event()
        self._error: BaseException | None = None
        self._thread = threading.Thread(
            target=self._run, args=(directory, devices, workers), name="embedfarm-farm", daemon=True
        )
        self._thread.start()
        self._ready.wait()
        if self._error is not None:
            raise self._error

    def _run(self, directory: str | Path | None, devices: str, workers: int) -> None:
        try:
            with tempfile.TemporaryDirectory(prefix="embedfarm-") as temporary:
                place = Path(directory or temporary)
                with run_local_farm(place, Settings(), devices, workers) as local:
                    self.url = local.url
                    self._ready.set()
                    self._closed.wait()
        except BaseException as error:  # noqa: BLE001 # raised where the farm was asked for
            self._error = error
        self._ready.set()

    def close(self) -> None:
        """Stop the farm, and wait until its processes have ended."""
        self._closed.set()
        self._thread.join()


def _named(**options: str | None) -> dict[str, str]:
    return {name: value for name, value in options.items() if value is not None}


def _read_from(out: Path, start: int) -> Iterator[Chunks]:
    """Yield the chunks of an output that are on disk, from a start index on."""
    try:
        with OutputReader(out) as reader:
            while (chunks := reader.read(start, BATCH_CHUNKS)) is not None:
                yield chunks
                start = chunks.end
    except NotBegun:
        return
