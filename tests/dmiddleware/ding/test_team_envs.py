import importlib
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from easydict import EasyDict
from gymnasium import spaces

from dmiddleware.classic import create_policy
from dmiddleware.ding.envs import BaseEnv, BaseEnvManagerV2, BaseEnvTimestep
from dmiddleware.ding.envs.adapter import AsGymnasium
from dmiddleware.ding.framework import task
from dmiddleware.ding.framework.context import OnlineRLContext
from dmiddleware.ding.framework.middleware import (
    StepCollector,
    gae_estimator,
    interaction_evaluator,
    multistep_trainer,
    termination_checker,
)
from dmiddleware.ding.model import MAVAC, QMix
from dmiddleware.ding.old_pettingzoo import use_old_rules
from dmiddleware.ding.policy import PPOPolicy
from dmiddleware.ding.utils import set_pkg_seed
from dmiddleware.env import SyncEnvManager, agent_spaces
from dmiddleware.errors import ConfigError, RegistryError, SpaceError
from dmiddleware.policy import MAPPOPolicy, QMIXPolicy
from dmiddleware.worker.dizoo_envs import training_env

N_AGENT, N_OBS, N_STATE, N_ACTION = 2, 3, 4, 5


class Pair(BaseEnv):
    """Two agents; the third step ends the episode, and the first may choose action 0 only."""

    def __init__(self, cfg: Any) -> None:
        super().__init__(cfg)
        first = cfg.get("action", spaces.Discrete(N_ACTION))
        second = cfg.get("second_action", first)
        self.action_space = spaces.Dict({"first": first, "second": second})
        self.actions: list[Any] = []

    def reset(self) -> Any:
        self._n_steps = 0
        return self._obs()

    def step(self, action: Any) -> Any:
        self.actions.append(action)
        self._n_steps += 1
        done = self._n_steps == 3
        info = {"eval_episode_return": 7.0} if done else {}
        return BaseEnvTimestep(self._obs(), self._cfg.reward, done, info)

    def seed(self, seed: int, dynamic_seed: bool = True) -> None:
        pass

    def close(self) -> None:
        pass

    def _obs(self) -> Any:
        shape = (N_AGENT, N_STATE) if self._cfg.get("state_of_each", True) else (N_STATE,)
        mask = np.zeros((N_AGENT, N_ACTION), np.float32)
        mask[0, 0] = 1
        return {
            "agent_state": np.full((N_AGENT, N_OBS), self._n_steps, np.float64),
            "global_state": np.arange(np.prod(shape), dtype=np.float32).reshape(shape),
            "agent_alone_state": np.zeros((N_AGENT, 1), np.float32),
            "action_mask": mask,
        }


def make_env(**cfg: Any) -> AsGymnasium:
    return AsGymnasium(lambda: Pair(EasyDict({"reward": np.ones(1), **cfg})))


def test_agents_observe_what_a_team_here_observes() -> None:
    env = make_env()
    obs, _ = env.reset(seed=0)
    team = agent_spaces(env.observation_space, env.action_space)
    assert env.observation_space.contains(obs)
    assert team.n_agent == N_AGENT
    assert team.observation.shape == (N_OBS,)
    assert team.action == spaces.Discrete(N_ACTION)
    assert sorted(obs) == ["action_mask", "agent_mask", "agents", "state"]


def test_the_state_of_a_team_has_the_states_of_all_agents() -> None:
    assert make_env().reset()[0]["state"].tolist() == list(range(N_AGENT * N_STATE))
    assert make_env(state_of_each=False).reset()[0]["state"].tolist() == list(range(N_STATE))


def test_an_agent_that_may_do_nothing_may_do_anything() -> None:
    assert make_env().reset()[0]["action_mask"].tolist() == [[1, 0, 0, 0, 0], [1] * N_ACTION]


def test_the_env_gets_an_array_of_all_actions() -> None:
    env = make_env()
    env.reset()
    env.step(np.array([3, 1]))
    assert env.env.actions[0].tolist() == [3, 1]


@pytest.mark.parametrize(
    ("reward", "rewards"),
    [(np.array([2.0]), [2.0, 2.0]), (2.0, [2.0, 2.0]), ([1.0, 3.0], [1.0, 3.0])],
)
def test_each_agent_gets_the_reward_of_the_team_or_its_own(
    reward: Any, rewards: list[float]
) -> None:
    env = make_env(reward=reward)
    env.reset()
    assert env.step(np.array([0, 0]))[1].tolist() == rewards


def test_the_return_of_an_episode_is_the_envs_own() -> None:
    with SyncEnvManager([make_env]) as envs:
        for _ in range(3):
            timestep = envs.step(np.zeros((1, N_AGENT), np.int64))
        assert timestep.info["eval_episode_return"].tolist() == [7.0]


def test_continuous_actions_of_agents_are_in_unit_bounds() -> None:
    space = make_env(action=spaces.Box(0, 9, (2,), np.float32)).action_space
    assert space == spaces.Box(-1, 1, (N_AGENT, 2), np.float32)


def test_agents_with_different_actions_are_refused() -> None:
    with pytest.raises(SpaceError, match="env with 2 agents needs the same action space"):
        make_env(second_action=spaces.Discrete(2))


def test_mavac_and_qmix_are_built_for_such_an_env() -> None:
    env = make_env()
    mavac = MAVAC(N_OBS, N_STATE, N_ACTION, N_AGENT, actor_head_hidden_size=8,
                  critic_head_hidden_size=8, action_space="discrete")  # fmt: skip
    mavac.check_spaces(env.observation_space, env.action_space)
    obs = {key: torch.as_tensor(value)[None] for key, value in env.reset()[0].items()}
    assert mavac(obs)["value"].shape == (1, N_AGENT)
    env = make_env(state_of_each=False)
    qmix = QMix(agent_num=N_AGENT, obs_shape=N_OBS, global_obs_shape=N_STATE, mixer=True,
                action_shape=N_ACTION, hidden_size_list=[16, 8])  # fmt: skip
    qmix.check_spaces(env.observation_space, env.action_space)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"actor_head_hidden_size": 8, "critic_head_hidden_size": 16}, "the same layers here"),
        ({"agent_num": None}, r"model\.agent_num must be the number of agents, got None"),
    ],
)
def test_what_mavac_cannot_be_is_refused(options: dict[str, Any], message: str) -> None:
    shapes = {"agent_obs_shape": N_OBS, "global_obs_shape": N_STATE, "action_shape": N_ACTION}
    with pytest.raises(ConfigError, match=message):
        MAVAC(**{**shapes, "agent_num": N_AGENT, **options})


def test_a_qmix_network_without_its_mixer_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"policy\.type='vdn'"):
        QMix(N_AGENT, N_OBS, N_STATE, N_ACTION, hidden_size_list=[8], mixer=False)


SHAPES = {
    "agent_num": N_AGENT,
    "agent_obs_shape": N_OBS,
    "global_obs_shape": N_STATE,
    "action_shape": N_ACTION,
}


def test_ppo_of_several_agents_is_mappo() -> None:
    cfg = {"multi_agent": True, "model": SHAPES}
    for policy in (
        PPOPolicy(EasyDict(cfg), model=MAVAC(**SHAPES)),
        PPOPolicy(EasyDict(cfg)),
        create_policy(EasyDict({"type": "ppo", **cfg})),
    ):
        assert policy.core is MAPPOPolicy


def test_qmix_of_a_config_takes_the_shapes_of_di_engine() -> None:
    model = {"agent_num": N_AGENT, "obs_shape": N_OBS, "global_obs_shape": N_STATE}
    policy = create_policy({"type": "qmix", "model": {**model, "action_shape": N_ACTION}})
    assert policy.core is QMIXPolicy


def test_an_algorithm_without_a_form_for_several_agents_is_refused() -> None:
    with pytest.raises(RegistryError, match=r"'ddpg' for several agents .* use mappo or qmix"):
        create_policy({"type": "ddpg", "multi_agent": True})


class Choice(Pair):
    """Pays the team for each agent that chooses action 1; all actions are allowed."""

    def step(self, action: Any) -> Any:
        obs, _, done, info = super().step(action)
        reward = np.array([float((action == 1).sum())])
        self._return = reward + (self._return if self._n_steps > 1 else 0)
        return BaseEnvTimestep(
            obs, reward, done, {"eval_episode_return": self._return} if done else info
        )

    def _obs(self) -> Any:
        return {**super()._obs(), "action_mask": np.ones((N_AGENT, N_ACTION), np.float32)}


def test_mappo_learns_from_such_envs() -> None:
    cfg = EasyDict(
        seed=0,
        env={"stop_value": 5.5, "n_evaluator_episode": 2},
        policy={
            "multi_agent": True,
            "action_space": "discrete",
            "model": SHAPES,
            "learn": {"batch_size": 96, "epoch_per_collect": 4, "learning_rate": 0.01},
            "collect": {"n_sample": 96, "unroll_len": 1},
            "eval": {"evaluator": {"eval_freq": 4}},
        },
    )
    set_pkg_seed(0, use_cuda=False)
    policy = PPOPolicy(cfg.policy, model=MAVAC(**SHAPES))
    collected, evaluated = (
        BaseEnvManagerV2([lambda: Choice(EasyDict(reward=None))] * 2) for _ in range(2)
    )
    with task.start(async_mode=False, ctx=OnlineRLContext()):
        task.use(interaction_evaluator(cfg, policy.eval_mode, evaluated))
        task.use(StepCollector(cfg, policy.collect_mode, collected))
        task.use(gae_estimator(cfg, policy.collect_mode))
        task.use(multistep_trainer(policy.learn_mode, log_freq=100))
        task.use(termination_checker(max_env_step=9600))
        task.run()
        assert task.ctx.eval_value >= 5.5


def test_a_file_of_old_pettingzoo_resets_to_the_observations() -> None:
    conversions = pytest.importorskip("pettingzoo.utils.conversions")
    simple_spread = pytest.importorskip("mpe2.simple_spread_v3")
    module = ModuleType("file")
    module.parallel_wrapper_fn = conversions.parallel_wrapper_fn  # type: ignore[attr-defined]
    use_old_rules(module)
    env = module.parallel_wrapper_fn(simple_spread.env)(N=2)
    assert sorted(env.reset(seed=1)) == ["agent_0", "agent_1"]
    assert conversions.parallel_wrapper_fn(simple_spread.env)(N=2).reset()[1] is not None


@pytest.mark.parametrize("continuous", [False, True])
def test_particles_of_a_file_of_old_pettingzoo_move_as_in_dizoo(continuous: bool) -> None:
    conversions = pytest.importorskip("pettingzoo.utils.conversions")
    particles = pytest.importorskip("mpe2._mpe_utils.simple_env")
    module = ModuleType("file")
    module.Scenario = importlib.import_module("mpe2.simple_spread.simple_spread").Scenario  # type: ignore[attr-defined]

    class RawEnv(particles.SimpleEnv):  # type: ignore[misc]
        def __init__(self) -> None:
            scenario = module.Scenario()
            world = scenario.make_world(3)
            options = {"continuous_actions": continuous, "local_ratio": 0.5}
            super().__init__(scenario, world, 25, **options)

    RawEnv.__module__ = "file"
    module.RawEnv = RawEnv  # type: ignore[attr-defined]
    use_old_rules(module)
    env = conversions.parallel_wrapper_fn(particles.make_env(RawEnv))()
    options = {"env_id": "simple_spread_v2", "n_agent": 3, "n_landmark": 3}
    team = training_env("petting_zoo", {**options, "continuous_actions": continuous})
    env.reset(seed=1)
    team.reset(seed=1)
    for step in range(25):
        numbers = np.abs(np.sin(np.arange(step, step + 15))).reshape(3, 5).astype(np.float32)
        actions = numbers if continuous else (numbers[:, 0] * 5).astype(int)
        obs, rewards, *_ = env.step(dict(zip(env.possible_agents, actions, strict=True)))
        seen, reward, *_ = team.step(actions)
        assert np.stack(list(obs.values())) == pytest.approx(seen["agents"], abs=1e-5)
        assert 2 * sum(rewards.values()) == pytest.approx(reward[0])  # local_ratio halves both
