"""Collectors, exploration and evaluators with DI-engine's arguments."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any, Final

from easydict import EasyDict

from dmiddleware.ding.framework.middleware.transitions import (
    collect_transitions,
    evaluate_transitions,
    is_of_program,
)
from dmiddleware.env import BaseEnvManager
from dmiddleware.errors import ConfigError
from dmiddleware.pipeline import Middleware
from dmiddleware.pipeline import middleware as declared
from dmiddleware.policy import spec_of
from dmiddleware.schedule import Schedule
from middleware import EpisodeCollector as CoreEpisodeCollector
from middleware import EpsGreedyHandler, InteractionEvaluator, OnlineRLContext, Role
from middleware import StepCollector as CoreStepCollector
from middleware.context import RLContext

__all__ = [
    "EpisodeCollector",
    "StepCollector",
    "eps_greedy_handler",
    "eps_greedy_masker",
    "interaction_evaluator",
    "interaction_evaluator_ttorch",
]

_log = logging.getLogger(__name__)

_NEVER: Final = 1e9
"""DI-engine's stop value that no return reaches."""


def StepCollector(  # noqa: N802 (DI-engine's name)
    cfg: EasyDict, policy: Any, env: Any, random_collect_size: int = 0
) -> Middleware[Any]:
    """Collect ``cfg.policy.collect.n_sample`` sequences of ``unroll_len`` steps in each step.

    Args:
        cfg: the compiled config.
        policy: the policy or its collect mode; with one of the program's own, ``ctx.trajectories``
            is a list of transitions.
        env: the envs.
        random_collect_size: env steps with random actions at the start.
    """
    collect = cfg.policy.collect
    if collect.get("n_sample") is None:
        raise ConfigError("StepCollector needs policy.collect.n_sample, which the config lacks")
    if is_of_program(policy, env):
        return collect_transitions(cfg, policy, env, random_collect_size, episodes=False)
    n_sample = collect.n_sample * collect.get("unroll_len", 1)
    random_steps = int(random_collect_size or 0)
    if random_steps and spec_of(policy, user="StepCollector").on_policy:
        _log.warning("random_collect_size has no effect: the policy learns from its own actions")
        random_steps = 0
    return CoreStepCollector(policy, env, n_sample=n_sample, random_steps=random_steps)


def EpisodeCollector(  # noqa: N802 (DI-engine's name)
    cfg: EasyDict, policy: Any, env: Any, random_collect_size: int = 0
) -> Middleware[Any]:
    """Collect ``cfg.policy.collect.n_episode`` whole episodes in each step."""
    if is_of_program(policy, env):
        return collect_transitions(cfg, policy, env, random_collect_size, episodes=True)
    if random_collect_size:
        raise ConfigError(
            "EpisodeCollector has no random_collect_size here; use StepCollector, or leave it out"
        )
    return CoreEpisodeCollector(policy, env, n_episode=cfg.policy.collect.n_episode)


class _EpsGreedyHandler(EpsGreedyHandler):
    """Sets ε on the way forward, and takes it back on the way back."""

    def __call__(self, ctx: OnlineRLContext) -> Iterator[None]:  # type: ignore[override]
        """Set ε."""
        super().__call__(ctx)
        yield
        ctx.collect_kwargs.pop("eps", None)


def eps_greedy_handler(cfg: EasyDict) -> EpsGreedyHandler:
    """Set ε as ``cfg.policy.other.eps`` says."""
    return _EpsGreedyHandler(Schedule.of(dict(cfg.policy.other.eps)))


def eps_greedy_masker() -> Any:
    """Let the collectors that follow act without random actions, by an ε of -1."""

    @declared(roles=(Role.COLLECTOR,), writes=("collect_kwargs",))
    def mask(ctx: OnlineRLContext) -> None:
        ctx.collect_kwargs["eps"] = -1

    return mask


class _Evaluator(InteractionEvaluator):
    """The evaluator that also writes the fields which only DI-engine has."""

    def __call__(self, ctx: RLContext) -> None:
        """Evaluate when it is due."""
        super().__call__(ctx)
        output: Any = ctx.eval_output
        if isinstance(output, dict) and "return_min" in output:
            for name in ("min", "max", "std"):
                setattr(ctx, f"eval_value_{name}", output[f"return_{name}"])


def interaction_evaluator(
    cfg: EasyDict, policy: Any, env: Any, render: bool = False, **options: Any
) -> Middleware[Any]:
    """Evaluate every ``cfg.policy.eval.evaluator.eval_freq`` updates.

    The task stops when the mean return of ``cfg.env.n_evaluator_episode`` episodes reaches
    ``cfg.env.stop_value``.

    Args:
        cfg: the compiled config.
        policy: the policy or its eval mode.
        env: the envs.
        render: no effect: videos are recorded in envs made with ``render_mode="rgb_array"``.
        options: refused, because no policy here takes more arguments than observations.

    Raises:
        ConfigError: if there are ``options``.
    """
    if options:
        raise ConfigError(
            f"interaction_evaluator has no options {', '.join(options)} here; give the policy what "
            "it needs when it is built"
        )
    if is_of_program(policy, env):
        return evaluate_transitions(cfg, policy, env)
    stop_value = cfg.env.get("stop_value")
    return _Evaluator(
        policy,
        env,
        n_episode=max(cfg.env.n_evaluator_episode, env.env_num),
        every_train_iter=cfg.policy.eval.evaluator.eval_freq,
        stop_value=None if stop_value is None or stop_value >= _NEVER else float(stop_value),
    )


def interaction_evaluator_ttorch(
    seed: int,
    policy: Any,
    env: BaseEnvManager,
    n_evaluator_episode: int | None = None,
    stop_value: float = float("inf"),
    eval_freq: int = 1000,
    render: bool = False,
) -> InteractionEvaluator:
    """Evaluate every ``eval_freq`` updates; the arguments are those of the config above."""
    return _Evaluator(
        policy,
        env,
        n_episode=n_evaluator_episode or env.env_num,
        every_train_iter=eval_freq,
        stop_value=stop_value if stop_value < _NEVER else None,
    )
