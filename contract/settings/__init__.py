"""Every limit and every waiting time of the farm, in one place.

Each field is read from `EMBEDFARM_<FIELD>`, else from `embedfarm.toml` in the working directory,
else it is the default below. A command-line flag of the same name overrules both. A file that
others can write is refused.
"""

import difflib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final, Self

from pydantic import model_validator
from pydantic_settings import (
    BaseSettings,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
)

from embedfarm.contract.settings.advice_limits import AdviceSettings
from embedfarm.contract.settings.door_limits import (
    DEFAULT_MODEL,
    HttpSettings,
    IngestSettings,
    NamedStore,
    Recurring,
)
from embedfarm.contract.settings.farm_limits import (
    CollectorSettings,
    EndpointType,
    HostSettings,
    JobSettings,
    LaneSettings,
    ProducerSettings,
    SchedulerSettings,
    WorkerSettings,
)
from embedfarm.contract.settings.profiles import PROFILES, PROPORTIONS
from embedfarm.contract.settings.storage_limits import StorageSettings
from embedfarm.contract.settings.trusted_files import TrustedToml, UntrustedFile

__all__ = [
    "DEFAULT_MODEL",
    "EndpointType",
    "NamedStore",
    "Recurring",
    "Settings",
    "UntrustedFile",
    "misspelt",
]

PREFIX: Final = "EMBEDFARM_"
SECRETS: Final = ("webhook_secret", "endpoint_key")
LIKENESS_MIN: Final = 0.85  # of a name to a setting's, to be taken for a misspelt one


class Settings(
    HttpSettings,
    IngestSettings,
    AdviceSettings,
    LaneSettings,
    StorageSettings,
    CollectorSettings,
    WorkerSettings,
    SchedulerSettings,
    ProducerSettings,
    JobSettings,
    HostSettings,
    BaseSettings,
):
    """The farm's limits. Sizes are in the unit of the name, times in seconds."""

    model_config = SettingsConfigDict(
        env_prefix=PREFIX,
        toml_file="embedfarm.toml",
        frozen=True,
        extra="forbid",
        hide_input_in_errors=True,  # it may be a secret
    )

    @model_validator(mode="before")
    @classmethod
    def _follow_profile(cls, values: dict[str, Any]) -> dict[str, Any]:
        """Fill in a profile's limits where nothing else is said."""
        return PROFILES.get(str(values.get("profile", "")), {}) | values

    @model_validator(mode="after")
    def _check_proportions(self) -> Self:
        """Refuse limits that together stop the farm, or make it do everything twice."""
        for small, factor, large in PROPORTIONS:
            limit = factor * getattr(self, small)
            if getattr(self, large) <= limit:
                raise ValueError(f"{large} must be more than {factor} * {small}, which is {limit}")
        return self

    @property
    def queue_server(self) -> str:
        """URL of the server of RQ's queue: `queue_url`, or the farm's."""
        return self.queue_url or self.redis_url

    @property
    def jobs_path(self) -> Path:
        """Directory of jobs by HTTP: `jobs_directory`, or its default."""
        chosen = self.jobs_directory or self.state_directory / "jobs"
        return chosen.expanduser().resolve()

    @property
    def task_roots(self) -> list[Path]:
        """Directories that RQ jobs may read and write below."""
        return [*self.ingest_roots, self.jobs_path]

    def environment(self) -> dict[str, str]:
        """Return all settings as variables for a child process: they overrule its TOML file."""
        values = self.model_dump(mode="json", exclude_none=True)
        for name in SECRETS:
            values[name] = getattr(self, name).get_secret_value()  # not in a dump
        for name, store in self.stores.items():
            values["stores"][name]["url"] = store.url.get_secret_value()
        return {
            f"EMBEDFARM_{name.upper()}": value if isinstance(value, str) else json.dumps(value)
            for name, value in values.items()
        }

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Return the sources of settings: flags, then the environment, then `embedfarm.toml`."""
        del dotenv_settings, file_secret_settings
        return init_settings, env_settings, TrustedToml(settings_cls)


def misspelt(variables: Iterable[str]) -> dict[str, str]:
    """Return the names of variables that seem to be settings but are none, with what is meant."""
    known = [PREFIX + name.upper() for name in Settings.model_fields]
    found = {}
    for name in variables:
        if name.startswith(PREFIX) and name not in known:
            for meant in difflib.get_close_matches(name, known, 1, LIKENESS_MIN):
                found[name] = meant
    return found
