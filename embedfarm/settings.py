"""Every limit and every waiting time of the farm, in one place.

Each field is read from `EMBEDFARM_<FIELD>`, else from `embedfarm.toml` in the working directory,
else it is the default below. A command-line flag of the same name overrules both.
"""

import json
import sys
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    model_validator,
)
from pydantic_settings import (
    BaseSettings,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    TomlConfigSettingsSource,
)

from embedfarm.profiles import MEBIBYTE, PROFILES, PROPORTIONS
from embedfarm.webhook_secret import NO_SECRET, WebhookSecret

DEFAULT_MODEL = "sentence-transformers/all-MiniLM-L6-v2"


class Recurring(BaseModel):
    """An RQ job that is asked for again and again.

    Attributes:
        cron: When, in UTC: minute, hour, day of the month, month, day of the week.
        task: Name of a function of `producer.tasks`.
        arguments: Of that function, by name.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    cron: str
    task: str
    arguments: dict[str, Any] = {}


class Settings(BaseSettings):
    """The farm's limits. Sizes are in the unit of the name, times in seconds."""

    model_config = SettingsConfigDict(
        env_prefix="EMBEDFARM_",
        toml_file="embedfarm.toml",
        frozen=True,
        extra="forbid",
        hide_input_in_errors=True,  # it may be a secret
    )

    profile: Annotated[
        Literal["", "high-throughput", "low-latency", "memory-constrained"],
        Field(
            description="Other defaults for some limits below; what is set by name still counts."
        ),
    ] = ""
    redis_url: Annotated[str, Field(description="Server to use; empty: a private one.")] = ""
    state_directory: Annotated[
        Path, Field(description="Logs of `work`; logs and the private server of `up`.")
    ] = Path("~/.local/state/embedfarm")
    model_cache: Annotated[
        Path | None, Field(description="Where hub models are kept; empty: the hub's own cache.")
    ] = None

    engine_cache: Annotated[Path, Field(description="Where converted models are kept.")] = Path(
        "~/.cache/embedfarm"
    )

    lease_seconds: Annotated[
        PositiveFloat,
        Field(description="A lease not renewed for this long goes to another worker."),
    ] = 12.0
    heartbeat_seconds: Annotated[PositiveFloat, Field(description="Time between heartbeats.")] = 1.0
    heartbeat_ttl_seconds: Annotated[
        PositiveFloat, Field(description="A worker silent for this long is counted as dead.")
    ] = 6.0
    plan_ttl_seconds: Annotated[
        PositiveFloat, Field(description="A plan older than this is not followed any more.")
    ] = 5.0
    scheduler_ttl_seconds: Annotated[
        PositiveFloat, Field(description="A standby takes over when the lock is this old.")
    ] = 5.0
    drain_seconds: Annotated[
        PositiveFloat, Field(description="Time between SIGTERM and SIGKILL.")
    ] = 30.0
    reconnect_seconds_max: Annotated[
        PositiveFloat, Field(description="How long a command waits for a server that is away.")
    ] = 120.0

    jobs_max: Annotated[
        PositiveInt, Field(description="Unfinished jobs on the farm; one more is refused.")
    ] = 1000
    ended_jobs_max: Annotated[
        PositiveInt, Field(description="Jobs that have ended, of which a record is kept.")
    ] = 10_000
    ended_seconds_max: Annotated[
        PositiveInt, Field(description="How long such a record is kept.")
    ] = 7 * 86400
    deliveries_max: Annotated[
        PositiveInt, Field(description="Deliveries of a block before it is split.")
    ] = 3
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
    results_bytes_max: Annotated[
        PositiveInt, Field(description="Uncollected results at which no more work is planned.")
    ] = 128 * MEBIBYTE
    part_bytes_max: Annotated[
        PositiveInt, Field(description="Vectors in one part file of the output.")
    ] = 24 * MEBIBYTE
    micro_batch_seconds_max: Annotated[
        PositiveFloat, Field(description="Most work that a worker leases at a time.")
    ] = 3.0
    ageing_seconds: Annotated[
        PositiveFloat, Field(description="A job that got nothing for this long rises one priority.")
    ] = 60.0
    affinity_seconds: Annotated[
        PositiveFloat,
        Field(description="Service that a job may be ahead because workers have its model loaded."),
    ] = 30.0
    micro_batch_bytes_max: Annotated[
        PositiveInt, Field(description="Most text that a worker leases at a time.")
    ] = 4 * MEBIBYTE
    probe_seconds: Annotated[
        PositiveFloat, Field(description="Size of the first micro-batch of an unknown worker.")
    ] = 0.3
    rate_half_life_seconds: Annotated[
        PositiveFloat, Field(description="Age at which a measured rate counts half.")
    ] = 4.0
    batch_tokens_max: Annotated[
        NonNegativeInt, Field(description="Padded tokens in one device batch; 0: the engine's own.")
    ] = 0
    batch_bytes_max: Annotated[
        NonNegativeInt,
        Field(description="Device memory for device batches beside the model; 0: all there is."),
    ] = 0
    redis_bytes_max: Annotated[
        PositiveInt, Field(description="`maxmemory` of the private server.")
    ] = 1024 * MEBIBYTE
    events_max: Annotated[PositiveInt, Field(description="Completions kept for statistics.")] = 4096

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
    lane_bytes_max: Annotated[PositiveInt, Field(description="Most text in a request.")] = MEBIBYTE
    lanes_bytes_max: Annotated[
        PositiveInt, Field(description="Text of all requests that Redis holds at most.")
    ] = 64 * MEBIBYTE
    lanes_max: Annotated[
        PositiveInt, Field(description="Models that interactive requests ask for at a time.")
    ] = 64

    ingest_roots: Annotated[
        list[Path],
        Field(description="Directories that RQ jobs may read and write below; none: nothing."),
    ] = []
    ingest_lease_seconds: Annotated[
        int,
        Field(ge=3, description="An RQ job whose worker is silent for this long begins again."),
    ] = 30
    ingest_seconds_max: Annotated[
        PositiveInt, Field(description="How long an RQ job may take that names no time itself.")
    ] = 7 * 86400
    jobs_directory: Annotated[
        Path | None,
        Field(
            description="Inputs and outputs of jobs by HTTP, which `serve` and `ingest` share; "
            "empty: `jobs` in `state_directory`."
        ),
    ] = None
    jobs_directory_seconds: Annotated[
        PositiveInt,
        Field(description="Age from which `cleanup` removes them, if their job is gone."),
    ] = 7 * 86400
    batch_requests_max: Annotated[
        PositiveInt, Field(description="Most requests in a file of OpenAI's batch protocol.")
    ] = 50_000
    ingest_urls: Annotated[
        list[str],
        Field(description="URLs below which RQ jobs may fetch corpora; none: no URL."),
    ] = []
    fetch_bytes_max: Annotated[
        PositiveInt, Field(description="Most that is fetched from one URL.")
    ] = 64 * 1024 * MEBIBYTE
    fetch_seconds_max: Annotated[
        PositiveFloat, Field(description="How long fetching from one URL may take.")
    ] = 6 * 3600.0
    outbound_hosts: Annotated[
        list[str],
        Field(description="Hosts, as `name` or `name:port`, that may have private addresses."),
    ] = []
    webhook_secret: Annotated[
        WebhookSecret,
        Field(
            description="Signs webhooks: `whsec_` and 24 to 64 bytes in base64; empty: unsigned."
        ),
    ] = NO_SECRET
    recurring: Annotated[
        list[Recurring],
        Field(
            description='RQ jobs by the clock (UTC), such as `[{"cron": "0 3 * * *", "task": '
            '"cleanup", "arguments": {"seconds": 86400}}]`.'
        ),
    ] = []
    models: Annotated[
        tuple[str, ...],
        Field(min_length=1, description="Models for requests by HTTP; TEI's routes use the first."),
    ] = (DEFAULT_MODEL,)
    keys_file: Annotated[
        Path | None, Field(description="API keys, as `keys new` prints them, one in a line.")
    ] = None
    http_body_bytes_max: Annotated[
        PositiveInt, Field(description="Most in the body of a request; more is answered with 413.")
    ] = 4 * MEBIBYTE
    http_upload_bytes_max: Annotated[
        PositiveInt, Field(description="Most in a corpus that is uploaded.")
    ] = 10 * 1024 * MEBIBYTE
    http_upload_seconds: Annotated[
        PositiveFloat,
        Field(description="Time for all of an upload; `http_body_seconds` is for each piece."),
    ] = 3600.0
    http_disk_bytes_min: Annotated[
        NonNegativeInt, Field(description="Room on the disk that an upload must leave.")
    ] = 1024 * MEBIBYTE
    idempotency_seconds: Annotated[
        PositiveInt, Field(description="How long the answer to an `Idempotency-Key` is kept.")
    ] = 86400
    http_head_seconds: Annotated[
        PositiveFloat, Field(description="Time for the head of a request to arrive.")
    ] = 10.0
    http_body_seconds: Annotated[
        PositiveFloat, Field(description="Time for the body of a request to arrive.")
    ] = 30.0
    http_requests_per_second: Annotated[
        NonNegativeFloat,
        Field(description="Requests of a key, or of an address without one; 0: no limit."),
    ] = 100.0
    http_requests_burst: Annotated[
        PositiveInt, Field(description="Requests that may come at once beyond that.")
    ] = 200
    http_clients_max: Annotated[
        PositiveInt, Field(description="Keys and addresses whose rate is remembered.")
    ] = 4096
    http_connections_max: Annotated[
        PositiveInt, Field(description="Connections that `serve` takes; one more gets 503.")
    ] = 1024
    http_waiting_max: Annotated[
        PositiveInt,
        Field(description="Requests that wait for vectors in one `serve`, each in a thread."),
    ] = 256
    http_streams_max: Annotated[
        PositiveInt,
        Field(description="Answers with results, and streams of events, at a time in one `serve`."),
    ] = 128
    http_results_bytes_max: Annotated[
        PositiveInt, Field(description="Vectors in one answer with results.")
    ] = 8 * MEBIBYTE
    http_wait_seconds_max: Annotated[
        PositiveFloat, Field(description="Most that a request waits for results.")
    ] = 30.0

    traces: Annotated[
        str, Field(description="OTLP/HTTP URL for traces, `http://…:4318/v1/traces`; empty: none.")
    ] = ""
    http_session_seconds: Annotated[
        PositiveInt, Field(description="How long somebody stays signed in on the pages.")
    ] = 12 * 3600

    slowdown: Annotated[
        dict[str, float],
        Field(description='For tests: devices made slower, such as {"cpu-1": 4}.'),
    ] = {}

    @model_validator(mode="before")
    @classmethod
    def _follow_profile(cls, values: dict[str, Any]) -> dict[str, Any]:
        """Fill in a profile's limits where nothing else is said."""
        return PROFILES.get(str(values.get("profile", "")), {}) | values

    @model_validator(mode="after")
    def _check_proportions(self) -> Self:
        """Refuse limits that together stop the farm, or make it do everything twice."""
        for small, factor, large in PROPORTIONS:
            limit = factor * getattr(self, small)
            if getattr(self, large) <= limit:
                raise ValueError(f"{large} must be more than {factor} * {small}, which is {limit}")
        return self

    @property
    def jobs_path(self) -> Path:
        """`jobs_directory`, or its default."""
        chosen = self.jobs_directory or self.state_directory / "jobs"
        return chosen.expanduser().resolve()

    @property
    def task_roots(self) -> list[Path]:
        """Directories that RQ jobs may read and write below."""
        return [*self.ingest_roots, self.jobs_path]

    def environment(self) -> dict[str, str]:
        """All settings, as variables for a child process; they overrule its `embedfarm.toml`."""
        values = self.model_dump(mode="json", exclude_none=True)
        values["webhook_secret"] = self.webhook_secret.get_secret_value()  # not in a dump
        return {
            f"EMBEDFARM_{name.upper()}": value if isinstance(value, str) else json.dumps(value)
            for name, value in values.items()
        }

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Flags, then the environment, then `embedfarm.toml`."""
        del dotenv_settings, file_secret_settings
        return init_settings, env_settings, TomlConfigSettingsSource(settings_cls)


def to_markdown() -> str:
    """docs/settings.md: `python -m embedfarm.settings > docs/settings.md`."""
    rows = [
        f"| `EMBEDFARM_{name.upper()}` | {field.get_default(call_default_factory=True)!r} "
        f"| {field.description} |"
        for name, field in Settings.model_fields.items()
    ]
    head = [
        "# Settings",
        "",
        "Read from the environment, else from `embedfarm.toml` in the working directory (names in",
        "lower case, without the prefix). Sizes are in the unit of the name, times in seconds.",
        "",
        "| variable | default | what it limits |",
        "|---|---|---|",
    ]
    return "\n".join([*head, *rows]) + "\n"


if __name__ == "__main__":
    sys.stdout.write(to_markdown())
