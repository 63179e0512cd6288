"""Runnable programs, each a whole training: ``python -m examples.cartpole_dqn``."""
