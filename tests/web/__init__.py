"""Tests of the farm by HTTP."""
