"""The whole farm, as its users start it."""
