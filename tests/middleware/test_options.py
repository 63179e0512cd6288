"""Every setting of a stock policy, and option of a worker, is read by what a program uses."""

from __future__ import annotations

import sys
from collections.abc import ItemsView, Iterable, Iterator, KeysView, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from dmiddleware.classic import collate
from dmiddleware.classic.config import Configurable
from dmiddleware.data import TensorBuffer
from dmiddleware.env import BaseEnvManager, make_env_manager
from dmiddleware.errors import ConfigError
from dmiddleware.pipeline import Task
from dmiddleware.policy import BCPolicy, DQNPolicy, Policy, PPOPolicy
from dmiddleware.settings import Settings, describe
from dmiddleware.worker import BaseLearner
from dmiddleware.worker.collector import EpisodeSerialCollector, SampleSerialCollector
from dmiddleware.worker.evaluator import InteractionSerialEvaluator
from middleware import (
    EpisodeCollector,
    OffPolicyLearner,
    OnPolicyLearner,
    StepCollector,
    data_pusher,
    eps_greedy_handler,
    gae_estimator,
)

SMALL = {"encoder_hidden_sizes": [8]}


class RecordedConfig(dict[str, Any]):
    """A config that records the paths of the values that are read from it."""

    def __init__(self, values: Mapping[str, Any], read: set[str], prefix: str = "") -> None:
        self._read, self._prefix = read, prefix
        for key, value in values.items():
            if isinstance(value, Mapping):
                value = RecordedConfig(value, read, f"{prefix}{key}.")
            self[key] = value

    def __getitem__(self, key: str) -> Any:
        self._read.add(self._prefix + key)
        return super().__getitem__(key)

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None

    def get(self, key: str, default: Any = None) -> Any:
        try:
            return self[key]
        except KeyError:
            return default

    def __iter__(self) -> Iterator[str]:  # without it, dict() and ** bypass __getitem__
        return super().__iter__()

    def keys(self) -> KeysView[str]:
        return KeysView(self)

    def items(self) -> Any:
        return ItemsView(self)


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Return the paths and names that are read from all configs and settings during the test."""
    found: set[str] = set()
    merged_config = vars(Configurable)["merged_config"].__func__

    def recorded(cls: Any, cfg: Mapping[str, Any] | None = None) -> RecordedConfig:
        return RecordedConfig(merged_config(cls, cfg), found)

    def recording(settings: Any, name: str) -> Any:
        reader = sys._getframe(1).f_globals["__name__"]
        if reader not in ("dataclasses", "dmiddleware.settings"):  # they copy all of them
            found.add(name)
        return object.__getattribute__(settings, name)

    monkeypatch.setattr(Configurable, "merged_config", classmethod(recorded))
    monkeypatch.setattr(Settings, "__getattribute__", recording)
    return found


@pytest.fixture(autouse=True)
def working_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def process_group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def cartpole() -> BaseEnvManager:
    return make_env_manager("CartPole-v1", env_num=2, seed=0)


def unread(cls: Any, read: Iterable[str]) -> set[str]:
    if issubclass(cls, Policy):
        return {setting.name for setting in describe(cls.settings_class())} - set(read)
    return set(cls.options()) - set(read)


def act(policy: Policy) -> None:
    """Use what all policies have in common: collecting by either API."""
    with Task() as task:
        task.use(StepCollector(policy, cartpole(), n_sample=8))
        task.use(EpisodeCollector(policy, cartpole(), n_episode=2)).run(max_step=1)
    with SampleSerialCollector({}, cartpole(), policy) as collector:
        collector.collect(n_sample=8)


def test_every_option_of_dqn_is_read(read: set[str], process_group: None) -> None:
    DQNPolicy.for_env(cartpole(), model=SMALL, multi_gpu=True)
    policy = DQNPolicy.for_env(
        cartpole(), model=SMALL, obs_norm=True, n_step=3, target_update_freq=1
    )
    act(policy)
    buffer = TensorBuffer(100, n_step=3, seed=0)
    with Task() as task:
        task.use(eps_greedy_handler(policy))
        task.use(StepCollector(policy, cartpole(), n_sample=80, random_steps=80))
        task.use(data_pusher(buffer)).use(OffPolicyLearner(policy, buffer))
        task.run(max_step=1)
        assert task.ctx.train_iter == 1
    assert not unread(DQNPolicy, read)


def test_every_option_of_ppo_is_read(read: set[str], process_group: None) -> None:
    PPOPolicy.for_env(cartpole(), model=SMALL, multi_gpu=True)
    policy = PPOPolicy.for_env(
        cartpole(), model=SMALL, obs_norm=True, reward_norm=True, value_norm=True
    )
    act(policy)
    with pytest.raises(ConfigError, match="on-policy"):
        StepCollector(policy, cartpole(), n_sample=8, random_steps=1)
    with Task() as task:
        task.use(StepCollector(policy, cartpole(), n_sample=8)).use(gae_estimator(policy))
        task.use(OnPolicyLearner(policy)).run(max_step=1)
        assert task.ctx.train_iter
    assert not unread(PPOPolicy, read)


def test_every_option_of_behavior_cloning_is_read(read: set[str], process_group: None) -> None:
    ranked = BCPolicy.for_env(cartpole(), model=SMALL, multi_gpu=True, batch_size=8)
    policy = BCPolicy.for_env(cartpole(), model=SMALL, obs_norm=True, batch_size=8)
    policy.observe(torch.randn(16, 4))
    act(ranked)
    act(policy)
    buffer = TensorBuffer(100, seed=0)
    with Task() as task:
        task.use(StepCollector(policy, cartpole(), n_sample=8, random_steps=8)).use(
            data_pusher(buffer)
        )
        task.use(OffPolicyLearner(policy, buffer))
        task.use(OffPolicyLearner(ranked, buffer, name="ranked"))
        task.run(max_step=1)
        assert task.ctx.train_iter == 2
    assert not unread(BCPolicy, read)


@pytest.mark.parametrize("cls", [SampleSerialCollector, EpisodeSerialCollector])
def test_every_option_of_a_serial_collector_is_read(
    read: set[str], cls: type[SampleSerialCollector | EpisodeSerialCollector]
) -> None:
    policy = DQNPolicy.for_env(cartpole(), model=SMALL)
    with cls({}, cartpole(), policy) as collector:
        collector.collect(4)
    assert not unread(cls, read)


def test_every_option_of_the_serial_evaluator_is_read(read: set[str]) -> None:
    policy = DQNPolicy.for_env(cartpole(), model=SMALL)
    envs = make_env_manager(
        "CartPole-v1", env_num=2, seed=0, env_kwargs={"render_mode": "rgb_array"}
    )
    cfg = {"n_episode": 2, "render": {"render_freq": 1}}
    with InteractionSerialEvaluator(cfg, envs, policy) as evaluator:
        assert evaluator.should_eval(0)
        evaluator.eval(train_iter=1, envstep=8)
        assert not evaluator.should_eval(2)
    assert not unread(InteractionSerialEvaluator, read)


def test_every_option_of_the_learner_is_read(read: set[str]) -> None:
    policy = BCPolicy.for_env(cartpole(), model=SMALL, batch_size=4, modes=["learn"])
    cfg = {"train_iterations": 2, "dataloader": {"num_workers": 1, "worker": "thread"}}
    with BaseLearner(cfg, policy) as learner:
        sample = {"obs": torch.zeros(4), "action": torch.tensor(1)}
        learner.get_data = lambda batch_size: [lambda: sample] * batch_size
        learner.setup_dataloader()
        learner.start()
    with BaseLearner({}, policy, dist_info=(1, 2)) as other_rank:
        other_rank.train(collate([sample] * 4))
    assert not unread(BaseLearner, read)
