"""The simulators themselves, on the CPU; each test is skipped without the package.

They compile for up to two minutes.
"""

from __future__ import annotations

import functools
import warnings

import gymnasium as gym
import pytest
import torch

from dmiddleware import Task
from dmiddleware.env import JaxEnv, SimulatorEnv, VectorEnvManager, make_env_manager
from dmiddleware.errors import ConfigError
from dmiddleware.policy import PPOPolicy
from dmiddleware.rollout import RolloutCollector
from middleware import (
    GAEEstimator,
    InteractionEvaluator,
    OnlineRLContext,
    OnPolicyLearner,
    StepCollector,
    TerminationChecker,
)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600), pytest.mark.filterwarnings("default")]

WORLDS = 8


def trained(envs, *, n_steps=20, n_updates=2):
    """Return the rows of a collection and the lengths of its episodes; then train for a while."""
    policy = PPOPolicy.for_env(envs, seed=0, batch_size=envs.env_num * n_steps // 2)
    with Task(OnlineRLContext(), seed=0) as task:
        collector = RolloutCollector(policy, envs)
        batch = collector.collect(envs.env_num * n_steps)
        assert collector.end_rows is not None  # collected on the device
        task.use(StepCollector(policy, envs, n_sample=envs.env_num * n_steps))
        task.use(GAEEstimator(policy))
        task.use(OnPolicyLearner(policy))
        task.run(n_updates)
    return batch, collector.episode_lengths


def jax_envs(env, *, env_num=WORLDS, seed=0, **options):
    kwargs = {"env": env, "episode_length": 7, **options}
    return make_env_manager("dmiddleware.env:JaxEnv", env_num=env_num, env_kwargs=kwargs, seed=seed)


def test_ppo_updates_on_256_ants_of_brax():
    pytest.importorskip("brax")
    envs = jax_envs("brax.envs:get_environment('ant', backend='spring')", env_num=256)
    batch, lengths = trained(envs)
    assert batch["obs"].shape == (20, 256, 27)
    assert batch["action"].shape == (20, 256, 8)
    assert set(lengths) <= set(range(1, 8))


@pytest.mark.learning
def test_ppo_balances_the_pendulum_of_brax():
    pytest.importorskip("brax")
    name = "brax.envs:get_environment('inverted_pendulum')"
    envs = jax_envs(name, env_num=64, episode_length=1000)
    policy = PPOPolicy.for_env(
        envs,
        seed=0,
        batch_size=256,
        epoch_per_collect=10,
        learning_rate=1e-3,
        discount=0.98,
        entropy_weight=0.0,
        value_norm=True,
    )
    evaluated = jax_envs(name, episode_length=1000, seed=1)
    with Task(OnlineRLContext(), seed=0) as task:
        task.use(InteractionEvaluator(policy, evaluated, n_episode=8, every_env_step=20_000))
        task.use(StepCollector(policy, envs, n_sample=64 * 16))
        task.use(GAEEstimator(policy))
        task.use(OnPolicyLearner(policy))
        task.use(TerminationChecker(max_env_step=62_000))
        task.run()
        assert task.ctx.last_eval_value > 900


def test_envs_that_brax_wraps_for_its_training_are_refused():
    brax = pytest.importorskip("brax.envs")
    with pytest.raises(ConfigError, match="resets its worlds itself"):
        JaxEnv(brax.create("fast"), episode_length=10)


def test_envs_of_mujoco_playground_are_collected():
    pytest.importorskip("mujoco_playground")
    env = "mujoco_playground:registry.load('CartpoleBalance', config_overrides={'impl': 'jax'})"
    batch, lengths = trained(jax_envs(env), n_updates=1)
    assert batch["obs"].shape == (20, WORLDS, 5)
    assert batch["truncated"].any()
    assert max(lengths) <= 7


@pytest.mark.parametrize("is_rsl", [False, True])
def test_worlds_of_mjlab_are_collected(is_rsl):
    pytest.importorskip("mjlab")
    import mjlab.tasks  # noqa: F401 - registers them
    from mjlab.envs import ManagerBasedRlEnv
    from mjlab.rl import RslRlVecEnvWrapper
    from mjlab.tasks.registry import load_env_cfg

    def make():
        cfg = load_env_cfg("Mjlab-Cartpole-Balance")
        cfg.scene.num_envs, cfg.episode_length_s = WORLDS, 0.35
        env = ManagerBasedRlEnv(cfg, device="cpu")
        return RslRlVecEnvWrapper(env) if is_rsl else env

    def places(seed):
        make_vector = functools.partial(SimulatorEnv, make, groups="actor")
        with make_env_manager(make_vector, env_num=WORLDS, mode="vector", seed=seed) as envs:
            first = envs.ready_obs.clone()
            batch, lengths = trained(envs)
        assert batch["obs"].shape == (20, WORLDS, 5)
        assert batch["truncated"].any()
        assert not batch["terminated"].any()
        assert set(lengths) == {7}
        return first

    rows = places(3)
    if not is_rsl:  # its reset takes no seed
        assert torch.equal(rows, places(3))


def test_a_world_of_maniskill_is_collected():
    pytest.importorskip("mani_skill")
    import mani_skill.envs  # noqa: F401 - registers them
    from mani_skill.vector.wrappers.gymnasium import ManiSkillVectorEnv

    def make():
        return gym.make(
            "Empty-v1",
            num_envs=1,
            obs_mode="state",
            sim_backend="cpu",
            render_backend="none",
            max_episode_steps=7,
        )

    with pytest.raises(ConfigError, match="ManiSkillVectorEnv"):
        SimulatorEnv(make)
    with VectorEnvManager(lambda: SimulatorEnv(ManiSkillVectorEnv(make())), 1, seed=0) as envs:
        batch, lengths = trained(envs)
    assert set(lengths) == {7}
    # ManiSkill returns the last observations: the joints have moved since the one before.
    done = batch["done"]
    assert not (batch["next_obs"][done] == batch["obs"][done]).all(-1).any()
    assert torch.equal(batch["next_obs"][:-1][~done[:-1]], batch["obs"][1:][~done[:-1]])


def test_worlds_of_genesis_are_collected():
    gs = pytest.importorskip("genesis")

    class Ball:
        """A ball on a plane, with the interface of the envs in Genesis' examples."""

        num_envs = WORLDS

        def __init__(self):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                gs.init(backend=gs.cpu, logging_level="error", seed=0)
            self.scene = gs.Scene(show_viewer=False)
            self.scene.add_entity(gs.morphs.Plane())
            self.ball = self.scene.add_entity(gs.morphs.Sphere(radius=0.1, pos=(0, 0, 0.2)))
            self.scene.build(n_envs=WORLDS)
            self.n_steps = torch.zeros(WORLDS, dtype=torch.int64)

        def get_observations(self):
            return {"policy": torch.cat([self.ball.get_pos(), self.ball.get_vel()], dim=1)}

        def reset(self):
            self._begin(torch.arange(WORLDS))
            return self.get_observations(), {}

        def _begin(self, ids):
            place = torch.tensor([0.0, 0.0, 0.2]) + 0.05 * torch.rand(len(ids), 3)
            self.ball.set_pos(place, envs_idx=ids)
            self.n_steps[ids] = 0

        def step(self, actions):
            self.ball.set_dofs_velocity(actions, dofs_idx_local=[0, 1])
            self.scene.step()
            self.n_steps += 1
            reward, late = self.ball.get_pos()[:, 0].clone(), self.n_steps >= 7
            self._begin(late.nonzero()[:, 0])
            return self.get_observations(), reward, late, {"time_outs": late}

    box = gym.spaces.Box(-float("inf"), float("inf"), (6,))
    actions = gym.spaces.Box(-1.0, 1.0, (2,))
    make_vector = functools.partial(
        SimulatorEnv, Ball, observation_space=box, action_space=actions, groups="policy"
    )
    with make_env_manager(make_vector, env_num=WORLDS, mode="vector", seed=0) as envs:
        batch, lengths = trained(envs)
    assert batch["obs"].shape == (20, WORLDS, 6)
    assert set(lengths) == {7}
