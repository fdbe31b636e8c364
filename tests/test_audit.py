"""Tests of what `make audit` makes of pip-audit's reports."""

from typing import Any

from tests.audit import judge

SOUND = {"name": "anyio", "version": "4.16.0", "vulns": []}
UNKNOWN = {"name": "torch", "skip_reason": "Dependency not found on PyPI"}
BAD: dict[str, Any] = {
    "name": "jinja2",
    "version": "2.4.1",
    "vulns": [{"id": "PYSEC-1", "fix_versions": ["2.7"], "aliases": [], "description": "x"}],
}


def test_a_vulnerability_is_named() -> None:
    """A vulnerability is named with its package and the version that mends it."""
    found, known, total = judge({"dependencies": [SOUND, BAD, UNKNOWN], "fixes": []})
    assert found == ["jinja2 2.4.1: PYSEC-1, fixed in ['2.7']"]
    assert (known, total) == (2, 3)


def test_a_service_that_knows_nothing_has_not_said_all_is_well() -> None:
    """A service that knows no package, such as a mirror of the index, is told by a count of 0."""
    assert judge({"dependencies": [UNKNOWN], "fixes": []}) == ([], 0, 1)
