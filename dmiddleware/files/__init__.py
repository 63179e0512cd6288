"""What lies on disk: checkpoints, datasets, and the formats of both."""
