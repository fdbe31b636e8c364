"""Types that bodies are made of, so that the OpenAPI document says all of it."""

from types import GenericAlias
from typing import Annotated, Any, Final, TypeAlias, TypeVar, get_args, get_origin

import msgspec
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    create_model,
)

from embedfarm.contract.encoding import Record

T = TypeVar("T")

Many: TypeAlias = Annotated[list[T], Field(fail_fast=True)]
"""A list in a body: what is wrong with its first wrong item is told, and the others are not looked
at, since each error takes kilobytes."""


TEXT, TEXTS, TEXTS_WITH_IDS = Tag("(text)"), Tag("(texts)"), Tag("(texts with ids)")
TOKENS, ROWS = Tag("(tokens)"), Tag("(rows of tokens)")
"""Shapes that a field of several may have. Errors leave them out of the place that they name
(`embedfarm.web.http.problems`): they are in parentheses."""


def shapes(message: str) -> Discriminator:
    """Let the first item of a value say which of several shapes it is to have.

    Args:
        message: What is said of a value that has none of them.
    """
    return Discriminator(_shape_of, custom_error_type="shape", custom_error_message=message)


def _shape_of(value: object) -> str | None:
    if isinstance(value, str):
        return TEXT.tag
    first = value[0] if isinstance(value, list) and value else ""
    kinds = {str: TEXTS, int: TOKENS, float: TOKENS, list: ROWS, dict: TEXTS_WITH_IDS}
    kind = kinds.get(type(first))
    return kind.tag if kind and isinstance(value, list) else None


class Body(BaseModel):
    """A body with the types of JSON: no number is a boolean, and no text a number."""

    model_config = ConfigDict(strict=True)


def _as_integer(value: object) -> object:
    return int(value) if isinstance(value, float) and value.is_integer() else value


# Behind the limits of an integer in a body, since JSON does not tell 1.0 from 1.
WHOLE: Final = BeforeValidator(_as_integer)


def schema_of(record: type[Record]) -> type[BaseModel]:
    """Make a model with the fields of a record; give it what `as_dict` makes of one."""
    fields: dict[str, Any] = {
        each.name: (_type_of(each.type), ...) for each in msgspec.structs.fields(record)
    }
    summary = (record.__doc__ or "").partition("\n")[0]
    return create_model(record.__name__, __doc__=summary, **fields)


def _type_of(hint: Any) -> Any:  # noqa: ANN401 # a type as annotations have it
    """Return the type of a field, with a model in the place of a record in a list."""
    (inner, *_) = get_args(hint) or (None,)
    if get_origin(hint) is list and isinstance(inner, type) and issubclass(inner, Record):
        return many(schema_of(inner))
    return hint


def many(schema: type[BaseModel]) -> GenericAlias:
    """Return the type of a list of `schema`; mypy rejects `list[schema]`, made at run time."""
    return GenericAlias(list, (schema,))
