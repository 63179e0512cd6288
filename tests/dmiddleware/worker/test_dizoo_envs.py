"""Configs that name envs of dizoo, which is not installed."""

import logging

import gymnasium as gym
import numpy as np
import pytest

from dmiddleware.errors import ConfigError
from dmiddleware.worker import compile_config, serial_run
from dmiddleware.worker.dizoo_envs import evaluation_env, training_env


def shapes(kind, **options):
    env = training_env(kind, options)
    observation, _ = env.reset(seed=0)
    assert observation in env.observation_space
    assert env.step(env.action_space.sample())[0] in env.observation_space
    env.close()
    return env.observation_space.shape, env.action_space


def box(n):
    return gym.spaces.Box(-1, 1, (n,), np.float32)


@pytest.mark.parametrize(
    ("kind", "options", "observation", "action"),
    [
        ("acrobot", {}, (6,), gym.spaces.Discrete(3)),
        ("bipedalwalker", {"act_scale": True, "rew_clip": True}, (24,), box(4)),
        ("bitflip", {"n_bits": 5}, (10,), gym.spaces.Discrete(5)),
        ("cartpole", {}, (4,), gym.spaces.Discrete(2)),
        ("cliffwalking", {"max_episode_steps": 300}, (48,), gym.spaces.Discrete(4)),
        ("d4rl", {"env_id": "hopper-medium-v0", "use_act_scale": True}, (11,), box(3)),
        ("frozen_lake", {"is_slippery": False}, (16,), gym.spaces.Discrete(4)),
        ("lunarlander", {"env_id": "LunarLander-v2"}, (8,), gym.spaces.Discrete(4)),
        (
            "lunarlander",
            {"env_id": "LunarLanderContinuous-v2", "act_scale": True},
            (8,),
            box(2),
        ),
        ("minigrid", {"env_id": "MiniGrid-Empty-8x8-v0"}, (2835,), gym.spaces.Discrete(7)),
        ("minigrid", {"env_id": "MiniGrid-NoisyTV-v0"}, (2835,), gym.spaces.Discrete(7)),
        ("mountain_car", {}, (2,), gym.spaces.Discrete(3)),
        ("mujoco", {"env_id": "Ant-v3"}, (111,), box(8)),
        ("mujoco", {"env_id": "HalfCheetah-v3"}, (17,), box(6)),
        ("pendulum", {"act_scale": True}, (3,), box(1)),
        ("pendulum", {"continuous": False}, (3,), gym.spaces.Discrete(11)),
        ("taxi", {"max_episode_steps": 60}, (34,), gym.spaces.Discrete(6)),
    ],
)
def test_an_env_has_the_spaces_of_dizoo(kind, options, observation, action):
    assert shapes(kind, **options) == (observation, action)


def test_an_atari_env_stacks_frames_and_shows_lives_in_training_only():
    options = {"env_id": "PongNoFrameskip-v4", "frame_stack": 2}
    assert shapes("atari", **options) == ((2, 84, 84), gym.spaces.Discrete(6))
    envs = [make("atari", options) for make in (training_env, evaluation_env)]
    assert [env.spec.kwargs["repeat_action_probability"] for env in envs] == [0.0, 0.0]


def reached_torque(env, action):
    env.reset(seed=0)
    env.step(action)
    return env.unwrapped.last_u


def test_actions_reach_the_env_scaled_once():
    scaled = training_env("pendulum", {"act_scale": True})
    for action, torque in ((-1.0, -2.0), (0.5, 1.0), (3.0, 2.0)):
        assert reached_torque(scaled, np.array([action], np.float32)) == pytest.approx(torque)
    discrete = training_env("pendulum", {"act_scale": True, "continuous": False})
    for action, torque in ((0, -2.0), (5, 0.0), (10, 2.0)):
        assert reached_torque(discrete, action) == pytest.approx(torque)


def smallest_reward(make):
    env = make("bipedalwalker", {"rew_clip": True})
    env.reset(seed=0)
    rewards, is_over = [], False
    while not is_over:
        _, reward, terminated, truncated, _ = env.step(np.array([1.0, 0, 1.0, 0], np.float32))
        rewards.append(reward)
        is_over = terminated or truncated
    return min(rewards)


def test_an_evaluation_sees_rewards_that_training_clips():
    assert smallest_reward(training_env) == -10.0
    assert smallest_reward(evaluation_env) == -100.0


def test_delayed_rewards_come_together():
    plain = training_env("mujoco", {"env_id": "Hopper-v3"})
    delayed = training_env("mujoco", {"env_id": "Hopper-v3", "delay_reward_step": 3})
    for env in (plain, delayed):
        env.reset(seed=0)
    action = np.zeros(3, np.float32)
    rewards = [plain.step(action)[1] for _ in range(6)]
    late = [delayed.step(action)[1] for _ in range(6)]
    assert late == pytest.approx([0, 0, sum(rewards[:3]), 0, 0, sum(rewards[3:])])


def test_flipping_the_last_wrong_bit_ends_the_episode_with_a_reward():
    env = training_env("bitflip", {"n_bits": 4})
    bits, _ = env.reset(seed=1)
    wrong = np.flatnonzero(bits[:4] != bits[4:])
    *others, last = [env.step(int(bit)) for bit in wrong]
    assert [step[1:4] for step in others] == [(0.0, False, False)] * len(others)
    assert last[1:4] == (1.0, True, False)
    env.reset(seed=1)
    right = int(np.flatnonzero(bits[:4] == bits[4:])[0])
    steps = [env.step(right) for _ in range(4)]
    assert [step[2:4] for step in steps] == [(False, False)] * 3 + [(False, True)]


def test_noisy_tiles_give_rewards_and_change_what_is_seen():
    env = training_env("minigrid", {"env_id": "MiniGrid-NoisyTV-v0", "max_step": 100})
    rewards, n_changed = [], 0
    for seed in range(20):
        env.reset(seed=seed)
        for step in range(100):
            action = 2 if step % 5 else step // 5 % 2
            obs, reward, terminated, truncated, _ = env.step(action)
            rewards.append(reward)
            n_changed += bool((obs % 1 == 0.5).any())
            assert set(np.unique(obs % 1)) <= {0.0, 0.5}
            if terminated:
                break
        assert terminated or truncated
    noisy = [reward for reward in rewards if 0 < reward <= 0.1]
    assert noisy and all(reward >= 0.05 for reward in noisy)
    assert n_changed > 10


def procgen(**options):
    pytest.importorskip("envpool")
    try:
        return training_env("procgen", options)
    except ConfigError as error:
        pytest.skip(str(error))


def test_levels_of_procgen_are_those_that_the_config_names():
    env = procgen(env_id="coinrun", start_level=3, num_levels=1)
    assert env.action_space == gym.spaces.Discrete(15)
    first, _ = env.reset(seed=0)
    assert first in env.observation_space and first.shape == (3, 64, 64)
    assert first.dtype == np.float32 and first.max() > 1
    env.step(7)
    assert (env.reset()[0] == first).all()
    assert (env.reset(seed=1)[0] == first).all()
    env.close()
    env = procgen(env_id="coinrun")
    assert (env.reset(seed=0)[0] != first).any()
    env.close()


def config(kind, **env):
    main = {
        "exp_name": "trial",
        "env": {"collector_env_num": 2, "evaluator_env_num": 1, "n_evaluator_episode": 1, **env},
        "policy": {
            "model": {"obs_shape": 4, "action_shape": 2},
            "learn": {"batch_size": 8},
            "collect": {"n_sample": 16},
        },
    }
    create = {
        "env": {"type": kind, "import_names": [f"dizoo.somewhere.{kind}_env"]},
        "env_manager": {"type": "base"},
        "policy": {"type": "dqn"},
    }
    return main, create


def test_a_config_that_names_an_env_of_dizoo_runs_without_dizoo(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    policy = serial_run(*config("cartpole"), max_train_iter=2, show_progress=False)
    assert policy.get_attribute("train_iter") == 2


def test_a_compiled_config_has_the_env_and_its_options_as_plain_values(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    main, create = config("pendulum", act_scale=True)
    main["policy"]["model"] = {"obs_shape": 3, "action_shape": 1}
    env = compile_config(main, {**create, "policy": {"type": "sac"}}).env
    assert env.kwargs == {"kind": "pendulum", "options": {"act_scale": True}}
    assert env.id.endswith(":training_env")
    assert env.evaluator_id.endswith(":evaluation_env")


def test_keys_that_an_env_of_dizoo_does_not_read_are_named(tmp_path, monkeypatch, caplog):
    monkeypatch.chdir(tmp_path)
    with caplog.at_level(logging.WARNING):
        compile_config(*config("cartpole", collector_batch_size=8, env_id="CartPole-v0"))
    assert "does not read collector_batch_size" in caplog.text


@pytest.mark.parametrize(
    ("kind", "env", "word"),
    [
        ("smac", {}, "StarCraft"),
        ("mbpendulum", {}, "world models"),
        ("cartpole", {"obs_plus_prev_action_reward": True}, "NGU"),
    ],
)
def test_an_env_that_is_not_here_is_refused_with_the_reason(kind, env, word, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=word):
        compile_config(*config(kind, **env))


@pytest.mark.parametrize(
    ("kind", "options", "word"),
    [
        ("mujoco", {"env_id": "Walk2d-v3"}, "Walker2d-v3"),
        ("mujoco", {"env_id": "Hopper-v3", "action_bins_per_branch": 4}, "BDQ"),
        ("d4rl", {"env_id": "kitchen-complete-v0"}, "D4RL"),
        ("minigrid", {"env_id": "MiniGrid-AKTDT-7x7-1-v0"}, "files of dizoo"),
        ("minigrid", {"env_id": "MiniGrid-None-v0"}, "MiniGrid-None"),
        ("procgen", {"env_id": "coinrum"}, "coinrun"),
        ("procgen", {"control_level": False}, "start_level"),
        ("lunarlander", {"env_id": "LunarLander-v9"}, "LunarLanderContinuous-v2"),
    ],
)
def test_an_env_that_its_package_does_not_have_is_refused(kind, options, word):
    with pytest.raises(ConfigError, match=word):
        training_env(kind, options)


def test_an_env_without_its_package_says_how_to_install_it(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    for kind, word in (("atari", "atari"), ("minigrid", "minigrid"), ("lunarlander", "box2d")):
        options = {"env_id": "LunarLander-v2" if kind == "lunarlander" else "Some-v0"}
        with pytest.raises(ConfigError, match=rf"dmiddleware\[{word}\]"):
            training_env(kind, options)
