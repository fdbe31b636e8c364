"""`make audit`: looks up whether a version in constraints.txt has a known vulnerability.

pip-audit asks a service on the network. Where that is out of reach, or knows no such package, which
is what a mirror without advisories answers, this says so and fails nothing.
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, Final

SECONDS_MAX: Final = 180
COMMAND: Final = [
    sys.executable, "-m", "pip_audit", "--requirement", "constraints.txt", "--no-deps",
    "--disable-pip", "--format", "json", "--progress-spinner", "off", "--timeout", "15",
]  # fmt: skip


def judge(report: dict[str, Any]) -> tuple[list[str], int, int]:
    """Return what pip-audit's report says.

    Returns:
        A sentence for each vulnerability, the packages that were looked up, and all packages.
    """
    packages = report["dependencies"]
    known = [each for each in packages if "skip_reason" not in each]
    found = [
        f"{each['name']} {each['version']}: {flaw['id']}, fixed in {flaw['fix_versions'] or 'none'}"
        for each in known
        for flaw in each["vulns"]
    ]
    return found, len(known), len(packages)


def main() -> int:
    """Run pip-audit, and return 1 if it found something."""
    with tempfile.TemporaryDirectory() as place:
        path = Path(place) / "report.json"
        command = [*COMMAND, "--output", str(path)]
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, timeout=SECONDS_MAX, check=False
            )
        except subprocess.TimeoutExpired:
            _say(f"audit: NOT DONE, no answer within {SECONDS_MAX} s")
            return 0
        if not path.exists():
            _say(f"audit: NOT DONE, {done.stderr.strip().splitlines()[-1:]}")
            return 0
        found, known, total = judge(json.loads(path.read_text()))
    for sentence in found:
        _say(sentence)
    state = "done" if known == total else "NOT DONE" if not known else "DONE IN PART"
    _say(f"audit: {state}, {known} of {total} packages are known to the service")
    return 1 if found else 0


def _say(sentence: str) -> None:
    sys.stdout.write(f"{sentence}\n")


if __name__ == "__main__":
    sys.exit(main())
