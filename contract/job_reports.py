"""What workers say about jobs: models and tokens that they agree on, refusals, and accounts."""

import hashlib
import json
from collections import defaultdict
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Final, NamedTuple, cast

import msgspec

from embedfarm.contract import wire
from embedfarm.contract.canaries import Canaries, disagreement
from embedfarm.contract.encoding import decode, encode
from embedfarm.contract.errors import EmbedfarmError
from embedfarm.contract.farm_keys import FarmKeys
from embedfarm.contract.jobs import Job
from embedfarm.contract.model_files import differences
from embedfarm.contract.records import TokenisationSettings
from embedfarm.contract.status import JobGone
from embedfarm.contract.unreadable_records import read_words
from embedfarm.contract.usage import Account

NOT_NOW: Final = "not now: "  # how a reason begins that passes
DIGEST_CHARACTERS: Final = 16  # of canaries, which commits name by it


class ModelRefused(EmbedfarmError, RuntimeError):
    """Raised when a worker cannot or must not embed a job; the message says why."""

    exit_status = 2


class CanaryAgreement(NamedTuple):
    """How a worker's canaries agree with those of a job.

    Attributes:
        difference: In which way they differ; "" where they do not, or the job is gone, or what it
            has cannot be read.
        digest: Digest of the job's canaries as the server has them; "" where it has none.
    """

    difference: str
    digest: str


@dataclass
class JobReports(FarmKeys):
    """Reports of a farm's workers about its jobs: fingerprints, refusals, usage."""

    def agree(self, job: str, fingerprint: Mapping[str, str], of: str = "") -> bytes:
        """Make sure that every worker of a job has the same model files.

        The first worker's fingerprint becomes the job's, unless the submitter gave one.

        Args:
            job: Id of the job.
            fingerprint: What the caller's model files are, by component.
            of: Owner or generation of the job that is meant; "" for whichever has the id.

        Returns:
            The job's fingerprint as the server has it.

        Raises:
            ModelRefused: This worker's fingerprint differs; the message names the components.
            JobGone: There is no such job, or another one has the id.
        """
        ours = json.dumps(dict(fingerprint), sort_keys=True)
        agreed = Job(self.client, job, of).note("fingerprint", ours, first=True)
        if agreed is None:
            raise JobGone(job)
        known = read_words(agreed, f"fingerprint of {job}", self.on_unreadable)
        differing = differences(known, fingerprint)
        if differing:
            raise ModelRefused(f"another model than the job's: {', '.join(differing)} differ")
        return agreed

    def agree_together(
        self,
        jobs: Mapping[str, str],
        worker: str,
        fingerprint: Mapping[str, str],
        tokenisation: TokenisationSettings | None,
    ) -> dict[str, bytes]:
        """Agree on model files and tokens with the other workers of several jobs, in one pipeline.

        Args:
            jobs: Generations of the jobs, by id.
            worker: Name of the worker.
            fingerprint: As for `agree`.
            tokenisation: As for `agree_on_tokens`.

        Returns:
            The fingerprints of the jobs of which all is settled, as the server has them. Others are
            gone, or of other files, or the worker has refused them before: they are to be looked at
            one by one.
        """
        ours = json.dumps(dict(fingerprint), sort_keys=True).encode()
        tokens = encode(tokenisation) if tokenisation else b""
        pipe = self.client.pipeline(transaction=False)
        note = self._script("note")
        for job, generation in jobs.items():
            meta = wire.JobKeys(job).meta
            for name, value in (("fingerprint", ours), ("recipe", tokens)):
                note(keys=[meta], args=["HSETNX", generation, name, value], client=pipe)
            pipe.hget(meta, f"refused:{worker}")
        answers = iter(pipe.execute(raise_on_error=False))
        return {
            job: known
            for job, known, noted, refused in zip(jobs, answers, answers, answers, strict=True)
            if known == ours and noted in {b"", tokens} and not refused
        }

    def fingerprint(self, job: str, owner: str = "") -> dict[str, str]:
        """Return the fingerprint that the job's workers agreed on, empty before the first one."""
        (data,) = Job(self.client, job, owner).notes("fingerprint").values() or [b"{}"]
        return read_words(data, f"fingerprint of {job}", self.on_unreadable)

    def agree_on_canaries(
        self, jobs: Collection[tuple[str, str]], canaries: Canaries, dtype: str
    ) -> dict[tuple[str, str], CanaryAgreement]:
        """See that workers make the canaries that the other workers of some jobs make.

        The first worker's canaries become a job's, unless the submitter gave some. Their digest
        is noted with them, so that a server that has it has them, whatever it lost. Workers of
        before note the digest by itself: where it is not there, both are noted again.

        Args:
            jobs: Ids of the jobs, each with the owner or generation that is meant, or "".
            canaries: What the caller makes.
            dtype: Type that its model computes in.
        """
        ours = msgspec.json.encode(canaries)
        pipe, note = self.client.pipeline(transaction=False), self._script("note")
        for job, of in jobs:
            meta = wire.JobKeys(job).meta
            own = ("canaries", ours, "canaries_digest", _digest(ours))
            note(keys=[meta], args=["HSETNX", of, *own], client=pipe)
        found = {}
        for (job, of), data in zip(jobs, pipe.execute(), strict=True):
            digest = _digest(data) if data else ""
            known = self._canaries(job, b"" if data == ours else data or b"")
            difference = "" if known is None else disagreement(known, canaries, dtype)
            found[job, of] = CanaryAgreement(difference, digest)
            if digest:
                both = ("canaries_digest", digest, "canaries", data)
                note(keys=[wire.JobKeys(job).meta], args=["HSETNX", of, *both], client=pipe)
        pipe.execute()
        return found

    def canaries(self, job: str, owner: str = "") -> Canaries | None:
        """Return the canaries that the job's workers agreed on; None before the first one."""
        return self._canaries(job, Job(self.client, job, owner).notes("canaries").get("", b""))

    def _canaries(self, job: str, data: bytes) -> Canaries | None:
        """Return canaries out of JSON, None where there are none; report anything else."""
        try:
            return None if not data else msgspec.json.decode(data, type=Canaries)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            self.on_unreadable(f"canaries of {job}", str(error))
            return None

    def agree_on_tokens(
        self, job: str, tokenisation: TokenisationSettings | None, of: str = ""
    ) -> None:
        """Make sure that every worker of a job can read its token ids.

        The first worker's settings become the job's. Without any, the job's blocks are texts,
        which all workers can read.

        Args:
            job: Id of the job.
            tokenisation: How the caller makes token ids; None if it reads texts only.
            of: Owner or generation of the job that is meant; "" for whichever has the id.

        Raises:
            ModelRefused: This worker's settings differ.
            JobGone: There is no such job, or another one has the id.
        """
        ours = encode(tokenisation) if tokenisation else b""
        agreed = Job(self.client, job, of).note("recipe", ours, first=True)
        if agreed is None:
            raise JobGone(job)
        if agreed not in {b"", ours}:
            raise ModelRefused("this worker's tokenizer does not make the job's token ids")

    def tokenisation(self, job: str) -> TokenisationSettings | None:
        """Return how a job's token ids are made; None if no worker said so, or they need texts.

        Raises:
            RecordError: The settings cannot be read, as from another version.
        """
        data = cast("bytes | None", self.client.hget(wire.JobKeys(job).meta, "recipe"))
        return decode(TokenisationSettings, data) if data else None

    def account(
        self, worker: str, incarnation: str, accounts: Mapping[tuple[str, str], Account]
    ) -> None:
        """Note what a worker has done for jobs so far, in place of what it noted before.

        Nothing is noted about a job that is gone or was made anew.

        Args:
            worker: Name of the worker.
            incarnation: Which start of it is meant.
            accounts: By job and its generation, which may be "" for whichever has the id.
        """
        pipe = self.client.pipeline(transaction=False)
        note, name = self._script("note"), f"account:{worker}#{incarnation}"
        for (job, generation), account in accounts.items():
            note(
                keys=[wire.JobKeys(job).meta],
                args=["HSET", generation, name, encode(account)],
                client=pipe,
            )
        pipe.execute()

    def accounts(self, job: str, owner: str = "") -> dict[str, Account]:
        """Return a job's accounts by worker, those of a worker's restarts added up.

        Their chunks are counted with each commit, so that all of them are the job's `chunks_done`.
        """
        accounts: defaultdict[str, Account] = defaultdict(Account)
        chunks = {}
        for name, data in Job(self.client, job, owner).notes("").items():
            kind, _, whose = name.partition(":")
            if kind == "account":
                account = self._read(Account, f"{wire.JobKeys(job).meta} {name}", data)
                accounts[whose.rpartition("#")[0]].add(account or Account())
            elif kind == "chunks" and data.isdigit():
                chunks[whose] = int(data)
        for worker, count in chunks.items():
            accounts[worker].chunks = count
        return dict(accounts)

    def refuse(self, job: str, worker: str, reason: str, of: str = "") -> None:
        """Note that a worker cannot embed a job, for people and for the submitter.

        A reason that begins with `NOT_NOW` passes: the worker tries again, and nobody gives up.
        """
        Job(self.client, job, of).note(f"refused:{worker}", reason)

    def accept(self, job: str, worker: str, of: str = "") -> None:
        """Take back what a worker has refused a job for, if anything."""
        handle = Job(self.client, job, of)
        if handle.noted(f"refused:{worker}"):
            handle.note(f"refused:{worker}", "")

    def refusals(self, job: str, owner: str = "") -> dict[str, str]:
        """Return the reasons of workers that cannot embed a job, by worker."""
        notes = Job(self.client, job, owner).notes("refused:")
        return {
            worker: reason.decode(errors="replace") for worker, reason in notes.items() if reason
        }


def _digest(canaries: bytes) -> str:
    """Return the digest by which commits ask for canaries."""
    return hashlib.sha256(canaries).hexdigest()[:DIGEST_CHARACTERS]
