"""What a job asks for: the fields of its specification, each declared once, with all that derives.

Doors (command line, HTTP, RQ, Python), the identity of outputs, the keys of engines and of rates,
and the documents take from `JOB_FIELDS` what they need of a field.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from functools import lru_cache
from importlib.metadata import entry_points
from typing import Annotated, Final, get_args, get_type_hints

import msgspec

from embedfarm.contract.encoding import COUNT_MAX, Record
from embedfarm.contract.errors import EmbedfarmError
from embedfarm.contract.hyperplanes import BITS_MAX, BITS_MIN

CHARACTERS_MAX: Final = 4096
DIMENSIONS_MAX: Final = 1 << 16
TOKENS_MAX: Final = 1 << 20
PLUGIN_NAME: Final = re.compile("[a-z][a-z0-9_-]{0,39}")


class Decides(IntEnum):
    """What a field decides; each of them decides all that stands before it.

    Nothing, how vectors are stored, the vectors, or also which weights a worker has to load.
    """

    NOTHING = 0
    STORAGE = 1
    VECTORS = 2
    WEIGHTS = 3


@dataclass(frozen=True)
class JobField:
    """Properties of a job field beside its name, type and default.

    Attributes:
        help: What it says, in half a sentence, for all who ask.
        decides: What it decides.
        choices: What it may say, if not anything.
        plugins: Group of entry points by which installed packages bring more choices, "" for none.
        most: Largest number, or most characters, that a door takes.
        least: Smallest number.
        step: Number that it is a multiple of.
        paces: Whether throughput is remembered apart for each value.
        later: Whether outputs that were made before it existed have none: at its default it is left
            out of their identity.
    """

    help: str
    decides: Decides
    choices: tuple[str, ...] = ()
    plugins: str = ""
    most: int = CHARACTERS_MAX
    least: int = 0
    step: int = 1
    paces: bool = False
    later: bool = False

    @property
    def sentence(self) -> str:
        """What the field says, as a sentence."""
        return f"{self.help[:1].upper()}{self.help[1:]}."


class JobSpecError(EmbedfarmError, ValueError):
    """Raised for a job that no worker could do as it is asked for."""

    exit_status = 2


class JobSpec(Record, forbid_unknown_fields=True):
    """Specification of a job; nothing in it changes once the job exists.

    What each field says stands beside it, and in `JOB_FIELDS`.

    Raises:
        ValueError: A field asks for what no worker could do.
    """

    model: Annotated[
        str, JobField("directory, hub name, or null:DIMENSIONS", Decides.WEIGHTS, paces=True)
    ]
    dtype: Annotated[
        str,
        JobField(
            "type that the model computes in; int8 on CPUs, faster at a loss that is measured",
            Decides.WEIGHTS,
            ("auto", "float32", "bfloat16", "float16", "int8"),
            paces=True,
        ),
    ] = "auto"
    vector_dtype: Annotated[
        str,
        JobField(
            "type of the stored vectors; ubinary: sign bits; lsh: bits of random hyperplanes",
            Decides.STORAGE,
            ("float32", "float16", "int8", "ubinary", "lsh"),
        ),
    ] = "float32"
    prompt: Annotated[
        str, JobField("text put before every chunk; none: the model's own", Decides.VECTORS)
    ] = ""
    max_length: Annotated[
        int,
        JobField(
            "tokens kept of a chunk; 0: the model's own limit",
            Decides.VECTORS,
            most=TOKENS_MAX,
            paces=True,
        ),
    ] = 0
    normalize: Annotated[
        bool, JobField("scale vectors to length 1 even if the model does not", Decides.VECTORS)
    ] = False
    dimensions: Annotated[
        int,
        JobField(
            "leading components kept (Matryoshka); 0: all", Decides.VECTORS, most=DIMENSIONS_MAX
        ),
    ] = 0
    name: Annotated[str, JobField("name for people", Decides.NOTHING, most=200)] = ""
    ranges: Annotated[
        bytes,
        JobField(
            "for int8: least and greatest of each component, float32 of shape (2, dimensions)",
            Decides.STORAGE,
        ),
    ] = b""
    engine: Annotated[
        str,
        JobField(
            "what runs the model; auto: the fastest, tried once on each processor",
            Decides.NOTHING,
            ("auto", "torch", "openvino"),
            plugins="embedfarm.engines",
            paces=True,
        ),
    ] = "auto"
    long: Annotated[
        str,
        JobField(
            "what becomes of a chunk over the limit: cut, its windows averaged, or failed",
            Decides.VECTORS,
            ("truncate", "windows", "error"),
        ),
    ] = "truncate"
    long_overlap: Annotated[
        int,
        JobField(
            "about how many tokens a window repeats of the one before",
            Decides.VECTORS,
            most=TOKENS_MAX,
        ),
    ] = 32
    lsh_bits: Annotated[
        int,
        JobField(
            "hyperplanes of lsh, a multiple of 8",
            Decides.STORAGE,
            least=BITS_MIN,
            most=BITS_MAX,
            step=8,
        ),
    ] = 2048
    task: Annotated[
        str,
        JobField(
            "prompt and modules of sentence-transformers' `encode_query` or `encode_document`",
            Decides.VECTORS,
            ("", "query", "document"),
            later=True,
        ),
    ] = ""
    prompt_name: Annotated[
        str, JobField("one of the model's own prompts instead", Decides.VECTORS, later=True)
    ] = ""
    stored: Annotated[
        str,
        JobField(
            "directory or URL where workers store vectors, past Redis, until they are collected",
            Decides.NOTHING,
            later=True,
        ),
    ] = ""
    texts_from: Annotated[
        str,
        JobField(
            "where workers take texts from: blocks, or the source's own files, past Redis",
            Decides.NOTHING,
            ("blocks", "source"),
            later=True,
        ),
    ] = "blocks"

    def __post_init__(self) -> None:
        """Refuse a specification that no worker could serve, also off the wire."""
        for name, field in _CHOSEN.items():
            value = getattr(self, name)
            if value in field.choices:
                continue
            # A package that is not installed here may be where the job runs, which looks for it.
            if not field.plugins or not PLUGIN_NAME.fullmatch(value):
                raise JobSpecError(f"{name} {value!r} is none of {', '.join(field.choices)}")
        numbers = self.max_length, self.dimensions, self.long_overlap
        if not 0 <= min(numbers) <= max(numbers) <= COUNT_MAX:
            raise JobSpecError("max_length, dimensions and long_overlap are 0 to 2 to the 53rd")
        if self.lsh_bits % 8 or not BITS_MIN <= self.lsh_bits <= BITS_MAX:
            raise JobSpecError(f"lsh_bits is a multiple of 8 from {BITS_MIN} to {BITS_MAX}")
        if self.prompt and self.prompt_name:
            raise JobSpecError("prompt and prompt_name are two ways to say the same")


def _fields() -> dict[str, JobField]:
    hints = get_type_hints(JobSpec, include_extras=True)
    return {name: get_args(hints[name])[1] for name in JobSpec.__struct_fields__}


JOB_FIELDS: Final[Mapping[str, JobField]] = _fields()
"""The fields of a `JobSpec`, in their order on the wire."""

_LOADED: Final = [
    name for name, field in JOB_FIELDS.items() if field.decides == Decides.WEIGHTS
] + ["engine"]
_CHOSEN: Final = {name: field for name, field in JOB_FIELDS.items() if field.choices}

JOB_TYPES: Final[Mapping[str, type]] = {
    name: get_args(hint)[0]
    for name, hint in get_type_hints(JobSpec, include_extras=True).items()
    if name in JOB_FIELDS
}
"""The type of each field."""

JOB_DEFAULTS: Final[Mapping[str, object]] = dict(
    zip(
        JobSpec.__struct_fields__[-len(JobSpec.__struct_defaults__) :],
        JobSpec.__struct_defaults__,
        strict=True,
    )
)
"""The default of each field that has one: of all but the model."""


def encode_spec(spec: JobSpec) -> bytes:
    """Return the bytes of a spec as a job has it, which the farm's older programs read if they can.

    They refuse a field that they do not know. The last ones are left out while they ask for nothing
    that was not there before them.
    """
    values = list(msgspec.structs.astuple(spec))
    for name in reversed(list(JOB_FIELDS)):
        if not JOB_FIELDS[name].later or values[-1] != JOB_DEFAULTS[name]:
            break
        values.pop()
    return bytes([spec.version]) + msgspec.msgpack.encode(values)


def job_choices(name: str) -> tuple[str, ...]:
    """Return what a field may say by the packages that are installed here; () if anything."""
    field = JOB_FIELDS[name]
    others = (
        sorted(each.name for each in entry_points(group=field.plugins)) if field.plugins else []
    )
    return (*field.choices, *(other for other in others if other not in field.choices))


def decided_by(spec: JobSpec, least: Decides) -> dict[str, object]:
    """Return the fields of a spec that decide at least so much, by name."""
    return {n: getattr(spec, n) for n, field in JOB_FIELDS.items() if field.decides >= least}


def model_key(spec: JobSpec) -> str:
    """Return the name under which a model's throughput is remembered: all that changes it."""
    return "|".join(str(getattr(spec, n)) for n, field in JOB_FIELDS.items() if field.paces)


def weights_key(spec: JobSpec) -> str:
    """Return a name of all in a spec that decides what a worker loads for it."""
    return "|".join(str(getattr(spec, name)) for name in _LOADED)


@lru_cache(maxsize=4096)
def weights_of(model: str) -> str:
    """Return the `weights_key` of the specs that have this `model_key`."""
    names = [name for name, field in JOB_FIELDS.items() if field.paces]
    values = zip(names, model.rsplit("|", len(names) - 1), strict=False)
    return "|".join(value for name, value in values if name in _LOADED)
