"""Forecasts of jobs on the terminal: `embedfarm embed --plan`, `embedfarm simulate --plan`."""

from dataclasses import asdict
from typing import TYPE_CHECKING

from rich.console import Console

from embedfarm.cli.options import print_json
from embedfarm.contract.formatting import counted, format_seconds

if TYPE_CHECKING:
    from embedfarm.runs.place import Place
    from embedfarm.runs.request import Request
    from embedfarm.watch.forecast import Forecast


def plan_job(request: "Request", place: "Place", *, as_json: bool) -> None:
    """Forecast a job, print the forecast, and keep it beside the output for the job's end."""
    from embedfarm.collector.output_directory import State, read_state
    from embedfarm.runs.budget import keep_estimate
    from embedfarm.runs.versions import pin_versions
    from embedfarm.watch.forecast import forecast

    request = pin_versions(request, place.out)
    made = forecast(request, place.settings, place.devices, place.workers)
    if read_state(place.out) is not State.FINISHED:
        keep_estimate(place.out, request, made.estimate)
    tell_forecast(made, as_json=as_json)


def tell_forecast(made: "Forecast", *, as_json: bool) -> None:
    """Print a forecast: the size of the job, the speed of the workers, and what follows."""
    if as_json:
        print_json(asdict(made))
        return
    console = Console(highlight=False, soft_wrap=True)
    console.print(f"{counted(made.chunks, 'chunk')}, about {made.tokens:,} tokens")
    speed = f"{made.tokens_per_second:,.0f} tokens/s by {made.source}"
    console.print(f"{counted(made.workers, 'worker')}, {speed}")
    console.print(f"about {format_seconds(made.seconds)}: {made.estimate.words}")
