"""Ask models, now or queued, with arrays or uploaded objects."""
