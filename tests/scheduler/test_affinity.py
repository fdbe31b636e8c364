"""Tests of which workers load another model."""

import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from typing import Final

import pytest

from embedfarm.scheduler.ledger import Service
from embedfarm.scheduler.passes import decide
from embedfarm.scheduler.passes.affinity import LOADS_WORTH, Affinity
from embedfarm.scheduler.passes.share import Fair
from embedfarm.scheduler.simulation.scenario import Machine, Scenario, Work, spread
from embedfarm.scheduler.simulation.simulated_farm import Outcome
from embedfarm.scheduler.simulation.suite import simulate
from embedfarm.scheduler.state import SHARES_MIN, Draft, FarmState, JobState
from tests.scheduler.model_oracle import least_seconds
from tests.scheduler.support import SETTINGS, draft, equals, farm, job, passes, served

TWO: Final = (Machine(20_000.0), Machine(20_000.0))

MODEL_BYTES: Final = 4 << 30  # of each of five models
SEEDS: Final = (1, pytest.param(5, marks=pytest.mark.slow))  # of what takes seconds each


def loaded(state: FarmState, model: str) -> FarmState:
    """Return the farm with a model on every device."""
    return replace(
        state, workers=tuple(replace(each, resident=frozenset({model})) for each in state.workers)
    )


def two_models(here: float, there: float, tenants: Sequence[str] = ("", "")) -> FarmState:
    """Return a farm with two served jobs, and one worker that has the model of the job "here"."""
    jobs = [
        replace(served("here", here, tenant=tenants[0], tenant_seconds=here), model="loaded"),
        replace(served("there", there, tenant=tenants[1], tenant_seconds=there), model="other"),
    ]
    return loaded(farm(jobs, equals(1)), "loaded")


@pytest.mark.parametrize("tenants", [("", ""), ("a", "b")])
@pytest.mark.parametrize(("ahead", "first"), [(0, "here"), (30, "here"), (30.1, "there")])
def test_a_worker_stays_with_its_model(ahead: float, first: str, tenants: list[str]) -> None:
    """A worker keeps its model until another job is behind by more than `affinity_seconds`."""
    made = Affinity(SETTINGS)(Fair(SETTINGS)(draft(two_models(50 + ahead, 50, tenants))))
    assert made.queue("worker-0")[0].job == first
    assert {each.job for each in made.queue("worker-0")} == {"here", "there"}


def test_no_model_is_worth_a_level() -> None:
    """A more urgent job is worked on even if its model must be loaded first."""
    state = two_models(0, 0)
    here, there = state.jobs
    urgent = replace(there, status=replace(there.status, priority=2))
    made = decide(replace(state, jobs=(here, urgent)), passes())
    assert made.shares["worker-0"][0].job == "there"


def test_a_worker_without_a_model_takes_what_is_fair() -> None:
    """The order of the shares stays where no model is loaded, or one that no job wants."""
    for model in ("", "unwanted"):
        made = Fair(SETTINGS)(draft(loaded(two_models(9, 0), model)))
        assert Affinity(SETTINGS)(made).queues == made.queues


def test_a_job_beyond_the_queue_is_found() -> None:
    """The job of the loaded model comes first even if many others had less."""
    jobs = [served(f"job-{place}", 0.0) for place in range(2 * SHARES_MIN)]
    here = replace(served("here", 5.0), model="loaded")
    made = Fair(SETTINGS)(draft(loaded(farm([*jobs, here], equals(1)), "loaded")))
    queue = Affinity(SETTINGS)(made).queue("worker-0")
    assert queue[0].job == "here"
    assert len(queue) == SHARES_MIN


def test_staying_is_told() -> None:
    """The notes say who stays with which model."""
    made = Affinity(SETTINGS)(Fair(SETTINGS)(draft(two_models(9, 0))))
    assert made.notes[-1] == ("affinity", "worker-0 stays with loaded and here", "worker-0")


# How many load a model.


def placed(jobs: Sequence[JobState], models: Sequence[str], **known: float) -> FarmState:
    """Return a farm of equal workers that have these models; `known` are seconds of loading.

    A worker's models are joined by "+".
    """
    state = farm(jobs, equals(len(models)))
    workers = zip(state.workers, models, strict=True)
    made = tuple(
        replace(worker, resident=frozenset(filter(None, names.split("+"))))
        for worker, names in workers
    )
    return replace(state, workers=made, load_seconds=known)


def firsts(made: Draft) -> Counter[str]:
    """Return for how many workers each job comes first, "" for none."""
    queues = [made.queue(worker.name) for worker in made.state.asking]
    return Counter(queue[0].job if queue else "" for queue in queues)


def of(model: str, name: str, seconds: float = 0.0) -> JobState:
    """Return a job of a model with much to lease that has had so many seconds of the farm."""
    return replace(served(name, seconds), model=model)


def place(state: FarmState) -> Draft:
    """Return what the passes up to this one make of a state."""
    return Affinity(SETTINGS)(Fair(SETTINGS)(draft(state)))


def test_models_are_spread_at_once() -> None:
    """Half of the workers load the model of a second job that is worth as much, and no more."""
    jobs = [of("a", "here"), of("b", "there")]
    made = place(placed(jobs, ["a"] * 4, a=5.0, b=5.0))
    assert firsts(made) == {"here": 2, "there": 2}
    made = place(placed(jobs, ["a", "a", "b", "b"], a=5.0, b=5.0))
    assert [made.queue(f"worker-{n}")[0].job for n in range(4)] == ["here"] * 2 + ["there"] * 2


def test_parts_go_by_weight() -> None:
    """Workers are spread by what jobs weigh, and not by how many jobs a model has."""
    heavy = served("heavy", 0.0, weight=3)
    jobs = [of("a", "one"), of("a", "two"), replace(heavy, model="b")]
    made = place(placed(jobs, ["a"] * 5))
    assert firsts(made)["heavy"] == 3


def test_a_job_that_is_being_served_is_no_reason_to_load() -> None:
    """A job that is behind waits for the worker that has its model now, or is loading it."""
    jobs = [of("a", "here", 500.0), of("b", "there")]
    assert firsts(place(placed(jobs, ["a", "b"]))) == {"here": 1, "there": 1}


def grows(model: str, name: str, idle_seconds: float) -> JobState:
    """Return a job that grows and has nothing to lease, for so many seconds."""
    return replace(job(name, state="open"), model=model, idle_seconds=idle_seconds)


@pytest.mark.parametrize(("idle", "first"), [(0.0, ""), (4.9, ""), (5.0, "there")])
def test_a_worker_waits_for_a_job_that_grows(idle: float, first: str) -> None:
    """Where little is sent at a time, a worker stays for as long as its model takes to load."""
    jobs = [grows("a", "here", idle), of("b", "there")]
    assert firsts(place(placed(jobs, ["a"], a=5.0, b=5.0))) == {first: 1}


def test_workers_do_not_swap_for_the_same_block() -> None:
    """One of two workers whose job grows loads the model of another job, and the other waits."""
    jobs = [grows("a", "here", 0.0), of("b", "there")]
    made = place(placed(jobs, ["a", "a"], a=5.0, b=5.0))
    assert firsts(made) == {"": 1, "there": 1}
    assert any("stays with a: more is to come of here" in note.words for note in made.notes)


def test_a_worker_with_several_models_takes_what_is_fair() -> None:
    """A worker that has the models of several jobs does the one that had least, at no cost."""
    jobs = [of("a", "here", 20.0), of("b", "there")]
    made = place(placed(jobs, ["a+b", "a"], a=5.0, b=5.0))
    assert [made.queue(f"worker-{n}")[0].job for n in range(2)] == ["there", "here"]
    assert not [note for note in made.notes if "worker-0" in note.words]


def test_workers_with_several_models_are_divided_among_them() -> None:
    """Where each model has its part of the workers that have several, nobody loads another."""
    jobs = [of("a", "one"), of("b", "two"), of("c", "three")]
    made = place(placed(jobs, ["a+b", "a+b", "c"], a=5.0, b=5.0, c=5.0))
    assert {queue[0].job for n in range(2) for queue in [made.queue(f"worker-{n}")]} <= {
        "one",
        "two",
    }
    made = place(placed(jobs, ["a+b", "a+b", "a+b"], a=5.0, b=5.0, c=5.0))
    assert firsts(made)["three"] == 1


def test_jobs_of_other_lengths_share_what_is_loaded() -> None:
    """A job with another maximum length is one of the model that is loaded."""
    jobs = [of("m|auto|0|auto", "here", 20.0), of("m|auto|64|auto", "there")]
    made = place(placed(jobs, ["m|auto|auto"]))
    assert made.queue("worker-0")[0].job == "there"
    assert not [note for note in made.notes if note.name == "affinity"]


def test_models_that_are_more_than_workers_take_turns() -> None:
    """A job whose model nobody has is served once another one is far enough ahead of it."""
    jobs = [of("a", "a", 100.0), of("b", "b", 100.0), of("c", "c", 0.0)]
    made = place(placed(jobs, ["a", "b"], a=1.0, b=1.0, c=1.0))
    assert firsts(made)["c"] == 1
    slow = place(placed(jobs, ["a", "b"], a=30.0, b=30.0, c=30.0))
    assert firsts(slow) == {"a": 1, "b": 1}  # a turn has to be longer than that


def test_few_chunks_are_loaded_for_by_few() -> None:
    """An urgent job of one block makes one worker swap, and not all; the others go on."""
    little = replace(job("little", waiting=1, priority=2), model="b")
    state = placed([of("a", "bulk"), little], ["a"] * 8, a=5.0)
    made = decide(state, passes())
    assert Counter(share[0].job for share in made.shares.values()) == {"bulk": 7, "little": 1}


def test_who_has_nothing_to_stay_for_loads() -> None:
    """A worker without a model, or with one that no job wants, is the one that loads."""
    for idle in ("", "unwanted"):
        little = replace(job("little", waiting=1), model="b")
        made = place(placed([of("a", "bulk"), little], ["a", "a", idle]))
        assert made.queue("worker-2")[0].job == "little"
        assert firsts(made) == {"bulk": 2, "little": 1}


def test_work_that_is_shorter_than_a_loading_is_left_to_who_has_the_model() -> None:
    """A second worker loads a model only if that is done before the first one could do it all."""
    jobs = [replace(job("short", waiting=30), model="b")]
    tokens = jobs[0].waiting_tokens
    for load, both in ((tokens / 1000.0 / 1.5, False), (tokens / 1000.0 / 2.5, True)):
        made = place(placed(jobs, ["b", "a"], b=load))
        assert bool(made.queue("worker-1")) is both
    assert firsts(place(placed(jobs, ["b", "a"]))) == {"short": 2}  # nobody knows how long it takes


def test_a_job_that_still_grows_is_worth_all_workers() -> None:
    """Nobody knows how much is to come of a corpus that is still read."""
    growing = replace(job("growing", waiting=1, state="open"), model="b")
    assert firsts(place(placed([growing], ["", "", ""], b=60.0))) == {"growing": 3}


def test_who_is_busy_for_long_does_not_count() -> None:
    """A worker that has the model, and hangs, keeps no other from loading it."""
    little = replace(job("little", waiting=1, leases=[("worker-0", 1)]), model="b")
    state = placed([little], ["b", "a"], b=1.0)
    assert not place(state).queue("worker-1")
    hung = replace(state.workers[0], held_seconds=60.0)
    assert place(replace(state, workers=(hung, state.workers[1]))).queue("worker-1")


def test_who_refused_a_job_does_not_count() -> None:
    """A worker that has the model, and cannot take the job, keeps no other from loading it."""
    little = replace(job("little", waiting=1), model="b")
    state = placed([little], ["b", "a"])
    refusing = replace(state.workers[0], refused=frozenset({"little"}))
    made = decide(replace(state, workers=(refusing, state.workers[1])), passes())
    assert made.shares["worker-1"][0].job == "little"


def test_a_model_that_does_not_fit_is_not_stayed_with() -> None:
    """A worker whose model is larger than its device is said to be takes other work, others it."""
    state = placed([of("a", "here"), of("b", "there")], ["a", "b"])
    small = replace(state.workers[0], memory_bytes=1)
    state = replace(state, workers=(small, state.workers[1]), model_bytes={"a": 2})
    made = decide(state, passes())
    assert [share.job for share in made.shares["worker-0"]] == ["there"]
    assert "here" in {share.job for share in made.shares["worker-1"]}


def test_a_job_that_has_waited_long_gets_one_worker() -> None:
    """A job that rose by its age makes one worker load its model; a more urgent one takes all."""
    here = of("a", "here", 0.0)
    for priority, workers in ((0, 1), (1, 4)):
        there = of("b", "there", 0.0)
        there = replace(there, status=replace(there.status, priority=priority))
        state = replace(placed([here, there], ["a"] * 4), jobs=(here, there))
        tiers = Draft(state=state, tiers=((there,), (here,)))
        made = Affinity(SETTINGS)(tiers)
        assert firsts(made)["there"] == workers if priority else firsts(made)["there"] >= workers


@pytest.mark.parametrize(("loaded", "leaves"), [(49.0, False), (51.0, True)])
@pytest.mark.parametrize("known", [{"a": 5.0}, {"a": 1.0, "b": 5.0}])
def test_a_job_that_has_waited_long_is_not_loaded_for_again_and_again(
    known: dict[str, float], loaded: float, *, leaves: bool
) -> None:
    """A worker works ten times as long as it will load since it loaded, unknown models included."""
    here, there = of("a", "here", 9.0), of("b", "there", 9.0)
    state = placed([here, there], ["a"], **known)
    (worker,) = state.workers
    state = replace(state, workers=(replace(worker, loaded_seconds=loaded),))
    made = Affinity(SETTINGS)(Draft(state=state, tiers=((there,), (here,))))
    assert (made.queue(worker.name)[0] is there) is leaves


@pytest.mark.parametrize(("load", "early"), [(2.5, False), (3.5, True)])
@pytest.mark.parametrize("known", ["a", "ab"])
def test_the_next_model_is_loaded_ahead(load: float, known: str, *, early: bool) -> None:
    """A worker whose own work ends before the next model is loaded loads that one meanwhile.

    A model that nobody has loaded yet is taken to need as long as the worker's own.
    """
    jobs = [replace(job("here", waiting=30), model="a"), of("b", "there")]
    assert jobs[0].waiting_tokens == 3000  # three seconds
    state = placed(jobs, ["a"], **dict.fromkeys(known, load))
    made = decide(state, passes(), explain=True)
    assert [each.job for each in made.shares["worker-0"] if not each.ahead] == ["here", "there"]
    assert [each.job for each in made.shares["worker-0"] if each.ahead] == ["there"] * early
    told = "worker-0 loads b ahead for there, if there is room"
    assert (("affinity", told, "worker-0") in made.notes) is early


def test_no_more_load_ahead_than_the_work_is_worth() -> None:
    """Eight workers whose work ends load no more copies of the next model than it keeps busy."""
    little = replace(job("little", waiting=2), model="b")
    jobs = [replace(job("here", waiting=30), model="a"), little]
    made = decide(placed(jobs, ["a"] * 8, a=60.0, b=60.0), passes())
    assert sum(each.ahead for shares in made.shares.values() for each in shares) <= 1
    growing = replace(jobs[0], status=replace(jobs[0].status, state="open"))
    made = decide(placed([growing, of("b", "there")], ["a"], a=60.0, b=60.0), passes())
    assert not any(each.ahead for each in made.shares["worker-0"]), "nobody knows when it ends"


@pytest.mark.parametrize(("ahead", "first"), [(0, "ending"), (35, "ending"), (36, "long")])
def test_the_job_that_ends_soon_is_ended_first(ahead: float, first: str) -> None:
    """A worker ends a job within a loading, to have room, unless that has had much more."""
    ending = job("ending", waiting=30, service=Service(50.0 + ahead, 0.0, 0.0))
    jobs = [replace(ending, model="a"), of("b", "long", 50.0), of("c", "next", 50.0)]
    state = placed(jobs, ["a+b"], a=3.5, b=3.5, c=3.5)
    assert place(state).queue("worker-0")[0].job == first
    alone = place(replace(state, jobs=state.jobs[:2]))
    assert alone.queue("worker-0")[0].job == ("ending" if ahead == 0 else "long")


def test_loading_is_told() -> None:
    """The notes say who loads what for which job, and who waits for others."""
    little = replace(job("little", waiting=1), model="b")
    made = place(placed([little], ["", "a"]))
    notes = {note.worker: note.words for note in made.notes if note.name == "affinity"}
    assert notes == {
        "worker-0": "worker-0 loads b for little",
        "worker-1": "worker-1 waits: others have the models that work waits for",
    }


# On a virtual clock.


def run(scenario: Scenario, seeds: int = 3) -> list[Outcome]:
    """Return the outcomes of a scenario."""
    return [simulate(scenario, "fair", SETTINGS, seed) for seed in range(seeds)]


def test_two_jobs_do_not_swap_in_lockstep() -> None:
    """Two workers and two jobs of two models: each worker loads one model, and stays with it."""
    work = (Work(60.0, "one", model="a"), Work(60.0, "two", arrives_seconds=3.0, model="b"))
    scenario = Scenario("two", "", TWO, work, load_seconds={"a": 5.0, "b": 5.0})
    for made in run(scenario):
        # At the end the one who is done first may help.
        assert len(made.loads) <= 4
        assert made.efficiency >= 0.85


@pytest.mark.parametrize("load", [5.0, 30.0, 120.0])
def test_models_that_do_not_fit_together_do_not_swap_for_ever(load: float) -> None:
    """A worker with room for one of three models works ten times as long as it loads.

    Each job has waited long by the time that another one's model is loaded, and is behind it.
    """
    scenario = three_models(240.0, load, 1)
    for made in run(scenario):
        assert least_seconds(scenario, beside=False) / made.makespan >= 0.9
        assert len(made.loads) <= 3 + 3 * 240.0 / (LOADS_WORTH * load)


def three_models(seconds: float, load: float, rooms: int) -> Scenario:
    """Return a job of each of three models on one worker that holds so many of them."""
    machine = replace(Machine(40_000.0), memory_bytes=rooms * MODEL_BYTES)
    work = tuple(Work(seconds, f"job-{model}", model=model) for model in "abc")
    loads, sizes = dict.fromkeys("abc", load), dict.fromkeys("abc", MODEL_BYTES)
    return Scenario("three", "", (machine,), work, load_seconds=loads, model_bytes=sizes)


@pytest.mark.slow
def test_schedules_beside_the_oracle() -> None:
    """The makespans of docs/scheduling.md, of which the least one that there is, is so much."""
    both = [2 * MODEL_BYTES, 4 * MODEL_BYTES] * 4
    cases = {
        "five models, eight workers, one each": (five_models([0] * 8), False),
        "five models, eight workers, two or four each": (five_models(both), True),
    }
    for seconds, load, rooms in product((240.0, 1200.0), (5.0, 30.0, 120.0), (1, 2)):
        name = f"three, one worker, {rooms} each, jobs of {seconds:.0f} s, loads of {load:.0f} s"
        cases[name] = three_models(seconds, load, rooms), rooms > 1
    for name, (scenario, beside) in cases.items():
        least = least_seconds(scenario, beside=beside)
        outcomes = run(scenario, 5)
        found = sorted(least / made.makespan for made in outcomes)
        loads = sorted(len(made.loads) for made in outcomes)
        line = f"{name}: {found[0]:.1%} to {found[-1]:.1%}; {loads[0]} to {loads[-1]} loads\n"
        sys.stdout.write(line)
        assert found[0] >= 0.9


def test_an_urgent_job_of_ten_chunks_costs_one_swap() -> None:
    """One worker of eight loads for it, and loads its own model again: the others stay."""
    urgent = Work(0.002, "urgent", arrives_seconds=20.0, priority=2, model="b")
    work = (Work(60.0, "bulk", model="a"), urgent)
    scenario = Scenario("urgent", "", spread(8), work, load_seconds={"a": 5.0, "b": 5.0})
    for made in run(scenario):
        assert len(made.loads) == 8 + 2
        assert made.job_ended["urgent"] - 20.0 <= 5.0 + 2 * SETTINGS.micro_batch_seconds_max


@pytest.mark.parametrize("seeds", SEEDS)
def test_many_models_with_long_loads_hardly_cost_more(seeds: int) -> None:
    """Five models of 5 to 120 s of loading on eight unequal workers come near the ideal.

    They come nearer to what could be done by whoever knows the future, and must load models too.
    """
    scenario = five_models([0] * 8)
    least = least_seconds(scenario, beside=False)
    for made in run(scenario, seeds):
        assert made.efficiency >= 0.85
        assert least / made.makespan >= 0.9
        assert len(made.loads) <= 40


@pytest.mark.parametrize("seeds", SEEDS)
def test_workers_that_hold_several_models_cost_less(seeds: int) -> None:
    """Workers with memory for two or four of five models come nearer, also with urgent jobs.

    An urgent job is done within seconds, though loading its model may take two minutes.
    """
    rooms = [2 * MODEL_BYTES, 4 * MODEL_BYTES] * 4
    scenario = five_models(rooms)
    least = least_seconds(scenario, beside=True)
    for made in run(scenario, seeds):
        assert made.efficiency >= 0.9
        assert least / made.makespan >= 0.9
    urgent = tuple(
        Work(0.5, f"urgent-{n}", arrives_seconds=60.0 + 100 * n, model=f"m{n % 5}", priority=2)
        for n in range(8)
    )
    for made in run(five_models(rooms, urgent), seeds):
        assert made.efficiency >= 0.9
        assert len(made.loads) <= 80
        assert max(made.job_ended[each.name] - each.arrives_seconds for each in urgent) <= 15.0


def five_models(rooms: Sequence[int], further: tuple[Work, ...] = ()) -> Scenario:
    """Return a long job of each of five models on eight workers of so much memory, 0 for any."""
    loads = {f"m{n}": seconds for n, seconds in enumerate((5.0, 10.0, 30.0, 60.0, 120.0))}
    work = tuple(
        Work(240.0, f"job-{name}", arrives_seconds=10.0 * n, model=name)
        for n, name in enumerate(loads)
    )
    machines = tuple(
        replace(machine, memory_bytes=room) for machine, room in zip(spread(8), rooms, strict=True)
    )
    sizes = dict.fromkeys(loads, MODEL_BYTES)
    return Scenario("five", "", machines, (*work, *further), load_seconds=loads, model_bytes=sizes)
