"""Tests of the worker station."""
