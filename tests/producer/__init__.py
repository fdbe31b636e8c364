"""Tests of the producer: readers, chunker, blocks and submission."""
