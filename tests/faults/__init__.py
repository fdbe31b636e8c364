"""Faults of the link to the server."""
