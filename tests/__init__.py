"""The tests; each docstring is the claim that its test checks."""
