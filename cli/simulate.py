"""`embedfarm simulate`: try the scheduler out before it is trusted."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from embedfarm.cli.options import (
    USAGE,
    AsJson,
    Devices,
    RedisUrl,
    fail,
    farm_settings,
    plain_errors,
    print_json,
    read_settings,
)
from embedfarm.cli.plan import tell_forecast
from embedfarm.contract.job_spec import JobSpec
from embedfarm.contract.settings import DEFAULT_MODEL, Settings
from embedfarm.readers import CorpusOptions
from embedfarm.runs.request import Request, tokenizer_file
from embedfarm.watch.corpus_sample import take_sample
from embedfarm.watch.forecast import (
    CHUNK_TOKENS,
    forecast,
    remembered_speeds,
)

if TYPE_CHECKING:
    from embedfarm.scheduler.simulation.scenario import Machine, Scenario
    from embedfarm.scheduler.simulation.suite import Row

ALL_POLICIES = "fair,rounds,fixed,adaptive"
SECONDS_MAX = 100_000.0
MARK = "<!-- {} workers -->\n"
MARK_END = "<!-- end -->\n"

Names = Annotated[
    str, typer.Option("--scenario", help="Scenarios, with commas between; --list shows them.")
]
Suite = Annotated[bool, typer.Option("--suite", help="The seven scenarios of docs/scheduling.md.")]
Policies = Annotated[str, typer.Option(help="Policies side by side, with commas between.")]
Workers = Annotated[int, typer.Option(min=2, help="Modelled workers, the fastest 4 x the slowest.")]
CpuWorkers = Annotated[int, typer.Option(min=0, help="With --plan: CPU workers, as for `embed`.")]
Speeds = Annotated[
    str, typer.Option(help="Tokens per second of each worker instead, with commas between.")
]
FromHistory = Annotated[
    bool, typer.Option("--from-history", help="Workers as the farm at --redis remembers them.")
]
Model = Annotated[str, typer.Option(help="Model of --from-history and --plan.")]
Seeds = Annotated[
    int, typer.Option(min=1, help="Runs of each scenario; the same seed gives the same run.")
]
Seconds = Annotated[
    float,
    typer.Option(
        min=0, max=SECONDS_MAX, help="Size of the job at the speed of all workers; 0: as it is."
    ),
]
Lengths = Annotated[
    Path | None, typer.Option(help="A corpus whose chunk lengths the job has, as for `embed`.")
]
Timeline = Annotated[
    Path | None, typer.Option(help="Draw the first scenario, policy and seed: a .png or .svg.")
]
Plan = Annotated[
    list[str] | None,
    typer.Option(help="Forecast how long this corpus will take, without embedding it."),
]
Report = Annotated[
    Path | None, typer.Option(help="Put the table into this file, between its marks.")
]
List = Annotated[bool, typer.Option("--list", help="Show scenarios and policies, and end.")]


def simulate(  # noqa: PLR0913, PLR0917 -- each is a flag
    names: Names = "wrong-history",
    suite: Suite = False,  # noqa: FBT002 -- a flag
    policies: Policies = ALL_POLICIES,
    workers: Workers = 8,
    speeds: Speeds = "",
    from_history: FromHistory = False,  # noqa: FBT002 -- a flag
    model: Model = DEFAULT_MODEL,
    seeds: Seeds = 40,
    seconds: Seconds = 0.0,
    lengths: Lengths = None,
    timeline: Timeline = None,
    report: Report = None,
    plan: Plan = None,
    devices: Devices = "all",
    cpu_workers: CpuWorkers = 0,
    show: List = False,  # noqa: FBT002 -- a flag
    redis: RedisUrl = "",
    as_json: AsJson = False,  # noqa: FBT002 -- a flag
) -> None:
    """Run the scheduler's own core against modelled workers, on a virtual clock.

    Each cell is the ideal makespan (all workers share all work without friction) over the
    simulated one: the mean over the seeds and the 5th percentile, in per cent.
    """
    from embedfarm.scheduler.policies import POLICIES
    from embedfarm.scheduler.simulation.scenario import Machine, more_scenarios
    from embedfarm.scheduler.simulation.scenario import suite as seven

    settings = farm_settings(redis) if from_history else read_settings(redis)
    spec = JobSpec(model=model)
    if plan:
        with plain_errors():
            made = forecast(_request(plan, spec, settings), settings, devices, cpu_workers)
            tell_forecast(made, as_json=as_json)
        return
    with plain_errors():
        tokens = [] if lengths is None else _lengths(lengths, spec, settings)
        if from_history:
            mean = sum(tokens) / len(tokens) if tokens else CHUNK_TOKENS
            machines = tuple(map(Machine, remembered_speeds(spec, settings, mean)))
        else:
            machines = _machines(workers, speeds)
        known = {each.name: each for each in (*seven(machines), *more_scenarios(machines))}
        chosen = [each.name for each in seven(machines)] if suite else names.split(",")
        wanted = policies.split(",")
        if show:
            _show(known.values(), POLICIES)
            return
        for name, there in [*((n, known) for n in chosen), *((p, POLICIES) for p in wanted)]:
            if name not in there:
                fail(f"{name!r} is none of {', '.join(there)}", USAGE)
        scenarios = [_resize(known[name], seconds, tokens) for name in chosen]
        rows = _run(scenarios, wanted, seeds, settings, quiet=as_json)
        if timeline is not None:
            _draw(scenarios[0], wanted[0], settings, timeline)
        if report is not None:
            _write(report, rows, scenarios)
    if as_json:
        print_json([asdict(row) for row in rows])
    else:
        _print(rows, scenarios, wanted)


def _request(corpus: Sequence[str], spec: JobSpec, settings: Settings) -> Request:
    """Return the request to embed a corpus that is read as it comes."""
    options = CorpusOptions(tokenizer_file=tokenizer_file(corpus, spec.model, settings))
    return Request(tuple(corpus), options, skip_bad_rows=False, spec=spec, sink="parquet")


def _lengths(corpus: Path, spec: JobSpec, settings: Settings) -> list[int]:
    """Return the estimated tokens of each chunk of a corpus."""
    sample = take_sample(_request([str(corpus)], spec, settings), settings)
    return list(map(int, sample.lengths))


def _machines(workers: int, speeds: str) -> "tuple[Machine, ...]":
    """Return the modelled workers: with speeds evenly spread, or as given."""
    from embedfarm.scheduler.simulation.scenario import Machine, spread

    if not speeds:
        return spread(workers)
    try:
        given = [float(each) for each in speeds.split(",")]
    except ValueError as error:
        fail(f"--speeds: {error}", USAGE)
    if not all(0 < each < math.inf for each in given):  # NaN is not, either
        fail("--speeds: each must be a number of more than 0", USAGE)
    return tuple(map(Machine, given))


def _resize(scenario: "Scenario", seconds: float, lengths: Sequence[int]) -> "Scenario":
    """Return the scenario with another size or other chunks of its jobs."""
    if seconds:
        times = seconds / sum(work.seconds for work in scenario.work)
        work = tuple(replace(each, seconds=each.seconds * times) for each in scenario.work)
        scenario = replace(scenario, work=work)
    if lengths:
        work = tuple(replace(each, lengths=lengths) for each in scenario.work)
        scenario = replace(scenario, work=work)
    return scenario


def _run(
    scenarios: "Sequence[Scenario]",
    policies: Sequence[str],
    seeds: int,
    settings: Settings,
    *,
    quiet: bool,
) -> "list[Row]":
    """Simulate all rows, with a progress bar unless it must be quiet."""
    from embedfarm.scheduler.simulation.suite import compare

    with Progress(console=Console(stderr=True), transient=True, disable=quiet) as progress:
        task = progress.add_task("simulating", total=len(scenarios) * len(policies) * seeds)
        return list(compare(scenarios, policies, seeds, settings, lambda: progress.advance(task)))


def _draw(scenario: "Scenario", policy: str, settings: Settings, path: Path) -> None:
    """Draw the timeline of one run."""
    from embedfarm.scheduler.simulation.suite import simulate as run
    from embedfarm.scheduler.simulation.timeline import draw_timeline

    if path.suffix not in {".png", ".svg"}:
        fail(f"--timeline: {path} is neither .png nor .svg", USAGE)
    draw_timeline(run(scenario, policy, settings, 0), f"{scenario.about}; {policy}", path)


def _write(path: Path, rows: "Sequence[Row]", scenarios: "Sequence[Scenario]") -> None:
    """Put the table between the marks for so many workers; anything else in the file stays."""
    from embedfarm.scheduler.simulation.suite import to_markdown

    text = path.read_text(encoding="utf-8")
    begin = MARK.format(rows[0].workers)
    before, found, rest = text.partition(begin)
    _, ended, after = rest.partition(MARK_END)
    if not found or not ended:
        fail(f"{path} has no {begin.strip()} … {MARK_END.strip()}", USAGE)
    table = to_markdown(rows, scenarios)
    path.write_text(f"{before}{begin}\n{table}\n{MARK_END}{after}", encoding="utf-8")


def _print(rows: "Sequence[Row]", scenarios: "Sequence[Scenario]", policies: Sequence[str]) -> None:
    table = Table(box=None, pad_edge=False)
    for column in ("scenario", "", *policies):
        table.add_column(column, justify="right" if column in policies else "left")
    for scenario in scenarios:
        found = {row.policy: row for row in rows if row.scenario == scenario.name}
        cells = [
            f"{100 * found[each].efficiency_mean:.1f} / {100 * found[each].efficiency_p5:.1f}"
            for each in policies
        ]
        table.add_row(scenario.name, scenario.about, *cells)
    console = Console(highlight=False)
    console.print(table)
    row = rows[0]
    console.print(
        f"{row.workers} workers, {row.seeds} seeds; per cent of the ideal: mean / 5th percentile"
    )


def _show(scenarios: "Iterable[Scenario]", policies: Mapping[str, Sequence[str]]) -> None:
    console = Console(highlight=False)
    table = Table(box=None, pad_edge=False, show_header=False)
    for scenario in scenarios:
        table.add_row(scenario.name, scenario.about)
    console.print(table)
    console.print()
    table = Table(box=None, pad_edge=False, show_header=False)
    for policy, passes in policies.items():
        table.add_row(policy, " → ".join(passes))
    console.print(table)
