"""Tests of the whole farm, as its users start it."""
