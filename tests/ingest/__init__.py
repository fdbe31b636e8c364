"""Tests of the RQ door, with real processes."""
