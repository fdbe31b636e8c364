"""Every key of the farm, with its type, writer, reader and lifetime, and every script.

A stream promises at-least-once delivery in no particular order. Exactly once is made by the commit
script, order by the start index, and completeness by the collector.

Keys of a job carry the hash tag `{job}`, so that they share a cluster slot with their scripts.

    key                      type    what                             writer    -> reader     lives
    ef:{J}:in                stream  blocks, ID `<start + 1>-<count>` producer  -> worker     job
    ef:{J}:retry             stream  blocks that failed or were lost  worker    -> worker     job
    ef:{J}:res               hash    start index -> Result            worker    -> collector  drain
    ef:{J}:meta              hash    spec, `JobStatus`, what is noted all       -> all        7 d
    ef:{J}:failed            stream  newest 10,000 failed chunks      worker    -> people     7 d
    ef:{J}:bell              list    <= 1 item: a result came         worker    -> collector  job
    ef:{J}:room              list    <= 1 item: results drained       collector -> producer   job

    ef:{farm}:jobs           zset    job -> unix seconds of creation  producer  -> all        job
    ef:{farm}:ended          zset    job -> unix seconds of its end   submitter -> people     7 d
    ef:{farm}:endings        hash    "state cause" -> jobs that did   submitter -> people
    ef:{farm}:workers        zset    worker -> unix seconds last seen worker    -> all        1 h
    ef:{farm}:worker:<name>  hash    incarnation, Heartbeat           worker    -> all        6 s
    ef:{farm}:plan:<name>    string  Plan                             scheduler -> worker     5 s
    ef:{farm}:wake:<name>    list    <= 1 item: look at the plan       all       -> worker     5 s
    ef:{farm}:policy         string  Policy: the passes, if chosen    people    -> scheduler
    ef:{farm}:decisions      list    newest Decisions, capped         scheduler -> people
    ef:{farm}:stats          string  SchedulerStats                   scheduler -> people     60 s
    ef:{farm}:events         stream  completions, comings and goings  all       -> scheduler
    ef:{farm}:log:<name>     stream  newest 200 lines of its log      all       -> people     24 h
    ef:{farm}:logs           zset    process -> unix s of last line   all       -> people
    ef:{farm}:timeline       stream  newest 2,000 FarmEvents          all       -> people
    ef:{farm}:samples        stream  newest 360 Samples, an hour      scheduler -> people
    ef:{farm}:long-samples   stream  newest 1,008 Samples, a week     scheduler -> people
    ef:{farm}:history        hash    worker|model|class -> Rate       scheduler -> scheduler  30 d
    ef:{farm}:budget:<d>|<m> string  tokens of a device batch         worker    -> worker     7 d
    ef:{farm}:load:<w>|<m>   string  LoadAttempts without an end      worker    -> worker     24 h
    ef:{farm}:models         hash    model -> ModelOrder              people    -> worker
    ef:{farm}:model-counts   hash    "counter model" -> how often      worker    -> people
    ef:{farm}:scheduler      hash    token, fence: the lock           scheduler -> scheduler  5 s
    ef:{farm}:fence          string  counter of lock holders          scheduler -> scheduler
    ef:{farm}:window         hash    what all jobs hold, as counted   all       -> all        5 s

    ef:{farm}:ingest         hash    token, fence: who enqueues       ingest    -> ingest     5 s
    ef:{farm}:ingest-fence   string  counter of lock holders          ingest    -> ingest
    ef:{farm}:recurring:<run> string unix seconds of the newest run   ingest    -> ingest     400 d

    ef:{farm}:answer:<hash>  string  answer to an `Idempotency-Key`   web       -> web        24 h
    ef:{farm}:in-work:<hash> string  one whose request is in work     web       -> web        60 s

    ef:{farm}:tenant:<name>  zset    job -> unix seconds of creation  web       -> web
    ef:{farm}:session:<hash> string  SHA-256 of who signed in's key   web       -> web        12 h

    ef:{farm}:lane:<engine>  stream  LanePiece by `engine_key`        caller    -> worker     120 s
    ef:{farm}:lanes          zset    engine -> unix ms of a request   caller    -> worker     120 s
    ef:{farm}:lane-sizes     hash    engine -> bytes of its pieces    caller    -> caller     120 s
    ef:{farm}:lane-bell      stream  engines asked for, newest 64     caller    -> worker
    ef:{farm}:loader:<engine>  string  worker that loads it           worker    -> worker     60 s
    ef:{farm}:unloaded:<engine>  hash  worker -> why it cannot        worker    -> all        30 s
    ef:{farm}:reply:<id>     list    LaneAnswer for each piece        worker    -> caller     30 s

RQ's keys (`rq:*`) are outside of this scheme and have no hash tag; RQ does not run on a cluster, so
that the setting `queue_url` names another server for them.

The lives in seconds are settings. The farm's own keys share the tag `{farm}`, because plans are
written by a script that looks at the lock. Noted in `meta` are "fingerprint", the model that the
workers agreed on, "canaries", what it makes of fixed texts, in JSON, "canaries_digest", by which
commits name these, "recipe", the `TokenisationSettings` of token ids, "refused:<worker>", why one
cannot embed the job ("" once it can), "account:<worker>#<incarnation>", an `Account` of what it
did, "chunks:<worker>", how many chunks it committed, "command", the command line that does the
same, "traceparent", for `contract.tracing`, "feed", with feeds, "owner", the output that it fills,
and "generation", the making of the job: whoever makes it anew under the same name begins another
one, and blocks of earlier ones count no more (`scripts/create.lua`). `meta` and the newest 100 of
`failed` outlive the job for so long.
"""

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Final

GROUP: Final = "farm"
JOBS: Final = "ef:{farm}:jobs"
ENDED: Final = "ef:{farm}:ended"
ENDINGS: Final = "ef:{farm}:endings"
WORKERS: Final = "ef:{farm}:workers"
MODELS: Final = "ef:{farm}:models"
MODEL_COUNTS: Final = "ef:{farm}:model-counts"
EVENTS: Final = "ef:{farm}:events"
EVENTS_MAX: Final = 4096
LOGS: Final = "ef:{farm}:logs"
TIMELINE: Final = "ef:{farm}:timeline"
SAMPLES: Final = "ef:{farm}:samples"
LONG_SAMPLES: Final = "ef:{farm}:long-samples"
HISTORY: Final = "ef:{farm}:history"
SCHEDULER: Final = "ef:{farm}:scheduler"
FENCE: Final = "ef:{farm}:fence"
POLICY: Final = "ef:{farm}:policy"
DECISIONS: Final = "ef:{farm}:decisions"
STATS: Final = "ef:{farm}:stats"
INGEST: Final = "ef:{farm}:ingest"
INGEST_FENCE: Final = "ef:{farm}:ingest-fence"
WINDOW: Final = "ef:{farm}:window"
LANES: Final = "ef:{farm}:lanes"
LANE_SIZES: Final = "ef:{farm}:lane-sizes"
LANE_WAKEUPS: Final = "ef:{farm}:lane-bell"


def worker_key(name: str) -> str:
    """Return the key of a worker's heartbeat."""
    return f"ef:{{farm}}:worker:{name}"


def plan_key(name: str) -> str:
    """Return the key of a worker's plan."""
    return f"ef:{{farm}}:plan:{name}"


def wake_key(name: str) -> str:
    """Return the key of the list that a worker with nothing to do waits on."""
    return f"ef:{{farm}}:wake:{name}"


def budget_key(device: str, model: str) -> str:
    """Return the key of the device batch's budget, learned on a kind of device for a model."""
    return f"ef:{{farm}}:budget:{device}|{model}"


def load_key(name: str, model: str) -> str:
    """Return the key of a worker's loads of a model that have not come to an end."""
    return f"ef:{{farm}}:load:{name}|{model}"


def recurring_key(run: str) -> str:
    """Return the key of the newest run of a recurring job."""
    return f"ef:{{farm}}:recurring:{run}"


def answer_key(name: str) -> str:
    """Return the key of the answer to a request with an `Idempotency-Key`, which may come again."""
    return f"ef:{{farm}}:answer:{name}"


def in_work_key(name: str) -> str:
    """Return the key that exists while a request with an `Idempotency-Key` is answered."""
    return f"ef:{{farm}}:in-work:{name}"


def log_key(name: str) -> str:
    """Return the key of the last lines that a process has logged."""
    return f"ef:{{farm}}:log:{name}"


def lane_key(engine: str) -> str:
    """Return the key of the interactive requests that one engine serves."""
    return f"ef:{{farm}}:lane:{engine}"


def loader_key(engine: str) -> str:
    """Return the key of the worker that loads an engine because requests ask for it."""
    return f"ef:{{farm}}:loader:{engine}"


def unloaded_key(engine: str) -> str:
    """Return the key of the reasons why workers could not load an engine."""
    return f"ef:{{farm}}:unloaded:{engine}"


def reply_key(request: str) -> str:
    """Return the key of the answers to an interactive request."""
    return f"ef:{{farm}}:reply:{request}"


def session_key(digest: str) -> str:
    """Return the key of a session on the pages, by the SHA-256 of its secret."""
    return f"ef:{{farm}}:session:{digest}"


def tenant_key(tenant: str) -> str:
    """Return the key of the jobs that a tenant has made by HTTP, if it may have only so many."""
    return f"ef:{{farm}}:tenant:{tenant}"


@dataclass(frozen=True)
class JobKeys:
    """The keys of one job."""

    job: str

    def _key(self, suffix: str) -> str:
        return f"ef:{{{self.job}}}:{suffix}"

    @property
    def blocks(self) -> str:
        """Key of the stream of blocks."""
        return self._key("in")

    @property
    def retry(self) -> str:
        """Key of the stream of blocks to try again: pieces of failed ones, and lost ones."""
        return self._key("retry")

    @property
    def results(self) -> str:
        """Key of the hash of results."""
        return self._key("res")

    @property
    def meta(self) -> str:
        """Key of the hash of spec, state and counters."""
        return self._key("meta")

    @property
    def failed(self) -> str:
        """Key of the stream of failed chunks."""
        return self._key("failed")

    @property
    def result_wakeup(self) -> str:
        """Key of the list that wakes the collector: a result came."""
        return self._key("bell")

    @property
    def room(self) -> str:
        """Key of the list that wakes the producer: the window has room."""
        return self._key("room")

    def all(self) -> list[str]:
        """Return every key of the job, for deletion."""
        return [
            self.blocks, self.retry, self.results, self.meta, self.failed,
            self.result_wakeup, self.room,
        ]  # fmt: skip


def entry_id(start: int, count: int) -> str:
    """Return the stream ID of the block of `count` chunks that begins at chunk `start`.

    The ID names one block for ever: a server that lost the end of its log may get other blocks from
    the same start, and a late commit of the old block must not acknowledge those.
    """
    return f"{start + 1}-{count}"


@cache
def script(name: str) -> str:
    """Return the source of a Lua script, whose head comment documents its interface."""
    return (Path(__file__).parent / "scripts" / f"{name}.lua").read_text(encoding="utf-8")
