"""Runs many seeds, or one of them with its log.

python -m tests.simulation --seeds 1000 --seed0 0     many, on all cores
python -m tests.simulation --seed 17                  one, with all that happens in it
"""

import os
import sys

if os.environ.get("PYTHONHASHSEED") != "0":  # sets are iterated in the same order in every run
    os.execve(sys.executable, [sys.executable, "-m", "tests.simulation", *sys.argv[1:]],  # noqa: S606 # ourselves
              {**os.environ, "PYTHONHASHSEED": "0"})  # fmt: skip

from tests.simulation.library import production

if __name__ == "__main__":
    production("tests.simulation.run")
    from tests.simulation.soak import main

    sys.exit(main())
