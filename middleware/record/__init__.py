"""What a run leaves behind: checkpoints, snapshots, metrics, logs and curves."""
