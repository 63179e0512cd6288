"""Settings under the names that other libraries give them."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from typing import Any

import pytest

import dmiddleware.data
import dmiddleware.env
import dmiddleware.rollout
import middleware
from dmiddleware.classic import DequeBuffer, create_policy
from dmiddleware.data import PrioritySampler, TensorBuffer
from dmiddleware.env import SyncEnvManager, make_env_manager
from dmiddleware.errors import ConfigError
from dmiddleware.policy import DQNPolicy, PPOPolicy, SACPolicy, TD3Policy
from dmiddleware.rollout import RolloutCollector
from dmiddleware.settings import hints_of
from middleware import (
    EpisodeCollector,
    Experiment,
    GAEEstimator,
    OffPolicyLearner,
    OnPolicyLearner,
    StepCollector,
    eps_greedy_handler,
    interaction_evaluator,
    termination_checker,
)
from middleware.base import BaseMiddleware
from tests.dmiddleware.policy.every_policy import EVERY, env_for, made


@pytest.mark.parametrize(
    ("cls", "name", "ours"),
    [
        (DQNPolicy, "gamma", "did you mean discount?"),
        (DQNPolicy, "tau", "did you mean target_tau?"),
        (DQNPolicy, "lr", "did you mean learning_rate?"),
        (DQNPolicy, "exploration_fraction", "did you mean eps?"),
        (DQNPolicy, "exploration_final_eps", "did you mean eps?"),
        (DQNPolicy, "epsilon", "did you mean eps?"),
        (DQNPolicy, "target_update_interval", "did you mean target_update_freq?"),
        (DQNPolicy, "max_grad_norm", "did you mean grad_clip_norm?"),
        (DQNPolicy, "n_steps", "did you mean n_step?"),
        (DQNPolicy, "estimation_step", "did you mean n_step?"),
        (PPOPolicy, "clip_range", "did you mean clip_ratio?"),
        (PPOPolicy, "clip_coef", "did you mean clip_ratio?"),
        (PPOPolicy, "vf_coef", "did you mean value_weight?"),
        (PPOPolicy, "ent_coef", "did you mean entropy_weight?"),
        (PPOPolicy, "n_epochs", "did you mean epoch_per_collect?"),
        (PPOPolicy, "n_steps", "here it is n_sample of the collector"),
        (PPOPolicy, "epsilon", "the schedule of ε"),
        (SACPolicy, "ent_coef", "did you mean alpha?"),
        (SACPolicy, "lr", "did you mean learning_rate_q or learning_rate_policy?"),
        (SACPolicy, "gae_lambda", "an option of the policies that have it"),
        (TD3Policy, "policy_delay", "did you mean actor_update_freq?"),
        (TD3Policy, "critic_lr", "did you mean learning_rate_critic?"),
    ],
)
def test_an_option_of_another_library_names_ours(cls: Any, name: str, ours: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(f"unknown setting {name}; ") + ".*") as caught:
        cls.for_env(env_for(cls), **{name: 0.5})
    assert ours in str(caught.value)


@pytest.mark.parametrize(
    ("name", "home"),
    [
        ("buffer_size", "TensorBuffer(size)"),
        ("learning_starts", "OffPolicyLearner(policy, buffer, learn_start=...)"),
        ("gradient_steps", "OffPolicyLearner(policy, buffer, update_per_collect=...)"),
        ("total_timesteps", "TerminationChecker(max_env_step=...)"),
        ("n_envs", "make_env_manager(env, env_num=...)"),
        ("num_envs", "make_env_manager(env, env_num=...)"),
        ("net_arch", "for_env(env, model={"),
        ("policy_kwargs", "for_env(env, model={"),
        ("tensorboard_log", "Experiment(name, policy)"),
        ("eps_test", "evaluating is greedy"),
        ("random_steps", "StepCollector(policy, envs, random_steps=...)"),
    ],
)
@pytest.mark.parametrize("cls", EVERY)
def test_a_setting_that_no_policy_has_names_what_has_it(cls: Any, name: str, home: str) -> None:
    with pytest.raises(ConfigError, match=f"unknown setting {name}; ") as caught:
        cls.for_env(env_for(cls), **{name: 1})
    assert home in str(caught.value)


@pytest.mark.parametrize(
    ("config", "ours"),
    [
        ({"gamma": 0.9}, "unknown key gamma; did you mean discount_factor?"),
        ({"lr": 0.1}, "unknown key lr; did you mean learn.learning_rate?"),
        ({"learn": {"lr": 0.1}}, "unknown key learn.lr; did you mean learn.learning_rate?"),
        ({"learn": {"tau": 0.1}}, "unknown key learn.tau; did you mean learn.target_tau?"),
        ({"other": {"eps": {"start_e": 1.0}}}, "did you mean other.eps.start?"),
        ({"buffer_size": 10}, "here it is the size of the buffer: TensorBuffer(size)"),
        ({"model": {"net_arch": [8]}}, "unknown key net_arch; did you mean encoder_hidden_sizes?"),
    ],
)
def test_so_does_a_key_of_a_config(config: dict[str, Any], ours: str) -> None:
    with pytest.raises(ConfigError) as caught:
        create_policy({"type": "dqn", **config})
    assert ours in str(caught.value)


POLICY = made(DQNPolicy)
ENVS = make_env_manager(lambda: env_for(DQNPolicy), env_num=2)
BUFFER = TensorBuffer(100)


@pytest.mark.parametrize(
    ("build", "name", "ours"),
    [
        (lambda **k: TensorBuffer(**k), "buffer_size", "did you mean size?"),
        (lambda **k: TensorBuffer(**k), "capacity", "did you mean size?"),
        (lambda **k: TensorBuffer(9, **k), "gamma", "did you mean discount?"),
        (lambda **k: TensorBuffer(9, **k), "estimation_step", "did you mean n_step?"),
        (lambda **k: TensorBuffer(9, **k), "batch_size", "an option of the policies"),
        (lambda **k: DequeBuffer(**k), "maxlen", "did you mean size?"),
        (PrioritySampler, "prioritized_replay_alpha", "did you mean alpha?"),
        (lambda **k: OffPolicyLearner(POLICY, BUFFER, **k), "learning_starts", "mean learn_start?"),
        (lambda **k: OffPolicyLearner(POLICY, BUFFER, **k), "utd_ratio", "update_per_collect?"),
        (lambda **k: OffPolicyLearner(POLICY, BUFFER, **k), "lr", "here it is learning_rate or"),
        (
            lambda **k: OffPolicyLearner(POLICY, BUFFER, **k),
            "batch_size",
            "here it is an option of the policies that have it, set where the policy is built",
        ),
        (lambda **k: OnPolicyLearner(POLICY, **k), "n_epochs", "here it is epoch_per_collect"),
        (lambda **k: OnPolicyLearner(POLICY, **k), "lr", "for_env(env, learning_rate=...)"),
        (lambda **k: StepCollector(POLICY, ENVS, **k), "train_freq", "did you mean n_sample?"),
        (lambda **k: StepCollector(POLICY, ENVS, **k), "n_steps", "did you mean n_sample?"),
        (
            lambda **k: StepCollector(POLICY, ENVS, **k),
            "eps",
            "the schedule of ε: eps of the policy",
        ),
        (lambda **k: EpisodeCollector(POLICY, ENVS, **k), "episode_per_collect", "n_episode?"),
        (lambda **k: make_env_manager("CartPole-v1", **k), "num_envs", "did you mean env_num?"),
        (lambda **k: make_env_manager("CartPole-v1", **k), "n_envs", "did you mean env_num?"),
        (termination_checker, "total_timesteps", "did you mean max_env_step?"),
        (eps_greedy_handler, "start_e", "here it is the schedule of ε: eps of the policy"),
        (eps_greedy_handler, "exploration_fraction", "eps of the policy"),
        (lambda **k: interaction_evaluator(POLICY, ENVS, **k), "n_eval_episodes", "n_episode?"),
        (lambda **k: Experiment("x", POLICY, **k), "verbose", "shows the progress"),
    ],
)
def test_so_does_an_argument(build: Callable[..., Any], name: str, ours: str) -> None:
    with pytest.raises(ConfigError, match=f"unknown keyword {name}; ") as caught:
        build(**{name: 1})
    assert ours in str(caught.value)


def middleware_that_take_options() -> list[Any]:
    """Return all public classes of middleware, buffers and collectors that have options."""
    found = [
        getattr(module, name)
        for module in (middleware, dmiddleware.data, dmiddleware.rollout, dmiddleware.env)
        for name in module.__all__
    ]
    return [
        cls
        for cls in found
        if inspect.isclass(cls)
        and any(issubclass(cls, base) for base in (BaseMiddleware, TensorBuffer, RolloutCollector))
        and cls is not BaseMiddleware
    ]


@pytest.mark.parametrize("cls", middleware_that_take_options())
def test_every_option_of_a_policy_says_where_it_is_set(cls: Any) -> None:
    own = inspect.signature(cls).parameters
    names = {name for policy in EVERY for name in hints_of(policy.settings_class())}
    required = [
        object()
        for one in own.values()
        if one.default is one.empty and one.kind is one.POSITIONAL_OR_KEYWORD
    ]
    for name in names - own.keys() - {"eps", "cuda", "optimizer"}:
        with pytest.raises(ConfigError, match=f"unknown keyword {name}; ") as caught:
            cls(*required, **{name: 1})
        hint = str(caught.value).partition("; ")[2]
        # What a class has under another name comes first.
        assert f"for_env(env, {name}=...)" in hint or hint.startswith("did you mean"), hint
        assert f"here it is {name}," not in hint


@pytest.mark.parametrize(
    ("build", "name", "home"),
    [
        (lambda **k: OnPolicyLearner(POLICY, **k), "clip_ratio", "for_env(env, clip_ratio=...)"),
        (lambda **k: OnPolicyLearner(POLICY, **k), "rho_clip", "for_env(env, rho_clip=...)"),
        (lambda **k: GAEEstimator(POLICY, **k), "gae_lambda", "for_env(env, gae_lambda=...)"),
        (lambda **k: StepCollector(POLICY, ENVS, **k), "stop_value", "InteractionEvaluator"),
        (lambda **k: OffPolicyLearner(POLICY, BUFFER, **k), "max_env_step", "TerminationChecker"),
        (lambda **k: SyncEnvManager([], **k), "step_timeout_s", "AsyncEnvManager"),
        (
            lambda **k: OnPolicyLearner(POLICY, **k),
            "batch_sise",
            "if batch_size was meant, here",
        ),
        (lambda **k: DQNPolicy({}, **k), "batch_size", "for_env(env, batch_size=...)"),
    ],
)
def test_an_option_of_another_class_names_that_class(
    build: Callable[..., Any], name: str, home: str
) -> None:
    with pytest.raises(ConfigError, match=re.escape(home)):
        build(**{name: 1})
