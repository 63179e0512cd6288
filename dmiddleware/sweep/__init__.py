"""Many runs of one program with different settings: ``ditask sweep``.

A sweep is a folder: its plan, which is written before the first run starts, and a folder for each
run. Which runs have ended is read from these folders, so a sweep that was killed at any time
continues. The settings come from a grid, or from Optuna.
"""
