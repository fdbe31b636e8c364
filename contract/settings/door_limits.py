"""Limits of the doors: RQ and HTTP."""

from pathlib import Path
from typing import Annotated, Any, Final

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    SecretStr,
)

from embedfarm.contract.settings.profiles import MEBIBYTE
from embedfarm.contract.settings.webhook_secret import NO_SECRET, WebhookSecret

EVERY_TENANT: Final = "*"
DEFAULT_MODEL: Final = "sentence-transformers/all-MiniLM-L6-v2"


class Recurring(BaseModel):
    """Recurring RQ job, which the farm enqueues by the clock.

    Attributes:
        cron: Times of its runs, in UTC: minute, hour, day of the month, month, day of the week.
        task: Name of a function of `producer.tasks`.
        arguments: Arguments of that function, by name.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    cron: str
    task: str
    arguments: dict[str, Any] = {}


class NamedStore(BaseModel):
    """A collection of a vector store, which jobs may name without knowing where it is.

    Attributes:
        url: URL of the collection as `embed --to` takes it, with its key or password.
        tenants: Tenants whose keys may name it; `*` for all of them.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)

    url: SecretStr
    tenants: list[str] = []

    def serves(self, tenant: str | None) -> bool:
        """Tell whether a key of a tenant may name the store; None is for an operator's key."""
        return tenant is None or not {tenant, EVERY_TENANT}.isdisjoint(self.tenants)


class TenantLimits(BaseModel):
    """Limits of all of a tenant's keys together; None means no limit but the farm's.

    Attributes:
        jobs: Most unfinished jobs by HTTP.
        priority: Highest priority of a job: 0 normal, 1 high, 2 urgent.
        bytes: Size of inputs, outputs and files on the disk at which nothing more is taken.
        requests: Most answers in work at a time, streams among them.
        requests_per_second: Most requests per second, on average.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    jobs: PositiveInt | None = None
    priority: Annotated[int, Field(ge=0, le=2)] | None = None
    bytes: PositiveInt | None = None
    requests: PositiveInt | None = None
    requests_per_second: PositiveFloat | None = None


class IngestSettings(BaseModel):
    """Limits of jobs that others enqueue, and of what goes outwards for them."""

    queue_url: Annotated[
        str,
        Field(
            description="Server of RQ's queue, for `ingest`, `serve` and programs; empty: the "
            "farm's. RQ does not run on a cluster, so that a farm on one needs another server."
        ),
    ] = ""
    ingest_roots: Annotated[
        list[Path],
        Field(description="Directories that RQ jobs may read and write below; none: nothing."),
    ] = []
    ingest_lease_seconds: Annotated[
        int,
        Field(ge=3, description="An RQ job whose worker is silent for this long begins again."),
    ] = 30
    ingest_seconds_max: Annotated[
        PositiveInt,
        Field(description="How long an RQ job may come no further that names no time itself."),
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
    stores: Annotated[
        dict[str, NamedStore],
        Field(
            description='Vector stores that jobs fill by name, such as `{"search": {"url": '
            '"postgresql://farm:PASSWORD@db/search#documents", "tenants": ["shop"]}}`; keys of '
            "other tenants than these may not name them."
        ),
    ] = {}
    recurring: Annotated[
        list[Recurring],
        Field(
            description='RQ jobs by the clock (UTC), such as `[{"cron": "0 3 * * *", "task": '
            '"cleanup", "arguments": {"seconds": 86400}}]`.'
        ),
    ] = []


class HttpSettings(BaseModel):
    """Limits of the web application, its keys and its tenants."""

    models: Annotated[
        tuple[str, ...],
        Field(min_length=1, description="Models for requests by HTTP; TEI's routes use the first."),
    ] = (DEFAULT_MODEL,)
    accept_token_ids: Annotated[
        bool,
        Field(
            description="Whether token ids are taken in place of texts; they must be those of the "
            "model's own tokenizer, which most clients do not have."
        ),
    ] = False
    keys_file: Annotated[
        Path | None, Field(description="API keys, as `keys new` prints them, one in a line.")
    ] = None
    tenant_limits: Annotated[
        dict[str, TenantLimits],
        Field(
            description='What keys of a tenant may have together, such as `{"*": {"jobs": 100}, '
            '"search": {"jobs": 10, "priority": 1, "bytes": 10737418240, "requests": 32, '
            '"requests_per_second": 20}}`; `*`: each tenant, where it has no limit of its own.'
        ),
    ] = {}
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
    http_search_bytes_max: Annotated[
        PositiveInt,
        Field(
            description="Vectors that are searched by HTTP, and corpus of which texts are shown."
        ),
    ] = 2048 * MEBIBYTE
    http_session_seconds: Annotated[
        PositiveInt, Field(description="How long somebody stays signed in on the pages.")
    ] = 12 * 3600
    http_wait_seconds_max: Annotated[
        PositiveFloat, Field(description="Most that a request waits for results.")
    ] = 30.0

    def limits_of(self, tenant: str) -> TenantLimits:
        """Return the limits of a tenant: its own, and where it has none those of each tenant."""
        usual, own = (
            self.tenant_limits.get(name, TenantLimits()) for name in (EVERY_TENANT, tenant)
        )
        return usual.model_copy(update=own.model_dump(exclude_none=True))
