"""Environments in separate processes: the pool, the worker, their pipe and shared memory."""
