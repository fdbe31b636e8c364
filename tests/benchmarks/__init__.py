"""Tests of the benchmarks: their figures, documents and runs."""
