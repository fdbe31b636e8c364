"""Engines, which turn texts into vectors, behind one small protocol (`engine`)."""
