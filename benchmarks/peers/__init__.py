"""One script for each thing that embeds text; those with a requirements file are other people's.

A peer `name.py` runs in the virtual environment `build/peers/name`, made from `name.txt`; one
without such a file runs in the farm's own. Nothing here but `farm` and `engine` imports the farm.
"""
