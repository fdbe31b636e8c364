"""The collector: results out of Redis, in order, into files that are checked at the end."""
