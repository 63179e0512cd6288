import functools

import gymnasium as gym
import numpy as np
import pytest
from optional import needed

from dmiddleware.env import atari_preprocessing, make_env_manager
from dmiddleware.errors import ConfigError

needed("ale_py")
KWARGS = {"frameskip": 1, "obs_type": "grayscale", "repeat_action_probability": 0.0}
FIRE, RIGHT = 1, 2


def made(env="ALE/Breakout-v5", **options):
    return atari_preprocessing(gym.make(env, **KWARGS), **options)


def resized(frame):
    """Return the means over the areas of 84 x 84 pixels: 2.5 rows and 40/21 columns each."""
    rows = np.repeat(frame, 2, axis=0).reshape(84, 5, 160).mean(axis=1)
    return np.repeat(rows, 21, axis=1).reshape(84, 84, 40).mean(axis=2)


def test_an_observation_is_the_maximum_of_the_last_two_frames_of_four():
    env, raw = made("ALE/Pong-v5", noop_max=0), gym.make("ALE/Pong-v5", **KWARGS)
    obs, _ = env.reset(seed=1)
    first, _ = raw.reset(seed=1)
    assert obs.shape == (4, 84, 84)
    assert obs.dtype == np.uint8
    assert np.abs(obs[3] - resized(first)).max() <= 0.501
    assert (obs == obs[0]).all()
    rng = np.random.default_rng(0)
    for _ in range(30):
        action = int(rng.integers(6))
        before = obs
        obs, reward, terminated, truncated, _ = env.step(action)
        frames, rewards = zip(*[raw.step(action)[:2] for _ in range(4)], strict=True)
        assert np.abs(obs[3] - resized(np.maximum(frames[2], frames[3]))).max() <= 0.501
        np.testing.assert_array_equal(obs[:3], before[1:])
        assert reward == np.sign(sum(rewards))
        assert not terminated
        assert not truncated


def test_without_skipped_frames_an_observation_is_the_maximum_of_two_in_a_row():
    env = made("ALE/Pong-v5", noop_max=0, frame_skip=1)
    raw = gym.make("ALE/Pong-v5", **KWARGS)
    for seed in range(2):
        obs, frame = env.reset(seed=seed)[0], raw.reset(seed=seed)[0]
        assert np.abs(obs[3] - resized(frame)).max() <= 0.501
        for _ in range(150):
            before, frame = frame, raw.step(RIGHT)[0]
            obs = env.step(RIGHT)[0]
            assert np.abs(obs[3] - resized(np.maximum(before, frame))).max() <= 0.501


def test_a_lost_life_ends_the_episode_but_not_the_game():
    env = made(noop_max=0)
    _, info = env.reset(seed=0)
    assert info["lives"] == 5
    lives = []
    for _ in range(5):
        terminated = False
        n_steps = 0
        while not terminated:
            action = FIRE if n_steps % 10 == 0 else RIGHT
            _, _, terminated, truncated, info = env.step(action)
            assert not truncated
            n_steps += 1
        lives.append(info["lives"])
        frame = info["frame_number"]
        _, info = env.reset()
        if lives[-1]:
            assert info["frame_number"] == frame + 1
            assert info["lives"] == lives[-1]
    assert lives == [4, 3, 2, 1, 0]
    assert info["lives"] == 5


def test_for_evaluation_the_whole_game_is_one_episode_with_its_true_rewards():
    def score(**options):
        env = made("ALE/SpaceInvaders-v5", noop_max=0, **options)
        env.reset(seed=0)
        rewards, over = [], False
        while not over:
            _, reward, terminated, truncated, _ = env.step(1)
            rewards.append(reward)
            over = terminated or truncated
        return rewards

    game = score(life_loss=False, clip_reward=False)
    life = score(life_loss=True, clip_reward=True)
    assert len(game) > len(life)
    assert max(game) > 1
    assert set(life) <= {-1.0, 0.0, 1.0}
    assert np.sign(game[: len(life)]).tolist() == life


def test_episodes_start_with_seeded_no_ops():
    env = made(noop_max=30)
    starts = [env.reset(seed=seed)[1]["frame_number"] for seed in range(8)]
    assert len(set(starts)) > 3
    assert 1 <= min(starts) <= max(starts) <= 30
    assert [env.reset(seed=seed)[1]["frame_number"] for seed in range(8)] == starts
    assert made(noop_max=0).reset(seed=0)[1]["frame_number"] == 0


def test_a_seed_starts_a_new_game_even_after_a_lost_life():
    env = made(noop_max=0)
    env.reset(seed=0)
    while not env.step(FIRE)[2]:
        pass
    assert env.reset(seed=0)[1]["lives"] == 5


def test_envs_that_cannot_be_preprocessed_are_refused():
    with pytest.raises(ConfigError, match="ale-py"):
        atari_preprocessing(gym.make("CartPole-v1"))
    with pytest.raises(ConfigError, match="frameskip"):
        atari_preprocessing(gym.make("ALE/Pong-v5"))
    for wrong in ({"frame_skip": 0}, {"screen_size": 0}, {"frame_stack": 0}, {"noop_max": -1}):
        with pytest.raises(ConfigError, match=next(iter(wrong))):
            made(**wrong)


@pytest.mark.parametrize("mode", ["sync", pytest.param("async", marks=pytest.mark.process)])
def test_managers_take_the_preprocessing_as_a_wrapper(mode):
    wrapper = functools.partial(atari_preprocessing, screen_size=42, frame_stack=2)
    manager = make_env_manager(
        "ALE/Pong-v5", env_num=2, mode=mode, env_kwargs=KWARGS, wrappers=[wrapper], seed=0
    )
    with manager:
        assert manager.step(manager.sample_actions()).next_obs.shape == (2, 2, 42, 42)
