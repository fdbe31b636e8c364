"""The base of all errors that the farm raises on purpose."""

from typing import ClassVar


class EmbedfarmError(Exception):
    """Raised for what a user can understand and mend; its text is a sentence for people.

    Attributes:
        exit_status: Exit status of a command that ends by it: 1 failed, 2 wrong usage or
            configuration, 75 the farm is full, 130 interrupted and resumable.
    """

    exit_status: ClassVar[int] = 1
