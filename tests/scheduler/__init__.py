"""Tests of the scheduler station."""
