"""Middleware for envs, policies and data of the user's own: transitions in lists, not batches."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from inspect import getattr_static
from typing import Any, Final

import numpy as np
import torch
import treetensor.torch as ttorch
from easydict import EasyDict

from dmiddleware.classic import DequeBuffer
from dmiddleware.ding.framework.global_task import task
from dmiddleware.ding.rl_utils.returns import gae, gae_data
from dmiddleware.ding.torch_utils.trees import get_shape0, to_ndarray
from dmiddleware.ding.utils.data import ttorch_collate
from dmiddleware.env import BaseEnvManager
from dmiddleware.errors import NotEnoughData
from dmiddleware.pipeline import middleware as declared
from dmiddleware.policy.modes import ActingMode, LearnMode
from dmiddleware.rollout import VectorEvalMonitor
from middleware import Role

__all__ = [
    "TransitionList",
    "advantages_of",
    "collect_transitions",
    "evaluate_transitions",
    "inferencer",
    "is_of_program",
    "learn_samples",
    "rolloutor",
    "sampler",
    "train_samples",
]

Step = Callable[[Any], None]


def is_of_program(policy: Any, env: Any = None) -> bool:
    """Return whether a program brings a policy or an env manager that is not of this package."""
    if isinstance(policy, LearnMode | ActingMode) or _has(policy, "learn_mode"):
        return env is not None and not isinstance(env, BaseEnvManager)
    return _has(policy, "forward") or _has(policy, "get_attribute")


def _has(subject: Any, name: str) -> bool:
    # Without a call of it, as its first access may build something.
    return getattr_static(subject, name, None) is not None


class TransitionList:
    """The transitions of several envs, in order.

    Args:
        env_num: the number of envs.
    """

    def __init__(self, env_num: int) -> None:
        self.env_num = env_num
        self._rows: list[list[Any]] = [[] for _ in range(env_num)]

    def append(self, env_id: int, transition: Any) -> None:
        """Add a transition, which has an attribute ``done``."""
        self._rows[env_id].append(transition)

    def to_trajectories(self) -> tuple[list[Any], list[int]]:
        """Return all transitions, env by env, and the index of the last one of each env."""
        ends = itertools.accumulate(map(len, self._rows))
        return list(itertools.chain(*self._rows)), [end - 1 for end in ends]

    def to_episodes(self) -> list[list[Any]]:
        """Return the episodes that have ended, env by env."""
        episodes = []
        for rows in self._rows:
            begin = 0
            for number, row in enumerate(rows, start=1):
                if row.done:
                    episodes.append(rows[begin:number])
                    begin = number
        return episodes

    def clear(self) -> None:
        """Forget all transitions."""
        for rows in self._rows:
            rows.clear()


def _observations(env: Any) -> tuple[Any, dict[int, Any]]:
    """Return the observations to act on, and those of each env as ``float32``."""
    obs = ttorch.as_tensor(env.ready_obs)
    floats = obs.to(dtype=torch.float32)
    return obs, {env_id: floats[env_id] for env_id in range(get_shape0(floats))}


def inferencer(seed: int, policy: Any, env: Any) -> Step:
    """Act on the observations of all envs.

    It writes ``ctx.obs``, ``ctx.action`` and ``ctx.inference_output``, by env.

    Args:
        seed: seeds the envs.
        policy: has ``forward``, of observations by env to outputs by env.
        env: the env manager.
    """
    env.seed(seed)

    @declared(roles=(Role.COLLECTOR,), writes=("obs", "action", "inference_output"))
    def infer(ctx: Any) -> None:
        if env.closed:
            env.launch()
        ctx.obs, obs = _observations(env)
        ctx.inference_output = policy.forward(obs, **ctx.collect_kwargs)
        ctx.action = [to_ndarray(output["action"]) for output in ctx.inference_output.values()]

    return infer


def rolloutor(
    policy: Any, env: Any, transitions: TransitionList, collect_print_freq: int = 100
) -> Step:
    """Step the envs with ``ctx.action``, and add the transitions to a list.

    Args:
        policy: has ``process_transition`` and ``reset``.
        env: the env manager.
        transitions: where they go.
        collect_print_freq: no effect: the loggers have the interval.
    """
    episode_ids, new_ids = list(range(env.env_num)), itertools.count(env.env_num)

    @declared(roles=(Role.COLLECTOR,), reads=("obs", "action", "inference_output"))
    def roll_out(ctx: Any) -> None:
        for timestep in _stepped(env, ctx.action):
            env_id = int(timestep.env_id)
            row = ttorch.as_tensor(
                policy.process_transition(ctx.obs[env_id], ctx.inference_output[env_id], timestep)
            )
            row.collect_train_iter = torch.tensor([ctx.train_iter])
            row.env_data_id = torch.tensor([episode_ids[env_id]])
            transitions.append(env_id, row)
            ctx.env_step += 1
            if timestep.done:
                policy.reset([env_id])
                episode_ids[env_id] = next(new_ids)
                ctx.env_episode += 1

    return roll_out


def _stepped(env: Any, actions: Sequence[Any]) -> list[Any]:
    """Step all envs, and return a timestep for each, with tensors where the manager has trees."""
    if isinstance(env, BaseEnvManager):
        return list(env.step(dict(enumerate(actions))))
    return [step.tensor() if hasattr(step, "tensor") else step for step in env.step(actions)]


class _RandomPolicy:
    """Draws actions from the action space."""

    def __init__(self, policy: Any, env: Any) -> None:
        self.process_transition, self.reset = policy.process_transition, policy.reset
        self._env = env

    def forward(self, obs: Iterable[int], **options: Any) -> dict[int, Any]:
        """Return an action for each env."""
        space = self._env.action_space
        return {env_id: {"action": torch.as_tensor(space.sample())} for env_id in obs}


def collect_transitions(
    cfg: EasyDict, policy: Any, env: Any, n_random: int, *, episodes: bool
) -> Step:
    """Collect the steps, or the whole episodes, that the config asks for.

    Args:
        cfg: the compiled config.
        policy: has ``forward``, ``process_transition`` and ``reset``.
        env: the env manager.
        n_random: collect this many with random actions first.
        episodes: whether to count episodes, and to write them to ``ctx.episodes``.
    """
    counter = "env_episode" if episodes else "env_step"
    collect, transitions = cfg.policy.collect, TransitionList(env.env_num)
    n_needed = collect.n_episode if episodes else collect.n_sample * collect.get("unroll_len", 1)
    act = inferencer(cfg.seed, policy, env)
    act_randomly = inferencer(cfg.seed, _RandomPolicy(policy, env), env)
    roll_out = rolloutor(policy, env, transitions)
    writes = ("episodes",) if episodes else ("trajectories", "trajectory_end_idx")

    @declared(roles=(Role.COLLECTOR,), writes=writes)
    def collect_some(ctx: Any) -> None:
        before = getattr(ctx, counter)
        is_random = before < n_random
        while getattr(ctx, counter) - before < (n_random - before if is_random else n_needed):
            (act_randomly if is_random else act)(ctx)
            roll_out(ctx)
        if episodes:
            ctx.episodes = transitions.to_episodes()
        else:
            ctx.trajectories, ctx.trajectory_end_idx = transitions.to_trajectories()
        transitions.clear()

    return collect_some


def evaluate_transitions(cfg: EasyDict, policy: Any, env: Any) -> Step:
    """Evaluate every ``eval_freq`` updates of the config, and stop at its stop value."""
    every, n_episode = cfg.policy.eval.evaluator.eval_freq, cfg.env.n_evaluator_episode
    env.seed(cfg.seed, dynamic_seed=False)

    @declared(roles=(Role.EVALUATOR,), reads=("train_iter",), writes=("eval_value", "eval_output"))
    def evaluate(ctx: Any) -> None:
        if 0 <= ctx.last_eval_iter < ctx.train_iter < ctx.last_eval_iter + every:
            return
        if env.closed:
            env.launch()
        else:
            env.reset()
        policy.reset()
        returns = _play(policy, env, VectorEvalMonitor(env.env_num, n_episode))
        ctx.eval_value = ctx.last_eval_value = float(np.mean(returns))
        ctx.eval_value_min, ctx.eval_value_max = min(returns), max(returns)
        ctx.eval_value_std = float(np.std(returns))
        ctx.last_eval_iter, ctx.eval_output = ctx.train_iter, {"episode_return": ctx.eval_value}
        if ctx.train_iter > 0 and ctx.eval_value >= cfg.env.stop_value:
            task.stop(f"the return {ctx.eval_value:g} has reached the stop value")

    return evaluate


def _play(policy: Any, env: Any, monitor: VectorEvalMonitor) -> list[float]:
    while not monitor.is_finished():
        _, obs = _observations(env)
        outputs = policy.forward(obs)
        for timestep in _stepped(
            env, [to_ndarray(output["action"]) for output in outputs.values()]
        ):
            if timestep.done:
                policy.reset([int(timestep.env_id)])
                monitor.update_reward(
                    int(timestep.env_id), float(timestep.info["eval_episode_return"])
                )
    return monitor.get_episode_return()


def sampler(buffer_: Any, n_samples: int) -> Step:
    """Draw a list of samples into ``ctx.train_data``; None if there are too few.

    Args:
        buffer_: a DequeBuffer, or a list of buffers, each with its share of the samples.
        n_samples: how many.
    """
    parts = [(buffer_, 1)] if isinstance(buffer_, DequeBuffer) else list(buffer_)

    def sample(ctx: Any) -> None:
        try:
            drawn = [part.sample(int(n_samples * share)) for part, share in parts]
        except NotEnoughData:
            ctx.train_data = None
        else:
            ctx.train_data = [item.data for item in itertools.chain(*drawn)]

    return sample


def train_samples(policy: Any) -> Step:
    """Call the policy's ``forward`` with ``ctx.train_data``; a list of outputs counts as many."""

    @declared(roles=(Role.LEARNER,), reads=("train_data",), writes=("train_output", "train_iter"))
    def train(ctx: Any) -> None:
        if ctx.train_data is not None:
            ctx.train_output = policy.forward(ctx.train_data)
            ctx.train_iter += len(ctx.train_output) if isinstance(ctx.train_output, list) else 1

    return train


def learn_samples(n_updates: int, draw: Step, *rest: Step) -> Step:
    """Make ``n_updates``, each by steps of which the first draws ``ctx.train_data``."""

    @declared(roles=(Role.LEARNER,), writes=("train_data", "train_output", "train_iter"))
    def learn(ctx: Any) -> None:
        outputs = []
        for _ in range(n_updates):
            draw(ctx)
            if ctx.train_data is None:
                break
            for step in rest:
                step(ctx)
            outputs.append(ctx.train_output)
        ctx.train_output = outputs

    return learn


_CRITIC: Final = "compute_critic"


def advantages_of(cfg: EasyDict, policy: Any, rows: Sequence[Any], ends: Any) -> Any:
    """Return a batch of transitions with their advantages ``adv`` (Schulman et al., 2016).

    Args:
        cfg: the compiled config, which has the discount and λ.
        policy: has a model whose forward returns values in the mode ``"compute_critic"``.
        rows: the transitions.
        ends: the index of each one after which another trajectory begins.
    """
    batch, model = ttorch_collate(rows), policy.get_attribute("model")
    with torch.no_grad():
        value, next_value = (
            model.forward(obs.to(dtype=torch.float32), mode=_CRITIC)["value"]
            for obs in (batch.obs, batch.next_obs)
        )
    flag = batch.done.clone()
    flag[ends] = True
    batch.value, batch.traj_flag = value, flag
    columns = (value, next_value, batch.reward, batch.done.float(), flag.float())
    collect = cfg.policy.collect
    batch.adv = gae(gae_data(*columns), collect.discount_factor, collect.gae_lambda)
    return batch
