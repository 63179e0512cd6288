"""What envs report at the end of an episode, while collecting and while evaluating."""

from __future__ import annotations

import functools
import logging
import math

import gymnasium as gym
import numpy as np
import pytest
import torch

from dmiddleware.env import SyncEnvManager, VectorEnvManager, make_env_manager
from dmiddleware.policy import DQNPolicy
from dmiddleware.rollout import RolloutCollector, evaluate_episodes
from dmiddleware.rollout.episode_info import success_of
from middleware import InteractionEvaluator, OnlineRLContext, StepCollector


class Reporting(gym.Env):
    """Episodes of two steps, whose last info has what the env is made with."""

    observation_space = gym.spaces.Box(-1, 1, (2,))
    action_space = gym.spaces.Discrete(2)

    def __init__(self, values, key="is_success"):
        self.values, self.key, self.n_episodes, self.t = values, key, 0, 0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.t = 0
        return np.zeros(2, np.float32), {}

    def step(self, action):
        self.t += 1
        info = {}
        if self.t == 2:
            info = {self.key: self.values[self.n_episodes % len(self.values)], "text": "a"}
            self.n_episodes += 1
        return np.zeros(2, np.float32), 1.0, self.t == 2, False, info


class ManyReporting(gym.vector.VectorEnv):
    """Two such envs as one vector env, which reports a column."""

    num_envs = 2
    metadata = {"autoreset_mode": gym.vector.AutoresetMode.NEXT_STEP}
    single_observation_space = gym.spaces.Box(-1, 1, (2,))
    single_action_space = gym.spaces.Discrete(2)
    observation_space = gym.vector.utils.batch_space(single_observation_space, 2)
    action_space = gym.vector.utils.batch_space(single_action_space, 2)

    def __init__(self, info):
        self.info, self.t = info, 0

    def reset(self, *, seed=None, options=None):
        self.t = 0
        return np.zeros((2, 2), np.float32), {}

    def step(self, actions):
        self.t = (self.t + 1) % 3
        ends = np.full(2, self.t == 2)
        info = self.info if self.t == 2 else {}
        return np.zeros((2, 2), np.float32), np.ones(2), ends, np.zeros(2, bool), info


def policy():
    model = {"obs_shape": 2, "action_shape": 2, "encoder_hidden_sizes": [4]}
    return DQNPolicy({"seed": 0, "model": model})


def rates(envs):
    """The success rates that collecting and evaluating find."""
    with envs:
        collector = RolloutCollector(policy(), envs)
        collector.collect(8 * envs.env_num, policy_kwargs={"eps": 0.0})
        collected = collector.episode_successes
        info = evaluate_episodes(policy(), envs, 2 * envs.env_num).mean_info()
    collected_rate = sum(collected) / len(collected) if collected else None
    return collected_rate, success_of(info)


ONE_NUMBER = [
    True,
    1,
    1.0,
    np.True_,
    np.float32(1),
    np.int64(1),
    np.array(True),
    np.array([1.0]),
    np.array([[1]], np.uint8),
    np.array([True], dtype=object),
    [True],
    (1.0,),
    [np.array([1.0])],
    torch.tensor(1.0),
    torch.tensor([True]),
    torch.tensor([[1.0]], dtype=torch.bfloat16, requires_grad=True),
]

NO_NUMBER = [
    (None, "NoneType"),
    ("True", "str"),
    ({"reached": True}, "dict"),
    ({}, "dict"),
    ([], r"list of shape \(0,\)"),
    ([True, False], r"list of shape \(2,\)"),
    ([[1], [1, 2]], "list"),
    (np.array([1.0, 0.0]), r"ndarray of shape \(2,\)"),
    (np.array(["yes"]), r"ndarray of shape \(1,\)"),
    (torch.zeros(2, 3), r"Tensor of shape \(2, 3\)"),
    (math.nan, "float"),
    (np.array([np.inf]), r"ndarray of shape \(1,\)"),
    (1j, "complex"),
    (10**400, "int"),
    ({True}, "set"),
    (object(), "object"),
    (2, "int"),
    (-0.5, "float"),
    (torch.tensor([1.5]), r"Tensor of shape \(1,\)"),
]


@pytest.mark.parametrize("key", ["is_success", "success"])
@pytest.mark.parametrize("value", ONE_NUMBER, ids=repr)
def test_a_success_of_one_element_counts(value, key, caplog):
    assert rates(SyncEnvManager([functools.partial(Reporting, [value], key)] * 2)) == (1.0, 1.0)
    assert not caplog.records


@pytest.mark.parametrize(("value", "kind"), NO_NUMBER, ids=lambda value: repr(value)[:10])
def test_any_other_success_is_left_out_with_one_warning(value, kind, caplog):
    assert rates(SyncEnvManager([functools.partial(Reporting, [value])] * 2)) == (None, None)
    (warning,) = [one for one in caplog.records if one.levelno == logging.WARNING]
    assert f"'is_success' of type {kind}".replace("\\", "") in warning.getMessage()


def test_episodes_without_a_number_do_not_count_in_the_rate(caplog):
    values = [True, None, False, True]
    collected, evaluated = rates(SyncEnvManager([functools.partial(Reporting, values)]))
    assert collected == pytest.approx(2 / 3)
    assert evaluated == 1.0  # of True and None
    assert len(caplog.records) == 1


def test_processes_of_envs_report_their_successes_too(caplog):
    fns = {"mode": "async", "env_num": 2}
    make = functools.partial(Reporting, [np.array([1.0]), "no"])
    assert rates(make_env_manager(make, **fns)) == (1.0, 1.0)
    assert len(caplog.records) == 1


@pytest.mark.parametrize(
    ("info", "rate"),
    [
        ({"is_success": np.array([True, False]), "_is_success": np.array([True, True])}, 0.5),
        ({"success": np.array([1, 0], np.int8)}, 0.5),
        ({"is_success": torch.tensor([1.0, 0.0])}, 0.5),
        ({"is_success": np.array([[1.0], [0.0]])}, 0.5),
        ({"is_success": np.array([True, None]), "_is_success": np.array([True, True])}, 1.0),
        ({"is_success": np.array([True, False]), "_is_success": np.array([True, False])}, 1.0),
        ({"is_success": True}, 1.0),
        ({"is_success": None}, None),
        ({"is_success": np.zeros((2, 3))}, None),
        ({"is_success": {"a": np.ones(2)}, "_is_success": np.ones(2, bool)}, None),
        ({"is_success": {"a": np.ones(2)}}, None),
    ],
    ids=lambda one: repr(one)[:40],
)
def test_columns_of_vector_envs_are_read_as_the_infos_of_envs(info, rate, caplog):
    assert rates(VectorEnvManager(lambda: ManyReporting(info), 2)) == (rate, rate)


def test_a_run_logs_only_the_successes_that_count(run_steps_with_infos):
    logged, output = run_steps_with_infos([torch.tensor(1.0), {"a": 1}])
    assert logged["collect/success_rate"] == 1.0
    assert output["success_rate"] == output["episode_info"]["is_success"] == 1.0
    logged, output = run_steps_with_infos([None])
    assert "collect/success_rate" not in logged
    assert "success_rate" not in output
    assert "is_success" not in output["episode_info"]


@pytest.fixture
def run_steps_with_infos():
    from dmiddleware.pipeline import Task

    def run(values):
        with Task(OnlineRLContext(), seed=0) as task:
            agent, envs = policy(), [functools.partial(Reporting, values)] * 2
            seen = {}

            def note(ctx):
                seen.update(logged=dict(ctx.logged), output=ctx.eval_output)

            task.use(StepCollector(agent, SyncEnvManager(envs), n_sample=8))
            task.use(InteractionEvaluator(agent, SyncEnvManager(envs), n_episode=4))
            task.use(note)
            task.run(max_step=1)
        return seen["logged"], seen["output"]

    return run
