"""Small disks of their own, which can be full without harm to others; mounting takes root."""

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Final

BALLOON: Final = "balloon"
STEP_BYTES: Final = 1 << 12


@contextlib.contextmanager
def mounted(directory: Path, size_bytes: int) -> Iterator[Path]:
    """Mount a file system in memory, which is gone at the end with all that is on it.

    Raises:
        subprocess.CalledProcessError: This user may not mount.
    """
    directory.mkdir(parents=True, exist_ok=True)
    options = ["-t", "tmpfs", "-o", f"size={size_bytes}", "chaos"]
    subprocess.run([_program("mount"), *options, str(directory)], check=True)
    try:
        yield directory
    finally:
        subprocess.run([_program("umount"), "--lazy", str(directory)], check=True)


def _program(name: str) -> str:
    found = shutil.which(name)
    if found is None:
        raise FileNotFoundError(f"no program {name}")
    return found


@contextlib.contextmanager
def full(disk: Path) -> Iterator[None]:
    """Fill a disk to its last byte, and empty it again at the end."""
    balloon = disk / BALLOON
    try:
        with balloon.open("wb", buffering=0) as file:
            room = os.statvfs(disk)
            with contextlib.suppress(OSError):  # somebody else has taken some of it since
                os.posix_fallocate(file.fileno(), 0, room.f_bavail * room.f_frsize)
            with contextlib.suppress(OSError):
                file.seek(0, os.SEEK_END)
                while True:
                    file.write(bytes(STEP_BYTES))
        yield
    finally:
        balloon.unlink(missing_ok=True)
