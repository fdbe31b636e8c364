"""Tests of what `deploy/` holds for machines that others run."""
