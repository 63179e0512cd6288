"""Where nodes run: one file for each way to start their processes."""
