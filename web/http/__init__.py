"""Bodies, answers, errors and events, as all routes have them."""
