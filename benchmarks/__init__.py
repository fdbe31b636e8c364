"""Benchmarks of the farm, each a command that anyone can run."""
