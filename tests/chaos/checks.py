"""Checks of what must hold once a command has ended well."""

import shutil
import threading
from dataclasses import dataclass
from typing import Final

import numpy as np

from embedfarm.contract.broker import closing_client, persist
from embedfarm.contract.farm_client import FarmClient
from embedfarm.runs.own_job import JOB_ID_FILE
from tests.chaos.commands import Job, World
from tests.chaos.corpora import Vectors, Version, compare, write_texts
from tests.chaos.outcome import Outcome
from tests.farm.harness import manifest, read_parquet, run

ANSWER_SECONDS: Final = 120.0  # for a server that comes back


@dataclass
class Checks:
    """Comparison of each output with the versions of its corpus.

    Attributes:
        known: The vectors of all texts.
        world: The servers and the settings.
        outcome: Takes the findings.
    """

    known: Vectors
    world: World
    outcome: Outcome

    def check(self, job: Job) -> None:
        """Note an output as a finding unless its vectors are right, and the server has no rest."""
        out, outcome = job.out, self.outcome
        if (out / JOB_ID_FILE).exists():
            outcome.problems.append(f"{out.name}: its command has not ended the job")
        version = self._compare(job)
        facts = manifest(out)
        accounts = facts["accounts"].values()
        outcome.duplicates += sum(account.get("duplicates", 0) for account in accounts)
        against = write_texts(out.with_suffix(".against.jsonl"), version.texts)
        verified = run("verify", out, "--against", against)
        if facts["failed"] or verified.returncode:
            outcome.problems.append(f"{out.name}: {facts['failed']} failed; {verified.stdout}")
        self._check_server(job)
        shutil.rmtree(out)
        against.unlink()

    def _compare(self, job: Job) -> Version:
        """Compare the output with versions of the corpus, and return the one that it was made of.

        That is the newest version, unless the corpus was changed when the command had read it;
        then it is a version since the command was typed.
        """
        outcome = self.outcome
        indices, vectors, _ = read_parquet(job.out)
        candidates = [each for each in job.candidates if not each.spoiled]
        found = [compare(indices, vectors, each.texts, self.known) for each in candidates]
        best = max(range(len(found)), key=lambda n: (np.nan_to_num(found[n].cosine, nan=-2), n))
        outcome.lost += found[best].lost
        outcome.doubled += found[best].doubled
        outcome.cosine_min = float(np.minimum(outcome.cosine_min, found[best].cosine))
        if not found[best].ordered:
            outcome.problems.append(f"{job.out.name}: the indices are not 0 to N - 1 in order")
        return candidates[best]

    def _check_server(self, job: Job) -> None:
        """Note a finding unless the counters agree, and neither an entry nor a lease is left.

        A command that had seen its job's end on the server before a replica took over, which does
        not know of it, can do nothing about it: `cleanup` does the rest, in a day.
        """
        never = threading.Event()
        with closing_client(self.world.settings.redis_url) as client:
            handle = FarmClient(client).job(job.name)
            status = persist(handle.status, never, ANSWER_SECONDS)
            left = persist(lambda: client.exists(*handle.keys.all()), never, ANSWER_SECONDS)
            record = (handle.keys.meta, handle.keys.failed)
            kept = persist(lambda: client.exists(*record), never, ANSWER_SECONDS)
        if not status.ended and self.world.servers.forgot(job.ended):
            return
        if status.blocks_done != status.blocks_in or left > kept:
            self.outcome.problems.append(f"{job.name}: {left - kept} keys are left; {status}")
