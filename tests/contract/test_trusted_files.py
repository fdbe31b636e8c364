"""Tests that settings are read from no file that others can write."""

import os
import re
import shlex
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from embedfarm.cli.app import app
from embedfarm.contract.settings import Settings, UntrustedFile

STRANGER = 12345


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make a working directory with settings that only its user can write."""
    (place := tmp_path / "a place").mkdir(0o755)
    (place / "embedfarm.toml").write_text("events_max = 7\n")
    (place / "embedfarm.toml").chmod(0o644)
    monkeypatch.chdir(place)
    return place


def test_of_the_user(place: Path) -> None:
    """A settings file that only its user and root can write is read, through a link too."""
    (place / "embedfarm.toml").rename(place.parent / "real.toml")
    (place / "embedfarm.toml").symlink_to(place.parent / "real.toml")
    assert Settings().events_max == 7


def share(path: Path, mode: int) -> None:
    """Let a group write a file, if the test runs as root."""
    if os.geteuid():
        pytest.skip("only root can give a file to any group")
    os.chown(path, -1, STRANGER)
    path.chmod(mode)


def link(place: Path) -> None:
    """Move the settings file into a directory that everybody can write, behind a link."""
    (place / "open").mkdir()
    (place / "open").chmod(0o777)
    (place / "embedfarm.toml").rename(place / "open" / "real.toml")
    (place / "embedfarm.toml").symlink_to(place / "open" / "real.toml")


WAYS: dict[str, Callable[[Path], object]] = {
    "file of all": lambda place: (place / "embedfarm.toml").chmod(0o666),
    "file of a group": lambda place: share(place / "embedfarm.toml", 0o664),
    "directory of all": lambda place: place.chmod(0o777),
    "directory of a group": lambda place: share(place, 0o775),
    "linked from a directory of all": link,
}


@pytest.mark.parametrize("way", WAYS)
def test_of_others(place: Path, way: str) -> None:
    """A settings file that others can write is refused, with the command that mends it."""
    WAYS[way](place)
    with pytest.raises(
        UntrustedFile, match=r"embedfarm.toml is not read: .*; chmod go-w "
    ) as refused:
        Settings()
    mend = re.search("chmod.*", str(refused.value))
    assert mend
    subprocess.run(shlex.split(mend[0]), check=True)
    assert Settings().events_max == 7


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_in_a_shared_directory(place: Path) -> None:
    """A directory like /tmp gives a user their own settings file, and no stranger's."""
    place.chmod(0o1777)
    assert Settings().events_max == 7
    os.chown(place / "embedfarm.toml", STRANGER, -1)
    with pytest.raises(UntrustedFile, match=f"embedfarm.toml belongs to user {STRANGER}"):
        Settings()
    os.chown(place / "embedfarm.toml", 0, -1)
    os.chown(place, STRANGER, -1)
    with pytest.raises(UntrustedFile, match=f"a place belongs to user {STRANGER}"):
        Settings()


def test_verbs_say_so(place: Path) -> None:
    """A command exits with status 2 and says which settings file is not read."""
    place.chmod(0o777)
    done = CliRunner().invoke(app, ["doctor"])
    assert done.exit_code == 2
    assert "settings: embedfarm.toml is not read" in done.output
