"""Types that bodies are made of, so that the OpenAPI document says all of it."""

from types import GenericAlias
from typing import Annotated, Any, Final, TypeAlias, TypeVar

import msgspec
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, create_model

from embedfarm.contract.encoding import Record

T = TypeVar("T")

Many: TypeAlias = Annotated[list[T], Field(fail_fast=True)]
"""A list in a body: what is wrong with its first wrong item is told, and the others are not looked
at, since each error takes kilobytes."""


class Body(BaseModel):
    """A body with the types of JSON: no number is a boolean, and no text a number."""

    model_config = ConfigDict(strict=True)


def _as_integer(value: object) -> object:
    return int(value) if isinstance(value, float) and value.is_integer() else value


# Behind the limits of an integer in a body, since JSON does not tell 1.0 from 1.
WHOLE: Final = BeforeValidator(_as_integer)


def schema_of(record: type[Record]) -> type[BaseModel]:
    """Make a model with the fields of a record; give it the dict of `msgspec.structs.asdict`."""
    fields: dict[str, Any] = {
        each.name: (each.type, ...) for each in msgspec.structs.fields(record)
    }
    summary = (record.__doc__ or "").partition("\n")[0]
    return create_model(record.__name__, __doc__=summary, **fields)


def many(schema: type[BaseModel]) -> GenericAlias:
    """Return the type of a list of `schema`; mypy rejects `list[schema]`, made at run time."""
    return GenericAlias(list, (schema,))
