"""A farm of real processes, and one fault after the other: `make chaos`."""
