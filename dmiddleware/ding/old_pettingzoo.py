"""PettingZoo's parallel envs by the rules that DI-engine's files expect."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any, Final

__all__ = ["use_old_rules"]

_CONVERSIONS: Final = "pettingzoo.utils.conversions"
_NAME: Final = "parallel_wrapper_fn"


def use_old_rules(module: ModuleType) -> None:
    """Let ``reset`` of the parallel envs that a file makes return the observations alone."""
    if _CONVERSIONS in sys.modules and _NAME in vars(module):
        convert = sys.modules[_CONVERSIONS].parallel_wrapper_fn
        if getattr(module, _NAME) == convert:
            setattr(module, _NAME, _with_old_reset(convert))


def _with_old_reset(convert: Callable[..., Any]) -> Callable[..., Any]:
    def parallel_wrapper_fn(make_env: Callable[..., Any]) -> Callable[..., Any]:
        def make(**options: Any) -> Any:
            env = convert(make_env)(**options)
            reset = env.reset
            env.reset = lambda *arguments, **keywords: reset(*arguments, **keywords)[0]
            return env

        return make

    return parallel_wrapper_fn
