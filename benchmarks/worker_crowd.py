"""Many workers in one process: `python -m benchmarks.worker_crowd --first 0 --count 200`.

Each is the worker that any process has, with all its threads, on `EMBEDFARM_REDIS_URL`. What a
thousand of them do to a server and a scheduler can so be seen on a machine that has no room for a
thousand processes. The threads are greenlets, since a kernel would switch between eight thousand
threads for most of its time.
"""

# ruff: noqa: E402 -- nothing may be imported before its threads are greenlets
from gevent import monkey

monkey.patch_all()

import argparse
import logging
import threading

from embedfarm.contract.processes import stop_when_asked
from embedfarm.contract.settings import Settings
from embedfarm.workers.worker import Worker


def main() -> None:
    """Work until SIGTERM."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--count", type=int, default=200)
    options = parser.parse_args()
    logging.basicConfig(level=logging.WARNING)
    settings, stop = Settings(), stop_when_asked()
    threads = []
    for number in range(options.first, options.first + options.count):
        worker = Worker(settings.redis_url, f"cpu-{number}", "a kind", "cpu", settings, stop, dict)
        threads.append(threading.Thread(target=worker.run))
        threads[-1].start()
    for thread in threads:
        thread.join()


if __name__ == "__main__":
    main()
