"""The documented list of metrics is complete, and each metric in it is logged."""

import copy
import itertools
import re
import runpy
from dataclasses import fields
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch

from dmiddleware.env import make_env_manager
from dmiddleware.pipeline import Task
from dmiddleware.policy import DQNPolicy, PPOPolicy
from dmiddleware.policy.metrics import LEARNING_METRICS
from dmiddleware.rl import Schedule, explained_variance
from dmiddleware.rollout import RolloutCollector
from dmiddleware.router import EventTraffic, PeerTraffic
from dmiddleware.runs.metrics_file import read_metrics
from middleware import (
    ContextExchanger,
    Experiment,
    GAEEstimator,
    InteractionEvaluator,
    MetricsLogger,
    ModelExchanger,
    OnPolicyLearner,
    RunFolder,
    StepCollector,
)
from middleware.metrics import MIDDLEWARE_METRICS
from tests.dmiddleware.policy.every_policy import EVERY, batch_for, made
from tests.docs.pages import ROOT
from tests.middleware.nodes import run_nodes
from tests.variants import mostly_slow

COUNTERS = {"env_step", "train_iter", "time_s"}
ALL = [one for group in MIDDLEWARE_METRICS.values() for one in group]


class Reach(gym.Env[Any, Any]):
    """An episode has three steps; the goal is reached in those whose first action is 1."""

    observation_space = gym.spaces.Box(-1.0, 1.0, (3,), np.float32)
    action_space = gym.spaces.Discrete(2)
    key = "is_success"

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self._actions: list[int] = []
        return np.zeros(3, np.float32), {}

    def step(self, action: Any) -> Any:
        self._actions.append(int(action))
        info = {self.key: self._actions[0] == 1}
        return np.zeros(3, np.float32), 1.0, len(self._actions) == 3, False, info


class ReachOfMetaWorld(Reach):
    key = "success"


def pattern(name: str) -> str:
    return re.sub(r"<\w+>", "[^/]+?", name)


def undocumented(names: set[str]) -> set[str]:
    known = [pattern(one.name) for one in ALL]
    known += [f"learn/{name}" for name in LEARNING_METRICS]
    return {name for name in names if not any(re.fullmatch(one, name) for one in known)}


def logged(folder: Path) -> set[str]:
    return {name for row in read_metrics(folder) for name in row} - COUNTERS


def numbers(output: Any) -> set[str]:
    return {name for name, value in output.items() if isinstance(value, int | float)}


@pytest.mark.parametrize("cls", EVERY, ids=lambda cls: cls.__name__)
def test_an_algorithm_logs_what_it_declares_and_nothing_else(cls: Any) -> None:
    options = {"grad_clip_norm": 1.0} if "grad_norm" in cls.reports else {}
    policy = made(cls, **options, **({"aux_freq": 2} if "aux_loss" in cls.reports else {}))
    batch = batch_for(policy)
    # The actor of CrossQ moves in every third update.
    found = [numbers(policy.learn_mode.forward(batch)) for _ in range(3)]
    assert set().union(*found) == set(cls.reports)
    assert set(cls.reports) <= LEARNING_METRICS.keys()


def test_each_learning_metric_is_of_some_algorithm() -> None:
    reported = set(itertools.chain.from_iterable(cls.reports for cls in EVERY))
    assert reported == LEARNING_METRICS.keys()


def test_the_page_has_the_tables() -> None:
    writer = runpy.run_path(str(ROOT / "docs" / "write_metrics.py"))
    assert (ROOT / "docs/reference/metrics.md").read_text() == writer["page_with_tables"](), (
        "run: python docs/write_metrics.py"
    )


def test_the_counters_of_the_router_are_in_the_list() -> None:
    names = {one.name for one in ALL if one.name.startswith("router/")}
    events = {f"router/event/<event>/{one.name}" for one in fields(EventTraffic)}
    assert names == events | {f"router/node<n>/{one.name}" for one in fields(PeerTraffic)}


@pytest.mark.parametrize(
    ("mode", "env"),
    mostly_slow(itertools.product(["sync", "async"], [Reach, ReachOfMetaWorld]), keep=2),
)
def test_lengths_and_successes_are_logged(tmp_path: Path, env: Any, mode: Any) -> None:
    envs = make_env_manager(env, env_num=2, seed=0, mode=mode)
    eval_envs = make_env_manager(env, env_num=2, seed=1)
    policy = PPOPolicy.for_env(envs, seed=0, batch_size=12, epoch_per_collect=1)
    with RunFolder.create("reach", root=tmp_path) as run, Task(seed=0) as task:
        task.use(StepCollector(policy, envs, n_sample=24)).use(GAEEstimator(policy))
        task.use(OnPolicyLearner(policy))
        task.use(InteractionEvaluator(policy, eval_envs, n_episode=2))
        task.use(MetricsLogger(run, every_env_step=24)).run(max_step=3)
    rows = read_metrics(run.path)
    collected = [row for row in rows if "collect/length_mean" in row]
    evaluated = [row for row in rows if "eval/length_mean" in row]
    assert collected and evaluated
    assert {row["collect/length_mean"] for row in collected} == {3.0}
    assert {row["eval/length_mean"] for row in evaluated} == {3.0}
    assert all(0.0 < row["collect/success_rate"] < 1.0 for row in collected)
    assert all(row["eval/success_rate"] in (0.0, 1.0) for row in evaluated)
    assert all(row["learn/explained_variance"] <= 1.0 for row in collected)
    assert not undocumented(logged(run.path))


def test_a_resumed_collector_knows_how_long_its_episodes_are() -> None:
    policy = DQNPolicy.for_env(make_env_manager("CartPole-v1", env_num=2), seed=0)
    lengths = []
    with make_env_manager("CartPole-v1", env_num=2, seed=0) as envs:
        whole = RolloutCollector(policy, envs)
        whole.collect(10)
        state = copy.deepcopy(whole.state_dict())
        whole.collect(200)
        lengths.append(whole.episode_lengths)
    with make_env_manager("CartPole-v1", env_num=2, seed=7) as envs:
        resumed = RolloutCollector(policy, envs)
        assert resumed.load_state_dict(state)
        resumed.collect(200)
        lengths.append(resumed.episode_lengths)
    assert lengths[0] and lengths[0] == lengths[1]


def test_metrics_of_collectors_and_evaluators_reach_the_learner(tmp_path: Path) -> None:
    def chain(task: Task[Any]) -> Any:
        own = PPOPolicy.for_env(make_env_manager(Reach, env_num=2), seed=0, batch_size=8)
        run = RunFolder(tmp_path / "-".join(map(str, task.roles)))
        run.path.mkdir()
        task.at_close(run.close)
        task.use(ContextExchanger(max_ahead=1)).use(ModelExchanger(own))
        task.use(StepCollector(own, make_env_manager(Reach, env_num=2, seed=0), n_sample=12))
        task.use(GAEEstimator(own)).use(OnPolicyLearner(own))
        judged = make_env_manager(Reach, env_num=2, seed=1)
        task.use(InteractionEvaluator(own, judged, n_episode=2, every_train_iter=1))
        task.use(MetricsLogger(run, every_env_step=1))
        task.run(max_step=6 if task.has_role("learner") else None)
        return run.path

    learner, *_ = run_nodes(
        tmp_path, ("learner", chain), ("collector", chain), ("evaluator", chain)
    )
    names = logged(learner)
    assert {"collect/length_mean", "collect/success_rate", "exchange/node1_blocked_s"} <= names
    assert {"exchange/blocked_s", "exchange/policy_lag", "learn/policy_lag"} <= names
    assert not undocumented(names)


def test_a_schedule_is_logged_as_it_is_now() -> None:
    policy = made(PPOPolicy, clip_ratio=Schedule.linear(0.2, 0.1, decay=10, by="update"))
    batch = batch_for(policy)
    seen = [policy.learn_mode.forward(batch)["clip_ratio"] for _ in range(3)]
    assert seen == pytest.approx([0.2, 0.19, 0.18])


def test_settings_are_in_the_hparams_of_tensorboard(tmp_path: Path) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    metadata = pytest.importorskip("tensorboard.plugins.hparams.metadata")
    envs = make_env_manager("CartPole-v1", env_num=2, seed=0)
    policy = PPOPolicy.for_env(envs, seed=0, batch_size=32, learning_rate=1e-3)
    experiment = Experiment("settings", policy, root=tmp_path, n_fresh_episode=1)
    with Task(seed=3) as task:
        task.use(StepCollector(policy, envs, n_sample=64)).use(GAEEstimator(policy))
        task.use(OnPolicyLearner(policy)).use(experiment).run(max_step=1)
    folder = experiment.run.path / "tb"
    assert len(list(folder.rglob("events*"))) == 1
    read = accumulator.EventAccumulator(str(folder)).Reload()
    start = metadata.parse_session_start_info_plugin_data(
        read.SummaryMetadata(metadata.SESSION_START_INFO_TAG).plugin_data.content
    ).hparams
    assert start["policy.learning_rate"].number_value == pytest.approx(1e-3)
    assert start["StepCollector.n_sample"].number_value == 64
    assert start["env.id"].string_value == "CartPole-v1"
    assert start["seed"].number_value == 3
    shown = metadata.parse_experiment_plugin_data(
        read.SummaryMetadata(metadata.EXPERIMENT_TAG).plugin_data.content
    )
    assert [one.name.tag for one in shown.metric_infos] == [
        "eval/return_mean",
        "collect/return_mean",
    ]
    assert "collect/return_mean" in read.Tags()["scalars"]


def test_explained_variance() -> None:
    ret = torch.tensor([1.0, 2.0, 3.0, 4.0])
    assert explained_variance(ret, ret) == 1.0
    assert explained_variance(torch.zeros(4), ret) == 0.0
    assert explained_variance(-ret, ret) < 0.0
    assert explained_variance(ret, torch.ones(4)).isnan()
    mask = torch.tensor([True, True, True, False])
    assert explained_variance(torch.tensor([1.0, 2.0, 3.0, 99.0]), ret, mask=mask) == 1.0
