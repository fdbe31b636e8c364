"""Tests that all who ask for a job know the same fields, each from the one table."""

import inspect
import re
from pathlib import Path
from typing import Final

import pytest

from embedfarm.cli.embed import embed
from embedfarm.contract.farm_client import engine_key
from embedfarm.contract.job_spec import (
    JOB_DEFAULTS,
    JOB_FIELDS,
    JOB_TYPES,
    Decides,
    JobSpec,
    model_key,
    weights_key,
    weights_of,
)
from embedfarm.contract.model_files import job_components
from embedfarm.embedding import JobFields
from embedfarm.ingest.tasks import EMBED_OPTIONS
from embedfarm.readers import CorpusOptions
from embedfarm.runs.request import Request
from embedfarm.web.jobs.job_requests import Options

PAGE: Final = (Path(__file__).parents[2] / "docs" / "protocol.md").read_text(encoding="utf-8")
OTHERS: Final = {
    "model": "other", "dtype": "float32", "vector_dtype": "float16", "prompt": "p: ",
    "max_length": 8, "normalize": True, "dimensions": 4, "name": "x", "ranges": bytes(8),
    "engine": "torch", "long": "error", "long_overlap": 16, "lsh_bits": 64, "task": "query",
    "prompt_name": "p", "stored": "/mnt/vectors", "texts_from": "source",
}  # fmt: skip
"""A value of each field that is not its default."""


def test_doors_know_the_same_fields() -> None:
    """The command line, HTTP, RQ and Python take the fields of the table, and no other of a job."""
    fields = set(JOB_FIELDS) - {"name"}
    assert fields <= set(inspect.signature(embed).parameters)
    assert set(JOB_FIELDS) - {"ranges"} <= set(Options.model_fields)
    assert fields <= EMBED_OPTIONS
    assert fields - {"model"} == set(JobFields.__annotations__)
    assert JobFields.__annotations__.items() <= JOB_TYPES.items()


def test_doors_have_the_same_defaults() -> None:
    """What nobody says is the same through every door."""
    parameters = inspect.signature(embed).parameters
    for name, default in JOB_DEFAULTS.items():
        if name not in {"name", "ranges"}:
            assert parameters[name].default == default, name
            assert Options.model_fields[name].default == default, name


def identity(spec: JobSpec) -> dict[str, object]:
    """Return the identity of an output of a spec."""
    return Request(("x",), CorpusOptions(), False, spec, "npy").identity()


@pytest.mark.parametrize("name", JOB_FIELDS)
def test_what_a_field_decides(name: str) -> None:
    """A field changes outputs, engines, rates and fingerprints as the table says."""
    field = JOB_FIELDS[name]
    plain = {"model": "m", "vector_dtype": "lsh", "long": "windows"}
    base, changed = JobSpec(**plain), JobSpec(**(plain | {name: OTHERS[name]}))  # type: ignore[arg-type] # of each its own
    assert getattr(base, name) != getattr(changed, name)
    assert (identity(base) != identity(changed)) == (field.decides >= Decides.STORAGE)
    keyed = field.decides >= Decides.VECTORS or name == "engine"
    assert (engine_key(base) != engine_key(changed)) == keyed
    assert (model_key(base) != model_key(changed)) == field.paces
    assert weights_of(model_key(changed)) == weights_key(changed)
    assert (weights_key(base) != weights_key(changed)) == (
        field.decides == Decides.WEIGHTS or name == "engine"
    )
    told_apart = job_components(base) != job_components(changed)
    assert told_apart == (field.decides == Decides.VECTORS)


def test_outputs_from_before_a_field() -> None:
    """An output that was made before a field existed is still that of its request."""
    for name, field in JOB_FIELDS.items():
        assert (name in identity(JobSpec(model="m"))) == (
            field.decides >= Decides.STORAGE and not field.later
        )


def test_the_page_says_the_same() -> None:
    """The page about the protocol has the table's sentences and words."""
    for name, field in JOB_FIELDS.items():
        words = f" ({', '.join(filter(None, field.choices))})" if field.choices else ""
        assert re.search(rf"\| `{name}` \|.*\| {re.escape(field.help + words)} \|", PAGE), name
