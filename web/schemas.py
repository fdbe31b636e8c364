"""What bodies are made of, so that the OpenAPI document says all of it."""

from types import GenericAlias
from typing import Any, Final

import msgspec
from pydantic import BaseModel, BeforeValidator, ConfigDict, create_model

from embedfarm.records import Record


class Body(BaseModel):
    """What a request brings, with the types of JSON: no number is a boolean, no text a number."""

    model_config = ConfigDict(strict=True)


def _as_integer(value: object) -> object:
    return int(value) if isinstance(value, float) and value.is_integer() else value


# Behind the limits of an integer in a body, since JSON does not tell 1.0 from 1.
WHOLE: Final = BeforeValidator(_as_integer)


def schema_of(record: type[Record]) -> type[BaseModel]:
    """A model with the fields of a record; its instances are made of `msgspec.structs.asdict`."""
    fields: dict[str, Any] = {
        each.name: (each.type, ...) for each in msgspec.structs.fields(record)
    }
    summary = (record.__doc__ or "").partition("\n")[0]
    return create_model(record.__name__, __doc__=summary, **fields)


def many(schema: type[BaseModel]) -> GenericAlias:
    """A list of them; mypy takes `list[schema]` of what is made at run time for an error."""
    return GenericAlias(list, (schema,))
