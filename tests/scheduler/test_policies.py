"""Tests of policies, which are lists of passes by name: our own, and those of packages."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib.metadata import EntryPoint

import pytest

from embedfarm.contract.records import JobShare
from embedfarm.scheduler import policies
from embedfarm.scheduler.passes import PassFailed, decide
from embedfarm.scheduler.passes.order import FirstCome
from embedfarm.scheduler.policies import (
    DEFAULT_POLICY,
    POLICIES,
    PolicyRefused,
    UnknownPass,
    check_policy,
    make_passes,
    pass_names,
)
from embedfarm.scheduler.state import Draft
from tests.scheduler.conftest import Install
from tests.scheduler.support import SETTINGS, farm, job

REVERSE = """
from dataclasses import dataclass, replace

@dataclass(frozen=True)
class Own:
    settings: object
    name: str = "reverse"

    def __call__(self, draft):
        assert self.settings is not None
        return replace(draft, tiers=draft.tiers[::-1])
"""


@pytest.mark.parametrize("policy", POLICIES)
def test_every_policy_can_be_had(policy: str) -> None:
    """Each policy names passes that exist, in their order, and gives workers something to do."""
    check_policy(POLICIES[policy], SETTINGS)
    assert [each.name for each in make_passes(POLICIES[policy], SETTINGS)] == list(POLICIES[policy])


def test_the_default_is_one_of_them() -> None:
    """The policy that a farm follows when nobody has chosen exists."""
    assert DEFAULT_POLICY in POLICIES


def test_every_pass_goes_by_its_name() -> None:
    """A pass is listed, added, removed and explained under one name."""
    for name in pass_names():
        (made,) = make_passes([name], SETTINGS)
        assert made.name == name


def test_the_order_of_names_is_the_order_of_passes() -> None:
    """Passes are made in the order of their names, and a pass may come twice."""
    names = ["size", "defer", "fcfs", "defer"]
    assert [each.name for each in make_passes(names, SETTINGS)] == names


def test_an_unknown_pass_is_refused() -> None:
    """The error about an unknown pass names it, and the passes that exist."""
    with pytest.raises(UnknownPass, match=r"no pass is called 'nonsense'; .*affinity.*tail"):
        make_passes(["defer", "nonsense"], SETTINGS)


def test_a_package_may_bring_a_pass(install: Install) -> None:
    """A package's pass is listed among the others, and works beside them."""
    install("reverse", REVERSE)
    assert "reverse" in pass_names()
    jobs = [job("old", waiting=1, created_ms=1), job("new", waiting=1, created_ms=2)]
    passes = make_passes(["fcfs", "reverse", "size"], SETTINGS)
    (first, _) = decide(farm(jobs, {"worker": 1000}), passes).shares["worker"]
    assert first.job == "new"


def test_our_own_pass_is_not_replaced(install: Install) -> None:
    """A package's pass with one of our names does not replace ours."""
    install("fcfs", REVERSE)
    assert make_passes(["fcfs"], SETTINGS) == (FirstCome(),)
    assert pass_names().count("fcfs") == 1


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("import nothing_like_this", "No module named 'nothing_like_this'"),
        ("Other = 1", "has no attribute 'Own'"),
        ("class Own:\n    def __init__(self, settings):\n        raise OSError('disk')", "disk"),
    ],
)
def test_a_package_that_does_not_load_is_named(install: Install, source: str, reason: str) -> None:
    """The error about a package that does not load says which pass it has, and why."""
    install("broken", source)
    with pytest.raises(UnknownPass, match=rf"'broken' of own_passes:Own does not load: .*{reason}"):
        make_passes(["broken"], SETTINGS)


def test_the_group_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """An entry point of another group is no pass."""
    other = EntryPoint("other", "own_passes:Own", "another.group")

    def entry_points(group: str, **_names: str) -> list[EntryPoint]:
        return [other] if group == other.group else []

    monkeypatch.setattr(policies, "entry_points", entry_points)
    assert "other" not in pass_names()


def test_a_failing_pass_is_named() -> None:
    """The error about a pass that fails names it, and has its error as the cause."""

    class Broken:
        name = "broken"

        def __call__(self, _draft: object) -> object:
            raise KeyError("oops")

    with pytest.raises(PassFailed, match="KeyError: 'oops'") as raised:
        decide(farm([], {}), [*make_passes(["defer"], SETTINGS), Broken()])  # type: ignore[list-item] # so do those of others
    assert raised.value.name == "broken"
    assert isinstance(raised.value.__cause__, KeyError)


@dataclass(frozen=True)
class Strange:
    """A pass that somebody else has written."""

    act: Callable[[Draft], object]
    name: str = "strange"

    def __call__(self, draft: Draft) -> Draft:
        """Do whatever the test wants."""
        return self.act(draft)  # type: ignore[return-value] # so do those of others


SHARE = (JobShare(job="one", tokens=1, blocks=1),)
WRONG: dict[str, Callable[[Draft], object]] = {
    "gives NoneType, no draft": lambda _draft: None,
    "gives tuple, no draft": lambda draft: draft.tiers,
    "another state": lambda draft: replace(draft, state=farm([], {})),
    "no plan for other": lambda draft: replace(draft, shares={"worker": SHARE}),
    "a plan for nobody-here": lambda d: replace(d, shares={**d.shares, "nobody-here": SHARE}),
    "loses the job one": lambda draft: replace(draft, tiers=(draft.tiers[0][1:],)),
    "has the job one twice": lambda draft: replace(draft, tiers=(*draft.tiers, *draft.tiers)),
    "makes the job new up": lambda d: replace(d, tiers=(*d.tiers, (job("new", waiting=1),))),
}


@pytest.mark.parametrize("reason", WRONG)
@pytest.mark.parametrize("then", [[], ["defer", "size"]])
def test_what_is_no_plan_is_blamed_on_its_pass(reason: str, then: list[str]) -> None:
    """A pass that gives nonsense is named, and not the one after it."""
    state = farm([job("one", waiting=9), job("two", waiting=9)], {"worker": 1000, "other": 1000})
    strange = Strange(WRONG[reason])
    passes = [*make_passes(["defer", "size"], SETTINGS), strange, *make_passes(then, SETTINGS)]
    with pytest.raises(PassFailed, match=reason) as raised:
        decide(state, passes, explain=True)
    assert raised.value.name == "strange"


def test_a_pass_may_defer_a_job_and_say_so() -> None:
    """A job that a pass leaves out is not lost if a note says that it is deferred."""

    def wait(draft: Draft) -> Draft:
        kept = replace(draft, tiers=tuple(tier[1:] for tier in draft.tiers if tier[1:]))
        return kept.note("strange", ["one deferred: not on a Sunday"])

    state = farm([job("one", waiting=9), job("two", waiting=9)], {"worker": 1000})
    made = decide(state, [Strange(wait), *make_passes(["size"], SETTINGS)], explain=True)
    assert [share.job for share in made.shares["worker"]] == ["two"]


@pytest.mark.parametrize("names", [[], ["defer", "fair", "tail"]])
def test_a_policy_that_gives_nobody_work_is_refused(names: list[str]) -> None:
    """A policy without a pass that sizes, under which all workers stand still, is refused."""
    with pytest.raises(PolicyRefused, match="no worker would get anything to do"):
        check_policy(names, SETTINGS)


def test_a_policy_that_loses_jobs_is_refused(install: Install) -> None:
    """A policy whose pass loses jobs is refused when it is chosen, by the name of the pass."""
    install("broken", REVERSE.replace("draft.tiers[::-1]", "()"))
    with pytest.raises(PolicyRefused, match=r"pass reverse fails: .* loses the job job"):
        check_policy(["size", "broken"], SETTINGS)


def test_a_policy_that_fails_is_refused(install: Install) -> None:
    """A policy with a pass that raises is refused when it is chosen."""
    install("broken", REVERSE.replace("draft.tiers[::-1]", "1 / 0"))
    with pytest.raises(PolicyRefused, match="pass reverse fails: ZeroDivisionError"):
        check_policy(["broken", "size"], SETTINGS)
