"""The RQ door, with real processes."""
