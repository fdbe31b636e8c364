"""Tests of verbs of the command line, in real processes."""
