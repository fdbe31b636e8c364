"""Tests of what Python programs import."""
