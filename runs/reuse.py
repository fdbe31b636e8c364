"""An output that takes the vectors of other outputs for the texts that those have.

What those have goes into the output. Texts that they do not have are listed, each once, and
embedded as a corpus and an output of their own inside the output's state directory, where an
interrupted run goes on. Then they are known, too, and the corpus is read again.
"""

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count, takewhile
from pathlib import Path
from typing import Final, TypeVar

from embedfarm.collector.known_vectors import KnownVectors
from embedfarm.collector.manifest import (
    STATE_DIRECTORY,
    About,
    Manifest,
    OutputError,
    read_manifest,
)
from embedfarm.collector.output import Output, State, read_state
from embedfarm.collector.request_comparison import describe_differences
from embedfarm.collector.source_check import SourceChanged
from embedfarm.contract.job_spec import JOB_FIELDS, Decides
from embedfarm.contract.private_directories import make_private
from embedfarm.contract.redaction import name_source
from embedfarm.runs.disk_room import is_full, with_room
from embedfarm.runs.ending import discard_output, remove_state
from embedfarm.runs.fingerprint import hold_to
from embedfarm.runs.known_reading import KnownReading
from embedfarm.runs.own_job import make_own_job
from embedfarm.runs.request import Request
from embedfarm.runs.run import Interrupted, Place

T = TypeVar("T")
Embed = Callable[[Request, Place, threading.Event], Manifest]

# What an output's manifest has that decides about the bits of a vector, beside the fingerprint.
DECIDING: Final = [name for name, each in JOB_FIELDS.items() if each.decides >= Decides.STORAGE]


@dataclass
class Reuse:
    """One run of a request that takes from other outputs what they have.

    Attributes:
        request: What is to be embedded, and how.
        place: Where and by whom the rest is embedded.
        others: Finished outputs, those first whose vectors are preferred; where there are none,
            each text of the corpus is embedded once all the same.
        stop: Event that ends the run, which can be resumed; it is set when the run has ended.
        embed: Function that embeds a request at a place, to its end or until an event is set.
    """

    request: Request
    place: Place
    others: Sequence[Path]
    stop: threading.Event
    embed: Embed
    _known: KnownVectors = field(init=False)

    def run(self) -> Manifest:
        """Put the vector of every chunk into the output, and write the manifest.

        Raises:
            Interrupted: `stop` was set; the output can be resumed.
            OutputError: The directory belongs to another request; or another output is not
                finished, damaged, or made in another way.
            SourceChanged: The corpus was changed while it was read.
            CorpusError: The corpus cannot be read.
            ModelRefused: No worker can embed what is new with the model of the other outputs.
        """
        if "-" in self.request.sources:
            raise OutputError(
                "standard input cannot be read twice, as a corpus is for --reuse or --deduplicate"
            )
        is_new = read_state(self.place.out) is State.NEW
        try:
            with self._with_room(self._open) as output:
                try:
                    manifest = self._fill(output)
                except BaseException:
                    if is_new and not output.parts and not self._texts(0).exists():
                        discard_output(self.place.out)  # a corrected command is no other request
                    raise
            self._with_room(partial(remove_state, self.place.out))
        except OSError as error:
            if is_full(error) and self.stop.is_set():
                raise Interrupted from error
            raise
        finally:
            self.stop.set()
        return manifest

    def _open(self) -> Output:
        place, request = self.place, self.request
        return Output(
            place.out, request.identity(), sink=request.sink,
            part_bytes_max=place.settings.part_bytes_max,
        )  # fmt: skip

    def _fill(self, output: Output) -> Manifest:
        """Fill the output with what others have, what earlier runs have embedded, and the rest."""
        make_private(self._state)  # there are texts in it
        self._known = KnownVectors(self._state / "known", self.place.settings.reuse_bytes_max)
        for directory in self.others:
            self._learn(directory)
        for number in takewhile(lambda each: self._texts(each).exists(), count()):
            self._embed_new(number)
        return self._complete(output)

    @property
    def _state(self) -> Path:
        return self.place.out / STATE_DIRECTORY / "reuse"

    def _texts(self, number: int) -> Path:
        """Return the path of a list of texts that were not known."""
        return self._state / f"new-{number}.jsonl"

    def _learn(self, directory: Path) -> None:
        """Make the vectors of another output known.

        Raises:
            OutputError: It is not finished, or was made in another way.
        """
        manifest, asked = read_manifest(directory), self.request.identity()
        words = describe_differences(
            {name: manifest.settings.get(name) for name in DECIDING},
            {name: asked.get(name) for name in DECIDING},
        )
        if words:
            raise OutputError(f"{directory} cannot be reused: {words}")
        self._with_room(partial(self._known.add, directory))
        first = self._known.outputs[0]
        words = describe_differences(first.manifest.fingerprint, manifest.fingerprint)
        if words:
            raise OutputError(f"{directory} and {first.directory} are of two models: {words}")

    def _embed_new(self, number: int) -> None:
        """Embed a list of texts that were not known, or go on with that; then they are."""
        inner = self._state / f"new-{number}"
        if read_state(inner) is not State.FINISHED:
            if self._known.outputs:
                hold_to(inner, self._known.outputs[0].manifest.fingerprint)
            job_id = "" if number else self.place.job_id
            place = replace(self.place, out=inner, job_id=job_id, embed_changed=False)
            stop = threading.Event()  # of a run that sets it at its own end
            threading.Thread(target=_follow, args=(self.stop, stop), daemon=True).start()
            self.embed(self.request.of_texts(self._texts(number)), place, stop)
        self._with_room(partial(self._known.add, inner, failed=True))

    def _complete(self, output: Output) -> Manifest:
        """Read the corpus until no text of it is new, and finish the output."""
        while True:
            number = len(self._known.outputs) - len(self.others)
            reading = KnownReading(
                self.request, output, self._known, self._texts(number), self.place.settings,
                self.stop,
            )  # fmt: skip
            try:
                reading.read()
            except SourceChanged as error:
                if error.part is None:
                    raise
                # What is dropped is no work: its vectors are known.
                self._with_room(partial(output.keep, output.parts.index(error.part)))
                continue
            if not reading.new:
                return self._finish(output, reading)
            self._embed_new(number)

    def _finish(self, output: Output, reading: KnownReading) -> Manifest:
        """Write the manifest, which counts what was embedded for this output alone."""
        own = self._with_room(partial(make_own_job, self.place.out, self.place.job_id))
        outputs = [each.manifest for each in self._known.outputs]
        new = outputs[len(self.others) :]
        for manifest in new:
            output.credit(manifest.workers)
        about = About(
            job=own.name,
            model=self.request.spec.model,
            fingerprint=outputs[0].fingerprint,
            source={
                "sources": list(map(name_source, self.request.sources)),
                "files": dict(reading.files),
                "compared": {"by": "embed", "at": time.time(), "rows": reading.count},
            },
            skipped=reading.skipped.count,
            settings=self.request.identity(),
            load_seconds=max((each.load_seconds for each in new), default=0.0),
            embed_seconds=sum(each.embed_seconds for each in new),
            embedded=max(each.embedded for each in new or outputs),
            accounts={name: account for m in new for name, account in m.accounts.items()},
            reused={str(each): reading.taken[n] for n, each in enumerate(self.others)},
        )
        finish = partial(output.finish, reading.count, about)
        return reading.store(finish, finish)

    def _with_room(self, begin: Callable[[], T]) -> T:
        """Return the answer of `begin`, which is repeated until the disk has room for it."""
        place = self.place
        return with_room(begin, place.out, place.settings.full_disk_seconds, self.stop)


def _follow(first: threading.Event, second: threading.Event) -> None:
    """Set the second event as soon as the first one is."""
    first.wait()
    second.set()
