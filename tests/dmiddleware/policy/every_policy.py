"""Every stock policy, an env that suits it, and a batch that it learns from."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np

from dmiddleware.data import Batch, PrioritySampler, TensorBuffer, flatten_lead
from dmiddleware.env import make_env_manager
from dmiddleware.policy import (
    A2CPolicy,
    BCPolicy,
    BCQPolicy,
    C51Policy,
    CQLPolicy,
    CrossQPolicy,
    D4PGPolicy,
    DatasetNormSettings,
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
    IPPOPolicy,
    IQLPolicy,
    IQNPolicy,
    MAPPOPolicy,
    MDQNPolicy,
    OffPolicyPPGPolicy,
    OffPolicyPPOPolicy,
    PDQNPolicy,
    PGPolicy,
    PPGPolicy,
    PPOPolicy,
    PQNPolicy,
    QMIXPolicy,
    QRDQNPolicy,
    R2D2Policy,
    RainbowPolicy,
    RecurrentIPPOPolicy,
    RecurrentMAPPOPolicy,
    RecurrentPPOPolicy,
    RecurrentQMIXPolicy,
    RecurrentSACPolicy,
    RecurrentTD3Policy,
    SACPolicy,
    SQLPolicy,
    TD3BCPolicy,
    TD3Policy,
    TQCPolicy,
    VDNPolicy,
    WQMIXPolicy,
)
from dmiddleware.rl import discounted_return, with_returns_to_go
from dmiddleware.rollout import RolloutCollector
from dmiddleware.tree import with_columns
from middleware.advantage import AdvantageEstimator
from tests.dmiddleware.team_envs import CountingTeam
from tests.variants import mostly_slow

DISCRETE: list[Any] = [
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
    DiscreteSACPolicy,
]
CONTINUOUS: list[Any] = [
    SACPolicy,
    TQCPolicy,
    CrossQPolicy,
    RecurrentSACPolicy,
    RecurrentTD3Policy,
    FastTD3Policy,
    DDPGPolicy,
    D4PGPolicy,
    TD3Policy,
    TD3BCPolicy,
    CQLPolicy,
    BCQPolicy,
    EDACPolicy,
    IQLPolicy,
]
ON_POLICY: list[Any] = [
    PPOPolicy,
    PPGPolicy,
    PGPolicy,
    A2CPolicy,
    IMPALAPolicy,
    PQNPolicy,
    RecurrentPPOPolicy,
]
CLONING: list[Any] = [BCPolicy, DecisionTransformerPolicy]
BUFFERED_PPO: list[Any] = [OffPolicyPPOPolicy, OffPolicyPPGPolicy]
HYBRID: list[Any] = [PDQNPolicy]
TEAMS: list[Any] = [
    *(VDNPolicy, QMIXPolicy, WQMIXPolicy, RecurrentQMIXPolicy),
    *(IPPOPolicy, MAPPOPolicy, RecurrentIPPOPolicy, RecurrentMAPPOPolicy),
]
EVERY: list[Any] = [*DISCRETE, *CONTINUOUS, *ON_POLICY, *BUFFERED_PPO, *HYBRID, *CLONING, *TEAMS]

ONE_OF_A_KIND: list[Any] = [DQNPolicy, R2D2Policy, SACPolicy, PPOPolicy, BCPolicy, QMIXPolicy]
"""Policies that stand for the others in ``make test``, where a test of all of them is expensive."""

N_ENVS = 2
_MODELS: dict[Any, dict[str, Any]] = {
    CrossQPolicy: {"critic_hidden_sizes": [64, 64]},
    FastTD3Policy: {"critic_hidden_sizes": [64, 64], "actor_hidden_sizes": [64, 64]},
}
"""Smaller networks than a paper's, where its own would make the tests slow."""


def others_are_slow(policies: list[Any]) -> list[object]:
    """Return policies for ``parametrize``, with those marked as slow that others stand for."""
    kept = [at for at, policy in enumerate(policies) if policy in ONE_OF_A_KIND]
    return mostly_slow(policies, keep=kept)


class Toy(gym.Env[Any, Any]):
    """Observations are random, and an episode has six steps."""

    def __init__(self, action_space: gym.Space[Any]) -> None:
        self.observation_space = gym.spaces.Box(-1.0, 1.0, (3,), np.float32)
        self.action_space = action_space

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self._step = 0
        return self._obs(), {}

    def step(self, action: Any) -> Any:
        self._step += 1
        obs = self._obs()
        return obs, float(obs[0]), self._step == 6, False, {}

    def _obs(self) -> Any:
        return self.np_random.uniform(-1.0, 1.0, 3).astype(np.float32)


def env_for(cls: Any) -> gym.Env[Any, Any]:
    """Return an env that a class of policies supports."""
    if cls.several_agents:
        return CountingTeam(n_agent=2)
    if cls in CONTINUOUS:
        return Toy(gym.spaces.Box(-2.0, 2.0, (2,), np.float32))
    if cls in HYBRID:
        box = gym.spaces.Box(-2.0, 2.0, (2,), np.float32)
        return Toy(gym.spaces.Tuple([gym.spaces.Discrete(3), box]))
    return Toy(gym.spaces.Discrete(3))


def made(cls: Any, **options: Any) -> Any:
    """Return a policy of this class; one that normalizes by its data set has seen one."""
    policy = cls.for_env(env_for(cls), **{"seed": 0, "model": _MODELS.get(cls), **options})
    if issubclass(cls.settings_class(), DatasetNormSettings):
        policy.observe(collected(made(SACPolicy))["obs"])  # they do not depend on the policy
    return policy


def collected(policy: Any, n_step: int = 24) -> Batch:
    """Return ``[T, 2, …]`` that the policy collects in two envs."""
    with make_env_manager(lambda: env_for(type(policy)), env_num=N_ENVS, seed=0) as envs:
        return policy.train_batch(RolloutCollector(policy, envs).collect(N_ENVS * n_step))


def batch_for(policy: Any, n_rows: int = 16) -> Batch:
    """Return what the policy learns from, made of what it collects."""
    rows = collected(policy)
    if policy.on_policy:
        return on_policy_batch(policy, rows)
    return buffer_of(policy, to_store(policy, rows)).sample(n_rows)


def to_store(policy: Any, rows: Batch) -> Batch:
    """Return collected rows as a buffer gets them."""
    if policy.on_policy or policy.spec.gae_lambda is None:
        return rows
    return AdvantageEstimator(policy.learn_mode, user="the test")(rows)


def on_policy_batch(policy: Any, rows: Batch) -> Batch:
    """Return collected rows ``[T, E, …]`` as an on-policy algorithm learns from them."""
    if isinstance(policy, PGPolicy):
        columns = (rows["reward"], rows["terminated"], rows["done"])
        rows = with_columns(rows, ret=discounted_return(*columns, discount=policy.discount))
    elif policy.learns_from_trajectories:
        rows = policy.spec.add_targets(rows)
    else:
        rows = AdvantageEstimator(policy.learn_mode, user="the test")(rows)
    return rows if policy.minibatch_unit == "lanes" else flatten_lead(rows, 2)


def buffer_of(policy: Any, rows: Batch) -> TensorBuffer:
    """Return a buffer that draws what the policy learns from, filled with rows."""
    options: dict[str, Any] = {}
    if "state" in policy.learn_columns:
        options = {"unroll_len": 4, "start_columns": ("state",), "burn_in": policy.burn_in}
    elif isinstance(policy, DecisionTransformerPolicy):
        options, rows = {"unroll_len": 4}, with_returns_to_go(rows)
    elif policy.discount is not None:
        options = {"n_step": policy.n_step, "discount": policy.discount}
    if getattr(policy.cfg, "priority", False):
        options["sampler"] = PrioritySampler()
    buffer = TensorBuffer(500, seed=0, **options)
    buffer.push(rows)
    return buffer
