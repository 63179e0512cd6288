"""Environments in processes of their own: the pool, the worker and what connects them."""
