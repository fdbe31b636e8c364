"""Tests of exports into vector stores, against the real ones."""
