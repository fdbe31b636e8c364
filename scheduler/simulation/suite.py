"""Comparison of policies, side by side in one scenario after another."""

import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from embedfarm.contract.settings import Settings
from embedfarm.scheduler.policies import POLICIES, make_passes
from embedfarm.scheduler.simulation.scenario import Scenario
from embedfarm.scheduler.simulation.simulated_farm import Outcome, Simulation


@dataclass(frozen=True)
class Row:
    """Figures of a policy in a scenario, over all seeds.

    Attributes:
        scenario: Name of the scenario.
        policy: Name of the policy.
        workers: Number of workers in the scenario.
        seeds: Number of seeds that were run.
        efficiency_mean: Mean of the fluid bound over the makespan.
        efficiency_p5: 5th percentile of the fluid bound over the makespan.
        makespan_mean: Mean makespan in seconds.
        batches_mean: Mean number of micro-batches.
        copied_mean: Mean share of the tokens that was leased a second time.
    """

    scenario: str
    policy: str
    workers: int
    seeds: int
    efficiency_mean: float
    efficiency_p5: float
    makespan_mean: float
    batches_mean: float
    copied_mean: float


def simulate(scenario: Scenario, policy: str, settings: Settings, seed: int) -> Outcome:
    """Run a scenario once under a policy.

    Raises:
        embedfarm.scheduler.simulation.simulated_farm.Stuck: The jobs are never done.
    """
    return Simulation(scenario, make_passes(POLICIES[policy], settings), settings, seed).run()


def compare(
    scenarios: Iterable[Scenario],
    policies: Sequence[str],
    seeds: int,
    settings: Settings,
    tick: Callable[[], None] = lambda: None,
) -> Iterator[Row]:
    """Yield a row for each scenario and policy; `tick` is called after every run."""
    for scenario in scenarios:
        for policy in policies:
            outcomes = []
            for seed in range(seeds):
                outcomes.append(simulate(scenario, policy, settings, seed))
                tick()
            yield _row(scenario, policy, outcomes)


def _row(scenario: Scenario, policy: str, outcomes: Sequence[Outcome]) -> Row:
    reached = [each.efficiency for each in outcomes]
    copied = [each.copied_tokens / sum(each.worker_tokens.values()) for each in outcomes]
    return Row(
        scenario=scenario.name,
        policy=policy,
        workers=len(scenario.machines),
        seeds=len(outcomes),
        efficiency_mean=statistics.fmean(reached),
        efficiency_p5=float(np.percentile(reached, 5)),
        makespan_mean=statistics.fmean(each.makespan for each in outcomes),
        batches_mean=statistics.fmean(len(each.spans) for each in outcomes),
        copied_mean=statistics.fmean(copied),
    )


def to_markdown(rows: Sequence[Row], scenarios: Iterable[Scenario]) -> str:
    """Format rows as a table: scenarios down, policies across; mean and 5th percentile in %."""
    policies = list(dict.fromkeys(row.policy for row in rows))
    about = {scenario.name: scenario.about for scenario in scenarios}
    lines = [f"| scenario | {' | '.join(policies)} |", f"|---|{'---|' * len(policies)}"]
    for name in dict.fromkeys(row.scenario for row in rows):
        found = {row.policy: row for row in rows if row.scenario == name}
        cells = [
            f"{100 * found[each].efficiency_mean:.1f} / {100 * found[each].efficiency_p5:.1f}"
            f" ({found[each].batches_mean:.0f})"
            for each in policies
        ]
        lines.append(f"| {name}: {about[name]} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"
