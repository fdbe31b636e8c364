"""Limits of the farm itself, by the role that keeps them: what is leased, kept and waited for."""

from pathlib import Path
from typing import Annotated, Literal, TypeAlias

from pydantic import (
    BaseModel,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    SecretStr,
)

from embedfarm.contract.scheduling_terms import WEIGHT_MAX
from embedfarm.contract.settings.profiles import GIBIBYTE, MEBIBYTE


class HostSettings(BaseModel):
    """Limits and places of every process on a host."""

    profile: Annotated[
        Literal["", "high-throughput", "low-latency", "memory-constrained"],
        Field(
            description="Other defaults for some limits below; what is set by name still counts."
        ),
    ] = ""
    redis_url: Annotated[
        str,
        Field(
            description="Server to use: redis://, rediss://, unix://, redis+sentinel:// or "
            "redis+cluster:// (docs/security.md); empty: a private one."
        ),
    ] = ""
    redis_bytes_max: Annotated[
        PositiveInt, Field(description="`maxmemory` of the private server.")
    ] = 1024 * MEBIBYTE
    state_directory: Annotated[
        Path, Field(description="Logs of `work`; logs and the private server of `up`.")
    ] = Path("~/.local/state/embedfarm")
    model_cache: Annotated[
        Path | None, Field(description="Where hub models are kept; empty: the hub's own cache.")
    ] = None
    engine_cache: Annotated[Path, Field(description="Where converted models are kept.")] = Path(
        "~/.cache/embedfarm"
    )
    drain_seconds: Annotated[
        PositiveFloat, Field(description="Time between SIGTERM and SIGKILL.")
    ] = 30.0
    reconnect_seconds_max: Annotated[
        PositiveFloat, Field(description="How long a command waits for a server that is away.")
    ] = 120.0
    traces: Annotated[
        str, Field(description="OTLP/HTTP URL for traces, `http://…:4318/v1/traces`; empty: none.")
    ] = ""


class JobSettings(BaseModel):
    """Limits of jobs, those that have ended included."""

    jobs_max: Annotated[
        PositiveInt, Field(description="Unfinished jobs on the farm; one more is refused.")
    ] = 1000
    ended_jobs_max: Annotated[
        PositiveInt,
        Field(
            description="Jobs that have ended, of which a record is kept; beyond it, and a tenth, "
            "the oldest of the tenant that has most of them go."
        ),
    ] = 10_000
    ended_seconds_max: Annotated[
        PositiveInt, Field(description="How long such a record is kept.")
    ] = 7 * 86400
    job_chunks_max: Annotated[
        NonNegativeInt | None,
        Field(
            description="Most chunks of a job; 0: any number. By default any number for `embed`, "
            "and 1,000,000,000 for a job by RQ or HTTP."
        ),
    ] = None
    job_output_bytes_max: Annotated[
        NonNegativeInt | None,
        Field(
            description="Size at which an output may not grow on; 0: none. By default none for "
            "`embed`, and 1 TiB for a job by RQ or HTTP."
        ),
    ] = None
    corpus_bytes_max: Annotated[
        NonNegativeInt | None,
        Field(
            description="Most that a compressed file of a corpus unpacks to, and text in a corpus; "
            "0: any. By default any, but `http_upload_bytes_max` for an upload, and "
            "`fetch_bytes_max` for what is fetched."
        ),
    ] = None


class ProducerSettings(BaseModel):
    """Sizes of blocks, and of what a producer may have on the server."""

    block_seconds: Annotated[
        PositiveFloat, Field(description="Size of a block, in work of the slowest live worker.")
    ] = 0.1
    block_chunks_min: Annotated[PositiveInt, Field(description="Least chunks in a block.")] = 8
    block_chunks_max: Annotated[PositiveInt, Field(description="Most chunks in a block.")] = 8192
    block_bytes_max: Annotated[PositiveInt, Field(description="Most text in a block.")] = MEBIBYTE
    window_bytes_max: Annotated[
        PositiveInt,
        Field(
            description="Text and vectors of a job that Redis holds at most; the producer waits."
        ),
    ] = 80 * MEBIBYTE
    farm_window_bytes_max: Annotated[
        NonNegativeInt,
        Field(
            description="Text and vectors of all jobs that Redis holds at most; 0: half of the "
            "server's `maxmemory`, or of `redis_bytes_max` if it has none."
        ),
    ] = 0


class SchedulerSettings(BaseModel):
    """What plans follow, and how long they hold."""

    plan_ttl_seconds: Annotated[
        PositiveFloat, Field(description="A plan older than this is not followed any more.")
    ] = 5.0
    scheduler_ttl_seconds: Annotated[
        PositiveFloat, Field(description="A standby takes over when the lock is this old.")
    ] = 5.0
    micro_batch_seconds_max: Annotated[
        PositiveFloat, Field(description="Most work that a worker leases at a time.")
    ] = 4.0
    micro_batch_bytes_max: Annotated[
        PositiveInt, Field(description="Most text that a worker leases at a time.")
    ] = 4 * MEBIBYTE
    results_bytes_max: Annotated[
        PositiveInt, Field(description="Uncollected results at which no more work is planned.")
    ] = 128 * MEBIBYTE
    probe_seconds: Annotated[
        PositiveFloat, Field(description="Size of the first micro-batch of an unknown worker.")
    ] = 0.3
    rate_half_life_seconds: Annotated[
        PositiveFloat, Field(description="Age at which a measured rate counts half.")
    ] = 4.0
    ageing_seconds: Annotated[
        PositiveFloat, Field(description="A job that got nothing for this long rises one priority.")
    ] = 60.0
    affinity_seconds: Annotated[
        PositiveFloat,
        Field(description="Service that a job may be ahead because workers have its model loaded."),
    ] = 30.0
    tenant_weights: Annotated[
        dict[str, Annotated[int, Field(ge=1, le=WEIGHT_MAX)]],
        Field(description='Shares of tenants, such as {"search": 3}; one that is not named has 1.'),
    ] = {}
    events_max: Annotated[PositiveInt, Field(description="Completions kept for statistics.")] = 4096


EndpointType: TypeAlias = Literal["float32", "bfloat16", "float16", "int8"]


class WorkerSettings(BaseModel):
    """Leases, heartbeats, hangs and device batches of workers."""

    lease_seconds: Annotated[
        PositiveFloat,
        Field(description="A lease not renewed for this long goes to another worker."),
    ] = 12.0
    heartbeat_seconds: Annotated[PositiveFloat, Field(description="Time between heartbeats.")] = 1.0
    heartbeat_ttl_seconds: Annotated[
        PositiveFloat, Field(description="A worker silent for this long is counted as dead.")
    ] = 6.0
    deliveries_max: Annotated[
        PositiveInt, Field(description="Deliveries of a block before it is split.")
    ] = 3
    hang_seconds: Annotated[
        PositiveFloat,
        Field(description="A device batch that takes no longer than this is never given up."),
    ] = 30.0
    hang_factor: Annotated[
        PositiveInt,
        Field(description="Times its predicted time, after which it is taken for a hang."),
    ] = 10
    load_seconds_max: Annotated[
        PositiveFloat,
        Field(description="Longest that a model may take to load, a download included."),
    ] = 3600.0
    models_bytes_max: Annotated[
        NonNegativeInt,
        Field(description="Memory that a worker's loaded models take; 0: what is free."),
    ] = 0
    models_reserve_bytes: Annotated[
        NonNegativeInt,
        Field(description="Memory left free when a model is loaded beside others."),
    ] = GIBIBYTE
    models_parked_bytes_max: Annotated[
        NonNegativeInt,
        Field(description="Host memory for models that went from a GPU for others; 0: none."),
    ] = 16 * GIBIBYTE
    models_pinned: Annotated[
        tuple[str, ...],
        Field(description='Models that stay once they are loaded, such as ["org/name"].'),
    ] = ()
    model_idle_seconds: Annotated[
        NonNegativeFloat,
        Field(description="A model not used for this long is unloaded, unless pinned; 0: never."),
    ] = 900.0
    compile_models: Annotated[
        bool,
        Field(description="Whether GPUs compile models that have long been used, where it helps."),
    ] = False
    vector_cache_directory: Annotated[
        Path | None,
        Field(
            description="Directory on a local disk where all workers of this host keep vectors of "
            "texts, so that one that comes again, in any job, needs no device; empty: none."
        ),
    ] = None
    vector_cache_bytes_max: Annotated[
        int,
        Field(ge=64 * MEBIBYTE, description="Most bytes of it; what was not used goes for more."),
    ] = 10 * GIBIBYTE
    batch_tokens_max: Annotated[
        NonNegativeInt, Field(description="Padded tokens in one device batch; 0: the engine's own.")
    ] = 0
    batch_bytes_max: Annotated[
        NonNegativeInt,
        Field(description="Device memory for device batches beside the model; 0: all there is."),
    ] = 0
    device_cost_per_hour: Annotated[
        NonNegativeFloat,
        Field(description="Price of an hour of each device here, in any unit; 0: none."),
    ] = 0.0
    endpoint_url: Annotated[
        str,
        Field(description="Server that embeds for this worker; what stands before `/embeddings`."),
    ] = ""
    endpoint_model: Annotated[str, Field(description="Model that it has, as jobs name it.")] = ""
    endpoint_served_model: Annotated[
        str, Field(description="The same model as the server names it; empty: as jobs do.")
    ] = ""
    endpoint_dtype: Annotated[
        EndpointType, Field(description="Type that the server computes in.")
    ] = "float32"
    endpoint_requests_max: Annotated[
        PositiveInt, Field(description="Requests to the server at a time.")
    ] = 8
    endpoint_key: Annotated[
        SecretStr, Field(description="API key that the server wants; empty: none.")
    ] = SecretStr("")


class CollectorSettings(BaseModel):
    """Sizes and waiting times of collectors."""

    part_bytes_max: Annotated[
        PositiveInt, Field(description="Vectors in one part file of the output.")
    ] = 24 * MEBIBYTE
    reuse_bytes_max: Annotated[
        PositiveInt, Field(description="Vectors of other outputs in memory that are reused.")
    ] = 512 * MEBIBYTE
    sample_texts: Annotated[
        int,
        Field(
            ge=0,
            le=1000,
            description="Texts of the corpus that an output keeps, so that `check` can try other "
            "models on them; 0: none.",
        ),
    ] = 32
    reconcile_seconds: Annotated[
        PositiveFloat,
        Field(description="Waiting for one result, after which lost chunks are looked for."),
    ] = 10.0
    full_disk_seconds: Annotated[
        PositiveFloat, Field(description="Time between looks at an output's disk that is full.")
    ] = 5.0
    store_seconds_max: Annotated[
        PositiveFloat,
        Field(description="Time after which a vector store that does not answer is given up."),
    ] = 600.0
    store_parts_behind_max: Annotated[
        PositiveInt,
        Field(description="Parts on the disk and not in the vector store, at which a job waits."),
    ] = 4


class LaneSettings(BaseModel):
    """Limits of interactive requests, from door to device."""

    lane_wait_seconds: Annotated[
        NonNegativeFloat,
        Field(description="`max_wait`: how long an idle device waits for requests to share a run."),
    ] = 0.005
    lane_batch_seconds: Annotated[
        PositiveFloat,
        Field(description="Work on the device ahead of a request, while requests are coming."),
    ] = 0.1
    lane_quiet_seconds: Annotated[
        PositiveFloat,
        Field(description="Time without a request after which device batches are full size again."),
    ] = 5.0
    lane_swap_seconds: Annotated[
        NonNegativeFloat,
        Field(description="A request waits so long before jobs' models that are in use go for it."),
    ] = 10.0
    lane_lease_seconds: Annotated[
        PositiveFloat,
        Field(description="A request whose worker is silent for this long goes to another one."),
    ] = 3.0
    lane_seconds_max: Annotated[
        PositiveFloat, Field(description="Most that a request may wait for its answer.")
    ] = 120.0
    lane_pieces_max: Annotated[
        PositiveInt,
        Field(description="Pieces of requests for one model that wait or are being answered."),
    ] = 1024
    lane_texts_max: Annotated[PositiveInt, Field(description="Most texts in a request.")] = 2048
    lane_bytes_max: Annotated[
        PositiveInt,
        Field(description="Most text in a request; OpenAI's 300,000 tokens are some 1.5 MiB."),
    ] = 3 * MEBIBYTE
    lanes_bytes_max: Annotated[
        PositiveInt, Field(description="Text of all requests that Redis holds at most.")
    ] = 64 * MEBIBYTE
    lanes_max: Annotated[
        PositiveInt, Field(description="Models that interactive requests ask for at a time.")
    ] = 64
