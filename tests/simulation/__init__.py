"""Deterministic simulation: the production code on virtual time, against a model of the server.

Workers, the scheduler and `embedfarm embed` run as they are, each thread of theirs a greenlet; one
seed decides all that happens, so that a run that fails can be had again (`make soak`).
"""
