"""Tests of the producer: blocks and submission."""
