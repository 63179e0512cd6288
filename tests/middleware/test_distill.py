"""Tests of distillation: rows of a student with the actions of a teacher."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import pytest
import torch

from dmiddleware import Task
from dmiddleware.data import TensorBuffer
from dmiddleware.env import make_env_manager
from dmiddleware.errors import ConfigError, SpaceError
from dmiddleware.policy import BCPolicy, PPOPolicy, RecurrentPPOPolicy
from dmiddleware.rollout import RolloutCollector
from middleware import OffPolicyLearner, StepCollector, data_pusher, labeled_by
from tests.dmiddleware.policy.grouped_envs import BOX, Parts

SPACES = [BOX, gym.spaces.Discrete(3)]


def teacher_and_student(space: gym.Space[Any]) -> tuple[PPOPolicy, BCPolicy]:
    env = Parts(space)
    teacher = PPOPolicy.for_env(env, seed=1, obs_groups={"actor": ["proprio", "mass"]})
    student = BCPolicy.for_env(
        env, seed=0, obs_groups={"actor": ["proprio"]}, learning_rate=0.01, batch_size=64
    )
    return teacher, student


@pytest.mark.parametrize("space", SPACES)
def test_rows_have_what_the_student_reads_and_the_actions_of_the_teacher(space: Any) -> None:
    teacher, student = teacher_and_student(space)
    mode = labeled_by(teacher, student)
    with make_env_manager(lambda: Parts(space), env_num=2, seed=0) as envs:
        collected = RolloutCollector(mode, envs).collect(24)
    rows = mode.train_batch(collected)
    flat = collected["obs"]
    expected = [teacher.eval_mode.forward(flat[at])["action"] for at in range(12)]
    assert torch.equal(rows["action"], torch.stack(expected))
    acted = [student.eval_mode.forward(flat[at])["action"] for at in range(12)]
    assert torch.equal(collected["action"], torch.stack(acted))
    assert set(rows["obs"].keys()) == {"proprio"}
    assert "teacher_action" not in rows


@pytest.mark.parametrize("space", SPACES)
def test_the_student_learns_the_teacher_s_actions_in_a_chain(space: Any) -> None:
    teacher, student = teacher_and_student(space)
    losses = []
    with Task(seed=0) as task:
        envs = make_env_manager(lambda: Parts(space), env_num=4, seed=0)
        buffer = TensorBuffer(10_000, seed=0)
        task.use(StepCollector(labeled_by(teacher, student), envs, n_sample=64))
        task.use(data_pusher(buffer))
        task.use(OffPolicyLearner(student, buffer, update_per_collect=20))
        task.use(lambda ctx: losses.append(ctx.train_output[-1]["total_loss"]))
        task.run(max_step=8)
    assert losses[-1] < 0.85 * losses[0]


def test_a_teacher_sees_the_action_masks() -> None:
    space = gym.spaces.Discrete(3)
    env = Parts(space, masked=True)
    teacher = PPOPolicy.for_env(env, seed=1)
    student = BCPolicy.for_env(env, seed=0, obs_groups={"actor": ["proprio"]})
    mode = labeled_by(teacher, student)
    with make_env_manager(lambda: Parts(space, masked=True), env_num=2, seed=0) as envs:
        rows = mode.train_batch(RolloutCollector(mode, envs).collect(60))
    assert (rows["action"] > 0).all()
    assert set(rows["obs"].keys()) == {"proprio", "action_mask"}


def test_an_env_that_does_not_show_the_teacher_its_parts_is_refused() -> None:
    teacher, student = teacher_and_student(BOX)
    with (
        make_env_manager(lambda: Parts(BOX, names=("proprio",)), env_num=1, seed=0) as envs,
        pytest.raises(SpaceError, match="mass"),
    ):
        RolloutCollector(labeled_by(teacher, student), envs).collect(4)


def test_a_student_that_learns_from_its_own_actions_is_refused() -> None:
    teacher, _ = teacher_and_student(BOX)
    with pytest.raises(ConfigError, match="BCPolicy"):
        labeled_by(teacher, PPOPolicy.for_env(Parts(BOX), seed=0))


def test_a_teacher_with_a_memory_is_refused() -> None:
    _, student = teacher_and_student(BOX)
    with pytest.raises(ConfigError, match="memory"):
        labeled_by(RecurrentPPOPolicy.for_env(Parts(BOX), seed=0), student)


def test_a_teacher_that_sees_more_inputs_is_refused() -> None:
    class Nosy(BCPolicy):
        act_inputs = ("prev_reward",)

        def act_eval(self, obs: Any, env_id: Any, **kwargs: Any) -> Any:
            return super().act_eval(obs, env_id)

    _, student = teacher_and_student(BOX)
    with pytest.raises(ConfigError, match="prev_reward"):
        labeled_by(Nosy.for_env(Parts(BOX), seed=0), student)
