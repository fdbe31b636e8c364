"""A directory for PYTHONPATH, by which a disk fails below any Python program."""
