"""Tests of the readers and the chunker."""
