"""What all env managers promise alike."""

import functools
import logging

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.vector import AutoresetMode
from strange_envs import Crowd, Fragile, FragileSimulator, Nested, SavesItself, Walk, WithSimulator

from dmiddleware.env import AsyncEnvManager, SyncEnvManager, VectorEnvManager
from dmiddleware.errors import CheckpointMismatch, ConfigError, EnvStateError, StructureError
from dmiddleware.files.checkpoint import load_checkpoint, save_checkpoint
from dmiddleware.seeding import derive_seed

SYNC, ASYNC = "sync", pytest.param("async", marks=pytest.mark.process)
TWO = pytest.param("async, two processes", marks=pytest.mark.process)
SAME_STEP, DISABLED = "vector, same step", "vector, disabled"
ALL = [SYNC, ASYNC, SAME_STEP, DISABLED]
PLAIN = [SYNC, SAME_STEP, DISABLED]

pytestmark = pytest.mark.usefixtures("leaves_nothing_behind")


def vector_of(env_fns, mode):
    return gym.vector.SyncVectorEnv(env_fns, autoreset_mode=mode)


def make(kind, env_fn, env_num=3, seed=5, **kwargs):
    env_fns = [env_fn] * env_num
    if kind == "sync":
        return SyncEnvManager(env_fns, seed=seed, **kwargs)
    if kind.startswith("vector"):
        mode = AutoresetMode.SAME_STEP if "same" in kind else AutoresetMode.DISABLED
        fn = functools.partial(vector_of, env_fns, mode)
        return VectorEnvManager(fn, env_num, seed=seed, **kwargs)
    per_process = 2 if "two" in kind else 3
    return AsyncEnvManager(env_fns, seed=seed, envs_per_process=per_process, **kwargs)


def literally(env_fn, seeds, actions):
    """Step envs in the plainest way; yield what is expected of every row."""
    envs = [env_fn() for _ in seeds]
    for env, seed in zip(envs, seeds, strict=True):
        env.reset(seed=seed)
    totals = [[0.0, 0] for _ in envs]
    for rows in actions:
        expected = []
        for index, (env, action) in enumerate(zip(envs, rows, strict=True)):
            next_obs, reward, terminated, truncated, info = env.step(action)
            obs, info, done = next_obs, dict(info), terminated or truncated
            totals[index][0] += float(reward)
            totals[index][1] += 1
            if done:
                obs, _ = env.reset()
                total, length = totals[index]
                info |= {"eval_episode_return": np.float32(total), "eval_episode_length": length}
                totals[index] = [0.0, 0]
            expected.append((obs, next_obs, reward, terminated, truncated, info))
        yield expected


def check_row(row, expected):
    _, next_obs, reward, terminated, truncated, info = expected
    np.testing.assert_equal(row.obs, next_obs)
    np.testing.assert_equal(row.next_obs, next_obs)
    assert row.reward == np.float32(reward)
    assert (row.terminated, row.truncated, row.done) == (
        terminated,
        truncated,
        terminated or truncated,
    )
    np.testing.assert_equal(row.info, info)


@pytest.mark.parametrize("kind", [SYNC, TWO, SAME_STEP, DISABLED])
def test_steps_equal_those_of_a_plain_loop(kind):
    env_fn = functools.partial(Walk, info=True)
    actions = np.random.default_rng(0).integers(0, 3, (30, 3))
    seeds = [derive_seed(5, index) for index in range(3)]
    n_ended = 0
    with make(kind, env_fn) as manager:
        previous = manager.ready_obs
        for rows, expected in zip(actions, literally(env_fn, seeds, actions), strict=True):
            batch = manager.step(rows)
            assert batch.is_full
            assert batch.env_id.tolist() == [0, 1, 2]
            assert not batch.abnormal.any()
            for row, expected_row in zip(batch, expected, strict=True):
                check_row(row, expected_row)
            assert (batch.next_obs is batch.ready_obs) == (not batch.done.any())
            assert batch.ready_obs is not previous
            np.testing.assert_array_equal(manager.ready_obs, batch.ready_obs)
            for flags in (batch.done, batch.terminated, batch.truncated, batch.abnormal):
                assert flags.dtype == np.bool_
            assert batch.reward.dtype == np.float32
            n_ended += int(batch.done.sum())
            previous = batch.ready_obs
    assert n_ended > 10


@pytest.mark.parametrize("kind", [SYNC, ASYNC, SAME_STEP])
def test_nested_spaces_keep_their_structure_and_dtypes(kind):
    with make(kind, Nested, env_num=2) as manager:
        actions = [manager.sample_actions() for _ in range(9)]
        per_env = [
            [
                {
                    "move": batch["move"][index],
                    "push": tuple(part[index] for part in batch["push"]),
                }
                for index in range(2)
            ]
            for batch in actions
        ]
        seeds = [derive_seed(5, index) for index in range(2)]
        for batch, expected in zip(actions, literally(Nested, seeds, per_env), strict=True):
            step = manager.step(batch)
            assert step.ready_obs["image"].dtype == np.uint8
            assert step.ready_obs["image"].shape == (2, 2, 4, 4)
            assert step.ready_obs["mode"].dtype == np.int64
            assert step.ready_obs["where"]["x"].dtype == np.float64
            assert isinstance(step.ready_obs["pair"], tuple)
            for row, expected_row in zip(step, expected, strict=True):
                check_row(row, expected_row)


@pytest.mark.parametrize("kind", ALL)
def test_the_arrays_of_a_step_are_never_overwritten(kind):
    actions = np.random.default_rng(1).integers(0, 3, (12, 3))
    with make(kind, Walk) as manager:
        steps = [manager.step(rows) for rows in actions]
        names = ("ready_obs", "next_obs", "reward", "done", "terminated", "truncated", "env_id")
        copies = [{name: getattr(step, name).copy() for name in names} for step in steps]
        for rows in actions:
            manager.step(rows)
        for step, copy in zip(steps, copies, strict=True):
            for name, array in copy.items():
                np.testing.assert_array_equal(getattr(step, name), array)


@pytest.mark.parametrize("kind", PLAIN)
def test_the_seed_determines_the_run(kind):
    def run(seed):
        with make(kind, Walk, seed=seed) as manager:
            first = manager.ready_obs.copy()
            actions = [manager.sample_actions() for _ in range(10)]
            return [first, *(manager.step(rows).ready_obs for rows in actions), np.stack(actions)]

    for one, other in zip(run(3), run(3), strict=True):
        np.testing.assert_array_equal(one, other)
    for one, other in zip(run(3), run([derive_seed(3, index) for index in range(3)]), strict=True):
        np.testing.assert_array_equal(one, other)
    assert not np.array_equal(run(3)[0], run(4)[0])


@pytest.mark.parametrize("kind", [SYNC, ASYNC, DISABLED])
def test_a_later_seed_takes_effect_at_each_envs_next_reset(kind):
    actions = np.zeros((3, 3), np.int64)
    with make(kind, functools.partial(Walk, limit=3), seed=1) as manager:
        manager.seed(8)
        late = [manager.step(rows) for rows in actions][-1].ready_obs
    with make(kind, Walk, seed=8) as manager:
        np.testing.assert_array_equal(manager.ready_obs, late)


@pytest.mark.parametrize("kind", PLAIN)
def test_returns_of_long_episodes_are_summed_in_float64(kind):
    env_fn = functools.partial(Walk, goal=10**9, limit=1000, reward=1e-3)
    with make(kind, env_fn, env_num=1) as manager:
        for _ in range(1000):
            batch = manager.step(np.zeros(1, np.int64))
        info = batch.info.row(0)
    assert info["eval_episode_return"] == np.float32(sum(1e-3 * t for t in range(1, 1001)))
    assert info["eval_episode_length"] == 1000
    assert batch.info["eval_episode_return"].dtype == np.float32
    assert batch.truncated.all()
    assert not batch.terminated.any()


class SaysItsReturn(Walk):
    def step(self, action):
        *rest, info = super().step(action)
        return *rest, {**info, "eval_episode_return": 77.0}


@pytest.mark.parametrize("kind", PLAIN)
def test_a_return_that_the_env_reports_itself_is_kept(kind):
    with make(kind, functools.partial(SaysItsReturn, limit=1)) as manager:
        batch = manager.step(np.zeros(3, np.int64))
    assert [row.info["eval_episode_return"] for row in batch] == [77.0] * 3
    assert [row.info["eval_episode_length"] for row in batch] == [1] * 3


@pytest.mark.parametrize("kind", [SYNC, TWO])
def test_some_envs_can_be_stepped_without_the_others(kind):
    with make(kind, Walk) as manager:
        before = manager.ready_obs.copy()
        batch = manager.step({2: 1, 0: 2})
        assert batch.env_id.tolist() == [2, 0]
        assert not batch.is_full
        assert batch.ready_obs[:, 1].tolist() == [1, 2]
        after = manager.ready_obs
        np.testing.assert_array_equal(after[1], before[1])
        np.testing.assert_array_equal(after[[2, 0]], batch.ready_obs)
        assert before[:, 0].tolist() == [0, 0, 0]
        for _ in range(8):
            batch = manager.step({0: 0})
        assert batch.info.row(0)["eval_episode_length"] == 9
        batch = manager.step(np.array([0, 2, 0]))
        assert batch.is_full
        assert manager.ready_obs[:, 0].tolist() == [1, 1, 2]
        batch = manager.step(np.array([0, 2, 0]))
        assert batch.info.row(1)["eval_episode_length"] == 2


@pytest.mark.parametrize("kind", [SYNC, TWO, SAME_STEP, DISABLED])
def test_some_envs_can_be_reset_without_the_others(kind):
    with make(kind, functools.partial(Walk, info=True)) as manager:
        for _ in range(2):
            manager.step(np.ones(3, np.int64))
        manager.reset([1])
        assert manager.ready_obs[:, 0].tolist() == [2, 0, 2]
        assert manager.ready_info.row(1) == {"begun": True}
        assert manager.ready_info.row(0)["t"] == 2
        for _ in range(2):
            batch = manager.step(np.ones(3, np.int64))
        assert batch.done.tolist() == [True, False, True]
        for _ in range(2):
            batch = manager.step(np.ones(3, np.int64))
        assert batch.info.row(1)["eval_episode_length"] == 4
        manager.reset()
        assert manager.ready_obs[:, 0].tolist() == [0, 0, 0]


@pytest.mark.parametrize("kind", ALL)
def test_infos_of_resets_come_with_the_observations_to_act_on(kind):
    with make(kind, functools.partial(Walk, info=True, limit=2)) as manager:
        assert manager.ready_info.rows() == [{"begun": True}] * 3
        manager.step(np.zeros(3, np.int64))
        assert manager.ready_info["t"].tolist() == [1, 1, 1]
        batch = manager.step(np.zeros(3, np.int64))
        assert manager.ready_info.rows() == [{"begun": True}] * 3
        assert batch.info["t"].tolist() == [2, 2, 2]
        assert "begun" not in batch.info


def test_every_part_of_nested_actions_has_a_row_per_env():
    with make("sync", Nested) as manager:
        actions = manager.sample_actions()
        first = next(iter(actions))
        with pytest.raises(StructureError, match="given 2 actions for 3 ready envs"):
            manager.step({**actions, first: actions[first][:2]})
        manager.step(actions)


@pytest.mark.parametrize("kind", ALL)
def test_actions_that_do_not_fit_are_rejected_before_any_env_steps(kind):
    with make(kind, Walk) as manager:
        with pytest.raises(StructureError, match="given 2 actions for 3 ready envs"):
            manager.step(np.zeros(2, np.int64))
        with pytest.raises(StructureError, match=r"shape \(3, 1\).*Discrete\(3\)"):
            manager.step(np.zeros((3, 1), np.int64))
        with pytest.raises(StructureError, match=r"unknown env id 3; the ids are 0 to 2"):
            manager.step({0: 0, 3: 0})
        with pytest.raises(StructureError):
            manager.step({})
        with pytest.raises(StructureError, match=r"the actions do not fit.*float64"):
            manager.step({0: 0.5, 1: 0.0, 2: 0.0})
        with pytest.raises(StructureError, match=r"twice in \[1, 1\]"):
            manager.reset([1, 1])
        assert manager.ready_obs[:, 0].tolist() == [0, 0, 0]
        assert not manager.closed


@pytest.mark.parametrize("kind", PLAIN)
def test_a_manager_is_used_between_launch_and_close(kind):
    manager = make(kind, Walk)
    actions = np.zeros(3, np.int64)
    for _ in range(2):
        assert manager.closed
        for use in (
            lambda: manager.step(actions),
            manager.reset,
            manager.render,
            manager.state_dict,
            lambda: manager.ready_obs,
            lambda: manager.ready_obs_id,
            lambda: manager.ready_info,
            lambda: manager.resumable,
        ):
            with pytest.raises(EnvStateError, match="call launch"):
                use()
        manager.launch()
        with pytest.raises(EnvStateError, match="launched already"):
            manager.launch()
        first = manager.step(actions).ready_obs
        manager.close()
        manager.close()
    with manager:
        np.testing.assert_array_equal(manager.step(actions).ready_obs, first)


@pytest.mark.parametrize("kind", PLAIN)
def test_spaces_are_known_before_launch(kind):
    manager = make(kind, Nested)
    assert manager.observation_space == Nested().observation_space
    assert manager.action_space == Nested().action_space
    assert manager.closed
    sample = manager.sample_actions()
    with make(kind, Nested) as other:
        np.testing.assert_equal(other.sample_actions(), sample)


@pytest.mark.parametrize("kind", PLAIN)
@pytest.mark.parametrize("seed", [[1, 2], [1, 2, 3, 4]])
def test_a_list_of_seeds_has_one_per_env(kind, seed):
    with pytest.raises(ConfigError, match=f"{len(seed)} seeds were given for 3 envs"):
        make(kind, Walk, seed=seed)


@pytest.mark.parametrize("kind", [SYNC, ASYNC, SAME_STEP])
def test_images_come_from_the_requested_envs(kind):
    with make(kind, functools.partial(Walk, render_mode="rgb_array")) as manager:
        manager.step(np.zeros(3, np.int64))
        manager.reset([1])
        frames = manager.render([2, 1])
        assert [frame.dtype for frame in frames] == [np.uint8] * 2
        assert [frame.shape for frame in frames] == [(4, 6, 3)] * 2
        assert [int(frame[0, 0, 0]) for frame in frames] == [1, 0]
        assert len(manager.render()) == 3


@pytest.mark.parametrize("kind", [SYNC, ASYNC, SAME_STEP])
def test_envs_without_images_say_how_to_get_them(kind):
    class Blind(Walk):
        def render(self):
            return None

    with make(kind, Blind) as manager:
        with pytest.raises(EnvStateError, match="rgb_array"):
            manager.render()
        assert not manager.closed


@pytest.mark.parametrize("kind", ALL)
@pytest.mark.parametrize("env_fn", [functools.partial(Walk, info=True), SavesItself])
def test_a_saved_and_loaded_run_equals_an_uninterrupted_one(kind, env_fn, tmp_path):
    with make(kind, env_fn, seed=2) as manager:
        for _ in range(6):
            manager.step(manager.sample_actions())
        assert manager.resumable
        save_checkpoint(tmp_path / "env.safetensors", manager.state_dict())
        actions = [manager.sample_actions() for _ in range(12)]
        expected = [manager.step(rows) for rows in actions]
    state = load_checkpoint(tmp_path / "env.safetensors")
    with make(kind, env_fn, seed=99) as manager:
        assert manager.load_state_dict(state)
        assert manager.ready_obs.dtype == np.float32
        for rows, step in zip(actions, expected, strict=True):
            np.testing.assert_array_equal(manager.sample_actions(), rows)
            again = manager.step(rows)
            for name in ("ready_obs", "next_obs", "reward", "done", "truncated"):
                np.testing.assert_array_equal(getattr(again, name), getattr(step, name))
            np.testing.assert_equal(again.info.rows(), step.info.rows())


@pytest.mark.parametrize("kind", [SYNC, ASYNC, SAME_STEP])
def test_envs_that_cannot_be_saved_start_over_with_other_seeds(kind, caplog):
    with make(kind, WithSimulator) as manager:
        first = manager.ready_obs.copy()
        manager.step(np.zeros(3, np.int64))
        assert not manager.resumable
        state = manager.state_dict()
    with make(kind, WithSimulator) as manager, caplog.at_level(logging.WARNING):
        manager.step(np.zeros(3, np.int64))
        assert not manager.load_state_dict(state)
        resumed = manager.ready_obs
        assert resumed[:, 0].tolist() == [0, 0, 0]
        assert not np.array_equal(resumed, first)
    assert "start new episodes" in caplog.text


@pytest.mark.parametrize("kind", [SYNC, ASYNC, SAME_STEP])
def test_envs_start_over_with_other_seeds_after_every_resume(kind):
    firsts, state = [], None
    for _ in range(3):
        with make(kind, WithSimulator) as manager:
            if state is not None:
                assert not manager.load_state_dict(state)
            firsts += manager.ready_obs[:, 2].tolist()
            manager.step(np.zeros(3, np.int64))
            state = manager.state_dict()
    assert len(set(firsts)) == 9


@pytest.mark.parametrize("env_fn", [Fragile, FragileSimulator])
@pytest.mark.parametrize("kind", [SYNC, ASYNC, SAME_STEP])
def test_a_restart_after_a_resume_has_its_own_seeds(kind, env_fn):
    def step_until_restarted(manager):
        for _ in range(3):
            batch = manager.step(np.zeros(3, np.int64))
        assert batch.abnormal.all()
        return batch.ready_obs[:, 2].tolist()

    with make(kind, env_fn) as manager:
        first = step_until_restarted(manager)
        state = manager.state_dict()
        expected = step_until_restarted(manager), manager.restarts
    with make(kind, env_fn) as manager:
        assert manager.load_state_dict(state) == (env_fn is Fragile)
        second = step_until_restarted(manager)
        assert (second, manager.restarts) == expected
    assert len({*first, *second}) == 6


class Interrupted(Walk):
    """Raises what Ctrl-C raises, in its third step or its second reset."""

    def __init__(self, what):
        super().__init__()
        self.what, self.n_left = what, {"step": 3, "reset": 2}

    def count(self, what):
        self.n_left[what] -= 1
        if what == self.what and self.n_left[what] == 0:
            raise KeyboardInterrupt

    def step(self, action):
        self.count("step")
        return super().step(action)

    def reset(self, **kwargs):
        self.count("reset")
        return super().reset(**kwargs)


@pytest.mark.parametrize("kind", [SYNC, SAME_STEP, DISABLED])
@pytest.mark.parametrize("what", ["step", "reset"])
def test_an_interrupted_step_closes_the_manager(kind, what):
    manager = make(kind, functools.partial(Interrupted, what))
    manager.launch()
    for _ in range(2):
        manager.step(np.zeros(3, np.int64))
    with pytest.raises(KeyboardInterrupt):
        manager.step(np.zeros(3, np.int64)) if what == "step" else manager.reset()
    assert manager.closed
    with pytest.raises(EnvStateError, match="needs launched envs"):
        manager.step(np.zeros(3, np.int64))


@pytest.mark.parametrize("kind", [SYNC, TWO, SAME_STEP])
def test_envs_that_cannot_be_restored_start_over(kind, caplog):
    with make(kind, Crowd) as manager:
        manager.step(np.zeros(3, np.int64))
        state = manager.state_dict()
    with make(kind, Crowd) as manager, caplog.at_level(logging.WARNING):
        assert not manager.load_state_dict(state)
        assert manager.ready_obs[:, 0].tolist() == [0, 0, 0]
        assert manager.step(np.zeros(3, np.int64)).ready_obs[:, 0].tolist() == [1, 1, 1]
    assert "an object where this env has None, so the envs cannot continue" in caplog.text


@pytest.mark.parametrize("kind", [*PLAIN, ASYNC])
def test_the_state_of_other_envs_is_rejected(kind):
    with make(kind, Walk) as manager:
        state = manager.state_dict()
    two = make(kind, Walk, env_num=2)
    with two, pytest.raises(CheckpointMismatch, match="3 envs, but this manager has 2"):
        two.load_state_dict(state)
    other = make(kind, SavesItself)
    with other, pytest.raises(CheckpointMismatch, match=r"the saved env is .*Walk"):
        other.load_state_dict(state)


@pytest.mark.parametrize("kind", [SYNC, ASYNC, DISABLED])
def test_a_fixed_seed_starts_all_episodes_of_an_env_alike(kind):
    cartpole = functools.partial(gym.make, "CartPole-v1", max_episode_steps=3)
    with make(kind, cartpole, env_num=2, seed=None) as manager:
        manager.seed([3, 4], dynamic_seed=False)
        manager.reset()
        first = np.array(manager.ready_obs)
        for _ in range(3):
            for _ in range(3):
                step = manager.step(np.zeros(2, np.int64))
            assert step.done.all()
            np.testing.assert_array_equal(manager.ready_obs, first)
        manager.seed([3, 4])
        manager.reset()
        np.testing.assert_array_equal(manager.ready_obs, first)
        manager.reset()
        assert (np.array(manager.ready_obs) != first).any()


@pytest.mark.parametrize("kind", [SYNC, ASYNC])
@pytest.mark.parametrize("was_fixed", [True, False])
def test_a_restored_manager_starts_episodes_as_the_saved_one(kind, was_fixed):
    def first_obs(manager):
        manager.reset()
        return np.array(manager.ready_obs)

    cartpole = functools.partial(gym.make, "CartPole-v1")
    with make(kind, cartpole, env_num=2, seed=None) as manager:
        manager.seed([3, 4], dynamic_seed=not was_fixed)
        manager.reset()
        state = manager.state_dict()
        expected = [first_obs(manager) for _ in range(2)]
    with make(kind, cartpole, env_num=2, seed=None) as other:
        other.seed([5, 6], dynamic_seed=was_fixed)
        other.reset()
        assert other.load_state_dict(state)
        np.testing.assert_array_equal([first_obs(other) for _ in range(2)], expected)


def test_envs_that_reset_themselves_cannot_have_a_fixed_seed():
    manager = make(SAME_STEP, Walk)
    with pytest.raises(ConfigError, match="DISABLED"):
        manager.seed(3, dynamic_seed=False)
    assert manager.closed
    with manager, pytest.raises(ConfigError, match="DISABLED"):
        manager.seed(3, dynamic_seed=False)


@pytest.mark.parametrize("kind", [SYNC, ASYNC, DISABLED])
def test_a_fixed_seed_may_be_set_before_launch(kind):
    manager = make(kind, Walk, seed=None)
    manager.seed(3, dynamic_seed=False)
    with manager:
        first = manager.ready_obs[:, 2].tolist()
        manager.step(np.zeros(3, np.int64))
        manager.reset()
        assert manager.ready_obs[:, 2].tolist() == first


@pytest.mark.parametrize("kind", ALL)
def test_a_manager_counts_the_episodes_of_each_env(kind):
    with make(kind, functools.partial(Walk, goal=99, limit=3)) as manager:
        counts = []
        for _ in range(6):
            manager.step(np.zeros(3, np.int64))
            counts.append(manager.episode_counts)
        assert counts == [[0] * 3] * 2 + [[1] * 3] * 3 + [[2] * 3]
        manager.close()
        manager.launch()
        assert manager.episode_counts == [0] * 3


@pytest.mark.parametrize("mode", ["sync", "vector"])
def test_random_actions_continue_after_a_restart_and_a_resume(mode):
    class Gears(gym.Env):
        observation_space = gym.spaces.Box(-9.0, 9.0, (1,))

        def __init__(self):
            self.action_space, self.t = gym.spaces.Discrete(5), 0

        def reset(self, *, seed=None, options=None):
            super().reset(seed=seed)
            return np.zeros(1, np.float32), {}

        def step(self, action):
            self.t += 1
            if self.t == 4:
                raise RuntimeError("a gear broke")
            return np.zeros(1, np.float32), 0.0, self.t == 3, False, {}

    def make():
        if mode == "sync":
            return SyncEnvManager([Gears, Gears], seed=0)
        return VectorEnvManager(lambda: gym.vector.SyncVectorEnv([Gears, Gears]), 2, seed=0)

    drawn = []
    with make() as envs, make() as again, make() as resumed:
        for manager in (envs, again):
            for _ in range(6):
                manager.step(manager.sample_actions())
            assert manager.restarts > 0
        assert resumed.load_state_dict(envs.state_dict()) is True
        for manager in (envs, again, resumed):
            drawn.append([manager.action_space.sample() for _ in range(20)])
            drawn[-1] += manager.sample_actions().tolist()
    assert drawn[0] == drawn[1] == drawn[2]
