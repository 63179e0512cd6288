"""Envs of bsuite and dm_control."""

import os

import gymnasium as gym
import numpy as np
import pytest

from dmiddleware.errors import ConfigError
from dmiddleware.worker.dizoo_envs import training_env

os.environ.setdefault("MUJOCO_GL", "egl")  # read when dm_control is imported

STATE = {"domain_name": "cartpole", "task_name": "swingup", "from_pixels": False, "frame_stack": 1}


@pytest.fixture
def bsuite():
    return pytest.importorskip("bsuite")


@pytest.fixture
def suite():
    return pytest.importorskip("dm_control.suite")


def task(**options):
    return training_env("dmc2gym", {**STATE, **options})


def drawn(**options):
    try:
        return task(from_pixels=True, **options)
    except ConfigError as error:
        pytest.skip(str(error))


@pytest.mark.parametrize(
    ("id", "shape", "n_actions"),
    [
        ("bandit_noise/0", (1,), 11),
        ("cartpole_swingup/0", (8,), 3),
        ("deep_sea/0", (10, 10), 2),
        ("memory_len/15", (3,), 2),
    ],
)
def test_an_experiment_of_bsuite_has_the_spaces_of_dizoo(id, shape, n_actions, bsuite):
    env = training_env("bsuite", {"env_id": id})
    obs, _ = env.reset(seed=0)
    assert obs in env.observation_space
    assert env.observation_space.shape == shape
    assert env.action_space == gym.spaces.Discrete(n_actions)


def test_an_experiment_of_bsuite_goes_as_the_package_has_it(bsuite):
    env = training_env("bsuite", {"env_id": "cartpole_swingup/0"})
    settings = bsuite.sweep.SETTINGS["cartpole_swingup/0"]
    original = bsuite.load("cartpole_swingup", {**settings, "seed": 5})
    obs, _ = env.reset(seed=5)
    step = original.reset()
    rng, is_over = np.random.default_rng(0), False
    while not is_over:
        assert obs == pytest.approx(step.observation[0])
        action = int(rng.integers(3))
        obs, reward, terminated, truncated, _ = env.step(action)
        step = original.step(action)
        is_over = terminated or truncated
        assert (reward, is_over) == (step.reward, step.last())
    assert terminated and step.discount == 0


def test_experiments_of_bsuite_differ_by_their_seed_only(bsuite):
    first = [training_env("bsuite", {"env_id": "catch/0"}).reset(seed=n)[0] for n in (1, 1, 2, 3)]
    assert (first[0] == first[1]).all()
    assert any((first[0] != obs).any() for obs in first[2:])


def test_a_task_of_dm_control_sums_the_rewards_of_repeated_actions(suite):
    env = task(frame_skip=8, action_repeat=25)
    assert env.observation_space.shape == (5,)
    assert env.action_space == gym.spaces.Box(-1, 1, (1,), np.float32)
    original = suite.load("cartpole", "swingup", {"random": 3})
    obs, _ = env.reset(seed=3)
    parts = original.reset().observation
    assert obs == pytest.approx(np.concatenate([parts["position"], parts["velocity"]]))
    steps = [env.step(np.array([0.5], np.float32)) for _ in range(5)]
    rewards = [original.step(0.5).reward for _ in range(1000)]
    assert [step[1] for step in steps] == pytest.approx(np.reshape(rewards, (5, 200)).sum(1))
    assert [step[2:4] for step in steps] == [(False, False)] * 4 + [(False, True)]


def test_a_task_of_dm_control_takes_scaled_actions_and_stacks_its_states(suite):
    env, clipped = (task(frame_skip=1, frame_stack=3, clip_rewards=clip) for clip in (False, True))
    first, _ = env.reset(seed=0)
    obs, reward, *_ = env.step(np.array([7.0], np.float32))
    assert first.shape == (3, 5) and (first == first[0]).all()
    assert (obs[:2] == first[0]).all() and (obs[2] != first[0]).any()
    original = suite.load("cartpole", "swingup", {"random": 0})
    original.reset()
    step = original.step(1.0)
    parts = step.observation
    assert obs[2] == pytest.approx(np.concatenate([parts["position"], parts["velocity"]]))
    assert reward == pytest.approx(step.reward)
    clipped.reset(seed=0)
    assert clipped.step(np.array([7.0], np.float32))[1] == 1.0


@pytest.mark.parametrize(
    ("options", "shape", "dtype"),
    [
        ({"warp_frame": True, "scale": True, "channels_first": False}, (3, 84, 84), np.uint8),
        ({"frame_stack": 1, "height": 32, "width": 48}, (3, 32, 48), np.float32),
        ({"frame_stack": 2, "channels_first": False}, (2, 84, 84, 3), np.float32),
    ],
)
def test_a_task_of_dm_control_has_the_pictures_of_dizoo(options, shape, dtype, suite):
    env = drawn(**{"frame_stack": 3, **options})
    obs, _ = env.reset(seed=0)
    env.step(env.action_space.sample())
    assert obs in env.observation_space
    assert (obs.shape, obs.dtype) == (shape, dtype)
    assert obs.max() > 100 and obs.min() >= 0
    env.close()


def test_a_task_of_dm_control_draws_videos(suite):
    env = training_env("dmc2gym", STATE, render_mode="rgb_array")
    env.reset(seed=0)
    try:
        assert env.render().shape == (84, 84, 3)
    except ConfigError as error:
        pytest.skip(str(error))
    finally:
        env.close()


@pytest.mark.parametrize(
    ("kind", "options", "word"),
    [
        ("bsuite", {"env_id": "memory_len/999"}, "memory_len/0"),
        ("dmc2gym", {**STATE, "task_name": "swing"}, "cartpole/swingup"),
        ("dmc2gym", {**STATE, "scale": True}, "from_pixels"),
        ("dmc2gym", {**STATE, "clip_rewards": True, "action_repeat": 2}, "frame_skip"),
        (
            "dmc2gym",
            {**STATE, "from_pixels": True, "warp_frame": True, "resize": 64},
            "resize=64",
        ),
    ],
)
def test_an_env_that_is_not_here_is_refused(kind, options, word, bsuite, suite):
    with pytest.raises(ConfigError, match=word):
        training_env(kind, options)


def test_a_missing_package_is_named_with_its_extra(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    for kind, options, extra in (
        ("bsuite", {"env_id": "catch/0"}, "bsuite"),
        ("dmc2gym", STATE, "dm-control"),
        ("mujoco_multi", {"scenario": "Ant-v2", "agent_conf": "2x4", "agent_obsk": 1}, "robotics"),
    ):
        with pytest.raises(ConfigError, match=rf"dmiddleware\[{extra}\]"):
            training_env(kind, options)
