"""Command that simulates many seeds, or one of them with its log.

python -m tests.simulation --seeds 1000 --seed0 0     many, on all cores
python -m tests.simulation --seed 17                  one, with all that happens in it
python -m tests.simulation --seed 17 --shrink         the fewest operations that make it fail
"""

import os
import sys

# Sets are iterated in the same order in every run, should one of them ever decide anything.
if "PYTHONHASHSEED" not in os.environ:
    os.execve(sys.executable, [sys.executable, "-m", "tests.simulation", *sys.argv[1:]],  # noqa: S606 # ourselves
              {**os.environ, "PYTHONHASHSEED": "0"})  # fmt: skip

from tests.simulation.library import production

if __name__ == "__main__":
    production("tests.simulation.shrink")
    from tests.simulation.soak import main

    sys.exit(main())
