"""Completions in, plans out: how much each worker leases at a time. Never touches a GPU."""
