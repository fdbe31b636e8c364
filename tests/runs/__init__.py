"""Tests of a job from its request to its end, in real processes."""
