"""The fields of a job as options of a verb, made of the table of fields."""

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Final, Literal, TypeVar

import typer

from embedfarm.contract.job_spec import JOB_DEFAULTS, JOB_FIELDS, JOB_TYPES, job_choices
from embedfarm.contract.settings import DEFAULT_MODEL

Verb = TypeVar("Verb", bound=Callable[..., None])

NOT_OPTIONS: Final = frozenset({"name"})  # that of the output
RANGES: Final = Annotated[
    Path | None,
    typer.Option(
        help="For int8: a finished float output of this model, or ranges as .npy, shape (2, n)."
    ),
]


def with_job_fields(verb: Verb) -> Verb:
    """Give a verb an option for each field of a job, in the place of its `**fields`.

    They come behind the verb's parameters without a default.
    """
    signature = inspect.signature(verb, eval_str=True)
    own = [each for each in signature.parameters.values() if each.kind is not each.VAR_KEYWORD]
    needed = [each for each in own if each.default is each.empty]
    options = [_option(name) for name in JOB_FIELDS if name not in NOT_OPTIONS]
    others = [each for each in own if each.default is not each.empty]
    parameters = [
        each.replace(kind=inspect.Parameter.KEYWORD_ONLY) for each in (*needed, *options, *others)
    ]
    setattr(verb, "__signature__", signature.replace(parameters=parameters))  # noqa: B010 # as typer reads it
    verb.__annotations__ = {each.name: each.annotation for each in parameters}
    return verb


def _option(name: str) -> inspect.Parameter:
    """Return a field as a parameter of a function that typer reads."""
    default, annotation = JOB_DEFAULTS.get(name, DEFAULT_MODEL), annotation_of(name)
    if name == "ranges":
        default, annotation = None, RANGES
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation
    )


def annotation_of(name: str) -> Any:  # noqa: ANN401 # a type
    """Return the type of the option for a field, with what typer is to know of it."""
    field = JOB_FIELDS[name]
    kind: Any = Literal[job_choices(name)] if field.choices else JOB_TYPES[name]
    help_text = f"{field.help[:1].upper()}{field.help[1:]}."
    shown = JOB_DEFAULTS.get(name) != ""
    if kind is bool:
        return Annotated[bool, typer.Option(f"--{name}", help=help_text)]
    if kind is int:
        option = typer.Option(
            min=field.least, max=field.most, callback=_multiple_of(field.step), help=help_text
        )
        return Annotated[int, option]
    return Annotated[kind, typer.Option(help=help_text, show_default=shown)]


def _multiple_of(step: int) -> Callable[[int], int]:
    """Return a check that a number is a multiple of another; a usage error otherwise."""

    def check(number: int) -> int:
        if number % step:
            raise typer.BadParameter(f"must be a multiple of {step}")
        return number

    return check
