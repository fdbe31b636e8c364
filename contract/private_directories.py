"""Directories that nobody else may look into."""

import os
import stat
from pathlib import Path


def make_private(directory: Path) -> None:
    """Make a directory that only its owner may enter, whatever the umask says.

    Missing parents are made with the usual mode. An existing directory of ours is closed to others.
    Nothing in it needs a mode of its own. The program must have chosen its name: a directory that a
    user named may be shared on purpose.
    """
    directory.mkdir(mode=stat.S_IRWXU, parents=True, exist_ok=True)
    found = directory.stat()
    if found.st_uid == os.geteuid() and found.st_mode & (stat.S_IRWXG | stat.S_IRWXO):
        directory.chmod(stat.S_IRWXU)
