"""Policies, collectors and data of a program's own, behind the door: lists of transitions."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gymnasium
import pytest
import torch
from easydict import EasyDict

import dmiddleware.ding as door
from dmiddleware.ding.program import close_folders

CFG = EasyDict(
    seed=0,
    env={"n_evaluator_episode": 4, "stop_value": 10},
    policy={
        "learn": {"batch_size": 4, "update_per_collect": 3},
        "collect": {"n_sample": 8, "n_episode": 3, "discount_factor": 0.5, "gae_lambda": 0.5},
        "eval": {"evaluator": {"eval_freq": 5}},
        "other": {"eps": {"type": "linear", "start": 0.5, "end": 0.1, "decay": 100}},
    },
)


@pytest.fixture(autouse=True)
def opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    door.open_door()
    yield
    close_folders()
    door.close_door()


class Row(dict[str, Any]):
    """A transition by attributes, too."""

    __getattr__ = dict.__getitem__
    __setattr__ = dict.__setitem__


class OwnPolicy:
    """A policy by DI-engine's interface that derives from nothing here."""

    def __init__(self) -> None:
        self.batches: list[Any] = []
        self.n_ended = 0

    def reset(self, data_id: list[int] | None = None) -> None:
        self.n_ended += len(data_id or ())

    def forward(self, data: Any, **options: Any) -> Any:
        if isinstance(data, dict):
            assert all(obs.dtype is torch.float32 for obs in data.values())
            return {env_id: {"action": torch.tensor(1), **options} for env_id in data}
        self.batches.append(data)
        return {"total_loss": float(len(self.batches))}

    def process_transition(self, obs: Any, output: Any, timestep: Any) -> dict[str, Any]:
        return {
            "obs": obs,
            "action": output["action"],
            "reward": timestep.reward,
            "done": timestep.done,
        }


class Corridor(gymnasium.Env[Any, Any]):
    """Ends after four steps, with a reward of 1 in each."""

    observation_space = gymnasium.spaces.Box(0, 4, (1,))
    action_space = gymnasium.spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.steps = 0
        return torch.zeros(1).numpy(), {}

    def step(self, action: Any) -> Any:
        assert action == 1
        self.steps += 1
        return torch.full((1,), float(self.steps)).numpy(), 1.0, self.steps == 4, False, {}


def managers(n_envs: int = 2) -> Any:
    from dmiddleware.env import SyncEnvManager

    return SyncEnvManager([Corridor] * n_envs)


def test_an_own_policy_collects_steps_in_a_list_env_by_env() -> None:
    from ding.framework import OnlineRLContext
    from ding.framework.middleware import StepCollector

    ctx, policy = OnlineRLContext(), OwnPolicy()
    collect = StepCollector(CFG, policy, managers())
    collect(ctx)
    assert (ctx.env_step, ctx.env_episode, policy.n_ended) == (8, 2, 2)
    assert [float(row.obs) for row in ctx.trajectories] == [0.0, 1.0, 2.0, 3.0] * 2
    assert [row.env_data_id.item() for row in ctx.trajectories] == [0] * 4 + [1] * 4
    assert ctx.trajectory_end_idx == [3, 7]
    collect(ctx)
    assert [row.env_data_id.item() for row in ctx.trajectories] == [2] * 4 + [3] * 4


def test_an_own_policy_collects_whole_episodes_and_keeps_no_others() -> None:
    from ding.framework import OnlineRLContext
    from ding.framework.middleware import EpisodeCollector

    ctx = OnlineRLContext()
    EpisodeCollector(CFG, OwnPolicy(), managers())(ctx)
    assert [len(episode) for episode in ctx.episodes] == [4] * 4
    assert all(episode[-1].done and not episode[0].done for episode in ctx.episodes)


def test_an_own_policy_is_evaluated_at_its_interval_and_stops_the_task() -> None:
    from ding.framework import OnlineRLContext, task
    from ding.framework.middleware import interaction_evaluator

    values = []

    def train(ctx: Any) -> None:
        values.append((ctx.train_iter, ctx.eval_value))
        ctx.train_iter += 2
        CFG.env.stop_value = 4 if ctx.train_iter > 5 else 10

    with task.start(ctx=OnlineRLContext()):
        task.use(interaction_evaluator(CFG, OwnPolicy(), managers()))
        task.use(train)
        task.run(max_step=10)
        assert task.stop_reason is not None
    CFG.env.stop_value = 10
    assert values == [(0, 4.0), (2, -math.inf), (4, -math.inf), (6, 4.0)]


def test_a_collector_of_the_program_feeds_the_stock_pusher_and_an_own_policy() -> None:
    from ding.data import DequeBuffer
    from ding.framework import OnlineRLContext, task
    from ding.framework.middleware import OffPolicyLearner, data_pusher

    buffer, policy = DequeBuffer(size=100), OwnPolicy()

    def collect(ctx: Any) -> None:
        ctx.trajectories = [Row(number=number, env_data_id=torch.tensor(7)) for number in range(6)]

    with task.start(ctx=OnlineRLContext()):
        task.use(collect)
        task.use(data_pusher(CFG, buffer, group_by_env=True))
        task.use(OffPolicyLearner(CFG, policy, buffer))
        task.run(max_step=2)
        assert task.ctx.train_iter == 6
        assert [output["total_loss"] for output in task.ctx.train_output] == [4.0, 5.0, 6.0]
    assert [item.data.number for item in buffer.storage] == [*range(6), *range(6)]
    assert {item.meta["env"] for item in buffer.storage} == {7}
    assert [len(batch) for batch in policy.batches] == [4] * 6


def test_an_own_policy_makes_no_update_from_too_few_samples() -> None:
    from ding.data import DequeBuffer
    from ding.framework import OnlineRLContext
    from ding.framework.middleware import OffPolicyLearner

    ctx, policy, buffer = OnlineRLContext(), OwnPolicy(), DequeBuffer(size=100)
    buffer.push(Row(number=0))
    OffPolicyLearner(CFG, policy, buffer)(ctx)
    assert (ctx.train_iter, ctx.train_output, policy.batches) == (0, [], [])


def test_goals_are_replaced_in_episodes_that_are_lists() -> None:
    from ding.data import DequeBuffer
    from ding.framework import OnlineRLContext
    from ding.framework.middleware import HERLearner

    class Relabel:
        episode_size = None

        def estimate(self, episode: list[Any]) -> list[list[Any]]:
            return [episode, [{**row, "goal": 1} for row in episode]]

    ctx, policy, buffer = OnlineRLContext(), OwnPolicy(), DequeBuffer(size=10)
    for _ in range(4):
        buffer.push([{"goal": 0}] * 3)
    HERLearner(CFG, policy, buffer, Relabel())(ctx)
    assert [len(batch) for batch in policy.batches] == [24] * 3
    assert sum(row["goal"] for row in policy.batches[0]) == 12


def test_advantages_of_a_list_follow_the_paper() -> None:
    from ding.framework import OnlineRLContext
    from ding.framework.middleware import gae_estimator
    from treetensor.torch import as_tensor

    class Critic:
        def forward(self, obs: torch.Tensor, mode: str) -> dict[str, torch.Tensor]:
            assert mode == "compute_critic"
            return {"value": obs.squeeze(-1)}

    class Collect(OwnPolicy):
        def get_attribute(self, name: str) -> Any:
            return {"model": Critic()}[name]

    def row(obs: float, next_obs: float) -> Any:
        columns = {"obs": torch.tensor([obs]), "next_obs": torch.tensor([next_obs])}
        return as_tensor({**columns, "reward": torch.ones(1), "done": torch.tensor(False)})

    ctx = OnlineRLContext()
    ctx.trajectories, ctx.trajectory_end_idx = [row(0, 2), row(2, 4), row(8, 8)], [1, 2]
    gae_estimator(CFG, Collect())(ctx)
    # Steps have 1 + 0.5 * 2 - 0 = 2, 1 + 0.5 * 4 - 2 = 1 and 1 + 0.5 * 8 - 8 = -3.
    assert ctx.train_data.adv.tolist() == [2 + 0.25 * 1, 1, -3]
    assert ctx.train_data.traj_flag.tolist() == [False, True, True]
    assert ctx.trajectories is None


def test_a_list_gets_priorities_rewards_and_an_expert_s_rewards() -> None:
    from ding.data import DequeBuffer
    from ding.framework import OnlineRLContext
    from ding.framework.middleware import priority_calculator, reward_estimator, sqil_data_pusher

    class Doubled:
        def estimate(self, rows: list[Any]) -> None:
            for row in rows:
                row["reward"] *= 2

    ctx, buffer = OnlineRLContext(), DequeBuffer(size=10)
    ctx.train_data = rows = [Row(reward=torch.tensor([float(number)])) for number in (1, 2)]
    reward_estimator(CFG, Doubled())(ctx)
    assert ctx.train_data is rows
    ctx.trajectories = rows
    priority_calculator(lambda transitions: [5.0 * row.reward.item() for row in transitions])(ctx)
    assert [row.priority for row in rows] == [10.0, 20.0]
    sqil_data_pusher(CFG, buffer, expert=True)(ctx)
    assert [item.data.reward.item() for item in buffer.storage] == [1.0, 1.0]


def test_items_that_are_not_dictionaries_are_fetched_as_lists() -> None:
    from ding.framework import OfflineRLContext
    from ding.framework.middleware import offline_data_fetcher

    ctx = OfflineRLContext()
    fetch = offline_data_fetcher(CFG, [("a", number) for number in range(8)])
    drawn = []
    for _ in range(2):
        fetch(ctx)
        drawn += ctx.train_data
    assert sorted(drawn) == [("a", number) for number in range(8)]


def test_a_buffer_is_saved_at_first_and_at_its_interval(tmp_path: Path) -> None:
    from ding.data import DequeBuffer
    from ding.framework import OnlineRLContext
    from ding.framework.middleware import buffer_saver

    ctx, buffer = OnlineRLContext(), DequeBuffer(size=10)
    buffer.push("an item")
    save = buffer_saver(EasyDict(exp_name="saved"), buffer, every_envstep=100)
    for ctx.env_step in (30, 100, 130, 200, 240):
        save(ctx)
    names = {path.name for path in (tmp_path / "saved" / "replaybuffer").iterdir()}
    assert names == {f"data_envstep_{step}.hkl" for step in (30, 130, 240)}


def test_an_epsilon_lasts_for_the_rest_of_the_chain_and_a_masked_one_is_negative() -> None:
    from ding.framework import OnlineRLContext, task
    from ding.framework.middleware import eps_greedy_handler, eps_greedy_masker

    ctx, seen = OnlineRLContext(), []
    before = eps_greedy_handler(CFG)(ctx)
    next(before)
    assert ctx.collect_kwargs == {"eps": 0.5}
    assert next(before, "ended") == "ended"
    assert ctx.collect_kwargs == {}
    with task.start(ctx=OnlineRLContext()):
        task.use(eps_greedy_handler(CFG))
        task.use(eps_greedy_masker())
        task.use(lambda ctx: seen.append(ctx.collect_kwargs["eps"]))
        task.run(max_step=1)
    assert seen == [-1]


def test_a_stock_policy_with_a_masked_epsilon_acts_greedily() -> None:
    from ding.policy import DQNPolicy

    collect = DQNPolicy({"model": {"obs_shape": 1, "action_shape": 2}}).collect_mode
    obs = {env_id: torch.randn(1) for env_id in range(50)}
    masked, greedy = (
        [output["action"].item() for output in collect.forward(obs, eps=eps).values()]
        for eps in (-1, 0.0)
    )
    assert masked == greedy


def test_the_manager_of_each_name_is_made_from_functions_and_the_config() -> None:
    from ding.envs import BaseEnvManager, SubprocessEnvManagerV2

    cfg = {**BaseEnvManager.default_config(), "max_retry": 1}
    manager = BaseEnvManager([lambda: Corridor()] * 2, cfg)
    assert manager.env_num == 2
    assert isinstance(manager, BaseEnvManager)
    assert not isinstance(manager, SubprocessEnvManagerV2)
    assert isinstance(SubprocessEnvManagerV2([lambda: Corridor()]), BaseEnvManager)
    with manager:
        assert manager.ready_obs.shape == (2, 1)
