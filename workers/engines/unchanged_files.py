"""Files of a model, which must be the same for as long as something is made of them."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from embedfarm.contract import model_files
from embedfarm.contract.job_spec import JobSpec
from embedfarm.workers.engines.engine import ModelUnavailable


def files_of(spec: JobSpec, cache: Path | None) -> dict[str, str]:
    """Return a fingerprint of the files that this machine has of a model; empty without any."""
    directory = model_files.find_local(spec.model, cache)
    return {} if directory is None else model_files.fingerprint(spec.model, directory, spec, "")


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
