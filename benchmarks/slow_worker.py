"""A worker process on a slower device: `python -m benchmarks.slow_worker --device cpu-1`.

The process is that of any worker, but its null engine takes a multiple of the time: as many times
as long as `EMBEDFARM_BENCHMARK_SLOWDOWN` says, a JSON object of factors by device.
"""

import json
import os
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from embedfarm.contract.job_spec import JobSpec
from embedfarm.contract.processes import Child
from embedfarm.contract.settings import Settings
from embedfarm.workers import main, model_store
from embedfarm.workers.engines.null import NullEngine

SLOWDOWN: Final = "EMBEDFARM_BENCHMARK_SLOWDOWN"
ROOT: Final = Path(__file__).parents[1]


def slow_workers(settings: Settings, slowdown: Mapping[str, float]) -> list[Child]:
    """Return a worker process for each device; the server is `settings.redis_url`."""
    environment = settings.environment() | {
        SLOWDOWN: json.dumps(slowdown),
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
    }
    command = [sys.executable, "-m", "benchmarks.slow_worker", "--device"]
    return [Child(f"worker-{device}", [*command, device], environment) for device in slowdown]


class SlowEngine(NullEngine):
    """A null engine that is slower than the model's name says."""

    slowdown: float = 1.0

    @classmethod
    def open(cls, spec: JobSpec) -> NullEngine:
        """Make the engine that `spec.model` describes, at a part of its speed."""
        engine = super().open(spec)
        return replace(engine, tokens_per_second=engine.tokens_per_second / cls.slowdown)


def open_slow(spec: JobSpec, *_: Any) -> NullEngine:  # noqa: ANN401 # as open_engine
    """Open the slow engine, in the place of `open_engine`."""
    return SlowEngine.open(spec)


if __name__ == "__main__":
    SlowEngine.slowdown = json.loads(os.environ[SLOWDOWN])[sys.argv[sys.argv.index("--device") + 1]]
    vars(model_store)["open_engine"] = open_slow  # where it is looked up
    sys.exit(main.main())
