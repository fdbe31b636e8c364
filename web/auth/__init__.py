"""Authorisation by HTTP: keys, sessions and rate limits."""
