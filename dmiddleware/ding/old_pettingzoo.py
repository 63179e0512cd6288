"""PettingZoo's envs by the rules that DI-engine's files expect, those of PettingZoo 1.22."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any, Final

import numpy as np

__all__ = ["use_old_rules"]

_CONVERSIONS: Final = "pettingzoo.utils.conversions"
_NAME: Final = "parallel_wrapper_fn"
_SPREAD: Final = "mpe2.simple_spread.simple_spread"
_PARTICLES: Final = "mpe2._mpe_utils.simple_env"
_DIRECTIONS: Final = [0, 2, 1, 4, 3]
"""Where the continuous moves to the left, right, below and above are among those of MPE2."""


def use_old_rules(module: ModuleType) -> None:
    """Let ``reset`` of the parallel envs that a file makes return the observations alone.

    Particles of ``simple_spread`` move after their speed has changed, collide with themselves too,
    and have the old directions of continuous moves.
    """
    names = vars(module)
    if _CONVERSIONS in sys.modules and _NAME in names:
        convert = sys.modules[_CONVERSIONS].parallel_wrapper_fn
        if names[_NAME] == convert:
            setattr(module, _NAME, _with_old_reset(convert))
    for name, value in list(names.items()):
        if not isinstance(value, type):
            continue
        if value.__module__ == _SPREAD and value.__name__ == "Scenario":
            setattr(module, name, _with_old_particles(value))
        elif value.__module__ == module.__name__ and _PARTICLES in sys.modules:
            base = sys.modules[_PARTICLES].SimpleEnv
            if issubclass(value, base):
                value._set_action = _with_old_directions(base._set_action)  # type: ignore[attr-defined]


def _with_old_reset(convert: Callable[..., Any]) -> Callable[..., Any]:
    def parallel_wrapper_fn(make_env: Callable[..., Any]) -> Callable[..., Any]:
        def make(**options: Any) -> Any:
            env = convert(make_env)(**options)
            reset = env.reset
            env.reset = lambda *arguments, **keywords: reset(*arguments, **keywords)[0]
            return env

        return make

    return parallel_wrapper_fn


def _with_old_particles(scenario: Any) -> type[Any]:
    class Scenario(scenario):  # type: ignore[misc]  # a class of another package
        def make_world(self, *arguments: Any, **options: Any) -> Any:
            world = super().make_world(*arguments, **options)
            world.integrate_state = functools.partial(_move, world, world.integrate_state)
            return world

        def reward(self, agent: Any, world: Any) -> float:
            return float(super().reward(agent, world)) - float(agent.collide)

    return Scenario


def _move(world: Any, integrate: Callable[[Any], None], forces: Any) -> None:
    """Move particles by their new velocities."""
    starts = [entity.state.p_pos.copy() for entity in world.entities]
    integrate(forces)
    for entity, start in zip(world.entities, starts, strict=True):
        if entity.movable:
            entity.state.p_pos = start + entity.state.p_vel * world.dt


def _with_old_directions(set_action: Callable[..., None]) -> Callable[..., None]:
    def old_set_action(self: Any, action: Any, agent: Any, space: Any, time: Any = None) -> None:
        if self.continuous_actions and agent.movable:
            action = [np.asarray(action[0])[_DIRECTIONS], *action[1:]]
        set_action(self, action, agent, space, time)

    return old_set_action
