"""Engines that were chosen on this machine, and how fast each was: kept for a while."""

import time
from pathlib import Path
from typing import Final

import msgspec

from embedfarm.contract.settings import Settings
from embedfarm.workers.engines.cache_files import keep

KEPT_SECONDS: Final = 30 * 86_400.0  # a noisy moment, or an older library, may have decided


class Choice(msgspec.Struct, frozen=True):
    """The engine that was chosen for a model, and how fast those were that were tried.

    Attributes:
        engine: "torch" or "openvino".
        tokens_per_second: Speed of each engine; one that does not take the model is not there.
        model: The model's name.
        dtype: The precision that was asked for.
        tried_at: Unix time of the trial, in seconds.
    """

    engine: str
    tokens_per_second: dict[str, float]
    model: str = ""
    dtype: str = ""
    tried_at: float = 0.0


def choices_directory(settings: Settings) -> Path:
    """Return where the choices of this machine are kept, which need not exist."""
    return settings.engine_cache.expanduser() / "choices"


def read_choice(path: Path) -> Choice | None:
    """Return a choice that is kept in a file; None where it is to be made, or made again."""
    try:
        choice = msgspec.json.decode(path.read_bytes(), type=Choice)
    except (OSError, msgspec.MsgspecError):
        return None
    return choice if time.time() - choice.tried_at < KEPT_SECONDS else None


def keep_choice(path: Path, choice: Choice) -> None:
    """Keep a choice in a file, if it can be written."""
    keep(path, msgspec.json.encode(choice))


def kept_choices(settings: Settings) -> dict[Path, Choice]:
    """Return the choices that hold on this machine, by their files."""
    files = sorted(choices_directory(settings).glob("*.json"))
    return {path: choice for path in files if (choice := read_choice(path)) is not None}


def forget_choices(model: str, settings: Settings) -> int:
    """Forget what was chosen for a model, so that it is tried again; return how many there were."""
    forgotten = [path for path, kept in kept_choices(settings).items() if kept.model == model]
    for path in forgotten:
        path.unlink(missing_ok=True)
    return len(forgotten)
