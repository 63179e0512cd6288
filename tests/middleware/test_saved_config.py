"""A run's config.yaml builds the policy of the run again."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import yaml

from dmiddleware.data import TensorBuffer
from dmiddleware.env import make_env_manager
from dmiddleware.pipeline import Task
from dmiddleware.policy import (
    POLICY_REGISTRY,
    DecisionTransformerPolicy,
    DQNPolicy,
    Policy,
    PolicySettings,
    PPOPolicy,
    SACPolicy,
    create_policy,
)
from dmiddleware.schedule import Schedule
from dmiddleware.settings import plain_values
from middleware import (
    DataPusher,
    EpisodeCollector,
    Experiment,
    OffPolicyLearner,
    OnPolicyLearner,
    StepCollector,
    data_pusher,
    eps_greedy_handler,
    gae_estimator,
    montecarlo_return_estimator,
)
from middleware.classic import offpolicy_data_fetcher, trainer
from tests.dmiddleware.policy.equal_states import same
from tests.dmiddleware.policy.every_policy import (
    EVERY,
    buffer_of,
    collected,
    env_for,
    made,
    others_are_slow,
    to_store,
)


def config_of_a_run(root: Path, policy: Any, *middleware: Any) -> dict[str, Any]:
    """Run one step of a chain, and return the policy's part of its config.yaml."""
    config: dict[str, Any] = saved_by_a_run(root, policy, *middleware)["policy"]
    return config


def saved_by_a_run(root: Path, policy: Any, *middleware: Any) -> dict[str, Any]:
    """Run one step of a chain, and return its config.yaml."""
    experiment = Experiment("short", policy, root=root)
    with Task(seed=0) as task:
        for one in (*middleware, experiment):
            task.use(one)
        task.run(max_step=1)
    saved: dict[str, Any] = yaml.safe_load(
        (experiment.run.path / "config.yaml").read_text(encoding="utf-8")
    )
    return saved


def usual_chain(policy: Any) -> list[Any]:
    """Return the middleware with which a policy usually learns."""
    envs = make_env_manager(lambda: env_for(type(policy)), env_num=2, seed=0)
    collector = StepCollector(policy, envs, n_sample=48)
    explores = [] if policy.explores else [eps_greedy_handler(policy)]
    if policy.on_policy:
        on_policy = OnPolicyLearner(policy)
        if policy.learns_from_trajectories:
            return [*explores, collector, on_policy]
        if policy.spec.gae_lambda is not None:
            return [*explores, collector, gae_estimator(policy), on_policy]
        episodes = EpisodeCollector(policy, envs, n_episode=8)
        return [*explores, episodes, montecarlo_return_estimator(policy), on_policy]
    if isinstance(policy, DecisionTransformerPolicy):
        buffer = buffer_of(policy, collected(policy))
        return [offpolicy_data_fetcher(buffer, batch_size=8), trainer(policy)]
    buffer = buffer_of(policy, to_store(policy, collected(policy)))
    learner = OffPolicyLearner(policy, buffer, update_per_collect=2)
    if policy.spec.gae_lambda is not None:
        return [collector, gae_estimator(policy), DataPusher(buffer, what="train_data"), learner]
    return [*explores, collector, data_pusher(buffer), learner]


@pytest.mark.parametrize("cls", others_are_slow(EVERY))
def test_the_config_of_every_policy_builds_it_again(cls: Any, tmp_path: Path) -> None:
    policy = made(cls, batch_size=32)
    config = config_of_a_run(tmp_path, policy, *usual_chain(policy))
    state = policy.learn_mode.state_dict()
    again = create_policy(config)
    assert type(again) is cls
    again.learn_mode.load_state_dict(state)
    assert same(again.learn_mode.state_dict(), state)
    assert plain_values(again.cfg) == plain_values(policy.cfg)


@pytest.mark.parametrize("cls", [SACPolicy, DQNPolicy])
def test_random_steps_are_saved_with_the_collector(cls: Any, tmp_path: Path) -> None:
    policy = made(cls)
    chain = usual_chain(policy)
    envs = make_env_manager(lambda: env_for(cls), env_num=2, seed=0)
    chain[-3] = StepCollector(policy, envs, n_sample=48, random_steps=64)
    saved = saved_by_a_run(tmp_path, policy, *chain)
    collector = {"env_num": 2, "n_sample": 48, "random_steps": 64}
    assert {"StepCollector": collector} in saved["chain"]
    assert type(create_policy(saved["policy"])) is cls


def test_schedules_are_saved(tmp_path: Path) -> None:
    rate = Schedule.linear(1e-3, 1e-5, decay=100, by="update")
    clip = Schedule.piecewise([(0, 0.3), (10, 0.1)], by="update")
    policy = made(PPOPolicy, learning_rate=rate, clip_ratio=clip, entropy_weight=0.01)
    again = create_policy(config_of_a_run(tmp_path, policy, *usual_chain(policy)))
    assert again.schedules == policy.schedules


class OneSettings(PolicySettings):
    """Those of all policies, and one more."""

    shift: int = 1
    batch_size = 8


@POLICY_REGISTRY.register("policy_with_one_option")
class OneSetting(Policy):
    """An algorithm of one's own."""

    cfg: OneSettings
    model_type = "q_network"

    def learn(self, batch: Any) -> dict[str, Any]:
        return {"total_loss": 0.0}

    def act_collect(self, obs: Any, env_id: Any) -> dict[str, Any]:
        return {"action": self.model(obs)["logit"].argmax(-1)}


def test_the_config_of_a_policy_of_ones_own_names_its_module(tmp_path: Path) -> None:
    env = env_for(DQNPolicy)
    policy = OneSetting.for_env(env, shift=3, modes=["learn", "collect"])
    buffer = TensorBuffer(500, seed=0)
    envs = make_env_manager(lambda: env_for(DQNPolicy), env_num=2, seed=0)
    chain = [
        StepCollector(policy, envs, n_sample=48),
        data_pusher(buffer),
        OffPolicyLearner(policy, buffer, update_per_collect=2),
    ]
    config = config_of_a_run(tmp_path, policy, *chain)
    assert (config["type"], config["import_names"]) == ("policy_with_one_option", [__name__])
    again = create_policy(config, modes=["collect"])
    assert isinstance(again, OneSetting) and again.cfg.shift == 3


class Odd:
    """A middleware that has anything where the stock ones have settings."""

    def __init__(self, settings: Any) -> None:
        self._settings = settings

    @property
    def settings(self) -> Any:
        if isinstance(self._settings, Exception):
            raise self._settings
        return self._settings

    def __call__(self, ctx: Any) -> None:
        """Do nothing."""


class NoText:
    """An object without text."""

    def __repr__(self) -> str:
        raise RuntimeError("no text")


@pytest.mark.parametrize(
    ("settings", "saved"),
    [
        (3, {"settings": 3}),
        (Namespace(rate=1), {"settings": "Namespace(rate=1)"}),
        ({"a": NoText(), 1: {2}}, {"a": f"<unsaved: {__name__}.NoText>", "1": [2]}),
        (RuntimeError("not yet"), {}),
    ],
)
def test_whatever_settings_a_middleware_has_the_run_continues(
    settings: Any, saved: Any, tmp_path: Path
) -> None:
    config = saved_by_a_run(tmp_path, made(DQNPolicy), *usual_chain(made(DQNPolicy)), Odd(settings))
    assert {"Odd": saved} in config["chain"]
