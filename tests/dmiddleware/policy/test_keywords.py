"""Keyword arguments of forward: those that nothing declares are refused."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from dmiddleware import classic
from dmiddleware.env import BaseEnvManager, make_env_manager
from dmiddleware.errors import ConfigError
from dmiddleware.pipeline import Task
from dmiddleware.policy import (
    DQNPolicy,
    IPPOPolicy,
    Policy,
    PPOPolicy,
    R2D2Policy,
    RecurrentPPOPolicy,
    RecurrentQMIXPolicy,
    SACPolicy,
    VDNPolicy,
)
from dmiddleware.rollout import RolloutCollector, evaluate_episodes
from middleware import EpisodeCollector, OnlineRLContext, StepCollector, eps_greedy_handler
from tests.dmiddleware.policy.every_policy import EVERY, batch_for, collected, env_for, made


@pytest.fixture
def envs(request: pytest.FixtureRequest) -> Iterator[BaseEnvManager]:
    with make_env_manager(lambda: env_for(request.param), env_num=2, seed=0) as manager:
        yield manager


@pytest.mark.parametrize("cls", EVERY)
def test_every_policy_refuses_unknown_keywords_in_every_mode(cls: Any) -> None:
    policy = made(cls)
    batch = batch_for(policy)
    obs = collected(policy, 1)["obs"][0]
    for call, mode in (
        (lambda **k: policy.learn_mode.forward(batch, **k), "learn"),
        (lambda **k: policy.collect_mode.forward(obs, **k), "collect"),
        (lambda **k: policy.eval_mode.forward(obs, **k), "eval"),
    ):
        for kwargs in ({"nonsense": 3}, {"phase": "x", "temperature": 1.0}, {"epsilom": 0.1}):
            name = next(iter(kwargs))
            wanted = rf"{cls.__name__}: forward in {mode} mode has no keyword {name}"
            with pytest.raises(ConfigError, match=wanted):
                call(**kwargs)
    if not policy.act_inputs:  # with one row for each env
        with pytest.raises(ConfigError, match="no keyword nonsense"):
            per_env = classic.as_eval_mode(policy, user="the test")
            per_env.forward({0: obs[0], 1: obs[1]}, nonsense=3)


@pytest.mark.parametrize("envs", [DQNPolicy], indirect=True)
@pytest.mark.parametrize("name", ["epsilon", "exploration_rate", "eps_train", "epss"])
def test_another_name_of_eps_is_answered_with_ours(envs: BaseEnvManager, name: str) -> None:
    policy = made(DQNPolicy)
    for call in (
        lambda: RolloutCollector(policy, envs).collect(4, policy_kwargs={name: 1.0}),
        lambda: RolloutCollector(policy, envs).collect_episodes(2, policy_kwargs={name: 1.0}),
        lambda: RolloutCollector(policy, envs).collect_step(policy_kwargs={name: 1.0}),
    ):
        with pytest.raises(ConfigError, match=rf"no keyword {name}; did you mean eps\?"):
            call()


@pytest.mark.parametrize("cls", [DQNPolicy, R2D2Policy, VDNPolicy, RecurrentQMIXPolicy])
def test_eps_is_a_keyword_of_collecting_only(cls: Any) -> None:
    policy = made(cls)
    with make_env_manager(lambda: env_for(cls), env_num=2, seed=0) as envs:
        rows = RolloutCollector(policy, envs).collect(100, policy_kwargs={"eps": 1.0})
        assert len(rows["action"].unique()) == 3
        wanted = r"eval mode has no keyword eps; it is one of collect_mode\.forward"
        with pytest.raises(ConfigError, match=wanted):
            evaluate_episodes(policy, envs, 2, policy_kwargs={"eps": 0.1})


@pytest.mark.parametrize("cls", [PPOPolicy, SACPolicy, RecurrentPPOPolicy, IPPOPolicy])
def test_drawing_actions_is_a_keyword_of_evaluating(cls: Any) -> None:
    policy = made(cls)
    with make_env_manager(lambda: env_for(cls), env_num=2, seed=0) as envs:
        evaluate_episodes(policy, envs, 2, policy_kwargs={"deterministic": False})
        with pytest.raises(
            ConfigError, match=r"no keyword is_deterministic; did you mean determini"
        ):
            evaluate_episodes(policy, envs, 2, policy_kwargs={"is_deterministic": False})


@pytest.mark.parametrize("collector", [StepCollector, EpisodeCollector])
@pytest.mark.parametrize("cls", [DQNPolicy, SACPolicy, PPOPolicy])
def test_so_are_those_of_the_context(cls: Any, collector: Any) -> None:
    def misspell(ctx: OnlineRLContext) -> None:
        ctx.collect_kwargs["epsilon"] = 0.5

    policy = made(cls)
    size = {"n_sample": 4} if collector is StepCollector else {"n_episode": 2}
    envs = make_env_manager(lambda: env_for(cls), env_num=2, seed=0)
    with Task(seed=0) as task, pytest.raises(ConfigError, match="no keyword epsilon; "):
        task.use(misspell).use(collector(policy, envs, **size)).run(max_step=1)


def test_the_handler_of_eps_reaches_the_policy() -> None:
    policy = made(DQNPolicy)
    envs = make_env_manager(lambda: env_for(DQNPolicy), env_num=2, seed=0)
    with Task(seed=0) as task:
        task.use(eps_greedy_handler(policy)).use(StepCollector(policy, envs, n_sample=60))
        task.run(max_step=1)
        assert len(task.ctx.trajectories["action"].unique()) == 3


class Own(Policy):
    """An algorithm that declares keywords of its own, some of them in a base class."""

    def learn(self, batch: Any, *, phase: str = "first", **kwargs: Any) -> dict[str, Any]:
        return {"total_loss": 0.0, "phase": phase}

    def act_collect(
        self, obs: Any, env_id: Any, *, temperature: float = 1.0, **kwargs: Any
    ) -> dict[str, Any]:
        return {"action": torch.full((len(env_id),), int(temperature))}

    def act_eval(self, obs: Any, env_id: Any) -> dict[str, Any]:
        return {"action": torch.zeros(len(env_id), dtype=torch.int64)}


class Derived(Own):
    def act_collect(
        self, obs: Any, env_id: Any, *, shift: int = 0, **kwargs: Any
    ) -> dict[str, Any]:
        output = super().act_collect(obs, env_id, **kwargs)
        return {"action": output["action"] + shift}


class Closed(Own):
    """It passes nothing on, so the keywords of its base class are not its own."""

    def act_collect(self, obs: Any, env_id: Any, shift: int = 0) -> dict[str, Any]:
        return {"action": torch.full((len(env_id),), shift)}


def test_an_algorithm_declares_its_own_keywords_as_parameters() -> None:
    obs = torch.zeros(2, 3)
    own, derived, closed = (cls(model=torch.nn.Identity()) for cls in (Own, Derived, Closed))
    assert own.learn_mode.forward({"obs": obs}, phase="second")["phase"] == "second"
    assert own.collect_mode.forward(obs, temperature=2.0)["action"].tolist() == [2, 2]
    assert derived.collect_mode.forward(obs, temperature=2.0, shift=1)["action"].tolist() == [3, 3]
    assert closed.collect_mode.forward(obs, shift=1)["action"].tolist() == [1, 1]
    for policy, name in ((own, "shift"), (closed, "temperature")):
        with pytest.raises(ConfigError, match=rf"no keyword {name}.*act_collect"):
            policy.collect_mode.forward(obs, **{name: 1})
    with pytest.raises(ConfigError, match="no keyword phases; did you mean phase"):
        own.learn_mode.forward({"obs": obs}, phases="second")


class PerEnv(classic.Policy):
    """As DI-engine has it: ε is a parameter that has no default."""

    def _forward_collect(self, data: Any, eps: float) -> dict[int, Any]:
        return {env_id: {"action": torch.tensor(int(eps))} for env_id in data}


def test_a_policy_that_is_written_per_env_declares_them_likewise() -> None:
    policy = PerEnv(model=torch.nn.Identity(), enable_field=["collect"])
    obs = torch.zeros(2, 3)
    assert policy.collect_mode.forward(obs, eps=1.0)["action"].tolist() == [1, 1]
    assert policy.collect_mode.forward({5: obs[0]}, eps=2)[5]["action"] == 2
    with pytest.raises(ConfigError, match=r"no keyword epsilon; did you mean eps\?.*collect$"):
        policy.collect_mode.forward({5: obs[0]}, epsilon=2)


@pytest.mark.parametrize("name", ["state", "prev_reward", "prev_action", "is_first"])
def test_inputs_that_a_policy_does_not_ask_for_are_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=f"no keyword {name}"):
        made(SACPolicy).collect_mode.forward(torch.zeros(2, 3), **{name: torch.zeros(2, 1)})
