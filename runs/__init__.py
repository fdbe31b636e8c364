"""A job from its request to its end: run, resumed, retried and refilled, on any farm."""
