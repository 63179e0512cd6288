import copy
import dataclasses
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch

from dmiddleware.data import as_tree
from dmiddleware.env import make_env_manager
from dmiddleware.errors import ConfigError, SpaceError
from dmiddleware.pipeline import Task, middleware
from dmiddleware.policy import DQNPolicy, PPOPolicy
from dmiddleware.runs import read_metrics
from middleware import (
    ContextExchanger,
    MetricsLogger,
    OnlineRLContext,
    Role,
    RunFolder,
    TerminationChecker,
)
from middleware.collect import EpisodeCollector, StepCollector
from tests.middleware.nodes import run_nodes


@pytest.fixture
def envs() -> Any:
    return make_env_manager("CartPole-v1", env_num=2, seed=0)


@pytest.fixture
def dqn() -> DQNPolicy:
    return DQNPolicy(
        {"seed": 0, "model": {"obs_shape": 4, "action_shape": 2, "encoder_hidden_sizes": [8]}}
    )


def test_step_collector_writes_a_batch_of_time_by_env(
    run_steps: Any, dqn: DQNPolicy, envs: Any
) -> None:
    ctx = run_steps(StepCollector(dqn.collect_mode, envs, n_sample=6))
    assert ctx.trajectories["obs"].shape == (3, 2, 4)
    assert ctx.trajectories["action"].dtype == torch.int64
    assert ctx.trajectories["done"].shape == (3, 2)
    assert ctx.env_step == 6


def test_counters_grow_from_step_to_step(run_steps: Any, dqn: DQNPolicy, envs: Any) -> None:
    ends = []

    def count_ends(ctx: OnlineRLContext) -> None:
        ends.append(int(ctx.trajectories["done"].sum()))

    ctx = run_steps(StepCollector(dqn.collect_mode, envs, n_sample=40), count_ends, n_steps=5)
    assert ctx.env_step == 200
    assert ctx.env_episode == sum(ends) > 0


def test_resumed_run_continues_its_counters(run_steps: Any, dqn: DQNPolicy, envs: Any) -> None:
    ctx = OnlineRLContext(env_step=1000, env_episode=50)
    ctx = run_steps(StepCollector(dqn.collect_mode, envs, n_sample=40), ctx=ctx)
    assert ctx.env_step == 1040
    assert ctx.env_episode >= 50


def test_ends_are_indices_into_the_flattened_rows(
    run_steps: Any, dqn: DQNPolicy, envs: Any
) -> None:
    ctx = run_steps(StepCollector(dqn.collect_mode, envs, n_sample=100))
    done = ctx.trajectories["done"].flatten()
    assert done[ctx.trajectory_end_idx].all()
    assert len(ctx.trajectory_end_idx) == int(done.sum()) > 0


def test_collect_kwargs_reach_the_policy(run_steps: Any, dqn: DQNPolicy, envs: Any) -> None:
    def explore(ctx: OnlineRLContext) -> None:
        ctx.collect_kwargs["eps"] = 1.0

    def share_of_greedy(ctx: OnlineRLContext) -> float:
        rows = ctx.trajectories
        return float((rows["action"] == rows["logit"].argmax(-1)).float().mean())

    greedy = run_steps(StepCollector(dqn.collect_mode, envs, n_sample=200))
    random = run_steps(explore, StepCollector(dqn.collect_mode, envs, n_sample=200))
    assert share_of_greedy(greedy) == 1.0
    assert 0.3 < share_of_greedy(random) < 0.7


def test_rows_have_the_iteration_of_the_policy_that_collected_them(
    run_steps: Any, dqn: DQNPolicy, envs: Any
) -> None:
    collector = StepCollector(dqn.collect_mode, envs, n_sample=4)
    ctx = run_steps(collector, ctx=OnlineRLContext(train_iter=7))
    assert ctx.trajectories["collect_iter"].unique().tolist() == [7]


def test_random_steps_come_first_and_all_at_once(run_steps: Any, dqn: DQNPolicy, envs: Any) -> None:
    steps = []

    def note(ctx: OnlineRLContext) -> None:
        greedy = ctx.trajectories["action"] == ctx.trajectories["logit"].argmax(-1)
        steps.append((ctx.env_step, bool(greedy.all())))

    collector = StepCollector(dqn.collect_mode, envs, n_sample=4, random_steps=100)
    run_steps(collector, note, n_steps=3)
    assert steps == [(100, False), (104, True), (108, True)]


def test_resumed_run_collects_no_random_steps_again(
    run_steps: Any, dqn: DQNPolicy, envs: Any
) -> None:
    collector = StepCollector(dqn.collect_mode, envs, n_sample=4, random_steps=100)
    ctx = run_steps(collector, ctx=OnlineRLContext(env_step=100))
    assert ctx.env_step == 104


def test_returns_of_finished_episodes_are_logged(run_steps: Any, dqn: DQNPolicy, envs: Any) -> None:
    ctx = run_steps(StepCollector(dqn.collect_mode, envs, n_sample=100))
    rows, done = ctx.trajectories, ctx.trajectories["done"]
    # The reward of CartPole is 1 per step, and all episodes began in this batch.
    finished = [
        rows["reward"][rows["episode_id"] == number].sum() for number in rows["episode_id"][done]
    ]
    assert ctx.logged["collect/return_mean"] == pytest.approx(float(sum(finished) / len(finished)))


def test_step_without_a_finished_episode_logs_no_return(
    run_steps: Any, dqn: DQNPolicy, envs: Any
) -> None:
    assert run_steps(StepCollector(dqn.collect_mode, envs, n_sample=4)).logged == {}


def test_policy_makes_its_training_samples(run_steps: Any, dqn: DQNPolicy, envs: Any) -> None:
    def halved(batch: Any) -> Any:
        return as_tree({**dict(batch.items()), "reward": batch["reward"] / 2})

    mode = dataclasses.replace(dqn.collect_mode, train_batch=halved)
    ctx = run_steps(StepCollector(mode, envs, n_sample=100))
    assert ctx.trajectories["reward"].max() == 0.5


def test_only_envs_launched_by_the_middleware_are_closed(
    run_steps: Any, dqn: DQNPolicy, envs: Any
) -> None:
    run_steps(StepCollector(dqn.collect_mode, envs, n_sample=4))
    assert envs.closed
    with envs:
        run_steps(StepCollector(dqn.collect_mode, envs, n_sample=4))
        assert not envs.closed


def test_envs_are_closed_after_an_error(run_steps: Any, dqn: DQNPolicy, envs: Any) -> None:
    def fail(ctx: OnlineRLContext) -> None:
        raise RuntimeError("no")

    with pytest.raises(RuntimeError, match="no"):
        run_steps(StepCollector(dqn.collect_mode, envs, n_sample=4), fail)
    assert envs.closed


@pytest.mark.parametrize("make", [StepCollector, EpisodeCollector])
def test_envs_that_do_not_fit_the_model_are_rejected_before_the_first_step(
    dqn: DQNPolicy, make: Any
) -> None:
    envs = make_env_manager("Acrobot-v1", env_num=2)
    size = {"n_sample": 2} if make is StepCollector else {"n_episode": 2}
    reached = []
    with Task(OnlineRLContext()) as task:
        task.use(reached.append).use(make(dqn.collect_mode, envs, **size))
        with pytest.raises(SpaceError, match=r"(?s)4.*6|6.*4"):
            task.run(max_step=1)
    assert reached == []
    assert envs.closed


def test_same_seeds_collect_the_same(run_steps: Any) -> None:
    def collect() -> Any:
        policy = DQNPolicy({"seed": 3, "model": {"obs_shape": 4, "action_shape": 2}})
        envs = make_env_manager("CartPole-v1", env_num=2, seed=5)
        collector = StepCollector(policy.collect_mode, envs, n_sample=20, random_steps=20)
        return run_steps(collector, n_steps=2).trajectories

    first, second = collect(), collect()
    # Ids of episodes are unique, whatever the seed.
    assert all(torch.equal(first[key], second[key]) for key in first if key != "episode_id")
    assert not torch.isin(first["episode_id"], second["episode_id"]).any()


def test_ranks_draw_different_actions() -> None:
    def actions(rank: int) -> torch.Tensor:
        envs = make_env_manager("CartPole-v1", env_num=2, seed=0)
        policy = PPOPolicy.for_env(envs, seed=0)
        collected = []
        with Task(seed=0, rank=rank) as task:
            task.use(StepCollector(policy, envs, n_sample=40))
            task.use(lambda ctx: collected.append(ctx.trajectories.action))
            task.run(max_step=1)
        return torch.cat(collected)

    assert torch.equal(actions(1), actions(1))
    assert not torch.equal(actions(0), actions(1))
    assert not torch.equal(actions(1), actions(2))


def test_collector_continues_from_its_state(run_steps: Any, dqn: DQNPolicy, envs: Any) -> None:
    first = StepCollector(dqn.collect_mode, envs, n_sample=40)
    with Task(OnlineRLContext()) as task:
        task.use(first).run(max_step=2)
        state = task.state_dict()
    second = StepCollector(
        dqn.collect_mode, make_env_manager("CartPole-v1", env_num=2, seed=9), n_sample=40
    )
    with Task(OnlineRLContext()) as task:
        task.use(second).load_state_dict(state)
        task.run(max_step=1)
        assert task.ctx.env_step == 120
        assert second.state_dict()["stepper"]["env_step"] == 120


def test_episode_collector_writes_whole_episodes(run_steps: Any, dqn: DQNPolicy, envs: Any) -> None:
    ctx = run_steps(EpisodeCollector(dqn.collect_mode, envs, n_episode=5))
    assert len(ctx.episodes) == 5
    for episode in ctx.episodes:
        assert episode["done"].tolist() == [False] * (len(episode["done"]) - 1) + [True]
        assert len(episode["episode_id"].unique()) == 1
    assert ctx.env_episode >= 5
    assert ctx.env_step >= sum(len(episode["done"]) for episode in ctx.episodes)


def test_episodes_are_trajectories_too(run_steps: Any, dqn: DQNPolicy, envs: Any) -> None:
    ctx = run_steps(EpisodeCollector(dqn.collect_mode, envs, n_episode=3))
    assert torch.equal(
        ctx.trajectories["obs"], torch.cat([episode["obs"] for episode in ctx.episodes])
    )
    assert ctx.trajectories["done"][ctx.trajectory_end_idx].all()
    assert len(ctx.trajectory_end_idx) == 3


def test_continuous_actions_are_collected(run_steps: Any) -> None:
    envs = make_env_manager("Pendulum-v1", env_num=2, seed=0)
    space = gym.spaces.Box(-2.0, 2.0, (1,))
    policy = PPOPolicy.for_env(
        SimpleNamespace(observation_space=envs.observation_space, action_space=space), seed=0
    )
    ctx = run_steps(StepCollector(policy, envs, n_sample=8))
    assert ctx.trajectories["action"].shape == (4, 2, 1)
    assert ctx.trajectories["action"].dtype == torch.float32


def test_random_steps_of_an_on_policy_policy_are_rejected(envs: Any) -> None:
    policy = PPOPolicy({"model": {"obs_shape": 4, "action_shape": 2, "action_space": "discrete"}})
    with pytest.raises(ConfigError, match="on-policy"):
        StepCollector(policy, envs, n_sample=8, random_steps=8)


def test_wrong_types_of_policy_and_envs_are_rejected(dqn: DQNPolicy, envs: Any) -> None:
    for collector, option in ((StepCollector, "n_sample"), (EpisodeCollector, "n_episode")):
        with pytest.raises(ConfigError, match=rf"{collector.__name__}.*env manager"):
            collector(dqn, "CartPole-v1", **{option: 1})
        with pytest.raises(ConfigError, match=rf"{collector.__name__}.*policy"):
            collector(dqn.eval_mode, envs, **{option: 1})


def test_collectors_are_active_in_the_role_collector(dqn: DQNPolicy, envs: Any) -> None:
    for collector in (
        StepCollector(dqn.collect_mode, envs, n_sample=1),
        EpisodeCollector(dqn.collect_mode, envs, n_episode=1),
    ):
        assert collector.roles == (Role.COLLECTOR,)
        assert "trajectories" in collector.writes


def test_sizes_must_be_positive(dqn: DQNPolicy, envs: Any) -> None:
    with pytest.raises(ValueError, match="n_sample must be an integer ≥ 1, got 0"):
        StepCollector(dqn.collect_mode, envs, n_sample=0)
    with pytest.raises(ValueError, match="random_steps must be an integer ≥ 0, got -1"):
        StepCollector(dqn.collect_mode, envs, n_sample=1, random_steps=-1)
    with pytest.raises(ValueError, match="n_episode must be an integer ≥ 1, got 0"):
        EpisodeCollector(dqn.collect_mode, envs, n_episode=0)


class Crashing(gym.Env[Any, Any]):
    """Episodes of nine steps, whose every third step raises with a given probability."""

    observation_space = gym.spaces.Box(-1.0, 1.0, (2,), np.float32)
    action_space = gym.spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.t = 0
        return self.np_random.random(2, np.float32), {}

    def step(self, action: Any) -> Any:
        self.t += 1
        if self.t % 3 == 0 and self.np_random.random() < 0.2:
            raise RuntimeError("the simulator crashed")
        return self.np_random.random(2, np.float32), 1.0, self.t == 9, False, {}


def crashing(n_collectors: int = 1) -> tuple[list[Any], list[Any]]:
    """Return collectors and their envs."""
    envs = [
        make_env_manager(Crashing, env_num=4, max_retry=50, seed=at) for at in range(n_collectors)
    ]
    policy = DQNPolicy.for_env(envs[0], seed=0)
    return [StepCollector(policy, one, n_sample=20) for one in envs], envs


@pytest.mark.parametrize("n_collectors", [1, 2])
def test_metrics_have_the_restarts_of_envs_and_the_steps_that_they_cost(
    tmp_path: Path, n_collectors: int
) -> None:
    collectors, envs = crashing(n_collectors)
    with RunFolder(tmp_path) as run, Task(seed=0) as task:
        task.use(MetricsLogger(run, every_env_step=100))
        for collector in collectors:
            task.use(collector)
        task.run(max_step=20)
        restarts = sum(one.restarts for one in envs)
        dropped = sum(one.dropped_steps for one in envs)
    last = read_metrics(tmp_path)[-1]
    assert restarts > 5
    assert (last["collect/env_restarts"], last["collect/dropped_steps"]) == (restarts, dropped)


def test_envs_that_do_not_fail_leave_no_such_metric(tmp_path: Path) -> None:
    envs = make_env_manager("CartPole-v1", env_num=2, seed=0)
    with RunFolder(tmp_path) as run, Task(seed=0) as task:
        task.use(MetricsLogger(run, every_env_step=20))
        task.use(StepCollector(DQNPolicy.for_env(envs, seed=0), envs, n_sample=20)).run(max_step=3)
    assert not any("collect/env_restarts" in row for row in read_metrics(tmp_path))


def test_a_resumed_run_continues_the_number_of_restarts(tmp_path: Path) -> None:
    def rows_with(stop: int | None) -> list[Any]:
        folder, state = tmp_path / str(stop), None
        for n_steps in (20,) if stop is None else (stop, 20 - stop):
            (collector,), (envs,) = crashing()
            with RunFolder(folder) as run, Task(seed=0) as task, envs:
                task.use(MetricsLogger(run, every_env_step=100)).use(collector)
                if state is not None:
                    task.load_state_dict(state)
                task.run(max_step=n_steps)
                state = copy.deepcopy(task.state_dict())
        names = ("collect/env_restarts", "collect/dropped_steps", "collect/return_mean")
        return [[row.get(name) for name in names] for row in read_metrics(folder)]

    expected = rows_with(None)
    assert expected[-1][0] > 5
    for stop in (3, 7, 10):
        assert rows_with(stop) == expected


def test_a_learner_counts_the_restarts_of_all_collectors(tmp_path: Path) -> None:
    @middleware(roles=[Role.LEARNER], writes=["train_output"])
    def learn(ctx: OnlineRLContext) -> None:
        ctx.train_iter += 1
        ctx.train_output = []

    def collect(task: Task[Any]) -> int:
        (collector,), (envs,) = crashing()
        with envs:
            task.use(ContextExchanger()).use(collector).use(learn).run()
            return envs.restarts

    def log(task: Task[Any]) -> None:
        with RunFolder.create("run", root=tmp_path) as run:
            task.use(ContextExchanger()).use(learn).use(MetricsLogger(run, every_train_iter=5))
            task.use(TerminationChecker(max_train_iter=40)).run()
            task.close()

    *restarts, _ = run_nodes(
        tmp_path, ("collector", collect), ("collector", collect), ("learner", log)
    )
    rows = read_metrics(tmp_path / "run")
    totals = [row["collect/env_restarts"] for row in rows if "collect/env_restarts" in row]
    # What was on its way at the end is not counted.
    assert 3 < totals[-1] <= sum(restarts)
    assert totals == sorted(totals)
