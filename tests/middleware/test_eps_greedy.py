from typing import Any

import pytest

from dmiddleware.classic import as_command_mode
from dmiddleware.errors import ChainError, ConfigError
from dmiddleware.policy import DQNPolicy, PPOPolicy
from middleware import OnlineRLContext, Role, eps_greedy_handler, termination_checker
from middleware.eps_greedy import EpsGreedyHandler

MODEL = {"obs_shape": 4, "action_shape": 2}


def with_epsilon(**eps: Any) -> DQNPolicy:
    if eps.get("type") != "piecewise":
        eps = {"type": "linear", "start": 1.0, "end": 0.05, "decay": 10_000, **eps}
    return DQNPolicy({"model": MODEL, "eps": eps})


def test_epsilon_falls_with_the_environment_steps(run_steps: Any) -> None:
    seen: list[float] = []

    def collect(ctx: OnlineRLContext) -> None:
        seen.append(ctx.collect_kwargs["eps"])
        ctx.env_step += 50

    policy = with_epsilon(start=1.0, end=0.2, decay=100)
    run_steps(eps_greedy_handler(policy), collect, n_steps=4)
    assert seen == pytest.approx([1.0, 0.6, 0.2, 0.2])


def test_exponential_decay_has_1_over_e_of_the_way_left_after_decay_steps(run_steps: Any) -> None:
    handler = eps_greedy_handler(with_epsilon(start=1.0, end=0.0, decay=100, type="exponential"))
    ctx = run_steps(handler, ctx=OnlineRLContext(env_step=100))
    assert ctx.collect_kwargs["eps"] == pytest.approx(0.36788, abs=1e-5)


def test_epsilon_may_follow_the_updates_or_the_progress(run_steps: Any) -> None:
    ctx = OnlineRLContext(env_step=10, train_iter=30)
    handler = eps_greedy_handler(with_epsilon(start=1.0, end=0.0, decay=40, by="update"))
    assert run_steps(handler, ctx=ctx).collect_kwargs["eps"] == 0.25
    points = [(0.0, 1.0), (0.5, 0.5), (1.0, 0.0)]
    handler = eps_greedy_handler(with_epsilon(type="piecewise", points=points, by="progress"))
    stop = termination_checker(max_env_step=100, max_train_iter=120)
    assert run_steps(handler, stop, ctx=ctx).collect_kwargs["eps"] == 0.75


def test_epsilon_follows_the_schedule_of_the_policy(run_steps: Any) -> None:
    points = [(0, 1.0), (10, 0.5), (20, 0.0)]
    policy = with_epsilon(type="piecewise", points=points, by="update")
    ctx = OnlineRLContext(env_step=1_000, train_iter=15)
    assert run_steps(eps_greedy_handler(policy), ctx=ctx).collect_kwargs["eps"] == 0.25
    commands = as_command_mode(policy, user="the test")
    assert commands.get_setting_collect({"envstep": 0, "train_iter": 15})["eps"] == 0.25


def test_progress_without_a_length_of_the_run_is_refused_before_the_first_step(
    run_steps: Any,
) -> None:
    with pytest.raises(ChainError, match=r"scheduled by progress.*add TerminationChecker"):
        run_steps(eps_greedy_handler(with_epsilon(decay=1, by="progress")))


def test_epsilon_is_logged(run_steps: Any) -> None:
    ctx = run_steps(eps_greedy_handler(with_epsilon(start=0.5)))
    assert ctx.logged == {"collect/eps": 0.5}


def test_other_collect_kwargs_stay(run_steps: Any) -> None:
    def set_temperature(ctx: OnlineRLContext) -> None:
        ctx.collect_kwargs["temperature"] = 2.0

    ctx = run_steps(set_temperature, eps_greedy_handler(with_epsilon()))
    assert ctx.collect_kwargs == {"temperature": 2.0, "eps": 1.0}


def test_it_is_active_in_the_role_collector() -> None:
    handler: Any = eps_greedy_handler(with_epsilon())
    assert handler.roles == (Role.COLLECTOR,)
    assert handler.reads == ("env_step", "train_iter")
    assert handler.writes == ("collect_kwargs",)


def test_invalid_probability_is_rejected() -> None:
    with pytest.raises(ConfigError, match=r"1\.5"):
        with_epsilon(start=1.5)


def test_a_policy_without_a_schedule_is_refused() -> None:
    message = r"EpsGreedyHandler reads eps from the policy, which has none"
    with pytest.raises(ConfigError, match=message):
        EpsGreedyHandler(PPOPolicy({"model": MODEL}))
