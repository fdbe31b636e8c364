"""Properties that hold for every farm, after every pass of every policy.

Every run looks at a few hundred farms; `pytest -m slow` looks at ten thousand.
"""

import copy
import itertools
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Final

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from embedfarm.contract.entries import Pending
from embedfarm.contract.records import JobShare
from embedfarm.scheduler.passes import decide
from embedfarm.scheduler.passes.baselines import BATCH_CHUNKS, BATCH_CHUNKS_MAX
from embedfarm.scheduler.passes.size import CAP_FACTOR_MAX, CONFIRMED_SECONDS, RESCUES_MAX
from embedfarm.scheduler.policies import POLICIES, make_passes
from embedfarm.scheduler.speculative_copies import SpeculativeCopies
from embedfarm.scheduler.state import Draft, FarmState, JobState
from tests.scheduler import support
from tests.scheduler.farms import SETTINGS, farms

EXAMPLES: Final = 50  # for each policy
EXAMPLES_SLOW: Final = 10_000
QUIET: Final = [HealthCheck.too_slow, HealthCheck.data_too_large]

Check = Callable[[FarmState, str], None]


# After every pass.


def tell_of_every_job(draft: Draft) -> None:
    """Assert that each job is in a tier, once, or that the notes say why it is not."""
    found = [job.job for job in draft.jobs]
    assert len(found) == len(set(found))
    assert all(job in draft.state.jobs for job in draft.jobs)
    deferred = {
        note.words.partition(" deferred: ")[0] for note in draft.notes if note.name == "defer"
    }
    assert {job.job for job in draft.state.jobs} - set(found) == deferred
    assert not set(found) & deferred
    assert all(draft.tiers)


def keep_queues_in_order(draft: Draft) -> None:
    """Assert that queues are short, and name each job once, which is kept and has blocks."""
    kept = {job.job for job in draft.jobs}
    assert set(draft.queues) <= {worker.name for worker in draft.state.asking}
    for queue in (*draft.queues.values(), draft.first):
        names = [job.job for job in queue]
        assert len(names) == len(set(names))
        assert len(names) <= draft.width
        assert set(names) <= kept
        assert all(job.waiting_blocks for job in queue)


def keep_shares_in_order(draft: Draft) -> None:
    """Assert that a plan is short, and names each job once, which is not deferred."""
    kept = {job.job for job in draft.jobs}
    for shares in draft.shares.values():
        names = [share.job for share in shares]
        assert len(names) == len(set(names))
        assert set(names) <= kept
        assert len(names) <= draft.width + RESCUES_MAX
        assert all(share.blocks >= 1 and share.tokens >= 0 for share in shares)


def check_passes(state: FarmState, policy: str) -> None:
    """Assert that no pass loses, doubles or invents a job, and that none changes the state."""
    before = copy.deepcopy(state)
    draft = Draft(state=state, tiers=(state.jobs,) if state.jobs else (), explain=True)
    for each in make_passes(POLICIES[policy], SETTINGS):
        draft = each(draft)
        assert draft.state is state
        tell_of_every_job(draft)
        keep_queues_in_order(draft)
        keep_shares_in_order(draft)
        tag_notes(draft)
    assert state == before


def tag_notes(draft: Draft) -> None:
    """Assert that a note that begins with a worker is tagged with it, and any other with none."""
    live = {worker.name for worker in draft.state.workers}
    for note in draft.notes:
        named = note.words.partition(" ")[0]
        assert note.worker == (named if named in live else "")


# After all of them.


def check_plans(state: FarmState, policy: str) -> None:
    """Assert that exactly the live, asked-for workers that do not drain get a plan."""
    made = decide(state, make_passes(POLICIES[policy], SETTINGS)).shares
    live = {worker.name for worker in state.workers if not worker.draining}
    assert set(made) == (live if state.planned is None else live & state.planned)


def check_function(state: FarmState, policy: str) -> None:
    """Assert that the same state gives the same plan, explained or not, with new passes too."""
    passes = make_passes(POLICIES[policy], SETTINGS)
    made = decide(state, passes)
    assert made == decide(copy.deepcopy(state), make_passes(POLICIES[policy], SETTINGS))
    explained = decide(state, passes, explain=True)
    assert explained.shares == made.shares
    assert explained.tiers == made.tiers
    assert not made.notes


def fits(state: FarmState, worker: str, job: JobState) -> bool:
    """Tell whether a model fits a device, as far as both sizes are known."""
    (memory,) = [each.memory_bytes for each in state.workers if each.name == worker]
    return not memory or state.model_bytes.get(job.model, 0) <= memory


def check_work(state: FarmState, policy: str) -> None:
    """Assert that a worker gets all jobs that it could do, up to the length of a plan.

    No job stands in the way: neither one whose model fits nowhere, nor one of too large blocks.
    Left out may only be what another worker has the model for, or is to load it for.
    """
    if policy == "rounds":  # where a round gives nobody anything before its end
        return
    draft = decide(state, make_passes(POLICIES[policy], SETTINGS))
    jobs = {job.job: job for job in draft.jobs}
    for worker, shares in draft.shares.items():
        able = [job for job in jobs.values() if job.waiting_blocks]
        given = [jobs[share.job] for share in shares if jobs[share.job].waiting_blocks]
        if "memory" in POLICIES[policy]:
            able = [job for job in able if fits(state, worker, job)]
            assert all(fits(state, worker, job) for job in given)
        if "affinity" in POLICIES[policy] and len(given) < draft.width:
            left = (job for job in able if job not in given)
            assert all(_has_another(draft, worker, job.model) for job in left)
        else:
            assert len(given) == min(len(able), draft.width)


def _has_another(draft: Draft, worker: str, model: str) -> bool:
    """Tell whether a worker other than this one has a model, or is to load it."""
    models = {job.job: job.model for job in draft.jobs}
    others = (each for each in draft.state.takers if each.name != worker)
    return any(
        model in {*each.resident, *(models[s.job] for s in draft.shares.get(each.name, ())[:1])}
        for each in others
    )


def check_copies(state: FarmState, policy: str) -> None:
    """Assert that copied blocks are leased to another live worker, copied once, and none waits."""
    draft = decide(state, make_passes(POLICIES[policy], SETTINGS))
    live = {worker.name for worker in state.workers}
    leases = {(job.job, each.id): each for job in draft.jobs for each in job.leases}
    copied: Counter[tuple[str, str]] = Counter()
    for worker, shares in draft.shares.items():
        for share in shares:
            for identifier in share.copies:
                lease = leases[share.job, identifier]
                copied[share.job, identifier] += 1
                assert lease.worker in live - {worker}
                assert lease.deliveries < SETTINGS.deliveries_max
    assert all(count == 1 for count in copied.values())
    if copied:
        assert not any(job.waiting_blocks for job in draft.jobs)


# Sizes.


def seconds_max(state: FarmState, overhead: float, updated: float) -> float:
    """Return the longest micro-batch of a worker in seconds, by the rule of `Size`."""
    cap = SETTINGS.micro_batch_seconds_max
    cap = min(max(cap, overhead / 0.01), CAP_FACTOR_MAX * cap)
    old = state.now - updated > CONFIRMED_SECONDS
    return min(cap, max(SETTINGS.probe_seconds, 6 * overhead)) if old else cap


def tokens_max(state: FarmState, worker: str, job: JobState, policy: str) -> float:
    """Return the most tokens of a worker's micro-batch, by the limits of its policy."""
    status = job.status
    if policy in {"rounds", "fixed"}:
        return BATCH_CHUNKS * status.chunk_tokens_mean
    rates = state.pace(job).rates
    if policy == "adaptive":
        chunks = BATCH_CHUNKS_MAX if worker in rates else BATCH_CHUNKS
        return chunks * status.chunk_tokens_mean
    if worker not in rates:
        slowest = [rates[w.name].tokens_per_second for w in state.takers if w.name in rates]
        return SETTINGS.probe_seconds * min(slowest, default=0.0)
    rate = rates[worker]
    longest = seconds_max(state, rate.overhead_seconds, rate.updated)
    return min(longest * rate.tokens_per_second, job.waiting_tokens)


def check_share(share: JobShare, job: JobState, most: float) -> None:
    """Assert that a share keeps to the limits on tokens and text, and has blocks for its tokens."""
    status = job.status
    assert share.tokens <= most * (1 + 1e-9)
    text = max(1, SETTINGS.micro_batch_bytes_max // max(1.0, status.block_bytes_mean))
    assert share.blocks <= text
    assert share.blocks * status.block_tokens_mean <= max(most, 1.0) + status.block_tokens_mean
    assert share.open == (status.state == "open")


def check_sizes(state: FarmState, policy: str) -> None:
    """Assert that each share is within the policy's limits, and not more than there is.

    Of a job that a worker was measured on, it gets at most the waiting tokens, and a block more.
    """
    draft = decide(state, make_passes(POLICIES[policy], SETTINGS))
    jobs = {job.job: job for job in draft.jobs}
    for worker, shares in draft.shares.items():
        for share in shares:
            job = jobs[share.job]
            check_share(share, job, tokens_max(state, worker, job, policy))
            if policy not in {"rounds", "fixed"} and worker in state.pace(job).rates:
                assert share.tokens <= job.waiting_tokens
                block = job.status.block_tokens_mean
                assert share.blocks * block <= job.waiting_tokens + block


def check_sum(state: FarmState, policy: str) -> None:
    """Assert that workers measured on a job get no more of it between them than waits.

    This is so in tokens, whatever else they hold or have in their queues; in blocks each of them
    may get one more, since a share is a block at least and is rounded to whole ones. Workers
    that probe are not in the sum: they get a short time's work, or a block, on top of it.
    """
    if "size" not in POLICIES[policy]:
        return
    draft = decide(state, make_passes(POLICIES[policy], SETTINGS))
    for job in draft.jobs:
        rates = state.pace(job).rates
        found = [
            share
            for worker, shares in draft.shares.items()
            for share in shares
            if share.job == job.job and worker in rates
        ]
        block = job.status.block_tokens_mean
        most = job.waiting_tokens * (1 + 1e-9)
        assert sum(share.tokens for share in found) <= most
        assert sum(share.blocks for share in found) * block <= most + len(found) * block


def check_speed(state: FarmState, policy: str) -> None:
    """Assert that the faster of two workers, which are alike and hold nothing, gets no less."""
    held = {worker for job in state.jobs for worker in job.held_blocks}
    draft = decide(state, make_passes(POLICIES[policy], SETTINGS))
    for job in draft.jobs:
        rates = state.pace(job).rates
        alike: dict[tuple[float, float], list[tuple[float, int]]] = {}
        for worker, shares in draft.shares.items():
            for share in shares:
                if share.job == job.job and worker in rates and worker not in held:
                    rate = rates[worker]
                    key = rate.overhead_seconds, rate.updated
                    alike.setdefault(key, []).append((rate.tokens_per_second, share.tokens))
        for found in alike.values():
            sizes = [tokens for _, tokens in sorted(found)]
            assert all(b >= a - 1 for a, b in itertools.pairwise(sizes))


CHECKS: Final = [
    check_passes,
    check_plans,
    check_function,
    check_work,
    check_copies,
    check_sizes,
    check_sum,
    check_speed,
]


def check_all(state: FarmState, policy: str) -> None:
    """Run all checks on a farm."""
    for check in CHECKS:
        check(state, policy)


@pytest.mark.parametrize("policy", sorted(POLICIES))
@settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=QUIET)
@given(farms())
def test_every_decision(policy: str, state: FarmState) -> None:
    """All checks of this module hold for any farm, under each policy."""
    check_all(state, policy)


# Over several decisions.


def tail_of(
    holders: Mapping[str, str],
    speeds: Mapping[str, float],
    at_work: set[str],
    copies: SpeculativeCopies,
) -> FarmState:
    """Return a farm with one job, all of whose blocks are leased by `holders`, and its workers."""
    made, lost = copies.look(["job"], speeds.keys())
    job = replace(
        support.job(leases=[("anybody", len(holders))]),
        held_blocks=Counter(holders.values()),
        leases=tuple(Pending("in", each, worker, 0, 1) for each, worker in holders.items()),
        copies=made["job"],
        copies_lost=lost["job"],
    )
    passed = dict.fromkeys(at_work & speeds.keys(), 0.1)
    return support.farm([job], speeds, held_seconds=passed)


@pytest.mark.parametrize("policy", ["fair", "fcfs"])
@settings(max_examples=4 * EXAMPLES, deadline=None, suppress_health_check=QUIET)
@given(data=st.data())
def test_no_block_is_repeated_by_two(policy: str, data: st.DataObject) -> None:
    """A block has one live copy, whoever comes, goes, ends or leases something between decisions.

    A worker is at what it was told until it has completed something; while it holds nothing its
    plan tells it the same again.
    """
    names, speeds = ["a", "b", "c", "d"], st.sampled_from([10.0, 1000.0, 100_000.0])
    holders = {f"{8 * n + 1}-8": data.draw(st.sampled_from(names)) for n in range(9)}
    copies, passes = SpeculativeCopies(), make_passes(POLICIES[policy], SETTINGS)
    doing: dict[str, set[str]] = {}
    for _ in range(data.draw(st.integers(2, 6))):
        live = data.draw(st.dictionaries(st.sampled_from(names), speeds, min_size=1))
        doing = {name: blocks for name, blocks in doing.items() if name in live}
        state = tail_of(holders, live, doing.keys() | set(holders.values()), copies)
        shares = decide(state, passes).shares
        copies.told(shares)
        told = {name: set(made[0].copies) if made else set() for name, made in shares.items()}
        for name, blocks in told.items():
            others = [doing.get(each, set()) | told[each] for each in live if each != name]
            assert not blocks & set().union(*others)
            if name not in holders.values():
                left = {block for block, holder in holders.items() if holder in live}
                assert doing.get(name, set()) & left <= blocks
            if blocks:
                doing[name] = doing.get(name, set()) | blocks
        for name in data.draw(st.lists(st.sampled_from(sorted(live)), max_size=2, unique=True)):
            done = doing.pop(name, set()) or {b for b, holder in holders.items() if holder == name}
            holders = {block: holder for block, holder in holders.items() if block not in done}
            copies.completed(name)
        heir = data.draw(st.sampled_from(sorted(live)))
        if data.draw(st.booleans()):
            holders = {b: holder if holder in live else heir for b, holder in holders.items()}


@pytest.mark.slow
@settings(max_examples=EXAMPLES_SLOW, deadline=None, suppress_health_check=QUIET)
@given(farms(), st.sampled_from(sorted(POLICIES)))
def test_every_decision_of_ten_thousand(state: FarmState, policy: str) -> None:
    """All checks of this module hold for ten thousand farms, whatever the policy."""
    check_all(state, policy)
