"""Tests of the table of coverage by room."""

from tests.room_coverage import NAMES, rooms_of, share, to_table


def summary(*numbers: int) -> dict[str, object]:
    """Return a file's part of coverage.py's report."""
    return {"summary": dict(zip(NAMES, numbers, strict=True))}


def test_files_add_up_by_room() -> None:
    """Lines and branches of a room's files are added, and all rooms make the last line."""
    files = {
        "web/app.py": summary(10, 9, 4, 1),
        "web/auth/keys.py": summary(10, 10, 0, 0),
        "cli/app.py": summary(5, 5, 0, 0),
    }
    rooms = rooms_of({"files": files})
    assert rooms == {"cli": [5, 5, 0, 0], "web": [20, 19, 4, 1]}
    assert to_table(rooms).splitlines()[2:] == [
        "| cli | 5 | 100.0 % | 0 | 100.0 % |",
        "| web | 20 | 95.0 % | 4 | 25.0 % |",
        "| all | 25 | 96.0 % | 4 | 25.0 % |",
    ]


def test_only_what_is_whole_is_a_hundred() -> None:
    """A share just below the whole is not rounded up to it."""
    assert share(9_999, 10_000) == "99.9 %"
