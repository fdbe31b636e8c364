"""What a model's load may raise: anything, since engines of others and libraries run in it."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from embedfarm.contract.model_files import ModelError
from embedfarm.workers.engines.engine import DeviceFailed, ModelUnavailable, OutOfMemory

log = logging.getLogger(__name__)


@contextmanager
def load_errors(model: str) -> Iterator[None]:
    """Raise `ModelError` in place of all that the body raises, unless the device has failed.

    Such an error costs the jobs of the model, and no others. Its traceback is logged.

    Args:
        model: Name of the model that the body loads.

    Raises:
        ModelUnavailable: The system refuses something now: memory, or room on a disk.
        ModelError: The model does not load; the message has the error's class and text.
        DeviceFailed: Nothing works on the device any more.
    """
    try:
        yield
    except (DeviceFailed, ModelError):
        raise
    except Exception as error:
        log.exception("%s does not load", model)
        kind = ModelUnavailable if _passes(error) else ModelError
        raise kind(f"{model} does not load: {type(error).__name__}: {error}") from error


def _passes(error: Exception) -> bool:
    """Tell whether the system refuses something now; libraries' own errors have no number."""
    full = isinstance(error, MemoryError | OutOfMemory)
    return full or (isinstance(error, OSError) and error.errno is not None)
