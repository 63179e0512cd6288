import dataclasses
from typing import Any

import pytest
import torch

from dmiddleware.data import as_tree, index_rows
from dmiddleware.env import make_env_manager
from dmiddleware.errors import ConfigError
from dmiddleware.policy import BCPolicy, DQNPolicy, PPOPolicy, QMIXPolicy
from middleware import (
    OnlineRLContext,
    gae_estimator,
    montecarlo_return_estimator,
    nstep_reward_enhancer,
)
from middleware.collect import EpisodeCollector, StepCollector
from tests.dmiddleware.team_envs import CountingTeam

DISCOUNT, LAMBDA = 0.9, 0.8


@pytest.fixture
def ppo() -> PPOPolicy:
    return PPOPolicy(
        {
            "seed": 0,
            "discount": DISCOUNT,
            "gae_lambda": LAMBDA,
            "model": {"obs_shape": 4, "action_shape": 2, "encoder_hidden_sizes": [8]},
        }
    )


def dqn(**settings: Any) -> DQNPolicy:
    return DQNPolicy({"model": {"obs_shape": 4, "action_shape": 2}, **settings})


def cartpole(**kwargs: Any) -> Any:
    return make_env_manager("CartPole-v1", env_num=3, seed=0, env_kwargs=kwargs)


def short_cartpole() -> Any:
    """CartPole with a time limit of 7 steps."""
    return cartpole(max_episode_steps=7)


def gae_by_hand(rows: Any, value_fn: Any) -> torch.Tensor:
    """Compute advantages with a literal loop over the rows that follow each row."""
    adv = torch.zeros(rows["reward"].shape)
    n_steps, n_envs = adv.shape
    for env in range(n_envs):
        for begin in range(n_steps):
            weight = 1.0
            for t in range(begin, n_steps):
                row = index_rows(index_rows(rows, t), env)
                next_value = value_fn(row["next_obs"][None])[0]
                bootstrap = 0.0 if row["terminated"] else DISCOUNT * next_value
                adv[begin, env] += weight * (row["reward"] + bootstrap - row["value"])
                weight *= DISCOUNT * LAMBDA
                follows = t + 1 < n_steps and rows["episode_id"][t + 1, env] == row["episode_id"]
                if row["done"] or not follows:
                    break
    return adv


@pytest.mark.parametrize("make_envs", [cartpole, short_cartpole])
def test_gae_equals_a_literal_loop(run_steps: Any, ppo: PPOPolicy, make_envs: Any) -> None:
    ctx = run_steps(
        StepCollector(ppo.collect_mode, make_envs(), n_sample=60),
        gae_estimator(ppo),
    )
    data = ctx.train_data
    assert data["done"].any()
    assert data["truncated"].any() == (make_envs is short_cartpole)
    expected = gae_by_hand(ctx.trajectories, ppo.learn_mode.spec.value_fn)
    torch.testing.assert_close(data["adv"], expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(data["ret"], expected + data["value"], rtol=1e-4, atol=1e-5)


def test_gae_stops_at_an_episode_that_a_failing_env_cut(run_steps: Any, ppo: PPOPolicy) -> None:
    def break_off(ctx: OnlineRLContext) -> None:
        rows = dict(ctx.trajectories.items())
        rows["episode_id"] = rows["episode_id"].clone()
        rows["episode_id"][5:, 1] += 1000
        ctx.trajectories = as_tree(rows)

    ctx = run_steps(
        StepCollector(ppo.collect_mode, short_cartpole(), n_sample=30),
        break_off,
        gae_estimator(ppo),
    )
    expected = gae_by_hand(ctx.trajectories, ppo.learn_mode.spec.value_fn)
    torch.testing.assert_close(ctx.train_data["adv"], expected, rtol=1e-4, atol=1e-5)


def test_statistics_of_rewards_and_returns_take_each_collected_batch_once(run_steps: Any) -> None:
    policy = PPOPolicy({"value_norm": True, "model": {"obs_shape": 4, "action_shape": 2}})
    ctx = run_steps(StepCollector(policy, cartpole(), n_sample=30), gae_estimator(policy))
    stats, ret = policy.return_stats, ctx.train_data["ret"]
    assert stats.count == 30
    assert stats.mean.item() == pytest.approx(ret.mean().item(), rel=1e-5)


def test_gae_takes_episodes_that_are_joined(run_steps: Any, ppo: PPOPolicy) -> None:
    ctx = run_steps(
        EpisodeCollector(ppo.collect_mode, cartpole(), n_episode=4),
        gae_estimator(ppo.learn_mode),
    )
    rows = ctx.trajectories
    expected = gae_by_hand(
        as_tree({key: rows[key].unsqueeze(1) for key in rows}),
        ppo.learn_mode.spec.value_fn,
    )
    torch.testing.assert_close(ctx.train_data["adv"], expected[:, 0], rtol=1e-4, atol=1e-5)


def test_gae_of_nested_observations_passes_trees_to_the_value_function(run_steps: Any) -> None:
    shape = (4, 2)
    rows = as_tree(
        {
            "next_obs": {"a": torch.ones(*shape, 3), "b": torch.ones(*shape)},
            "value": torch.zeros(shape),
            "reward": torch.zeros(shape),
            "terminated": torch.zeros(shape, dtype=torch.bool),
            "done": torch.tensor([[False, True], [False] * 2, [False] * 2, [False] * 2]),
            "episode_id": torch.tensor([[0, 1], [0, 2], [0, 2], [0, 2]]),
        }
    )

    def give(ctx: OnlineRLContext) -> None:
        ctx.trajectories = rows

    give.writes = ("trajectories",)  # type: ignore[attr-defined]
    asked = []

    def value_fn(obs: Any) -> torch.Tensor:
        asked.append((tuple(obs["a"].shape), tuple(obs["b"].shape)))
        return obs["a"].sum(-1)

    ppo = PPOPolicy({"model": {"obs_shape": 4, "action_shape": 2}})
    spec = dataclasses.replace(ppo.spec, value_fn=value_fn, discount=1.0, gae_lambda=1.0)
    mode = dataclasses.replace(ppo.learn_mode, spec=spec)
    ctx = run_steps(give, gae_estimator(mode))
    assert asked == [((3, 3), (3,))]
    assert ctx.train_data["adv"].tolist() == [[3.0, 3.0]] * 4


def test_montecarlo_returns_sum_to_the_end_of_the_episode(run_steps: Any, ppo: PPOPolicy) -> None:
    ctx = run_steps(
        EpisodeCollector(ppo.collect_mode, cartpole(), n_episode=3),
        montecarlo_return_estimator(dqn(discount=0.5)),
    )
    lengths = [len(episode["done"]) for episode in ctx.episodes]
    expected = [2.0 - 0.5 ** (length - t - 1) for length in lengths for t in range(length)]
    assert ctx.train_data["ret"].tolist() == pytest.approx(expected)
    assert ctx.train_data["obs"].shape == (sum(lengths), 4)


def test_nstep_rows_sum_rewards_and_look_ahead(run_steps: Any, ppo: PPOPolicy) -> None:
    before: list[Any] = []

    def note(ctx: OnlineRLContext) -> None:
        before.append(ctx.trajectories)

    ctx = run_steps(
        StepCollector(ppo.collect_mode, cartpole(), n_sample=90),
        note,
        nstep_reward_enhancer(dqn(n_step=3, discount=0.5)),
    )
    (old,), new = before, ctx.trajectories
    n_steps, n_envs = old["done"].shape
    for t in range(n_steps):
        for env in range(n_envs):
            k = 1
            while k < 3 and t + k < n_steps and not old["done"][t + k - 1, env]:
                k += 1
            assert float(new["reward"][t, env]) == pytest.approx(sum(0.5**i for i in range(k)))
            assert float(new["discount"][t, env]) == pytest.approx(0.5**k)
            assert torch.equal(new["next_obs"][t, env], old["next_obs"][t + k - 1, env])
            assert new["terminated"][t, env] == old["terminated"][t + k - 1, env]
            assert torch.equal(new["obs"][t, env], old["obs"][t, env])


@pytest.mark.parametrize(
    ("estimator", "setting"),
    [
        (gae_estimator, "discount"),
        (montecarlo_return_estimator, "discount"),
        (nstep_reward_enhancer, "discount"),
    ],
)
def test_policy_without_the_setting_is_rejected(estimator: Any, setting: str) -> None:
    policy = BCPolicy({"model": {"obs_shape": 4, "action_shape": 2}})
    with pytest.raises(ConfigError, match=setting):
        estimator(policy)


@pytest.mark.parametrize("estimator", [montecarlo_return_estimator, nstep_reward_enhancer])
def test_sums_for_a_single_agent_refuse_a_team_before_it_acts(estimator: Any) -> None:
    with pytest.raises(ConfigError, match="QMIXPolicy acts for several; use GAEEstimator"):
        estimator(QMIXPolicy.for_env(CountingTeam(), n_step=3))


def test_gae_of_a_policy_without_lambda_is_rejected() -> None:
    with pytest.raises(ConfigError, match="gae_lambda"):
        gae_estimator(dqn())


def test_rewards_are_normalized_where_advantages_are_estimated(run_steps: Any) -> None:
    cfg = {"reward_norm": True, "seed": 0, "model": {"obs_shape": 4, "action_shape": 2}}
    collector, learner = PPOPolicy(cfg), PPOPolicy(cfg)
    envs = make_env_manager("CartPole-v1", env_num=2, seed=0)
    ctx = run_steps(StepCollector(collector, envs, n_sample=100), gae_estimator(learner))
    assert ctx.trajectories["reward"].unique().tolist() == [1.0]
    saved = [
        p.learn_mode.state_dict()["learning"]["reward_normalizer"] for p in (collector, learner)
    ]
    assert [one["return_stats"]["count"] for one in saved] == [0, 100]
    assert ctx.train_data["ret"].max() < 10
