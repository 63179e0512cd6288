"""Middleware take the policies of the classic interface, and what only describes a policy."""

from __future__ import annotations

from typing import Any

import pytest

from dmiddleware.classic import create_policy, get_policy_cls
from dmiddleware.errors import ConfigError
from dmiddleware.schedule import Schedule
from middleware import (
    EpsGreedyHandler,
    GAEEstimator,
    ModelExchanger,
    NStepRewardEnhancer,
    OnlineRLContext,
)

MODEL = {"obs_shape": 4, "action_shape": 2}


def stock(name: str, **cfg: Any) -> Any:
    return create_policy({"type": name, "model": MODEL, "seed": 0, **cfg})


@pytest.mark.parametrize("mode", ["learn_mode", "collect_mode", "eval_mode", None])
def test_an_estimator_takes_a_stock_policy_or_any_mode_of_it(mode: str | None) -> None:
    policy = stock("ppo", model={**MODEL, "action_space": "discrete"})
    GAEEstimator(policy if mode is None else getattr(policy, mode))
    NStepRewardEnhancer(policy if mode is None else getattr(policy, mode))


def test_weights_of_a_stock_policy_and_of_a_subclass_are_exchanged() -> None:
    class Own(get_policy_cls({"type": "dqn"})):  # type: ignore[misc]  # a class made here
        pass

    for policy in (stock("dqn"), Own({"model": MODEL})):
        ModelExchanger(policy)
    with pytest.raises(ConfigError, match="not a mode"):
        ModelExchanger(stock("dqn").collect_mode)


@pytest.mark.parametrize(
    ("eps", "first"), [(0.25, 0.25), (1, 1.0), (Schedule.linear(0.5, 0.0, decay=10), 0.5)]
)
def test_epsilon_may_be_a_number_or_a_schedule(run_steps: Any, eps: Any, first: float) -> None:
    assert run_steps(EpsGreedyHandler(eps), ctx=OnlineRLContext()).collect_kwargs["eps"] == first


def test_epsilon_of_a_stock_policy_is_that_of_its_config(run_steps: Any) -> None:
    policy = stock("dqn", other={"eps": {"type": "linear", "start": 0.5, "end": 0.1, "decay": 9}})
    ctx = run_steps(EpsGreedyHandler(policy), ctx=OnlineRLContext())
    assert ctx.collect_kwargs["eps"] == 0.5
    with pytest.raises(ConfigError, match="eps"):
        EpsGreedyHandler(stock("sac", other={"eps": {"start": 0.5}}))
