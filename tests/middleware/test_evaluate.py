from types import SimpleNamespace
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch

from dmiddleware.data import load_checkpoint
from dmiddleware.env import make_env_manager
from dmiddleware.errors import ConfigError, SpaceError
from dmiddleware.pipeline import Task
from dmiddleware.policy import DQNPolicy, PPOPolicy
from dmiddleware.rollout import evaluate_episodes
from middleware import (
    GAEEstimator,
    OfflineRLContext,
    OnlineRLContext,
    OnPolicyLearner,
    Role,
    StepCollector,
    interaction_evaluator,
)
from middleware.record.checkpoint import CkptSaver
from middleware.record.run_folder import RunFolder
from tests.dmiddleware.policy.grouped_envs import GROUPS, Parts


@pytest.fixture
def dqn() -> DQNPolicy:
    return DQNPolicy(
        {"seed": 0, "model": {"obs_shape": 4, "action_shape": 2, "encoder_hidden_sizes": [8]}}
    )


def cartpole(env_num: int = 2, seed: int = 0, **kwargs: Any) -> Any:
    return make_env_manager("CartPole-v1", env_num=env_num, seed=seed, env_kwargs=kwargs)


def learn(ctx: OnlineRLContext) -> None:
    ctx.train_iter += 10


def test_policy_is_evaluated_in_the_first_step_and_then_at_an_interval(
    run_steps: Any, dqn: DQNPolicy
) -> None:
    at = []

    def note(ctx: OnlineRLContext) -> None:
        if ctx.eval_value is not None:
            at.append(ctx.train_iter)

    evaluator = interaction_evaluator(dqn.eval_mode, cartpole(), n_episode=2, every_train_iter=25)
    ctx = run_steps(learn, evaluator, note, n_steps=9)
    assert at == [10, 30, 50, 80]
    assert ctx.eval_value is None
    assert ctx.last_eval_iter == 80


def test_the_interval_may_be_in_env_steps(run_steps: Any, dqn: DQNPolicy) -> None:
    at = []

    def collect(ctx: OnlineRLContext) -> None:
        ctx.env_step += 64

    def note(ctx: OnlineRLContext) -> None:
        if ctx.eval_value is not None:
            at.append(ctx.env_step)

    evaluator = interaction_evaluator(dqn.eval_mode, cartpole(), n_episode=2, every_env_step=200)
    assert evaluator.settings.every_train_iter is None
    run_steps(collect, evaluator, note, n_steps=13)
    assert at == [64, 256, 448, 640, 832]


def test_a_run_of_40_000_env_steps_has_more_than_three_evaluations(
    run_steps: Any, dqn: DQNPolicy
) -> None:
    at = []

    def collect(ctx: OnlineRLContext) -> None:
        ctx.env_step += 800

    def note(ctx: OnlineRLContext) -> None:
        if ctx.eval_value is not None:
            at.append(ctx.env_step)

    evaluator = interaction_evaluator(dqn.eval_mode, cartpole(), n_episode=2)
    run_steps(collect, evaluator, note, n_steps=50)
    assert at == [800, 10_400, 20_000, 30_400, 40_000]


def test_an_evaluator_of_a_dataset_evaluates_each_thousand_updates(
    run_steps: Any, dqn: DQNPolicy
) -> None:
    at = []

    def learn_much(ctx: OfflineRLContext) -> None:
        ctx.train_iter += 400

    def note(ctx: OfflineRLContext) -> None:
        if ctx.eval_value is not None:
            at.append(ctx.train_iter)

    evaluator = interaction_evaluator(dqn.eval_mode, cartpole(), n_episode=2)
    run_steps(learn_much, evaluator, note, n_steps=6, ctx=OfflineRLContext())
    assert at == [400, 1200, 2000]


def test_evaluations_have_one_interval(dqn: DQNPolicy) -> None:
    with pytest.raises(ConfigError, match="every_env_step must be None with every_train_iter=5"):
        interaction_evaluator(
            dqn.eval_mode, cartpole(), n_episode=2, every_train_iter=5, every_env_step=5
        )


def test_an_evaluation_may_draw_actions(run_steps: Any) -> None:
    policy = PPOPolicy({"seed": 0, "model": {"obs_shape": 4, "action_shape": 2}})
    with cartpole(seed=5) as envs:
        greedy = evaluate_episodes(policy, envs, 6).get_episode_return()
    policy.seed(1)
    with cartpole(seed=5) as envs:
        kwargs = {"deterministic": False}
        drawn = evaluate_episodes(policy, envs, 6, policy_kwargs=kwargs).get_episode_return()
    assert drawn != greedy
    policy.seed(1)
    evaluator = interaction_evaluator(policy, cartpole(seed=5), n_episode=6, deterministic=False)
    assert run_steps(evaluator).eval_output["episode_return"] == drawn
    state = policy.eval_mode.state_dict()
    policy.seed(1)
    assert evaluator.evaluate_fresh(state, n_episode=6, seed=5) == drawn


def test_a_greedy_policy_cannot_draw_actions_in_an_evaluation(dqn: DQNPolicy) -> None:
    with pytest.raises(ConfigError, match="a distribution over actions"):
        interaction_evaluator(dqn, cartpole(), n_episode=2, deterministic=False)


def test_returns_equal_those_of_evaluate_episodes(run_steps: Any, dqn: DQNPolicy) -> None:
    with cartpole(seed=5) as envs:
        expected = evaluate_episodes(dqn.eval_mode, envs, 6).get_episode_return()
    ctx = run_steps(interaction_evaluator(dqn.eval_mode, cartpole(seed=5), n_episode=6))
    output = ctx.eval_output
    assert output["episode_return"] == expected
    assert ctx.eval_value == ctx.last_eval_value == output["return_mean"] == np.mean(expected)
    assert output["return_std"] == pytest.approx(np.std(expected))
    assert output["return_min"] == min(expected)
    assert output["return_max"] == max(expected)
    assert output["episode_info"]["eval_episode_length"] == pytest.approx(np.mean(expected))


def test_each_evaluation_plays_different_episodes(run_steps: Any, dqn: DQNPolicy) -> None:
    played = []

    def note(ctx: OnlineRLContext) -> None:
        played.append(tuple(ctx.eval_output["episode_return"]))

    evaluator = interaction_evaluator(dqn.eval_mode, cartpole(), n_episode=10, every_train_iter=1)
    run_steps(learn, evaluator, note, n_steps=3)
    assert len(set(played)) == 3


def test_task_stops_when_the_value_is_reached(dqn: DQNPolicy) -> None:
    with Task(OnlineRLContext()) as task:
        task.use(learn)
        task.use(interaction_evaluator(dqn.eval_mode, cartpole(), n_episode=2, stop_value=1.0))
        task.run(max_step=5)
        assert task.ctx.total_step == 0
        assert "has reached stop_value 1" in str(task.stop_reason)


def test_untrained_policy_does_not_stop_the_run(dqn: DQNPolicy) -> None:
    with Task(OnlineRLContext()) as task:
        task.use(interaction_evaluator(dqn.eval_mode, cartpole(), n_episode=2, stop_value=1.0))
        task.run(max_step=5)
        assert not task.finish


def test_return_below_the_value_does_not_stop_the_run(dqn: DQNPolicy) -> None:
    with Task(OnlineRLContext()) as task:
        task.use(learn)
        task.use(interaction_evaluator(dqn.eval_mode, cartpole(), n_episode=2, stop_value=501.0))
        task.run(max_step=3)
        assert not task.finish


def test_several_evaluations_in_a_row_must_reach_the_value(dqn: DQNPolicy) -> None:
    evaluator = interaction_evaluator(
        dqn, cartpole(), n_episode=2, every_train_iter=10, stop_value=1.0, stop_evaluations=3
    )
    with Task(OnlineRLContext()) as task:
        task.use(learn).use(evaluator)
        task.run(max_step=5)
        assert task.ctx.train_iter == 30
        assert "stop_value 1 in 3 evaluations in a row" in str(task.stop_reason)


def test_an_evaluation_below_the_value_starts_the_row_again(dqn: DQNPolicy, monkeypatch) -> None:
    returns = iter([9.0, 9.0, 1.0, 9.0, 9.0, 9.0, 9.0])

    def evaluate(*args: Any, **kwargs: Any) -> Any:
        value = next(returns)
        info = {"eval_episode_length": value}
        return SimpleNamespace(get_episode_return=lambda: [value], mean_info=lambda: info)

    monkeypatch.setattr("middleware.evaluate.evaluate_episodes", evaluate)
    evaluator = interaction_evaluator(
        dqn, cartpole(), n_episode=2, every_train_iter=10, stop_value=5.0, stop_evaluations=3
    )
    with Task(OnlineRLContext()) as task:
        task.use(learn).use(evaluator)
        task.run(max_step=7)
        assert task.ctx.train_iter == 60


def test_evaluated_policy_can_be_saved_after_further_updates(
    run: RunFolder, run_steps: Any, dqn: DQNPolicy
) -> None:
    before = dqn.eval_mode.state_dict()["model"]

    def change(ctx: OnlineRLContext) -> None:
        ctx.train_iter += 1
        state = dqn.eval_mode.state_dict()
        for value in state["model"].values():
            value.zero_()
        dqn.eval_mode.load_state_dict(state)

    evaluator = interaction_evaluator(dqn.eval_mode, cartpole(), n_episode=2)
    run_steps(evaluator, change, CkptSaver(dqn.learn_mode, run))
    best = load_checkpoint(run.best_ckpt)["model"]
    assert all(torch.equal(best[name], before[name]) for name in before)


def test_only_envs_launched_by_the_middleware_are_closed(run_steps: Any, dqn: DQNPolicy) -> None:
    envs = cartpole()
    run_steps(interaction_evaluator(dqn.eval_mode, envs, n_episode=2))
    assert envs.closed
    with envs:
        run_steps(interaction_evaluator(dqn.eval_mode, envs, n_episode=2))
        assert not envs.closed


def test_envs_that_do_not_fit_the_model_are_rejected_before_the_first_step(
    dqn: DQNPolicy,
) -> None:
    envs = make_env_manager("Acrobot-v1", env_num=2)
    reached: list[Any] = []
    with Task(OnlineRLContext()) as task:
        task.use(reached.append)
        task.use(interaction_evaluator(dqn.eval_mode, envs, n_episode=2))
        with pytest.raises(SpaceError):
            task.run(max_step=1)
    assert reached == []


def test_some_evaluations_are_filmed(run_steps: Any, dqn: DQNPolicy) -> None:
    films = []

    def note(ctx: OnlineRLContext) -> None:
        films.append(ctx.eval_output.get("video"))

    envs = cartpole(render_mode="rgb_array", max_episode_steps=4)
    evaluator = interaction_evaluator(
        dqn.eval_mode, envs, n_episode=2, every_train_iter=1, video_every=2, max_frames=3
    )
    run_steps(learn, evaluator, note, n_steps=3)
    assert [film is None for film in films] == [False, True, False]
    assert films[0].dtype == np.uint8
    assert films[0].shape[1:] == (3, 3, 400, 600)


def test_resumed_run_evaluates_at_the_same_updates(run_steps: Any, dqn: DQNPolicy) -> None:
    ctx = OnlineRLContext(train_iter=100, last_eval_iter=90, last_eval_value=5.0)
    evaluator = interaction_evaluator(dqn.eval_mode, cartpole(), n_episode=2, every_train_iter=25)
    ctx = run_steps(evaluator, ctx=ctx)
    assert (ctx.eval_value, ctx.last_eval_value) == (None, 5.0)


def test_continuous_policies_are_evaluated(run_steps: Any) -> None:
    envs = make_env_manager("Pendulum-v1", env_num=2, seed=0, env_kwargs={"max_episode_steps": 5})
    space = gym.spaces.Box(-2.0, 2.0, (1,))
    policy = PPOPolicy.for_env(
        SimpleNamespace(observation_space=envs.observation_space, action_space=space), seed=0
    )
    assert run_steps(interaction_evaluator(policy.eval_mode, envs, n_episode=2)).eval_value < 0


def test_it_is_active_in_the_role_evaluator(dqn: DQNPolicy) -> None:
    evaluator: Any = interaction_evaluator(dqn.eval_mode, cartpole(), n_episode=2)
    assert evaluator.roles == (Role.EVALUATOR,)


@pytest.mark.parametrize(
    "name", ["every_train_iter", "every_env_step", "video_every", "max_frames"]
)
def test_options_must_be_positive(dqn: DQNPolicy, name: str) -> None:
    with pytest.raises(ValueError, match=f"{name} must be an integer ≥ 1"):
        interaction_evaluator(dqn.eval_mode, cartpole(), n_episode=2, **{name: 0})  # type: ignore[arg-type]


def test_fewer_episodes_than_envs_are_rejected(dqn: DQNPolicy) -> None:
    with pytest.raises(ValueError, match="at least one per env, got 2 for 3 envs"):
        interaction_evaluator(dqn.eval_mode, cartpole(3), n_episode=2)


def test_fresh_evaluation_leaves_the_policy_and_the_envs_as_they_were(dqn: DQNPolicy) -> None:
    envs = cartpole()
    evaluator = interaction_evaluator(dqn, envs, n_episode=2)
    state = dqn.eval_mode.state_dict()
    before = state["model"]
    other = {**state, "model": {name: torch.zeros_like(value) for name, value in before.items()}}
    returns = [evaluator.evaluate_fresh(other, n_episode=6, seed=seed) for seed in (1, 1, 2)]
    # A network of zeros always pushes the cart to the left.
    assert all(8 <= value <= 11 for value in returns[0])
    assert returns[0] == returns[1] != returns[2]
    after = dqn.eval_mode.state_dict()["model"]
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert envs.closed


def returns_of(monkeypatch: pytest.MonkeyPatch, *values: float) -> None:
    """Let evaluations have these mean returns."""
    returns = iter(values)

    def evaluate(*args: Any, **kwargs: Any) -> Any:
        value = next(returns)
        info = {"eval_episode_length": value}
        return SimpleNamespace(get_episode_return=lambda: [value], mean_info=lambda: info)

    monkeypatch.setattr("middleware.evaluate.evaluate_episodes", evaluate)


@pytest.mark.parametrize(
    ("values", "n_evaluations"),
    [
        ((1, 1, 1, 9), 3),  # an equal return does not count as better
        ((3, 2, 4, 3, 4, 9), 5),
        ((1, 2, 3, 4, 5, 6), 6),
        ((3, float("nan"), 2, 9), 3),
        ((float("nan"), float("nan"), 9), 2),
        ((-5, -6, -4, -4.5, -5), 5),
    ],
)
def test_a_run_stops_after_evaluations_without_a_new_best(
    values: Any, n_evaluations: int, dqn: DQNPolicy, monkeypatch: pytest.MonkeyPatch
) -> None:
    returns_of(monkeypatch, *values)
    evaluator = interaction_evaluator(dqn, cartpole(), n_episode=2, every_train_iter=10, patience=2)
    with Task(OnlineRLContext()) as task:
        task.use(learn).use(evaluator)
        task.run(max_step=len(values))
        assert task.ctx.train_iter == 10 * n_evaluations
        assert task.finish == (n_evaluations < len(values) or values[0] == -5)
        assert not task.finish or "patience is 2" in str(task.stop_reason)


def test_a_resumed_run_has_the_patience_that_is_left(
    dqn: DQNPolicy, monkeypatch: pytest.MonkeyPatch
) -> None:
    returns_of(monkeypatch, 5, 4, 3, 2, 1)

    def run(patience: int, state: Any, max_step: int) -> Any:
        with Task(OnlineRLContext()) as task:
            task.use(learn).use(
                interaction_evaluator(
                    dqn, cartpole(), n_episode=2, every_train_iter=10, patience=patience
                )
            )
            if state is not None:
                task.load_state_dict(state)
            task.run(max_step=max_step)
            return task.state_dict(), task.ctx.train_iter

    state, n_updates = run(3, None, 2)
    assert n_updates == 20
    state, n_updates = run(3, state, 9)
    assert n_updates == 40
    assert run(3, state, 9)[1] == 40  # it had stopped
    assert run(4, state, 9)[1] == 50  # and continues with more patience


def test_an_evaluator_s_envs_may_give_the_actor_s_parts_alone() -> None:
    returns = []
    with Task(seed=0) as task:
        envs = make_env_manager(Parts, env_num=2, seed=0)
        eval_envs = make_env_manager(lambda: Parts(names=("proprio",)), env_num=2, seed=1)
        policy = PPOPolicy.for_env(envs, seed=0, obs_groups=GROUPS, obs_norm=True)
        task.use(StepCollector(policy, envs, n_sample=24))
        task.use(GAEEstimator(policy))
        task.use(OnPolicyLearner(policy))
        task.use(interaction_evaluator(policy, eval_envs, n_episode=2, every_train_iter=1))
        task.use(lambda ctx: returns.append(ctx.eval_value))
        task.run(max_step=2)
    assert len(returns) == 2
    assert policy.train_iter > 0
