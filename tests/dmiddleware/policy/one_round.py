"""One round of a policy in an env of any spaces: collect, learn, save, load and evaluate."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from gymnasium import spaces

from dmiddleware.data import (
    Batch,
    TensorBuffer,
    as_tree,
    flatten_lead,
    leaves,
    load_checkpoint,
    save_checkpoint,
)
from dmiddleware.env import make_env_manager
from dmiddleware.policy import (
    A2CPolicy,
    BCPolicy,
    BCQPolicy,
    C51Policy,
    CQLPolicy,
    CrossQPolicy,
    D4PGPolicy,
    DDPGPolicy,
    DecisionTransformerPolicy,
    DiscreteCQLPolicy,
    DiscreteSACPolicy,
    DQfDPolicy,
    DQNPolicy,
    EDACPolicy,
    FastTD3Policy,
    FQFPolicy,
    IMPALAPolicy,
    IQLPolicy,
    IQNPolicy,
    MDQNPolicy,
    OffPolicyPPGPolicy,
    OffPolicyPPOPolicy,
    PGPolicy,
    PPGPolicy,
    PPOPolicy,
    PQNPolicy,
    QRDQNPolicy,
    R2D2Policy,
    RainbowPolicy,
    RecurrentPPOPolicy,
    SACPolicy,
    SQLPolicy,
    TD3BCPolicy,
    TD3Policy,
    TQCPolicy,
)
from dmiddleware.rl import with_returns_to_go
from dmiddleware.rollout import RolloutCollector, evaluate_episodes
from dmiddleware.settings import plain_values
from tests.dmiddleware.policy.drawn_envs import Drawn

VALUE_BASED = [
    DQNPolicy,
    SQLPolicy,
    MDQNPolicy,
    DQfDPolicy,
    C51Policy,
    QRDQNPolicy,
    IQNPolicy,
    FQFPolicy,
    DiscreteCQLPolicy,
    RainbowPolicy,
    R2D2Policy,
    PQNPolicy,
]
DISCRETE = [*VALUE_BASED, DiscreteSACPolicy]
CONTINUOUS = [
    SACPolicy,
    TD3Policy,
    DDPGPolicy,
    D4PGPolicy,
    TQCPolicy,
    CrossQPolicy,
    FastTD3Policy,
    TD3BCPolicy,
    CQLPolicy,
    BCQPolicy,
    EDACPolicy,
    IQLPolicy,
]
ANY_ACTION = [
    *(PPOPolicy, PGPolicy, A2CPolicy, IMPALAPolicy, RecurrentPPOPolicy, OffPolicyPPOPolicy),
    *(PPGPolicy, OffPolicyPPGPolicy, BCPolicy),
]
STOCK = [*DISCRETE, *CONTINUOUS, *ANY_ACTION, DecisionTransformerPolicy]
"""Every stock policy of a single agent."""

BOX = spaces.Box(-1.0, 1.0, (2,), np.float32)


def action_space_of(cls: Any) -> gym.Space[Any]:
    """Return a space of actions that an algorithm supports."""
    return BOX if cls in CONTINUOUS else spaces.Discrete(3)


def learnable(policy: Any, rows: Batch) -> Batch:
    """Return rows ``[T, E, …]`` as the policy learns from them."""
    if isinstance(policy, DecisionTransformerPolicy | R2D2Policy):
        options: dict[str, Any] = {"unroll_len": getattr(policy, "context_length", 4)}
        if isinstance(policy, R2D2Policy):
            options |= {"burn_in": policy.burn_in, "start_columns": ("state",)}
        else:
            rows = with_returns_to_go(rows)
        return sampled(rows, **options)
    if policy.learns_from_trajectories:
        rows = policy.spec.add_targets(rows)
    elif "ret" in policy.learn_columns:
        adv = torch.linspace(-1.0, 1.0, rows["done"].numel()).reshape(rows["done"].shape)
        rows = as_tree({**{name: rows[name] for name in rows}, "adv": adv, "ret": adv})
    if policy.on_policy:
        return rows if policy.minibatch_unit == "lanes" else flatten_lead(rows)
    return sampled(rows, n_step=policy.n_step, discount=policy.discount or 0.9)


def sampled(rows: Batch, **options: Any) -> Batch:
    """Return a sample of a buffer with these rows."""
    buffer = TensorBuffer(500, seed=0, **options)
    buffer.push(rows)
    return buffer.sample(16)


def one_round(
    cls: Any,
    observation_space: gym.Space[Any],
    action_space: gym.Space[Any] | None = None,
    *,
    folder: Any = None,
    mode: str = "sync",
    **options: Any,
) -> Any:
    """Collect, learn, save, build again from the config, load and evaluate.

    Returns:
        The policy.
    """
    actions = action_space_of(cls) if action_space is None else action_space

    def make_env() -> Drawn:
        # Spaces hold random generators, so each env has its own.
        return Drawn(*copy.deepcopy((observation_space, actions)))

    with make_env_manager(make_env, env_num=1, seed=0, mode=mode, max_retry=0) as envs:
        if cls is R2D2Policy:
            options = {"burn_in": 2, **options}
        elif cls is FastTD3Policy:
            sizes = {"critic_hidden_sizes": [64], "actor_hidden_sizes": [64]}
            options = {"model": sizes, **options}
        elif cls is CrossQPolicy:
            options = {"model": {"critic_hidden_sizes": [64]}, **options}
        policy = cls.for_env(envs, seed=0, **options)
        rows = policy.train_batch(RolloutCollector(policy, envs).collect(48))
        if getattr(policy.cfg, "obs_norm", False):
            policy.observe(rows["obs"])
        outputs = policy.learn_mode.forward(learnable(policy, rows))
        for output in outputs if isinstance(outputs, list) else [outputs]:
            assert np.isfinite(output["total_loss"])
        if folder is not None:
            save_checkpoint(folder / "policy.ckpt", policy.learn_mode.state_dict())
            again = cls(plain_values(policy.cfg))
            again.learn_mode.load_state_dict(load_checkpoint(folder / "policy.ckpt"))
            check_same_actions(policy, again, make_env)
        evaluate_episodes(policy, envs, 2)
    return policy


def check_same_actions(one: Any, other: Any, make_env: Callable[[], gym.Env[Any, Any]]) -> None:
    """Require that two policies act alike from the same seed of an env on."""
    answers = []
    for policy in (one, other):
        with make_env_manager(make_env, env_num=1, seed=1, max_retry=0) as envs:
            rows = RolloutCollector(policy, envs).collect(12)
        answers.append(dict(leaves(as_tree({name: rows[name] for name in ("obs", "action")}))))
    assert answers[0].keys() == answers[1].keys()
    for path, leaf in answers[0].items():
        torch.testing.assert_close(leaf, answers[1][path], rtol=0, atol=0, equal_nan=True)
