"""Writing of results to disk in a thread of its own, while the next ones are fetched."""

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Self

from embedfarm.contract.records import Result


class Writer:
    """Calls `keep` for each result in order, a few results behind.

    Hashing, encoding and writing leave the interpreter's lock alone, so that fetching goes on.

    Args:
        keep: Function that takes one result; called in one thread.
        results_max: Most results that may wait.
    """

    def __init__(self, keep: Callable[[Result], None], results_max: int) -> None:
        self._keep = keep
        self._results_max = results_max
        self._failed = False
        self._waiting: deque[Future[None]] = deque()
        self._thread = ThreadPoolExecutor(1, "writer")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._thread.shutdown(cancel_futures=True)

    def put(self, result: Result) -> None:
        """Hand over a result, as soon as there is room for it.

        Raises:
            Exception: Whatever `keep` raised for an earlier one.
        """
        while len(self._waiting) >= self._results_max:
            self._waiting.popleft().result()
        self._waiting.append(self._thread.submit(self._keep_unless_failed, result))

    def _keep_unless_failed(self, result: Result) -> None:
        """Keep a result, unless one before it could not be kept."""
        if self._failed:
            return
        try:
            self._keep(result)
        except BaseException:
            self._failed = True
            raise

    def flush(self) -> None:
        """Wait until all results are kept.

        Raises:
            Exception: Whatever `keep` raised.
        """
        while self._waiting:
            self._waiting.popleft().result()
