"""Tests of the contract: records, scripts, limits, servers and model files."""
