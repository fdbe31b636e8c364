"""The scheduler's own core on a virtual clock, with modelled workers instead of devices."""
