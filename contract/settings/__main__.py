"""Generator of docs/settings.md: `python -m embedfarm.contract.settings > docs/settings.md`."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from pydantic import BaseModel

from embedfarm.contract.settings import Settings
from embedfarm.contract.settings.advice_limits import AdviceSettings
from embedfarm.contract.settings.door_limits import HttpSettings, IngestSettings
from embedfarm.contract.settings.farm_limits import (
    CollectorSettings,
    HostSettings,
    JobSettings,
    LaneSettings,
    ProducerSettings,
    SchedulerSettings,
    WorkerSettings,
)
from embedfarm.contract.settings.storage_limits import StorageSettings

HEAD: Final = """# Settings

Read from the environment, else from `embedfarm.toml` in the working directory (names in
lower case, without the prefix). Sizes are in the unit of the name, times in seconds.
"""
SECTIONS: Final[dict[str, type[BaseModel]]] = {
    "Every process": HostSettings,
    "Jobs": JobSettings,
    "Producers": ProducerSettings,
    "The scheduler": SchedulerSettings,
    "Workers": WorkerSettings,
    "Collectors": CollectorSettings,
    "Interactive requests": LaneSettings,
    "Vectors past the server": StorageSettings,
    "Advice": AdviceSettings,
    "RQ, and what goes outwards": IngestSettings,
    "HTTP": HttpSettings,
}


def to_markdown() -> str:
    """Return a page of Markdown with all settings in tables."""
    return "\n".join([HEAD, *(line for title in SECTIONS for line in _section(title))])


def _section(title: str) -> Iterator[str]:
    """Yield the lines of a section, with the settings that its class brings."""
    yield from (f"## {title}", "", "| variable | default | what it limits |", "|---|---|---|")
    for name in SECTIONS[title].model_fields:
        field = Settings.model_fields[name]
        default = _shown(field.get_default(call_default_factory=True))
        yield f"| `EMBEDFARM_{name.upper()}` | {default} | {field.description} |"
    yield ""


def _shown(default: object) -> str:
    """Return a default as it could be given in the environment; "" for an empty one."""
    if not default and not isinstance(default, int | float):
        return ""
    match default:
        case bool() | list() | tuple() | dict():
            return f"`{json.dumps(default)}`"
        case int():
            return f"`{default:_}`"
        case float():
            return f"`{default:g}`"
        case str() | Path():
            return f"`{default}`"
    raise TypeError(default)


if __name__ == "__main__":
    sys.stdout.write(to_markdown())
