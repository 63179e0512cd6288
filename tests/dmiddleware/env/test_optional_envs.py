import importlib.util

import numpy as np
import pytest
from optional import needed

from dmiddleware.env import make_env_manager
from dmiddleware.errors import ConfigError


def img_only(env):
    from minigrid.wrappers import ImgObsWrapper

    return ImgObsWrapper(env)


@pytest.mark.parametrize(
    ("module", "env", "options"),
    [
        ("mujoco", "HalfCheetah-v5", {}),
        ("mujoco", "Hopper-v5", {}),
        ("Box2D", "LunarLander-v3", {}),
        ("Box2D", "BipedalWalker-v3", {}),
        ("minigrid", "MiniGrid-Empty-5x5-v0", {"wrappers": [img_only]}),
        ("minigrid", "BabyAI-GoToObj-v0", {"wrappers": [img_only]}),
        ("gymnasium_robotics", "gymnasium_robotics:FetchReach-v4", {}),
        ("gymnasium_robotics", "gymnasium_robotics:PointMaze_UMaze-v3", {}),
        ("ale_py", "ALE/Pong-v5", {}),
        ("ale_py", "ALE/Pong-v5", {"mode": "vector"}),
    ],
)
def test_envs_of_the_extra_step_with_a_seed(module, env, options):
    needed(module)

    def play():
        with make_env_manager(env, env_num=2, seed=3, **options) as manager:
            rewards = [manager.step(manager.sample_actions()).reward for _ in range(20)]
            return np.stack(rewards), manager.ready_obs

    (rewards, obs), (again, obs_again) = play(), play()
    assert rewards.tolist() == again.tolist()
    np.testing.assert_equal(obs, obs_again)


@pytest.mark.parametrize(
    ("env", "extra"),
    [
        ("ALE/Pong-v5", "atari"),
        ("HalfCheetah-v5", "mujoco"),
        ("LunarLander-v3", "box2d"),
        ("MiniGrid-Empty-5x5-v0", "minigrid"),
        ("gymnasium_robotics:FetchReach-v4", "robotics"),
    ],
)
def test_without_the_extra_the_error_names_it(env, extra, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=rf"dmiddleware\[{extra}\]"):
        make_env_manager(env, env_num=1)
