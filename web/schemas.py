"""Records of the farm as pydantic models, so that the OpenAPI document knows their fields."""

from types import GenericAlias
from typing import Any

import msgspec
from pydantic import BaseModel, create_model

from embedfarm.records import Record


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
