"""Test of docs/tutorial.md: its commands work, in their order, and print what it shows."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

TEXT = (Path(__file__).parents[2] / "docs" / "tutorial.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```console\n(.*?)```", TEXT, re.DOTALL)
SECONDS_MAX = 300


def steps() -> list[tuple[str, list[str]]]:
    """Return each command of the document, and the lines that it is said to print."""
    found: list[tuple[str, list[str]]] = []
    for line in "".join(BLOCKS).splitlines():
        if line.startswith("$ "):
            found.append((line[2:], []))
        else:
            found[-1][1].append(line)
    return found


def pattern(lines: list[str]) -> str:
    """Return a pattern of these lines: any number for a number, anything for three dots."""
    text = re.sub(r"\d[\d,.]*", "\0", "\n".join(lines)).replace("…", "\1")
    return re.escape(text).replace("\0", r"\d[\d,.]*").replace("\1", ".*")


@pytest.mark.document
def test_tutorial(tmp_path: Path) -> None:
    """A newcomer who types what the tutorial says sees what it says."""
    programs = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    for command, lines in steps():
        done = subprocess.run(
            ["bash", "-c", command],  # noqa: S607
            cwd=tmp_path,
            env=os.environ | {"PATH": programs},
            capture_output=True,
            text=True,
            timeout=SECONDS_MAX,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        shown = done.stdout.strip("\n")
        assert re.fullmatch(pattern(lines), shown, re.DOTALL), f"{command}\n{shown}"
    assert len(steps()) > 8
