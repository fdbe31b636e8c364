"""Sightings of states, in the server's answers and in what the programs do themselves."""

import functools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from embedfarm.collector import journal, source_check
from embedfarm.collector.collect import NO_ROOM, Collector, JobCancelled
from embedfarm.collector.digest_index import NOWHERE
from embedfarm.collector.known_vectors import FilledResult, KnownVectors
from embedfarm.collector.manifest import OWN, Manifest
from embedfarm.collector.output import Output
from embedfarm.collector.sinks import jsonl
from embedfarm.contract import wire
from embedfarm.contract.records import Result
from embedfarm.producer.submitter import Rewind
from embedfarm.runs import completion
from embedfarm.runs.own_job import JOB_ID_FILE
from embedfarm.workers.leases import MicroBatch
from tests.simulation.link import Host
from tests.simulation.monitor import CLAIM, COMMIT, PUSH, SPLIT, script_sha
from tests.simulation.states import State, after

RARE: Final = 20_000

LEASE_LOST: Final = State("lease lost at its commit", "a commit is answered `duplicate`")
SPLIT_LATE: Final = State("lease lost at its split", "a split is answered `duplicate`", RARE)
SPLIT_TWICE: Final = State("block split twice", "an entry of the retry stream is split")
TAKEN_OVER: Final = State("expired lease taken over", "a claim is answered with an entry")
FENCED: Final = State("scheduler replaced while it lived", "plans are answered `fenced`")
SENT_TWICE: Final = State("block sent twice", "a push is answered `exists`")
GAP: Final = State("block sent behind a gap", "a push is answered `gap`")
ENDED_TWICE: Final = State("job ended that the server had lost", "an end is answered `gone`")
REWOUND: Final = State("producer rewound", "`Rewind` is raised")
STRADDLED: Final = State(
    "rest of a result taken", "a result is taken that begins before what is next", RARE
)
CUT_SHORT: Final = State(
    "cancelled with work on disk",
    "a cancelled job is collected up to its first gap, and that is some",
    5_000,
)
TORN: Final = State("journal line torn", "an opened journal is longer than its sound lines")
RESUMED: Final = State("output resumed behind a part", "an output is opened that has parts")
NOT_JOURNALLED: Final = State(
    "died between part and journal", "a resumed output has a part that its journal does not know"
)
TIDIED: Final = State("died behind the manifest", "a finished output still has the id of its job")
CLOSING: Final = State(
    "server died while a job was closing", "its log has the close of a job, and no end of one after"
)
TRIED_AGAIN: Final = State("part written again", "the disk refuses a part, and then takes it")
TOGETHER: Final = State("jobs in one micro-batch", "a micro-batch of several jobs is committed")
LEFT: Final = State(
    "job left its micro-batch",
    "one of several jobs has lost all its leases, and others have not",
    RARE,
)
NO_LAST_ROOM: Final = State("no room at the end", "`Output.finish` finds a disk full")

REUSED: Final = State("vector of another output taken", "a result is filled from one")
REPEATED: Final = State("vector of a row before taken", "a result is filled from its own output")
FAILS_AGAIN: Final = State(
    "failed text stands again", "a chunk gets the error of a row before with the same text", 5_000
)
UNFILLED: Final = State(
    "vector that nobody knows any more", "a result lacks one, and is not accepted", 5_000
)

ENDED: Final = wire.script("end").encode()
CLOSED: Final = wire.script("close").encode()

Seen = Callable[[Sequence[bytes], object], bool]


def _says(word: bytes) -> Seen:
    return lambda _words, reply: reply == word


ANSWERS: Final[Mapping[bytes, Sequence[tuple[Seen, State]]]] = {
    COMMIT: [(_says(b"duplicate"), LEASE_LOST)],
    SPLIT: [
        (_says(b"duplicate"), SPLIT_LATE),
        (lambda words, reply: reply == b"split" and words[3].endswith(b"}:retry"), SPLIT_TWICE),
    ],
    CLAIM: [(lambda _words, reply: bool(reply), TAKEN_OVER)],
    PUSH: [(_says(b"exists"), SENT_TWICE), (_says(b"gap"), GAP)],
    script_sha("publish"): [(_says(b"fenced"), FENCED)],
    script_sha("end"): [(_says(b"gone"), ENDED_TWICE)],
}


def answered(words: Sequence[bytes], reply: object) -> None:
    """Mark the states that a command and its answer show as reached."""
    for seen, state in ANSWERS.get(words[1], ()) if words[1:] else ():
        if seen(words, reply):
            state.reach()


@functools.cache
def watch() -> None:
    """Watch the programs of this process for states, from now on."""
    after(Rewind, "__init__", lambda _, *_arguments: REWOUND.reach())
    after(Result, "rest", lambda _, *_arguments: STRADDLED.reach())
    after(MicroBatch, "share_account", _see_shared)
    after(Collector, "_cut_short", _see_cut)
    after(KnownVectors, "fill", _see_filled)
    after(source_check, "_agree", _see_unfilled)
    after(journal, "_measure", _see_journal)
    after(Output, "__init__", _see_output)
    after(Output, "recover", lambda _, output: TRIED_AGAIN.reach(bool(output.buffered)))
    after(Output, "finish", _see_finish)
    after(jsonl, "keep_parts", _see_parts)
    after(completion, "check_finished", _see_finished)
    after(Host, "crash", _see_crash)


def _see_shared(_answer: object, batch: MicroBatch) -> None:
    TOGETHER.reach(len(batch.parts) > 1)
    LEFT.reach(not batch.lost and any(part.lost for part in batch.parts))


def _see_cut(error: object, collector: Collector) -> None:
    CUT_SHORT.reach(isinstance(error, JobCancelled) and bool(collector.output.parts))


def _see_filled(filled: object, _known: KnownVectors, result: Result, *_arguments: object) -> None:
    if isinstance(filled, FilledResult):
        REUSED.reach(bool(filled.reused.keys() - {OWN}))
        REPEATED.reach(OWN in filled.reused)
        FAILS_AGAIN.reach(len(filled.result.errors) > len(result.errors))


def _see_unfilled(
    accepted: object, result: Result, checksums: bytes, ids: object, places: NDArray[np.int64]
) -> None:
    del checksums, ids
    known = np.frombuffer(result.known, np.bool_)
    lacks = known.any() and not (len(places) and (places[known] != NOWHERE).all())
    UNFILLED.reach(accepted is None and bool(lacks))


def _see_journal(measured: object, path: Path) -> None:
    TORN.reach(measured != (path.stat().st_size, True))


def _see_output(error: object, output: Output, *_arguments: object, **_named: object) -> None:
    RESUMED.reach(error is None and bool(output.parts))


def _see_finish(answer: object, *_arguments: object) -> None:
    NO_LAST_ROOM.reach(isinstance(answer, OSError) and answer.errno in NO_ROOM)


def _see_parts(removed: object, *_arguments: object) -> None:
    NOT_JOURNALLED.reach(bool(removed))


def _see_finished(manifest: object, _request: object, out: Path) -> None:
    TIDIED.reach(isinstance(manifest, Manifest) and (out / JOB_ID_FILE).exists())


def _see_crash(_answer: object, host: Host, _lost_seconds: float, **_named: object) -> None:
    for _, words in reversed(host.log):
        if ENDED in words:
            return
        if CLOSED in words:
            CLOSING.reach()
            return
