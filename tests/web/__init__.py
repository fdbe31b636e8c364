"""The farm by HTTP."""
