"""Generator of docs/settings.md: `python -m embedfarm.contract.settings > docs/settings.md`."""

import sys

from embedfarm.contract.settings import Settings


def to_markdown() -> str:
    """Return a page of Markdown with all settings in a table."""
    rows = [
        f"| `EMBEDFARM_{name.upper()}` | {field.get_default(call_default_factory=True)!r} "
        f"| {field.description} |"
        for name, field in Settings.model_fields.items()
    ]
    head = [
        "# Settings",
        "",
        "Read from the environment, else from `embedfarm.toml` in the working directory (names in",
        "lower case, without the prefix). Sizes are in the unit of the name, times in seconds.",
        "",
        "| variable | default | what it limits |",
        "|---|---|---|",
    ]
    return "\n".join([*head, *rows]) + "\n"


if __name__ == "__main__":
    sys.stdout.write(to_markdown())
