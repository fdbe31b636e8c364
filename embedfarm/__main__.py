"""Entry point of `python -m embedfarm`: the command line, by the interpreter that runs already."""

from embedfarm.cli import main

main()
