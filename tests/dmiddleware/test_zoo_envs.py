"""The environments that need a memory."""

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env

from dmiddleware.env import make_env_manager
from dmiddleware.zoo.envs import Recall, TeamRecall

POSITIONS = "dmiddleware.zoo.envs:CartPolePositions-v1"
PENDULUM = "dmiddleware.zoo.envs:PendulumPositions-v1"


def episode(env, actions, seed):
    """Return the observations and the return of an episode."""
    seen, total, is_over = [env.reset(seed=seed)[0]], 0.0, False
    actions = iter(actions)
    while not is_over:
        obs, reward, is_over, *_ = env.step(next(actions))
        seen.append(obs)
        total += reward
    return np.array(seen), total


def test_the_velocities_are_left_out():
    env, whole = gym.make(POSITIONS), gym.make("CartPole-v1")
    np.testing.assert_array_equal(env.reset(seed=3)[0], whole.reset(seed=3)[0][[0, 2]])
    for action in (0, 1, 1, 0):
        np.testing.assert_array_equal(env.step(action)[0], whole.step(action)[0][[0, 2]])


def test_the_velocity_of_the_pendulum_is_left_out():
    env, whole = gym.make(PENDULUM), gym.make("Pendulum-v1")
    np.testing.assert_array_equal(env.reset(seed=3)[0], whole.reset(seed=3)[0][:2])
    for force in (0.5, -2.0, 2.0):
        action = np.array([force], np.float32)
        np.testing.assert_array_equal(env.step(action)[0], whole.step(action)[0][:2])
    assert env.observation_space.contains(env.step(action)[0])


def test_cartpole_ends_after_500_steps_and_can_be_saved():
    with make_env_manager(POSITIONS, env_num=1, seed=0) as envs:
        saved = envs.state_dict()
        assert saved is not None
        assert envs.load_state_dict(saved)
    env = gym.make(POSITIONS)
    env.reset(seed=0)
    for t in range(1, 501):
        env.unwrapped.state = (0.0, 0.0, 0.0, 0.0)
        truncated = env.step(0)[3]
        assert truncated == (t == 500)


@pytest.mark.parametrize(("n_cues", "delay"), [(4, 4), (2, 0), (3, 7)])
def test_no_policy_without_a_memory_recalls_more_than_one_cue(n_cues, delay):
    """Its action in the last step is the same for all cues, because it sees the same."""
    env = Recall(n_cues, delay)
    check_env(env, skip_render_check=True)
    cues, last_seen, by_action = set(), set(), []
    for action in range(n_cues):
        returns = {}
        for seed in range(40):
            seen, total = episode(env, [action] * (delay + 2), seed)
            assert len(seen) == delay + 3
            cue = int(seen[0].argmax())
            assert seen[0].tolist() == np.eye(n_cues + 1)[cue].tolist()
            assert (seen[1:-2] == 0).all()
            last_seen.add(tuple(seen[-2]))
            returns[cue] = total
        cues |= set(returns)
        by_action.append(sum(returns.values()) / n_cues)
    assert cues == set(range(n_cues))
    assert last_seen == {(0.0,) * n_cues + (1.0,)}
    # The best possible return without a memory, over all that it can do in the last step.
    assert max(by_action) == min(by_action) == 1 / n_cues


def test_a_memory_recalls_every_cue():
    env = Recall(4, 4)
    for seed in range(20):
        cue = int(env.reset(seed=seed)[0].argmax())
        assert episode(env, [cue] * 6, seed)[1] == 1.0


def test_each_agent_of_a_team_names_its_own_cue_and_all_share_the_reward():
    env = TeamRecall(n_agent=3, n_cues=4, delay=2)
    later, cues_of_all = set(), set()
    for seed in range(10):
        first, _ = env.reset(seed=seed)
        assert env.observation_space.contains(first)
        cues = first["agents"].argmax(1)
        cues_of_all.add(tuple(cues))
        for step in range(1, 5):
            right = step < 4 or seed < 5
            action = cues if right else [cues[0], *(1 + cues[1:]) % 4]
            obs, reward, is_over, is_cut, _ = env.step(np.array(action))
            later.add((step, obs["agents"].tobytes()))
            assert (obs["state"].reshape(3, 4).argmax(1) == cues).all()
            assert (is_over, is_cut) == (step == 4, False)
            share = 0.0 if step < 4 else 1.0 if right else 1 / 3
            assert reward.tolist() == [share] * 3
    assert len(cues_of_all) > 5
    # What agents see after the first step does not depend on the cues.
    assert len(later) == 4
