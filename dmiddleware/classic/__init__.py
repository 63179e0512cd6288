"""The interface of DI-engine's older pipeline, written on the core.

Nothing in the core imports this package.
"""

from dmiddleware.classic.deque_replay import DequeReplay

__all__ = ["DequeReplay"]
