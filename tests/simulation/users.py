"""Users of `embedfarm embed`: what they ask for, and what they do about each of its ends."""

import contextlib
import random
import shutil
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path
from typing import Final

import msgspec

from embedfarm.collector.collect import JobEnded
from embedfarm.collector.manifest import MANIFEST_FILE, Manifest, OutputError, read_manifest
from embedfarm.collector.source_check import SourceChanged
from embedfarm.contract import wire
from embedfarm.contract.broker import UNAVAILABLE, closing_client
from embedfarm.contract.durable_files import make_directories, replacing, sync_directory
from embedfarm.contract.farm_client import FarmClient
from embedfarm.contract.job_reports import ModelRefused
from embedfarm.contract.job_spec import JobSpec
from embedfarm.contract.jobs import JobTaken
from embedfarm.contract.scheduling_terms import USUAL, Terms
from embedfarm.contract.status import JobGone
from embedfarm.producer.submitter import JobRefused
from embedfarm.readers import CorpusError, CorpusOptions
from embedfarm.runs.place import Place
from embedfarm.runs.request import Request
from tests.simulation.corpora import Corpus
from tests.simulation.farm import URL, Role, run_embed
from tests.simulation.judge import DIMENSIONS, Failure, judge, listed_names
from tests.simulation.monitor import END
from tests.simulation.pages import Pages
from tests.simulation.scene import FinishedOutput, Scene
from tests.simulation.server import ModelServer
from tests.simulation.shelf import DEADLY, Shelf
from tests.simulation.source import SENT
from tests.simulation.states import State

CREATE: Final = wire.script("create").encode()
DELETE: Final = b"UNLINK"
ENDS: Final = {wire.script("end").encode(), END}  # as a log has it, and as it is asked
SIZES: Final = (1, 7, 20, 60)  # chunks of a corpus
FILES_MAX: Final = 3
SAME_ID_SHARE: Final = 0.25  # of jobs that are made under an id that was used before
AGAIN_SHARE: Final = 0.2  # of commands that are run again when they have finished
REFUSED_SHARE: Final = 0.05  # of jobs whose model no worker has
REFUSED_MODEL: Final = "null:none"
REUSE_SHARE: Final = 0.5  # of outputs, once there is one whose vectors another may take
REPEATING_SHARE: Final = 0.3  # of corpora with texts that stand twice, and of commands that know
TENANTS: Final = ("", "one", "two")

AGAIN: Final = State("id of a job used again", "a job is asked for under an id that was used")
REFUSED: Final = State("two outputs with one job refused", "`JobTaken` ends a run")
HOPELESS: Final = State("model that no worker can have", "`ModelRefused` ends a run, for good")
LATER: Final = State("model that no worker had yet", "`ModelRefused` ends a run, for a while")
CHANGED: Final = State("run over a changed row", "`SourceChanged` ends a run")
COPIED: Final = State("copy of an output refused", "its original needs what both have stored")


@dataclass
class Work:
    """An output to be made, of a corpus that may change meanwhile.

    Attributes:
        begun_at: Virtual seconds from which on the output may hold something.
        asked_at: Virtual seconds at which its command was last run.
        read_at: Virtual seconds at which the corpus was last begun to be read for the output.
        finished: Whether the output had its manifest when the command began.
        reading: Whether the corpus is being read.
        deadly: Texts that kill or hang each worker that embeds them.
        restored: Whether the corpus was put back to what it was.
        stumbled: Whether its command has ended by an error.
        discarded: Whether a command has discarded the output, with the name of its job; that may
            be as it was on a server that heard nothing of it, or was brought back by a crash.
        removing: Whether the output is being removed, or was when the user's machine went down.
        copied: Whether the output was copied, or is a copy itself.
        reuse: Finished outputs whose vectors its command may take.
        pages: The pages that a client has read of the output.
    """

    corpus: Corpus
    request: Request
    place: Place
    terms: Terms
    begun_at: float
    deadly: frozenset[str] = frozenset()
    asked_at: float = 0.0
    read_at: float = 0.0
    finished: bool = False
    reading: bool = False
    restored: bool = False
    stumbled: bool = False
    discarded: bool = False
    removing: bool = False
    copied: bool = False
    reuse: Sequence[Path] = ()
    pages: Pages = field(default_factory=Pages)

    def note_reading(self, begins: bool, now: float) -> None:  # noqa: FBT001 # a fact
        """Note that its corpus is read from the first row on, or was read to the last.

        A reading that begins behind the manifest that this command has written decides nothing.
        """
        self.reading = begins
        if begins and (self.finished or not (self.place.out / MANIFEST_FILE).exists()):
            self.read_at = now

    @property
    def keys(self) -> wire.JobKeys:
        """The Redis keys of its job."""
        return wire.JobKeys(self.place.job_id)


@dataclass
class User:
    """A user who has one command running, or none.

    Attributes:
        others: All users, with this one.
        over: Tells whether nothing will go wrong any more, so that the next end is the last.
        harm: Makes texts do harm: the deadly ones, and those that may kill.
        told_finished: Called when a command says that it is finished.
        role: The program that runs the commands.
        work: The output that the user wants, None between two.
    """

    scene: Scene
    name: str
    random: random.Random
    others: Sequence["User"]
    over: Callable[[], bool]
    harm: Callable[[Sequence[str], Sequence[str]], None]
    told_finished: Callable[[], None]
    role: Role | None = None
    work: Work | None = None
    _copies: list[Work] = field(default_factory=list)
    _numbers: Iterator[int] = field(default_factory=count)

    def program(self, stop: threading.Event) -> bool:
        """Run one command; return True if it was the last."""
        work = self.work = self.work or self._next()
        if work.removing:
            self._anew(work)
        work.asked_at = work.read_at = self.scene.world.now
        work.reading = False
        work.finished = (work.place.out / MANIFEST_FILE).exists()
        if self.scene.lively and work.request.sink == "stored" and not work.finished:
            self._copy(work)
        try:
            reuse, deduplicate = self._choose_reuse(work)
            manifest = run_embed(
                work.request, work.place, stop, work.terms, reuse, deduplicate=deduplicate
            )
        except (*UNAVAILABLE, OSError):
            raise
        except Exception as error:
            if self.scene.world.process.dead:
                raise
            self._react(work, error)
            return False
        if manifest is None:
            return False
        self.told_finished()
        self._check(work, manifest)
        if self.over() or not (self.scene.lively and self.random.random() < AGAIN_SHARE):
            self.work = None
        return self.over() and not self._copies

    # What they want.

    def _copy(self, work: Work) -> None:
        """Copy an unfinished output, once, to go on with the copy behind the original."""
        out = work.place.out
        if work.copied or not any(out.glob("part-*")):
            return
        target = out.with_name(f"{out.name}-c{next(self._numbers)}")
        try:
            for path in sorted(out.rglob("*")):
                there = target / path.relative_to(out)
                if path.is_dir():
                    make_directories(there)
                else:
                    make_directories(there.parent)
                    with replacing(there) as file:
                        file.write(path.read_bytes())
        except OSError:  # of a disk that is full, or fails: perhaps there will be room for it later
            shutil.rmtree(target, ignore_errors=True)
            return
        work.copied = True
        self._copies.append(replace(work, place=replace(work.place, out=target), pages=Pages()))

    def _next(self) -> Work:
        if self._copies:
            return self._copies.pop()
        some, scene = self.random, self.scene
        name = f"{self.name}-{next(self._numbers)}"
        files = [scene.directory / f"{name}.jsonl"]
        if scene.lively:
            more = some.randrange(FILES_MAX)
            files += [scene.directory / f"{name}-{number}.jsonl" for number in range(more)]
        corpus = Corpus(files, lambda: scene.world.now, random.Random(some.random()))
        texts = corpus.make_texts(some.choice(SIZES))
        shaky = some.sample(texts, some.choice([0, 1]))
        deadly = frozenset(some.sample(texts, some.choice([0, 0, 0, 0, 0, 1])))
        self.harm(sorted(deadly), shaky)
        before = self._choose_before()
        for each in before:
            texts += some.sample(each.texts, some.randrange(len(each.texts) + 1))
            deadly |= each.deadly
        if scene.lively and some.random() < REPEATING_SHARE:
            texts += some.choices(texts, k=some.randint(1, len(texts)))
        if before:
            some.shuffle(texts)
        corpus.write(texts)
        model = f"null:{DIMENSIONS}:{scene.speed}"
        terms = USUAL
        if scene.lively:
            terms = Terms(some.randrange(3), some.choice(TENANTS), some.randint(1, 3))
            model = REFUSED_MODEL if some.random() < REFUSED_SHARE else model
        if scene.shelf is not None and model != REFUSED_MODEL:
            model = some.choice(list(scene.shelf.titles))
        if before:
            model = before[0].model
        stored, sink = scene.choose_place(), some.choice(["npy", "jsonl"])
        request = Request(
            tuple(map(str, files)),
            CorpusOptions(),
            skip_bad_rows=False,
            spec=JobSpec(model=model, stored=stored, texts_from=scene.choose_texts()),
            sink="stored" if stored and scene.storage and scene.storage.lists else sink,
        )
        place = Place(scene.outputs / name, scene.settings, "", 0, self._choose_id(name))
        work = Work(corpus, request, place, terms, scene.world.now, deadly)
        work.reuse = [each.directory for each in before]
        return work

    def _choose_before(self) -> list[FinishedOutput]:
        """Choose outputs of one model for a new one to take their vectors; most often none."""
        finished = self.scene.finished
        if not (self.scene.lively and finished and self.random.random() < REUSE_SHARE):
            return []
        first = self.random.choice(finished)
        alike = [each for each in finished if each.model == first.model and each is not first]
        return [first, *self.random.sample(alike, min(len(alike), self.random.randrange(2)))]

    def _choose_reuse(self, work: Work) -> tuple[Sequence[Path], bool]:
        """Choose which vectors a command takes; the next one for the same output may take others.

        Returns:
            Other outputs, and whether each text is embedded once without them, too.
        """
        if not self.scene.lively:
            return (), False
        reuse = self.random.choice([work.reuse, work.reuse, work.reuse[:1], ()])
        return reuse, self.random.random() < REPEATING_SHARE

    def _choose_id(self, name: str) -> str:
        """Choose the id of a new job: most often one that was never used."""
        scene = self.scene
        if scene.lively and scene.ids and self.random.random() < SAME_ID_SHARE:
            name = self.random.choice(scene.ids)
            AGAIN.reach()
        scene.ids.append(name)
        return name

    # What they do about an end.

    def _react(self, work: Work, error: Exception) -> None:
        """Do what the error asks for, if there was a reason for it.

        Raises:
            Failure: There was no reason for the error.
        """
        self.scene.say(f"{work.place.out.name}, job {work.place.job_id}: {error!r}")
        reaction = self._reaction(work, error)
        if reaction is None:
            raise Failure(f"ended without a reason: {error!r}") from error
        self.scene.say(f"{self.name} does: {reaction.__name__.strip('_')}")
        work.stumbled = True
        if reaction != self._wait:
            self.scene.reacted_at = self.scene.world.now
        reaction(work)

    def _reaction(  # noqa: PLR0911 # one for each error
        self, work: Work, error: Exception
    ) -> Callable[[Work], None] | None:
        """Return what to do about an error; None if there is no reason for it."""
        choose = self.random.choice
        match error:
            case CorpusError() if len(work.corpus.since(work.asked_at)) > 1:
                return choose([self._mend, self._mend_and_reorder])  # it was read half changed
            case CorpusError() if work.corpus.is_bad and not work.request.skip_bad_rows:
                return choose([self._mend, self._mend_and_reorder, self._skip])
            case CorpusError() if not any(work.corpus.rows):  # all bad, and all were skipped
                return choose([self._mend, self._mend_and_reorder])
            case SourceChanged() if len(work.corpus.versions) > 1:
                CHANGED.reach()
                self._check_before_change(work)
                again = [] if work.restored else [self._restore, self._restore]
                again += [self._embed_changed, self._embed_changed]
                return choose([*again, self._anew, self._elsewhere, self._remove_job_and_anew])
            case JobTaken() if (
                work.stumbled
                or work.discarded
                or work.copied
                or self.scene.ids.count(work.place.job_id) > 1
            ):
                REFUSED.reach()
                return (
                    choose([self._wait, self._rename]) if self._shares(work) else self._remove_job
                )
            case ModelRefused() if work.request.spec.model == REFUSED_MODEL:
                return self._correct_model
            case ModelRefused():
                return self._refused(work, error)
            case JobEnded() | JobRefused() | JobGone() if work.place.job_id in self.scene.steered:
                return self._remove_job
            case OutputError():
                return self._refused_output(work, error)
        return None

    def _refused_output(self, work: Work, error: OutputError) -> Callable[[Work], None] | None:
        """Return what to do about outputs that are not what they should be; None for no reason."""
        if " is a copy of " in str(error):
            COPIED.reach()
            return self._rename
        return self._reuse_what_is_left if any(map(self._is_removed, work.reuse)) else None

    def _refused(self, work: Work, error: ModelRefused) -> Callable[[Work], None] | None:
        """Return what to do when no worker embeds a job; None if there is no reason for it."""
        if SENT in str(error) and len(work.corpus.versions) > 1:
            return self._wait  # the next run reads what there is now
        if self.scene.shelf is not None:
            return self._refused_by(self.scene.shelf, work, error)
        return self._wait if DEADLY in str(error) else None  # faults have ended it as often

    def _refused_by(self, shelf: Shelf, work: Work, error: ModelRefused) -> Callable[[Work], None]:
        """Return what to do about a model that no worker had: wait for it, or choose another."""
        model = work.request.spec.model
        if not shelf.hopeless(model):
            LATER.reach()
            return self._wait
        if any(shelf.why_never(model, role) in str(error) for role in shelf.rooms):
            HOPELESS.reach()
            return self._correct_model
        if DEADLY in str(error):  # faults have ended it as often, before it could say why
            return self._wait
        raise Failure(f"refused for another reason: {error}")

    def _check_before_change(self, work: Work) -> None:
        """Judge an output that was finished when its source had not changed yet."""
        if (work.place.out / MANIFEST_FILE).exists():
            manifest = read_manifest(work.place.out)
            self._judge(work, manifest, work.begun_at)

    @staticmethod
    def _mend(work: Work) -> None:
        work.corpus.mend()

    @staticmethod
    def _mend_and_reorder(work: Work) -> None:
        work.corpus.mend()
        work.corpus.reorder()

    def _skip(self, work: Work) -> None:
        """Begin again with bad rows skipped, which makes another output."""
        work.request = replace(work.request, skip_bad_rows=True)
        self._anew(work)

    @staticmethod
    def _restore(work: Work) -> None:
        """Restore the corpus that was there when the output was begun."""
        work.restored = True
        work.corpus.restore(work.corpus.since(work.begun_at)[-1])

    def _anew(self, work: Work) -> None:
        """Remove the output, so that no loss of power brings it back, and begin again."""
        work.removing = True
        shutil.rmtree(work.place.out, ignore_errors=True)
        with contextlib.suppress(OSError):
            sync_directory(work.place.out.parent)
        work.removing = False
        work.begun_at = self.scene.world.now
        work.restored = False
        work.pages = Pages()

    def _elsewhere(self, work: Work) -> None:
        """Leave the output as it is, and begin another one with the same id."""
        out = work.place.out
        work.place = replace(work.place, out=out.with_name(f"{out.name}-x{next(self._numbers)}"))
        work.begun_at = self.scene.world.now
        work.restored = False
        work.pages = Pages()

    def _embed_changed(self, work: Work) -> None:
        """Ask for changed rows to be embedded again, from now on."""
        work.place = replace(work.place, embed_changed=True)
        work.pages = Pages()

    def _shares(self, work: Work) -> bool:
        """Tell whether somebody else has a job of the same id now."""
        return any(
            user is not self and user.work and user.work.place.job_id == work.place.job_id
            for user in self.others
        )

    def _is_removed(self, out: Path) -> bool:
        """Tell whether somebody removes a finished output, or has removed it."""
        if not (out / MANIFEST_FILE).exists():
            return True
        works = (user.work for user in self.others if user.work is not None)
        return any(work.removing and work.place.out == out for work in works)

    def _reuse_what_is_left(self, work: Work) -> None:
        """Take no more vectors of outputs that somebody has removed."""
        work.reuse = [each for each in work.reuse if not self._is_removed(each)]

    def _wait(self, work: Work) -> None:
        """Change nothing, so that the command is run again until the id is free."""

    def _rename(self, work: Work) -> None:
        """Remove the output, and begin again with another id."""
        self._anew(work)
        work.place = replace(work.place, job_id=f"{self.name}-y{next(self._numbers)}")
        self.scene.ids.append(work.place.job_id)

    def _correct_model(self, work: Work) -> None:
        """Ask for a model that exists."""
        model, shelf = f"null:{DIMENSIONS}:{self.scene.speed}", self.scene.shelf
        model = model if shelf is None else self.random.choice(shelf.usable())
        spec = msgspec.structs.replace(work.request.spec, model=model)
        work.request = replace(work.request, spec=spec)
        work.reuse = ()
        work.corpus.reorder()

    def _remove_job_and_anew(self, work: Work) -> None:
        self._remove_job(work)
        self._anew(work)

    def _remove_job(self, work: Work) -> None:
        """Delete the job like `embedfarm jobs rm --force`; do nothing if the server is away."""
        self.scene.steered.add(work.place.job_id)
        with contextlib.suppress(*UNAVAILABLE), closing_client(URL) as client:
            FarmClient(client).job(work.place.job_id).delete()

    # What must hold.

    def _check(self, work: Work, manifest: Manifest) -> None:
        """Check the output, the pages and the server after a job that is done."""
        scene = self.scene
        scene.say(f"{work.place.out.name}, job {work.place.job_id}, is done")
        self._judge(work, manifest, work.read_at)
        work.pages.check(work.place.out)
        self._check_server(work)
        scene.chunks += manifest.count
        scene.failed += manifest.failed
        if scene.lively and manifest.count and work.place.out not in work.reuse:
            texts = work.corpus.versions[-1].texts
            model = work.request.spec.model
            scene.finished.append(FinishedOutput(work.place.out, model, texts, work.deadly))

    def _judge(self, work: Work, manifest: Manifest, since: float) -> None:
        stored = self.scene.read(work.place.out, manifest)
        versions = work.corpus.since(since)
        weights = ":".join(work.request.spec.model.split(":")[3:])
        judge(stored, versions, work.deadly, self.scene.settings.deliveries_max, weights)
        if len(stored.attempts) != manifest.failed:
            raise Failure(f"{len(stored.attempts)} errors are named, {manifest.failed} counted")
        bad = {each.rows.count(None) for each in versions}
        if manifest.skipped not in bad and not (work.finished and manifest.skipped > min(bad)):
            raise Failure(f"{manifest.skipped} rows are said to be skipped")
        texts = versions[0].texts
        harmless = [i for i in stored.attempts if i < len(texts) and texts[i] not in work.deadly]
        self.scene.harmless += len(harmless)

    def _left_in_storage(self, work: Work) -> list[str]:
        """Return the stored vectors that are left of a job that is done."""
        storage = self.scene.storage
        if storage is None:
            return []
        outputs = (work.place.out, *self.scene.listed)
        listed = {name for each in outputs for name in listed_names(each)}
        return storage.left(work.begun_at, listed)

    def _check_server(self, work: Work) -> None:
        """Check that nothing but the record of an ended job is left on the server.

        Nothing is checked if a crash undid the end, or that somebody deleted the job, when the
        command that embeds had looked at it already; if one made the server forget that the job was
        made and remember an earlier one of its name; or if somebody else has made the job anew.
        """
        host, keys = self.scene.host, work.keys
        if self._shares(work):
            return
        server, now_ms = host.server or ModelServer.replayed(host.log), host.now_ms()
        owner = server.execute([b"HGET", keys.meta.encode(), b"owner"], now_ms)
        made = (each for each in host.forgotten if CREATE in each and keys.meta.encode() in each)
        if owner is not None and any(owner not in each for each in made):
            return

        def is_end(words: Sequence[bytes]) -> bool:
            ends = not ENDS.isdisjoint(words) or DELETE in words[:1]
            return ends and keys.meta.encode() in words

        undone, embed = any(map(is_end, host.forgotten)), self.scene.world.process
        if undone and embed not in host.served and not is_end(host.asked.get(embed, [])):
            return
        if objects := self._left_in_storage(work):
            raise Failure(f"left in the storage: {objects}")
        gone = set(keys.all()) - {keys.meta, keys.failed}
        if left := {key for key in gone if server.execute([b"EXISTS", key.encode()], now_ms)}:
            raise Failure(f"left on the server: {sorted(left)}")
