import functools

import gymnasium as gym
import numpy as np
import pytest
from strange_envs import Fragile, Walk

import dmiddleware.env
from dmiddleware.env import (
    AsyncEnvManager,
    SyncEnvManager,
    VectorEnvManager,
    make_env_manager,
)
from dmiddleware.errors import ConfigError, EnvCrashed, EnvTimeout, RegistryError


def test_the_public_names_are_these():
    assert dmiddleware.env.__all__ == [
        "EnvSettings",
        "make_env",
        "make_env_manager",
        "BaseEnvManager",
        "SyncEnvManager",
        "AsyncEnvManager",
        "JaxEnv",
        "SimulatorEnv",
        "VectorEnvManager",
        "EnvPoolManager",
        "atari_preprocessing",
        "make_atari_env",
        "make_grid_env",
        "BatchedTimestep",
        "EnvTimestep",
        "StepInfo",
        "check_env_manager",
        "BattleEnv",
        "PettingZooAdapter",
        "ParallelEnvAdapter",
        "GameEnv",
        "OpponentEnv",
        "Opponents",
        "AgentSpaces",
        "team_spaces",
        "agent_spaces",
        "n_agent_of",
    ]


@pytest.mark.parametrize(
    ("mode", "kind"),
    [("sync", SyncEnvManager), ("async", AsyncEnvManager), ("vector", VectorEnvManager)],
)
def test_the_mode_selects_the_manager_and_nothing_is_launched(mode, kind):
    manager = make_env_manager("CartPole-v1", env_num=2, mode=mode)
    assert type(manager) is kind
    assert manager.env_num == 2
    assert manager.closed
    assert manager.action_space == gym.spaces.Discrete(2)


@pytest.mark.process
def test_a_gymnasium_env_steps_identically_in_this_process_and_in_others():
    def run(mode):
        with make_env_manager(
            "Pendulum-v1",
            env_num=2,
            mode=mode,
            seed=1,
            env_kwargs={"max_episode_steps": 5},
            wrappers=[functools.partial(gym.wrappers.ClipReward, max_reward=0.0)],
            envs_per_process=2,
        ) as manager:
            steps = [manager.step(manager.sample_actions()) for _ in range(12)]
        return steps

    for ours, theirs in zip(run("sync"), run("async"), strict=True):
        for name in ("ready_obs", "next_obs", "reward", "truncated"):
            one, other = getattr(ours, name), getattr(theirs, name)
            np.testing.assert_array_equal(one, other)
            assert one.dtype == other.dtype
        np.testing.assert_equal(ours.info.rows(), theirs.info.rows())
    assert ours.reward.max() <= 0


def test_wrappers_are_applied_to_each_env_first_one_innermost():
    shift = functools.partial(gym.wrappers.TransformReward, func=lambda reward: reward + 1)
    double = functools.partial(gym.wrappers.TransformReward, func=lambda reward: reward * 2)
    with make_env_manager(
        Walk, env_num=1, env_kwargs={"reward": 1.0}, wrappers=[shift, double]
    ) as manager:
        assert manager.step(np.zeros(1, int)).reward.tolist() == [4.0]


@pytest.mark.process
@pytest.mark.parametrize(
    ("where", "timeouts"),
    [
        ("step", {"step_timeout_s": 0.5, "reset_timeout_s": 60}),
        ("reset", {"step_timeout_s": 60, "reset_timeout_s": 0.5}),
    ],
)
def test_each_deadline_reaches_the_manager(where, timeouts):
    manager = make_env_manager(
        Fragile,
        env_num=1,
        mode="async",
        env_kwargs={"how": "hang", "where": where, "at": 1},
        max_retry=0,
        **timeouts,
    )
    with pytest.raises(EnvTimeout, match="did not answer in time"), manager:
        manager.step(np.zeros(1, int))


@pytest.mark.parametrize("mode", ["sync", pytest.param("async", marks=pytest.mark.process)])
@pytest.mark.parametrize("max_retry", [0, 2])
def test_an_env_is_restarted_as_often_as_asked(mode, max_retry):
    with make_env_manager(
        Fragile, env_num=1, mode=mode, env_kwargs={"at": 1}, max_retry=max_retry
    ) as manager:
        for _ in range(max_retry):
            assert manager.step(np.zeros(1, int)).abnormal.all()
        with pytest.raises(EnvCrashed, match=f"failed {max_retry + 1} time"):
            manager.step(np.zeros(1, int))


@pytest.mark.process
def test_envs_share_processes_as_asked():
    with make_env_manager(Walk, env_num=3, mode="async", envs_per_process=2) as manager:
        assert len(set(manager.pids)) == 2


def test_the_number_of_envs_may_be_a_numpy_integer():
    assert make_env_manager(Walk, env_num=np.int64(2)).env_num == 2


def test_an_unknown_id_lists_the_nearest_ones():
    with pytest.raises(RegistryError, match=r"'CartPol-v1'; nearest known: .*CartPole-v1"):
        make_env_manager("CartPol-v1", env_num=1)
    with pytest.raises(RegistryError, match="v99"):
        make_env_manager("CartPole-v99", env_num=1)
    with pytest.raises(RegistryError, match="No module named 'no_such_module'"):
        make_env_manager("no_such_module:Walk-v0", env_num=1)


def test_an_id_may_include_the_module_that_registers_it(tmp_path, monkeypatch):
    (tmp_path / "my_walks.py").write_text(
        "import gymnasium as gym\ngym.register('MyWalk-v0', entry_point='strange_envs:Walk')\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(gym.envs.registration, "registry", {**gym.registry})
    manager = make_env_manager("my_walks:MyWalk-v0", env_num=1)
    assert manager.action_space == Walk.action_space


@pytest.mark.process
def test_envs_registered_in_this_program_work_in_other_processes(monkeypatch):
    monkeypatch.setattr(gym.envs.registration, "registry", {**gym.registry})
    gym.register("OnlyHere-v0", entry_point=Walk, max_episode_steps=1)
    with make_env_manager("OnlyHere-v0", env_num=1, mode="async") as manager:
        assert manager.step(np.zeros(1, int)).truncated.all()


class Sized(Walk):
    def __init__(self, length=3):
        super().__init__()
        self.length = length


@pytest.mark.parametrize("mode", ["sync", pytest.param("async", marks=pytest.mark.process)])
def test_each_env_may_have_a_function_of_its_own(mode):
    makers = [functools.partial(Sized, length) for length in (2, 5, 3)]
    with make_env_manager(makers, env_num=3, mode=mode) as envs:
        assert envs.get_attr("length") == [2, 5, 3]
    with make_env_manager(envs.settings, seed=1, mode="sync") as again:
        assert again.get_attr("length") == [2, 5, 3]


def test_a_function_of_each_env_is_called_once():
    lengths = iter((2, 5))
    with make_env_manager([lambda: Sized(next(lengths))] * 2, env_num=2) as envs:
        assert envs.get_attr("length") == [2, 5]


def test_a_list_of_functions_has_one_for_each_env():
    with pytest.raises(ConfigError, match="2 functions, but env_num is 3"):
        make_env_manager([Sized, Sized], env_num=3)
    with pytest.raises(ConfigError, match="mode='sync'"):
        make_env_manager([Sized, Sized], env_num=2, mode="vector")
    with pytest.raises(ConfigError, match=r"list of such functions, got \[\]"):
        make_env_manager([], env_num=1)


@pytest.mark.parametrize("env_num", [0, -1, 1.5, "2", True])
@pytest.mark.parametrize("mode", ["sync", "async", "vector"])
def test_the_number_of_envs_is_a_positive_integer(env_num, mode):
    with pytest.raises(ConfigError, match="env_num must be an integer ≥ 1, got"):
        make_env_manager("CartPole-v1", env_num=env_num, mode=mode)


def test_other_mistakes_are_rejected():
    with pytest.raises(
        ConfigError, match="mode must be one of 'sync', 'async', 'vector', got 'threads'"
    ):
        make_env_manager("CartPole-v1", env_num=1, mode="threads")
    with pytest.raises(ConfigError, match=r"must be the id of an env.*got 5"):
        make_env_manager(5, env_num=1)
    with pytest.raises(ConfigError, match="Acrobot-v1 has no vectorized implementation"):
        make_env_manager("Acrobot-v1", env_num=1, mode="vector")
    with pytest.raises(ConfigError, match="max_retry must be an integer ≥ 0, got -1"):
        make_env_manager("CartPole-v1", env_num=1, max_retry=-1)


def test_a_wrapper_that_does_not_return_an_env_is_rejected():
    with pytest.raises(
        Exception, match="env 0 is None; does the function or wrapper that makes it"
    ):
        make_env_manager(Walk, env_num=1, wrappers=[lambda env: None]).launch()
