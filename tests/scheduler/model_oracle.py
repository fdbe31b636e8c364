"""The least time in which workers that must load models could do all jobs of a scenario.

It is the optimum of a mixed-integer program: which worker loads which model, and how long it works
with it. The program knows the future, lets jobs be divided at will, and leaves out arrivals, noise
and overheads, so that nobody can be quicker.
"""

from typing import Final

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp  # type: ignore[import-untyped]

from embedfarm.scheduler.simulation.scenario import Scenario

GAP: Final = 0.01  # of the optimum, at which it is near enough
SECONDS_MAX: Final = 60.0


def least_seconds(scenario: Scenario, *, beside: bool) -> float:
    """Return the least makespan of a scenario.

    Args:
        scenario: The scenario; each of its models must be in `load_seconds`.
        beside: Whether a worker works while it loads, once it has a first model.
    """
    speeds = np.array([machine.tokens_per_second for machine in scenario.machines])
    loads = np.array(list(scenario.load_seconds.values()))
    jobs = [
        sum(work.seconds for work in scenario.work if work.model == model)
        for model in scenario.load_seconds
    ]
    workers, models = len(speeds), len(loads)
    pairs = workers * models
    # The variables: seconds of each worker with each model; whether it loads it; the makespan.
    count = 2 * pairs + 1
    seconds = np.eye(pairs, count).reshape(workers, models, count)
    loaded = np.eye(pairs, count, pairs).reshape(workers, models, count)
    makespan = np.eye(1, count, count - 1)
    done = np.einsum("w,wmc->mc", speeds, seconds) / speeds.sum()
    spent = seconds.sum(axis=1) - makespan
    if not beside:
        spent += np.einsum("m,wmc->wc", loads, loaded)
    longest = sum(jobs) * speeds.sum() / speeds.min()
    only_with_it = (seconds - longest * loaded).reshape(pairs, count)
    found = milp(
        makespan[0],
        constraints=[
            LinearConstraint(done, lb=jobs),
            LinearConstraint(spent, ub=-loads.min() if beside else 0.0),
            LinearConstraint(only_with_it, ub=0.0),
        ],
        integrality=loaded.sum(axis=(0, 1)),
        bounds=Bounds(0.0, np.where(loaded.sum(axis=(0, 1)), 1.0, np.inf)),
        options={"time_limit": SECONDS_MAX, "mip_rel_gap": GAP},
    )
    return float(found.mip_dual_bound)
