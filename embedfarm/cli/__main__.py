"""`python -m embedfarm.cli`: the command line of this very installation, for child processes."""

from embedfarm.cli import main

main()
