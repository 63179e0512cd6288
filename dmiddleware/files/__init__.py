"""Files: checkpoints, datasets, and the formats of both."""
