"""The command line: the only place that sees every station.

Exit statuses: 0 done, 1 failed, 2 wrong usage or configuration, 3 finished with failed chunks,
75 the farm is full (try again later, as sysexits.h has it), 130 interrupted and resumable.
"""


def main() -> None:
    """Run the command line of `embedfarm`."""
    from embedfarm.cli.app import app

    app()
