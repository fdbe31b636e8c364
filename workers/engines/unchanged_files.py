"""Files of a model that stay the same for as long as something is made of them."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from embedfarm.contract import model_files
from embedfarm.contract.job_spec import JobSpec
from embedfarm.workers.engines.engine import ModelUnavailable


@contextmanager
def unchanged(spec: JobSpec, directory: Path, dtype: str) -> Iterator[dict[str, str]]:
    """Give the fingerprint of a model whose files the body reads.

    Args:
        spec: The job.
        directory: Directory of the model's files.
        dtype: Type that the model computes in.

    Raises:
        ModelUnavailable: The files were changed meanwhile, and what was read may be of either.
    """
    before = model_files.fingerprint(spec.model, directory, spec, dtype)
    yield before
    if model_files.fingerprint(spec.model, directory, spec, dtype) != before:
        raise ModelUnavailable(f"the files in {directory} changed while they were loaded")
