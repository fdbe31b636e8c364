"""A model of the server: what its commands answer and change, without clock, network or disk.

The model follows the oldest server that is promised to work, Redis 7.0, and knows only what the
farm sends; anything else ends the run with `NotImplementedError`, because a made-up answer would
prove nothing. `tests/simulation/test_server.py` compares it with real servers.
"""

from tests.simulation.server.replies import Wait
from tests.simulation.server.server import ModelServer

__all__ = ["ModelServer", "Wait"]
