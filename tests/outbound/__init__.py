"""Tests of what the farm sends outwards, to real servers on loopback."""
