"""Limits of advice: what is said of how many workers a farm should have."""

from typing import Annotated, Final

from pydantic import BaseModel, Field, NonNegativeFloat, NonNegativeInt, PositiveFloat

KIND_LENGTH_MAX: Final = 100
KIND_CHARACTERS: Final = "A-Za-z0-9 .,_+()-"
KIND_PATTERN: Final = rf"[A-Za-z0-9][{KIND_CHARACTERS}]{{0,{KIND_LENGTH_MAX - 1}}}"
"""Name of a kind of devices, such as "NVIDIA L4, 22 GiB" or one that somebody chose."""

Kind = Annotated[str, Field(pattern=rf"^{KIND_PATTERN}$")]


class AdviceSettings(BaseModel):
    """What `embedfarm advise`, `/v1/advice` and `/metrics` go by when they count workers."""

    device_kind: Annotated[
        str,
        Field(
            pattern=rf"^({KIND_PATTERN})?$",
            description="Kind under which the workers of this host are counted, such as h100-spot; "
            "empty: cpu, endpoint, or the product of a GPU.",
        ),
    ] = ""
    advice_within_seconds: Annotated[
        PositiveFloat,
        Field(description="Time from now within which jobs without a deadline are to end."),
    ] = 3600.0
    advice_start_seconds: Annotated[
        NonNegativeFloat,
        Field(
            description="Time that a new worker needs until it lives: a machine, its image, the "
            "program; models are loaded after that."
        ),
    ] = 60.0
    advice_workers_max: Annotated[
        dict[Kind, NonNegativeInt],
        Field(
            description='Most workers of each kind, such as {"cpu": 8}; any number of one that is '
            "not named."
        ),
    ] = {}
