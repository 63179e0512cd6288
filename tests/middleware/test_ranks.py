"""Tasks that learn as one over gloo, each in a process of its own, as torchrun starts them."""

from __future__ import annotations

import functools
import json
import os
import signal
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch

from dmiddleware import Task, middleware
from dmiddleware.data import TensorBuffer
from dmiddleware.distributed import rank_and_world_size
from dmiddleware.env import make_env_manager
from dmiddleware.errors import ChainError, CheckpointMismatch, LaunchError
from dmiddleware.pipeline import CurrentNode, running_as
from dmiddleware.policy import DQNPolicy, PPOPolicy
from dmiddleware.rl import Schedule
from dmiddleware.tree import as_tree
from middleware import (
    ContextExchanger,
    Experiment,
    OffPolicyLearner,
    OnlineRLContext,
    OnPolicyLearner,
    RunFolder,
    SnapshotSaver,
    StepCollector,
    data_pusher,
    eps_greedy_handler,
    gae_estimator,
    interaction_evaluator,
    termination_checker,
)
from tests.dmiddleware.distributed.rank_processes import run_ranks
from tests.waiting import wait_until

ENV = "CartPole-v1"
SMALL = {"encoder_hidden_sizes": [8]}


def record(seen: list[Any]) -> Any:
    @middleware(reads=("env_step", "train_iter"))
    def write(ctx: OnlineRLContext) -> None:
        seen.append((ctx.total_step, ctx.env_step, ctx.train_iter))

    return write


def parameters(policy: Any) -> dict[str, list[float]]:
    return {name: x.tolist() for name, x in policy.learn_mode.state_dict()["model"].items()}


def train_dqn(
    rank: int,
    folder: Path,
    *,
    run: str | Path = "run",
    max_env_step: int = 400,
    resume: bool = False,
    stop: Any = None,
    every_train_iter: int | None = None,
) -> dict[str, Any]:
    """Train a small DQN on one of the ranks, and return what it has seen."""
    torch.manual_seed(rank)
    os.chdir(folder)
    seen: list[Any] = []
    policy = DQNPolicy.for_env(
        make_env_manager(ENV, env_num=1),
        model=SMALL,
        seed=3,
        batch_size=32,
        eps=Schedule.linear(1.0, 0.05, decay=200),
        obs_norm=True,
        multi_gpu=rank_and_world_size()[1] > 1,
    )
    experiment = Experiment(RunFolder(run) if resume else str(run), policy, n_fresh_episode=2)
    with Task(seed=5, rank=rank) as task:
        envs = make_env_manager(ENV, env_num=2, seed=task.seed_for("collector"))
        eval_envs = make_env_manager(ENV, env_num=2, seed=task.seed_for("evaluator"))
        buffer = TensorBuffer(1000, seed=task.seed_for("buffer"))
        task.use(ContextExchanger())
        task.use(eps_greedy_handler(policy))
        # Rank 1 collects more in each step, and may learn earlier.
        task.use(StepCollector(policy, envs, n_sample=16 * (rank + 1)))
        task.use(record(seen))
        task.use(data_pusher(buffer))
        task.use(OffPolicyLearner(policy, buffer, update_per_collect=2))
        task.use(interaction_evaluator(policy, eval_envs, n_episode=2, every_train_iter=4))
        if stop is not None:
            task.use(functools.partial(stop, rank=rank))
        task.use(experiment)
        task.use(termination_checker(max_env_step=max_env_step))
        snapshots = SnapshotSaver(experiment.run, every_train_iter=every_train_iter)
        task.use(snapshots)
        resumed = resume and snapshots.resume(task)
        task.run()
        return {
            "seen": seen,
            "reason": task.stop_reason,
            "env_step": task.ctx.env_step,
            "train_iter": task.ctx.train_iter,
            "total_step": task.ctx.total_step,
            "parameters": parameters(policy),
            "buffer": buffer.sample(4)["obs"].tolist(),
            "path": str(experiment.run.path),
            "resumed": resumed,
            "snapshots": sorted(path.name for path in snapshots.paths),
        }


def stop_on_rank_1(ctx: OnlineRLContext, *, rank: int) -> None:
    if rank == 1 and ctx.total_step == 3:
        ctx.task.stop("rank 1 has seen enough", final=False)


def interrupt_rank_0(ctx: OnlineRLContext, *, rank: int) -> None:
    if rank == 0 and ctx.total_step == 3:
        os.kill(os.getpid(), signal.SIGTERM)


def train_interrupted(rank: int, folder: Path) -> dict[str, Any]:
    """Catch the exit that follows a signal, which would end the process without an answer."""
    outcome: dict[str, Any] = {}
    try:
        outcome = train_dqn(rank, folder, stop=interrupt_rank_0)
    except SystemExit as end:
        outcome = {"exit": end.code}
    folder = folder / "runs" / "run" / "snapshots"
    return {**outcome, "snapshots": sorted(path.name for path in folder.glob("step_*"))}


def stop_and_resume(rank: int, folder: Path) -> list[dict[str, Any]]:
    whole = train_dqn(rank, folder, run="whole")
    train_dqn(rank, folder, run="parts", max_env_step=150)
    resumed = train_dqn(rank, folder, run=folder / "runs" / "parts", resume=True)
    again = train_dqn(rank, folder, run=folder / "runs" / "parts", resume=True)
    return [whole, resumed, again]


def resume_damaged(rank: int, folder: Path) -> list[Any]:
    options = {"every_train_iter": 4, "run": "damaged"}
    saved = train_dqn(rank, folder, max_env_step=300, **options)["snapshots"]
    run = folder / "runs" / "damaged"
    if rank == 1:
        newest = run / "snapshots" / saved[-1]
        newest.write_bytes(newest.read_bytes()[:-100])
    resumed = train_dqn(rank, folder, run=run, resume=True, max_env_step=1)
    return [saved, resumed["env_step"]]


def train_ppo(rank: int, folder: Path) -> Any:
    """Rank 1 collects more rows, but makes as many minibatches."""
    policy = PPOPolicy.for_env(
        make_env_manager(ENV, env_num=1),
        model=SMALL,
        seed=3,
        multi_gpu=True,
        batch_size=16,
        epoch_per_collect=2,
    )
    outputs: list[int] = []

    def count(ctx: OnlineRLContext) -> None:
        assert isinstance(ctx.train_output, list)
        outputs.append(len(ctx.train_output))

    with Task(seed=5, rank=rank) as task:
        envs = make_env_manager(ENV, env_num=2, seed=task.seed_for("collector"))
        task.use(ContextExchanger())
        task.use(StepCollector(policy, envs, n_sample=64 if rank == 0 else 100))
        task.use(gae_estimator(policy)).use(OnPolicyLearner(policy)).use(count)
        task.use(termination_checker(max_env_step=400))
        task.run()
    return outputs, parameters(policy)


class NumberedEnv(gym.Env[Any, Any]):
    """Observations and rewards that depend on the env's number; episodes of 5 to 12 steps."""

    observation_space = gym.spaces.Box(-np.inf, np.inf, (3,), np.float32)
    action_space = gym.spaces.Discrete(2)

    def __init__(self, number: int) -> None:
        self.number, self.time = number, 0

    def obs(self) -> np.ndarray:
        return np.array([self.number, self.time, np.sin(self.number + self.time)], np.float32)

    def reset(self, **options: Any) -> Any:
        self.time = 0
        return self.obs(), {}

    def step(self, action: Any) -> Any:
        self.time += 1
        reward = 1.0 + self.number * int(action)
        return self.obs(), reward, self.time == 5 + self.number, False, {}


class TakingTurns(PPOPolicy):
    """Takes both actions in turn, so that some envs act as they do among others."""

    turn = 0

    def act_collect(self, obs: Any, env_id: Any, **kwargs: Any) -> dict[str, Any]:
        self.turn += 1
        output = super().act_collect(obs, env_id, **kwargs)
        action = torch.as_tensor(env_id + self.turn) % 2
        log_prob = output["logit"].log_softmax(-1).gather(1, action[:, None])[:, 0]
        return {**output, "action": action, "log_prob": log_prob}


def normalizing_ppo(envs: Any, **options: Any) -> TakingTurns:
    return TakingTurns.for_env(
        envs,
        model=SMALL,
        seed=3,
        batch_size=1000,  # all rows are one minibatch
        epoch_per_collect=3,
        obs_norm=True,
        reward_norm=True,
        value_norm=True,
        **options,
    )


def first_state(envs: Any) -> dict[str, Any]:
    """Return a policy's state after an update, since when it holds its statistics."""
    policy = normalizing_ppo(envs)
    obs = torch.arange(24.0).reshape(8, 3)
    acted = policy.collect_mode.forward(obs)
    numbers = torch.arange(8.0)
    policy.learn_mode.forward(as_tree({**acted, "obs": obs, "adv": numbers, "ret": numbers}))
    return policy.learn_mode.state_dict()


def train_normalized(rank: int | None, folder: Path) -> dict[str, Any]:
    """Learn from eight envs, or from four of them on each rank."""
    numbers = range(8) if rank is None else range(4 * rank, 4 * rank + 4)
    makers = [functools.partial(NumberedEnv, number) for number in numbers]
    envs = make_env_manager(makers, env_num=len(makers), seed=0)
    policy = normalizing_ppo(envs, multi_gpu=rank is not None)
    policy.learn_mode.load_state_dict(first_state(envs))
    with Task(seed=5, rank=rank or 0) as task:
        task.use(ContextExchanger())
        task.use(StepCollector(policy, envs, n_sample=10 * len(numbers)))
        task.use(gae_estimator(policy)).use(OnPolicyLearner(policy))
        task.use(termination_checker(max_train_iter=15))
        task.run()
        train_iter = task.ctx.train_iter
    state = policy.learn_mode.state_dict()
    statistics = {
        "obs": state["acting"]["obs_norm"]["running"]["obs"],
        "value": state["acting"]["return_stats"],
        "reward": state["learning"]["reward_normalizer"]["return_stats"],
    }
    seen = {
        f"{name} {kind}": torch.as_tensor(moments[kind]).tolist()
        for name, moments in statistics.items()
        for kind in ("count", "mean", "var")
    }
    return {"train_iter": train_iter, "parameters": parameters(policy), "statistics": seen}


def refuse_chains(rank: int, folder: Path) -> list[str]:
    problems = []
    for multi_gpu, exchanger, given in ((False, True, rank), (True, False, rank), (True, True, 7)):
        envs = make_env_manager(ENV, env_num=1)
        policy = DQNPolicy.for_env(
            envs,
            model=SMALL,
            batch_size=8,
            eps=Schedule.linear(1.0, 0.05, decay=200),
            multi_gpu=multi_gpu,
        )
        buffer = TensorBuffer(100)
        with Task(rank=given) as task:
            if exchanger:
                task.use(ContextExchanger())
            task.use(eps_greedy_handler(policy))
            task.use(StepCollector(policy, envs, n_sample=16)).use(data_pusher(buffer))
            task.use(OffPolicyLearner(policy, buffer))
            try:
                task.check()
            except ChainError as error:
                problems.append(str(error))
    return problems


def make_folders(rank: int, folder: Path) -> list[str]:
    """Make run folders, the last one where the ranks do not share their files."""
    os.chdir(folder)
    if rank == 1:  # it finds the folder that rank 0 has just made
        wait_until(Path("runs/new").is_dir, "the folder of rank 0")
    found = [RunFolder.create("new", resume=True), RunFolder.create("new", resume=True)]
    found.append(RunFolder.create("new"))
    Path(f"host-{rank}").mkdir()
    os.chdir(f"host-{rank}")
    found.append(RunFolder.create("apart"))
    assert found[-1].path.is_dir()
    return [str(one.path) for one in found]


JOBS = {
    "folders": make_folders,
    "trained": train_dqn,
    "stopped": functools.partial(train_dqn, stop=stop_on_rank_1),
    "interrupted": train_interrupted,
    "resumed": stop_and_resume,
    "damaged": resume_damaged,
    "ppo": train_ppo,
    "normalized": train_normalized,
    "refused": refuse_chains,
}


def do_jobs(rank: int, folder: Path) -> dict[str, Any]:
    answers = {}
    for name, job in JOBS.items():
        (folder / name).mkdir(exist_ok=True)
        answers[name] = job(rank, folder=folder / name)
    return answers


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("ranks")


@pytest.fixture(scope="module")
def ranks(folder: Path) -> dict[str, tuple[Any, Any]]:
    """What both ranks answer to every job, which works in a folder of its name."""
    first, second = run_ranks(functools.partial(do_jobs, folder=folder))
    return {name: (first[name], second[name]) for name in JOBS}


@pytest.mark.process
def test_ranks_take_the_same_steps_with_the_same_counters_and_parameters(ranks: Any) -> None:
    first, second = ranks["trained"]
    for name in ("reason", "env_step", "train_iter", "total_step", "parameters"):
        assert first[name] == second[name], name
    # At the start of each step they agree on the counter; each adds its own steps to it.
    assert [(step, env_step - 16, train_iter) for step, env_step, train_iter in first["seen"]] == [
        (step, env_step - 32, train_iter) for step, env_step, train_iter in second["seen"]
    ]
    assert first["env_step"] == 48 * len(first["seen"])
    assert first["train_iter"] > 0
    assert first["buffer"] != second["buffer"]


@pytest.mark.process
def test_all_ranks_use_the_folder_that_rank_0_finds_or_makes(ranks: Any) -> None:
    names = ["runs/new", "runs/new", "runs/new-2", "runs/apart"]
    assert ranks["folders"] == (names, names)


@pytest.mark.process
def test_a_rank_learns_only_when_all_can(ranks: Any) -> None:
    first, _ = ranks["trained"]
    # After the first step, only the buffer of rank 1 has enough rows.
    assert [train_iter for _, _, train_iter in first["seen"][:4]] == [0, 0, 2, 4]


@pytest.mark.process
def test_rank_0_alone_evaluates_logs_and_saves(ranks: Any, folder: Path) -> None:
    first, second = ranks["trained"]
    assert first["path"] == second["path"] == "runs/run"
    run = folder / "trained" / "runs" / "run"
    assert [path.name for path in run.parent.iterdir()] == ["run"]
    names = {path.name for path in run.iterdir()}
    assert names == {
        *("ckpt", "tb", "snapshots", "config.yaml", "curve.png", "final_ctx.json"),
        *("log.txt", "log.rank-1.txt", "result.json", "metrics.jsonl"),
    }
    assert [path for path in (run / "tb").iterdir() if path.is_dir()] == []
    assert "mean return" in (run / "log.txt").read_text()
    assert "mean return" not in (run / "log.rank-1.txt").read_text()
    assert json.loads((run / "final_ctx.json").read_text())["env_step"] == first["env_step"]


@pytest.mark.process
def test_a_stop_on_one_rank_ends_all_in_the_same_step(ranks: Any) -> None:
    ends = ranks["stopped"]
    assert {end["reason"] for end in ends} == {"rank 1 has seen enough"}
    assert {end["total_step"] for end in ends} == {3}
    assert {len(end["seen"]) for end in ends} == {4}


@pytest.mark.process
def test_a_signal_to_one_rank_ends_all_in_the_same_step_with_a_snapshot(ranks: Any) -> None:
    first, second = ranks["interrupted"]
    assert first["exit"] == 143
    assert second["reason"] == "received SIGTERM"
    assert second["total_step"] == 3
    assert second["snapshots"] == [
        "step_000000000003.rank-1.safetensors",
        "step_000000000003.safetensors",
    ]


@pytest.mark.process
def test_ranks_that_stop_and_resume_equal_ranks_that_never_stopped(ranks: Any) -> None:
    for whole, resumed, again in ranks["resumed"]:
        assert resumed["resumed"] is True
        assert 0 < len(resumed["seen"]) < len(whole["seen"])
        assert resumed["seen"] == whole["seen"][-len(resumed["seen"]) :]
        for name in ("env_step", "train_iter", "total_step", "parameters", "buffer"):
            assert resumed[name] == whole[name], name
        # A run that is resumed at its limit takes no step.
        assert again["seen"] == []
        assert again["env_step"] == whole["env_step"]


@pytest.mark.process
def test_ranks_resume_from_the_newest_snapshot_of_which_no_part_is_damaged(ranks: Any) -> None:
    (saved, env_step), (_, other_env_step) = ranks["damaged"]
    assert len(saved) == 2
    step = int(saved[0].removeprefix("step_").removesuffix(".safetensors"))
    assert env_step == other_env_step == 48 * (step + 1)


@pytest.mark.process
def test_a_snapshot_of_two_ranks_cannot_be_resumed_alone(
    ranks: Any, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert ranks["trained"]
    run = folder / "trained" / "runs" / "run"
    monkeypatch.chdir(folder)
    with pytest.raises(CheckpointMismatch, match=r"saved by 2 rank\(s\), but 1 run now"):
        train_dqn(0, folder, run=run, resume=True)


@pytest.mark.process
def test_ranks_with_different_numbers_of_rows_make_equally_many_updates(ranks: Any) -> None:
    first, second = ranks["ppo"]
    assert first == second
    assert set(first[0]) == {2 * 64 // 16}


@pytest.mark.process
def test_two_ranks_with_half_of_the_envs_each_learn_what_one_learns_from_all(
    ranks: Any, folder: Path
) -> None:
    first, second = ranks["normalized"]
    assert first == second
    alone = train_normalized(None, folder)
    assert first["train_iter"] == alone["train_iter"] == 15
    for name in ("parameters", "statistics"):
        assert first[name].keys() == alone[name].keys()
        for key, value in alone[name].items():
            torch.testing.assert_close(
                torch.tensor(first[name][key]), torch.tensor(value), rtol=1e-5, atol=1e-5
            )


@pytest.mark.process
def test_chains_in_which_ranks_would_not_learn_as_one_are_refused(ranks: Any) -> None:
    for problems in ranks["refused"]:
        alone, stops, rank = problems
        assert "multi_gpu=True" in alone and "1 problem" in alone
        assert "ContextExchanger()" in stops and "1 problem" in stops
        assert "Task(rank=rank)" in rank and "1 problem" in rank


def test_a_launched_learner_that_does_not_join_the_others_is_refused() -> None:
    node = CurrentNode(roles=("learner",), n_ranks=2)
    message = r"2 processes with the role learner.*data_parallel\(\).*learner=1"
    with running_as(node), pytest.raises(LaunchError, match=message):
        Task(OnlineRLContext())
    with running_as(node), Task(OnlineRLContext(), rank=0) as task:
        assert task.rank == 0
