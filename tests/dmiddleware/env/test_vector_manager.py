import functools
import logging

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode
from strange_envs import Fragile, Nested, Walk

from dmiddleware.env import VectorEnvManager, make_env_manager
from dmiddleware.errors import ConfigError, EnvCrashed, EnvProtocolError, StructureError
from dmiddleware.policy import PPOPolicy
from dmiddleware.rollout import RolloutCollector


class Counters(gym.vector.VectorEnv):
    """Counts in three worlds, which end after 2, 3 and 100 steps; resets itself in any mode."""

    single_observation_space = spaces.Box(-1, 1000, (1,), np.float32)
    single_action_space = spaces.Box(-1, 1, (), np.float32)
    num_envs = 3

    def __init__(self, mode, fails_at=None, final_as="objects"):
        self.metadata = {"autoreset_mode": mode, "render_modes": []}
        self.observation_space = spaces.Box(-1, 1000, (3, 1), np.float32)
        self.action_space = spaces.Box(-1, 1, (3,), np.float32)
        self.mode, self.fails_at, self.final_as = mode, fails_at, final_as
        self.buffer = np.zeros((3, 1), np.float32)  # handed out again and again
        self.n_steps = 0
        self.seeds = []
        self.n_closed = 0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.seeds.append(seed)
        mask = (options or {}).get("reset_mask", np.ones(3, bool))
        if self.mode is not AutoresetMode.DISABLED:
            assert mask.all()
        if mask.all():
            self.t = np.zeros(3, int)
            self.ended = np.zeros(3, bool)
        self.t[mask] = 0
        return self.obs(), {"new": mask.copy(), "_new": mask.copy()}

    def step(self, actions):
        assert actions.dtype == np.float32
        self.n_steps += 1
        if self.n_steps == self.fails_at:
            raise RuntimeError("the simulator diverged")
        self.t += 1
        if self.mode is AutoresetMode.NEXT_STEP:
            self.t[self.ended] = 0
        infos = {"t": self.t.copy(), "_t": np.ones(3, bool)}
        reward = self.t.astype(np.float32)
        truncated = self.t >= [2, 3, 100]
        self.ended = truncated
        obs = self.obs()
        if self.mode is AutoresetMode.SAME_STEP and truncated.any():
            infos = self.final(infos, obs.copy(), truncated)
            self.t[truncated] = 0
            obs = self.obs()
        return obs, reward, np.zeros(3, bool), truncated, infos

    def final(self, infos, obs, ended):
        final = obs
        if self.final_as == "objects":
            final = np.array(
                [row if one else None for row, one in zip(obs, ended, strict=True)], dtype=object
            )
        infos = {**infos, "t": np.where(ended, 0, infos["t"]), "final_info": infos}
        return {**infos, "final_obs": final, "_final_obs": ended, "_final_info": ended}

    def obs(self):
        self.buffer[:, 0] = self.t
        return self.buffer

    def close_extras(self, **kwargs):
        self.n_closed += 1


ACTIONS = np.zeros(3, np.float64)


def managed(mode, *, made=None, **kwargs):
    """Return a manager of ``Counters``, which are appended to the list ``made``."""
    options = {key: kwargs.pop(key) for key in ("seed", "max_retry") if key in kwargs}
    made = [] if made is None else made

    def make():
        made.append(Counters(mode, **kwargs))
        return made[-1]

    return VectorEnvManager(make, 3, **options)


@pytest.mark.parametrize("final_as", ["objects", "stacked"])
@pytest.mark.parametrize("mode", [AutoresetMode.SAME_STEP, AutoresetMode.DISABLED])
def test_final_and_first_observations_are_kept_apart(mode, final_as):
    made = []
    with managed(mode, made=made, final_as=final_as) as manager:
        steps = [manager.step(ACTIONS) for _ in range(6)]
    assert [step.next_obs[:, 0].tolist() for step in steps] == [
        [1, 1, 1],
        [2, 2, 2],
        [1, 3, 3],
        [2, 1, 4],
        [1, 2, 5],
        [2, 3, 6],
    ]
    assert [step.ready_obs[:, 0].tolist() for step in steps] == [
        [1, 1, 1],
        [0, 2, 2],
        [1, 0, 3],
        [0, 1, 4],
        [1, 2, 5],
        [0, 0, 6],
    ]
    assert all(step.is_full for step in steps)
    assert steps[5].truncated.tolist() == [True, True, False]
    assert steps[5].info["t"].tolist() == [2, 3, 6]
    assert steps[5].info["eval_episode_return"].tolist() == [3, 6, 0]
    assert steps[5].info["_eval_episode_return"].tolist() == [True, True, False]
    assert steps[5].info["eval_episode_return"].dtype == np.float32
    assert "final_obs" not in steps[5].info
    assert steps[4].next_obs is steps[4].ready_obs
    assert [vector.n_closed for vector in made] == [1]


def test_a_step_that_resets_is_not_a_transition():
    with managed(AutoresetMode.NEXT_STEP) as manager:
        steps, ready = [], []
        for _ in range(6):
            steps.append(manager.step(ACTIONS))
            ready.append(manager.ready_obs[:, 0].tolist())
            assert manager.ready_obs_id.tolist() == [0, 1, 2]
    assert all(step.env_id.tolist() == [0, 1, 2] for step in steps)
    assert [step.valid.tolist() for step in steps] == [
        [True, True, True],
        [True, True, True],
        [False, True, True],
        [True, False, True],
        [True, True, True],
        [False, True, True],
    ]
    assert [[row.env_id for row in step] for step in steps[1:3]] == [[0, 1, 2], [1, 2]]
    assert not any(step.abnormal.any() for step in steps)
    assert ready == [[1, 1, 1], [2, 2, 2], [0, 3, 3], [1, 0, 4], [2, 1, 5], [0, 2, 6]]
    assert [step.next_obs[:, 0].tolist() for step in steps] == ready
    assert [step.done.tolist() for step in steps[1:3]] == [
        [True, False, False],
        [False, True, False],
    ]
    assert steps[2].reward.tolist() == [0, 3, 3]
    assert [step.is_full for step in steps] == [True, True, False, False, True, False]
    assert steps[2].info.rows()[1:] == [
        {"t": 3, "eval_episode_return": 6.0, "eval_episode_length": 3},
        {"t": 3},
    ]
    assert steps[4].info.row(0)["eval_episode_return"] == 3.0
    assert steps[4].info.row(0)["eval_episode_length"] == 2


@pytest.mark.parametrize("mode", AutoresetMode)
def test_an_info_may_be_one_value_for_all_envs(mode):
    extra = {
        "fps": 30, "unit": None, "gain": np.array(2.0), "deep": {"fps": 30},
        "name": ["a", "b", "c"], "_name": np.ones(3, bool),
    }  # fmt: skip

    class Telling(Counters):
        def step(self, actions):
            obs, reward, terminated, truncated, infos = super().step(actions)
            return obs, reward, terminated, truncated, {**infos, **extra}

    with VectorEnvManager(lambda: Telling(mode), 3) as manager:
        for _ in range(6):
            for timestep in manager.step(ACTIONS):
                info = timestep.info
                if mode is AutoresetMode.SAME_STEP and timestep.done:
                    continue  # its info is the final one
                assert (info["fps"], info["unit"], info["gain"]) == (30, None, 2.0)
                assert info["deep"] == {"fps": 30}
                assert info["name"] == "abc"[timestep.env_id]
        assert manager.restarts == 0


def test_gymnasiums_vectorized_cartpole_plays_whole_episodes():
    with make_env_manager("CartPole-v1", env_num=4, mode="vector", seed=3) as manager:
        lengths = np.zeros(4, int)
        n_episodes = 0
        before = manager.ready_obs
        for _ in range(120):
            batch = manager.step(manager.sample_actions())
            lengths += batch.valid
            # A transition moves the cart by its speed; a reset would not.
            moved = (batch.next_obs[:, 0] - before[:, 0])[batch.valid]
            np.testing.assert_allclose(moved, 0.02 * before[batch.valid, 1], atol=1e-5)
            for row in batch:
                if row.done:
                    assert row.info["eval_episode_length"] == lengths[row.env_id]
                    assert row.info["eval_episode_return"] == lengths[row.env_id]
                    lengths[row.env_id] = 0
                    n_episodes += 1
            before = manager.ready_obs
    assert n_episodes > 10


@pytest.mark.parametrize("mode", list(AutoresetMode))
def test_the_arrays_of_a_step_are_never_overwritten(mode):
    with managed(mode) as manager:
        first = manager.step(ACTIONS)
        manager.step(ACTIONS)
        assert first.ready_obs[:, 0].tolist() == [1, 1, 1]
        assert first.reward.tolist() == [1, 1, 1]


def test_an_env_that_cannot_be_reset_separately_finishes_its_episode_unseen():
    with managed(AutoresetMode.NEXT_STEP) as manager:
        manager.step(ACTIONS)
        manager.reset([1])
        steps = [manager.step(ACTIONS) for _ in range(5)]
        ids = [step.valid.nonzero()[0].tolist() for step in steps]
        assert not any(step.reward[~step.valid].any() for step in steps)
        # Env 1 ends after its third step, is reset in the fourth, and is back in the fifth.
        assert ids == [[0, 2], [2], [0, 2], [0, 1, 2], [1, 2]]
        batch = manager.step(ACTIONS)
        assert batch.info.row(1)["eval_episode_length"] == 3
        assert batch.info.row(1)["eval_episode_return"] == 6
    with managed(AutoresetMode.SAME_STEP) as manager:
        manager.step(ACTIONS)
        manager.reset([1])
        ids = [manager.step(ACTIONS).valid.nonzero()[0].tolist() for _ in range(4)]
        assert ids == [[0, 2], [0, 2], [0, 1, 2], [0, 1, 2]]


def test_a_reset_of_all_envs_ends_unseen_episodes():
    with managed(AutoresetMode.NEXT_STEP) as manager:
        manager.step(ACTIONS)
        manager.reset([1])
        manager.reset()
        assert manager.step(ACTIONS).is_full


def test_infos_of_a_reset_by_mask_belong_to_the_envs_that_were_reset():
    with managed(AutoresetMode.DISABLED) as manager:
        assert manager.ready_info.rows() == [{"new": True}] * 3
        for _ in range(2):
            manager.step(ACTIONS)
        assert manager.ready_info.rows() == [{"new": True}, {"t": 2}, {"t": 2}]
        manager.reset([2])
        assert manager.ready_info.rows() == [{"new": True}, {"t": 2}, {"new": True}]


def test_a_custom_vector_env_gets_one_seed():
    made = []
    with managed(AutoresetMode.NEXT_STEP, made=made, seed=[7, 8, 9]) as manager:
        manager.reset()
    assert [vector.seeds for vector in made] == [[7, None]]


def test_all_envs_are_stepped_together():
    with managed(AutoresetMode.NEXT_STEP) as manager:
        assert manager.in_lockstep
        with pytest.raises(StructureError, match=r"all of its 3 envs together.*only for \[0, 2\]"):
            manager.step({2: 0.0, 0: 0.0})
        assert manager.step({2: 0.5, 0: 0.0, 1: 0.0}).is_full
        with pytest.raises(StructureError, match="2 actions for 3 ready envs"):
            manager.step(ACTIONS[:2])


def test_a_failing_vector_env_is_made_again_and_all_episodes_are_lost(caplog):
    made = []
    with managed(AutoresetMode.NEXT_STEP, made=made, fails_at=3, max_retry=2, seed=4) as manager:
        for _ in range(2):
            manager.step(ACTIONS)
        with caplog.at_level(logging.WARNING):
            batch = manager.step(ACTIONS)
        assert batch.abnormal.all()
        assert not batch.is_full
        assert batch.ready_obs[:, 0].tolist() == [0, 0, 0]
        assert [row.info for row in batch] == [{"new": True, "abnormal": True}] * 3
        assert not batch.done.any()
        assert (manager.restarts, manager.dropped_steps) == (1, 4)  # env 0 had ended
        old, new = made
        assert new.seeds != old.seeds
        assert (old.n_closed, new.n_closed) == (1, 0)
        assert manager.step(ACTIONS).is_full
    assert "vector env 0 failed in step: it raised RuntimeError: the simulator diverged" in (
        caplog.text
    )


def test_a_vector_env_that_keeps_failing_stops_the_run():
    with managed(AutoresetMode.SAME_STEP, fails_at=1, max_retry=1) as manager:
        assert manager.step(ACTIONS).abnormal.all()
        with pytest.raises(EnvCrashed, match=r"(?s)failed 2 time.*the simulator diverged"):
            manager.step(ACTIONS)
        assert manager.closed


def test_a_failure_at_launch_and_in_a_reset_is_final():
    fragile = functools.partial(Fragile, where="reset", at=2)
    manager = VectorEnvManager(lambda: gym.vector.SyncVectorEnv([fragile]), 1)
    with manager, pytest.raises(EnvCrashed, match="the motor burned out"):
        manager.reset()
    assert manager.closed

    def broken():
        raise OSError("no license")

    with pytest.raises(EnvCrashed, match="OSError: no license"):
        VectorEnvManager(broken, 1).launch()
    with pytest.raises(EnvCrashed, match="OSError: no license"):
        _ = VectorEnvManager(broken, 1).action_space


def test_actions_outside_the_space_are_reported_as_such():
    def strict():
        return gym.make_vec("CartPole-v1", num_envs=2, vectorization_mode="vector_entry_point")

    manager = VectorEnvManager(strict, 2)
    with manager, pytest.raises(StructureError, match=r"not in its action space Discrete\(2\)"):
        manager.step(np.array([0, 5]))
    assert manager.closed
    assert manager.restarts == 0


def broken_vector(**changes):
    vector = Counters(changes.pop("mode", AutoresetMode.SAME_STEP))
    step = vector.step

    def changed_step(actions):
        obs, reward, terminated, truncated, infos = step(actions)
        parts = {"obs": obs, "reward": reward, "flags": terminated, "infos": infos, **changes}
        result = (parts["obs"], parts["reward"], parts["flags"], truncated, parts["infos"])
        return parts.get("result", result)

    vector.step = changed_step
    return vector


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"result": (1, 2)}, r"must return \(obs, reward, .*but returned \(1, 2\)"),
        ({"reward": np.zeros(2)}, r"3 envs, but returned rewards of shape \(2,\)"),
        ({"flags": np.zeros((3, 1))}, r"flags of shape \(3, 1\).*return rewards \[3\]"),
        ({"obs": np.zeros((3, 2))}, "observations that do not fit"),
        ({"obs": np.zeros((2, 1))}, "it has 2 rows for 3 envs"),
        ({"infos": {}}, "no 'final_obs'"),
    ],
)
def test_a_vector_env_that_breaks_the_protocol_is_rejected(changes, message):
    manager = VectorEnvManager(functools.partial(broken_vector, **changes), 3)
    with manager, pytest.raises(EnvProtocolError, match=message):
        for _ in range(2):
            manager.step(ACTIONS)
    assert manager.closed
    assert manager.restarts == 0


def test_anything_but_a_vector_env_is_rejected():
    with pytest.raises(EnvProtocolError, match=r"made a Walk; mode 'vector' needs"):
        VectorEnvManager(Walk, 1).launch()
    with pytest.raises(ConfigError, match="the vector env has 3 envs, but env_num is 4"):
        VectorEnvManager(functools.partial(Counters, AutoresetMode.DISABLED), 4).launch()
    with pytest.raises(EnvProtocolError, match=r"metadata\['autoreset_mode'\] is None"):
        VectorEnvManager(functools.partial(Counters, None), 3).launch()


def test_wrappers_of_vector_envs_are_unwrapped():
    wrapper = functools.partial(gym.wrappers.vector.ClipReward, max_reward=0.5)
    with make_env_manager(
        "CartPole-v1", env_num=2, mode="vector", wrappers=[wrapper], seed=0
    ) as manager:
        assert manager.step(np.zeros(2, int)).reward.tolist() == [0.5, 0.5]
        assert manager.resumable


def test_nested_spaces_go_through_gymnasiums_vector_env():
    def vector():
        return gym.vector.SyncVectorEnv([Nested, Nested], autoreset_mode=AutoresetMode.NEXT_STEP)

    with VectorEnvManager(vector, 2, seed=0) as manager:
        for _ in range(6):
            batch = manager.step(manager.sample_actions())
        assert isinstance(batch.ready_obs["pair"], tuple)
        assert batch.ready_obs["image"].dtype == np.uint8


class TensorCounters(Counters):
    """The same on a device: takes and returns tensors."""

    device = "cpu"

    def reset(self, *, seed=None, options=None):
        obs, infos = super().reset(seed=seed, options=options)
        return self.tensor(obs), infos

    def step(self, actions):
        assert actions.device.type == self.device
        obs, *scalars, infos = super().step(actions.cpu().numpy())
        if "final_obs" in infos:
            infos["final_obs"] = self.tensor(infos["final_obs"])
        return self.tensor(obs), *map(self.tensor, scalars), infos

    def tensor(self, array):
        return torch.as_tensor(array, device=self.device)


class GPUCounters(TensorCounters):
    device = "cuda"


GPU = pytest.param(
    GPUCounters,
    marks=[
        pytest.mark.gpu,
        pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    ],
)


def test_restored_observations_lie_in_memory_as_they_did():
    def make():
        return make_env_manager("CartPole-v1", env_num=3, mode="vector", seed=0)

    with make() as envs:
        envs.step(np.zeros(3, int))
        state, before = envs.state_dict(), envs.ready_obs
    state["ready_obs"] = np.ascontiguousarray(state["ready_obs"])  # as it is read from a file
    with make() as envs:
        assert envs.load_state_dict(state)
        assert envs.ready_obs.strides == before.strides == (4, 12)
        assert np.array_equal(envs.ready_obs, before)


@pytest.mark.parametrize("kind", [TensorCounters, GPU])
@pytest.mark.parametrize("mode", list(AutoresetMode))
def test_the_tensors_of_a_simulator_stay_on_its_device(mode, kind):
    with (
        VectorEnvManager(lambda: kind(mode, final_as="stacked"), 3) as manager,
        VectorEnvManager(lambda: Counters(mode, final_as="stacked"), 3) as arrays,
    ):
        assert manager.ready_obs.device.type == kind.device
        for actions in [ACTIONS, {0: 0.0, 1: 0.0, 2: 0.0}, ACTIONS, ACTIONS, ACTIONS, ACTIONS]:
            step, expected = manager.step(actions), arrays.step(actions)
            for name in ("ready_obs", "next_obs"):
                tensor = getattr(step, name)
                assert tensor.device.type == kind.device
                np.testing.assert_array_equal(tensor.cpu().numpy(), getattr(expected, name))
            for name in ("reward", "done", "terminated", "truncated", "valid"):
                np.testing.assert_array_equal(getattr(step, name), getattr(expected, name))
                assert getattr(step, name).dtype == getattr(expected, name).dtype
            assert step.info.rows() == expected.info.rows()
        last, state = step.ready_obs.clone(), manager.state_dict()
        manager.step(ACTIONS)
        assert torch.equal(step.ready_obs, last)  # not overwritten
        assert manager.load_state_dict(state)
        assert manager.ready_obs.device.type == kind.device
        assert torch.equal(manager.ready_obs, last)


def test_tensors_of_another_shape_are_refused():
    class Wrong(TensorCounters):
        def obs(self):
            return super().obs()[:2]

    with pytest.raises(EnvProtocolError, match="shape"):
        VectorEnvManager(lambda: Wrong(AutoresetMode.DISABLED), 3).launch()


def test_tensors_are_collected_without_arrays():
    class Discrete(TensorCounters):
        single_action_space = spaces.Discrete(2)

        def step(self, actions):
            return super().step(actions.float())

    with VectorEnvManager(lambda: Discrete(AutoresetMode.NEXT_STEP), 3) as manager:
        policy = PPOPolicy.for_env(manager, seed=0)
        batch = RolloutCollector(policy, manager).collect(30)
    moved = batch["next_obs"] - batch["obs"]
    assert batch["obs"].shape == (10, 3, 1)
    assert (moved == 1).all()
