"""What operators ask: health, workers, decisions, metrics."""
