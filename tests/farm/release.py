"""The last release, as its own code: what it was is in the changelog, and git has it."""

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[2]
LINE: Final = re.compile(r"^This is commit `([0-9a-f]{40})`", re.MULTILINE)


def last_release() -> str:
    """Return the commit that the changelog names for the newest version that it lists."""
    released = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8").partition("\n## Unreleased")[2]
    found = LINE.search(released)
    assert found, "CHANGELOG.md names no commit of the last release"
    return found.group(1)


def unpack_release(directory: Path) -> dict[str, str]:
    """Unpack the last release into a directory, from the repository's own history.

    Returns:
        The variables with which Python finds its `embedfarm` before the one that is installed.

    Raises:
        AssertionError: The history is not here, as in a clone that is shallow.
    """
    command = ["git", "-C", str(ROOT), "archive", last_release()]
    done = subprocess.run(command, capture_output=True, check=False)
    why = done.stderr.decode()
    assert done.returncode == 0, (
        f"the last release is not in this clone (git fetch --unshallow): {why}"
    )
    subprocess.run(["tar", "-x", "-C", str(directory)], input=done.stdout, check=True)  # noqa: S607 -- of any system
    variables = {"PYTHONPATH": str(directory)}
    shown = subprocess.run(
        [sys.executable, "-P", "-c", "import embedfarm; print(embedfarm.__file__)"],
        env=os.environ | variables,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert shown.startswith(str(directory)), shown
    return variables
