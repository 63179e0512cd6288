"""Which env objects the open managers step: none may be stepped as two envs."""

from __future__ import annotations

import sys
import weakref
from typing import Any, Final

import gymnasium as gym

from dmiddleware.errors import EnvProtocolError

__all__ = ["EnvClaims"]


class EnvClaims:
    """The env objects that an open manager steps.

    An env that is stepped in two places mixes up two episodes: what one of them did shows up in the
    observations of the other. So each object has one owner until it is released. Wrappers and
    adapters do not hide it: what counts is the env inside.
    """

    def __init__(self) -> None:
        # The objects stay alive with the claims, so that no other object gets the same id.
        self._objects: dict[int, dict[int, object]] = {}

    def claim(self, env_id: int, env: object) -> None:
        """Claim an env, in place of the one that was claimed under this id before.

        Raises:
            EnvProtocolError: if it is, or holds, an object that is claimed already.
        """
        self.release(env_id)
        objects = _objects_in(env)
        for key in objects:
            owner = _OWNERS.get(key)
            if owner is not None:
                raise owner._refusal(key, env_id, is_own=owner is self)
        self._objects[env_id] = objects
        _OWNERS.update(dict.fromkeys(objects, self))

    def release(self, env_id: int | None = None) -> None:
        """Give up an env (None: all), so that others may use it."""
        for released in [*self._objects] if env_id is None else [env_id]:
            for key in self._objects.pop(released, {}):
                _OWNERS.pop(key, None)

    def _refusal(self, key: int, env_id: int, *, is_own: bool) -> EnvProtocolError:
        owner = next(number for number, objects in self._objects.items() if key in objects)
        name = type(self._objects[owner][key]).__name__
        where = "" if is_own else " of another manager that is open"
        remedy = "" if is_own else ", or close the other manager first"
        return EnvProtocolError(
            f"env {env_id} steps the same object (a {name}) as env {owner}{where}, which would mix "
            "up their episodes; let the env factory make a new env at every call, as in "
            f"lambda: {name}(...){remedy}"
        )


# The only state that all managers of a process share: whether an object is in use is a question
# about the process, not about one manager. An entry disappears with its owner.
_OWNERS: Final[weakref.WeakValueDictionary[int, EnvClaims]] = weakref.WeakValueDictionary()


def _objects_in(env: object) -> dict[int, object]:
    """Return an env without its wrappers, and the envs and games that it holds, by id."""
    objects: dict[int, object] = {}
    waiting = [env]
    while waiting:
        layer = waiting.pop()
        layer = getattr(layer, "unwrapped", layer)
        if id(layer) not in objects:
            objects[id(layer)] = layer
            waiting += [
                inner for inner in getattr(layer, "__dict__", {}).values() if _is_env(inner)
            ]
    return objects


def _is_env(value: object) -> bool:
    if isinstance(value, gym.Env):
        return True
    pettingzoo: Any = sys.modules.get("pettingzoo")
    if pettingzoo is not None and isinstance(value, pettingzoo.AECEnv | pettingzoo.ParallelEnv):
        return True
    return all(callable(getattr(type(value), name, None)) for name in ("reset", "step", "to_move"))
