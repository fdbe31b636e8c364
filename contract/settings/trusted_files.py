"""Files of settings, which are refused where other users could write them."""

import grp
import os
import pwd
import shlex
import stat
import tomllib
from contextlib import suppress
from pathlib import Path
from typing import Any

from pydantic_settings import TomlConfigSettingsSource

from embedfarm.contract.errors import EmbedfarmError


class UntrustedFile(EmbedfarmError, ValueError):
    """Raised when others could have written a file; the message says which command changes that."""

    exit_status = 2


class TrustedToml(TomlConfigSettingsSource):
    """Settings in a file that only its user and root can change."""

    def _read_file(self, file_path: Any) -> dict[str, Any]:  # noqa: ANN401 -- as the base has it
        return read_trusted(Path(file_path))


def read_trusted(path: Path) -> dict[str, Any]:
    """Parse a TOML file that nobody else can write.

    Raises:
        UntrustedFile: The file, its directory, or that of the file that it links to, belongs to
            somebody else than the user of this process or root, or can be written by others. The
            sticky bit of a directory keeps others from changing what is not theirs.
    """
    with path.open("rb") as file:
        _check(path, path, os.fstat(file.fileno()))
        for directory in {path.absolute().parent, path.resolve().parent}:
            _check(path, directory, directory.stat())
        return tomllib.load(file)


def _check(file: Path, place: Path, found: os.stat_result) -> None:
    """Refuse the file if others own `place`, or can write it."""
    named, user = shlex.quote(str(place)), os.geteuid()
    if found.st_uid not in {user, 0}:
        raise UntrustedFile(
            f"{file} is not read: {place} belongs to user {found.st_uid}, who could write "
            f"anything there; chown {user} {named}, or work in a directory of your own"
        )
    sticky = stat.S_ISDIR(found.st_mode) and found.st_mode & stat.S_ISVTX
    if _others_write(found) and not sticky:
        raise UntrustedFile(f"{file} is not read: others can write {place}; chmod go-w {named}")


def _others_write(found: os.stat_result) -> bool:
    """Tell whether other users may write, by the group's permissions or by everybody's."""
    in_group = found.st_mode & stat.S_IWGRP and not _is_own_group(found.st_gid)
    return bool(in_group or found.st_mode & stat.S_IWOTH)


def _is_own_group(number: int) -> bool:
    """Tell whether a group is the user's alone, as many systems make one for each user."""
    with suppress(KeyError):  # a user or a group that has no name
        name, group = pwd.getpwuid(os.geteuid()).pw_name, grp.getgrgid(number)
        return group.gr_name == name and set(group.gr_mem) <= {name}
    return False
