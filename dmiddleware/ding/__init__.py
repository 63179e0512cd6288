"""The door: programs, configs and tests of DI-engine run here as they are.

Importing this package makes ``ding``, ``ditk`` and the old ``gym`` importable in this process:
write ``import dmiddleware.ding`` as a program's first line, or start it by ``ditask ding FILE.py``.
Nothing in the project imports this package.
"""

from dmiddleware.ding.finder import NotHere, close_door, open_door

__all__ = ["NotHere", "close_door", "open_door"]

open_door()
