"""The verbs of the command line, as one typer app."""

import typer

from embedfarm.cli import (
    batch,
    bench,
    embed,
    ingest,
    inspection,
    jobs,
    keys,
    outputs,
    reconcile,
    roles,
    scheduler,
    simulate,
    top,
)

app = typer.Typer(
    name="embedfarm",
    help="Turn a corpus into vectors on every device you have.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)
app.command(epilog=embed.EXIT_CODES)(embed.embed)
app.command()(batch.batch)
app.command()(outputs.verify)
app.command()(outputs.search)
app.command()(outputs.export)
app.command()(reconcile.reconcile)
app.command()(bench.bench)
app.command()(simulate.simulate)
app.command()(roles.up)
app.command()(roles.schedule)
app.command()(roles.work)
app.command()(ingest.ingest)
app.command()(roles.serve)
app.add_typer(keys.keys_app, name="keys")
app.add_typer(scheduler.scheduler_app, name="scheduler")
app.add_typer(jobs.jobs_app, name="jobs")
app.command()(top.top)
app.command()(inspection.workers)
app.command()(inspection.devices)
app.command()(inspection.doctor)
