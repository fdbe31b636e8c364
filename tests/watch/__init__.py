"""Tests of watching a farm: its view, its jobs for people, its bottlenecks."""
