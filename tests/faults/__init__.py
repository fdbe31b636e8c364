"""Tests with faults of the link to the server."""
