"""Programs in DI-engine's style, written for these tests, behind the door."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from easydict import EasyDict

import dmiddleware.ding as door
from dmiddleware.ding.envs.adapter import AsGymnasium
from dmiddleware.ding.framework.row_view import RowView
from dmiddleware.ding.program import close_folders
from dmiddleware.errors import ConfigError, TaskStateError
from dmiddleware.tree import as_tree
from middleware import ModelExchanger as CoreModelExchanger

MAIN = {
    "exp_name": "cartpole",
    "env": {
        "collector_env_num": 2,
        "evaluator_env_num": 2,
        "n_evaluator_episode": 2,
        "stop_value": 1e9,
        "of_this_env": 3,
    },
    "policy": {
        "cuda": False,
        "discount_factor": 0.9,
        "nstep": 1,
        "model": {"obs_shape": 4, "action_shape": 2, "encoder_hidden_size_list": [16, 8]},
        "learn": {"batch_size": 8, "learning_rate": 1e-3, "update_per_collect": 2},
        "collect": {"n_sample": 8, "unroll_len": 1},
        "eval": {"evaluator": {"eval_freq": 1000}},
        "other": {
            "eps": {"type": "linear", "start": 0.9, "end": 0.1, "decay": 100},
            "replay_buffer": {"replay_buffer_size": 100},
        },
    },
}
CREATE = {
    "env": {"type": "an_env_of_the_program"},
    "env_manager": {"type": "base"},
    "policy": {"type": "dqn"},
}


@pytest.fixture(autouse=True)
def opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    door.open_door()
    yield
    close_folders()
    door.close_door()


class Program:
    """DQN on CartPole with DI-engine's names; ``used`` is added before the learner."""

    def __init__(self, *used: Any, seed: int = 0) -> None:
        self.used, self.seed = used, seed
        self.model: Any = None
        self.buffer: Any = None

    def run(self, max_step: int) -> Any:
        import gym
        from ding.config import compile_config
        from ding.data import DequeBuffer
        from ding.envs import BaseEnvManagerV2, DingEnvWrapper
        from ding.framework import OnlineRLContext, ding_init, task
        from ding.framework.middleware import (
            CkptSaver,
            OffPolicyLearner,
            StepCollector,
            data_pusher,
            eps_greedy_handler,
            interaction_evaluator,
            online_logger,
        )
        from ding.model import DQN
        from ding.policy import DQNPolicy
        from ding.utils import set_pkg_seed

        cfg = compile_config(MAIN, create_cfg=CREATE, auto=True, seed=self.seed)
        ding_init(cfg)
        make_env = [lambda: DingEnvWrapper(gym.make("CartPole-v1"))] * 2
        with task.start(ctx=OnlineRLContext()):
            set_pkg_seed(cfg.seed, use_cuda=False)
            self.model = DQN(**cfg.policy.model)
            self.buffer = DequeBuffer(size=cfg.policy.other.replay_buffer.replay_buffer_size)
            policy = DQNPolicy(cfg.policy, model=self.model)
            task.use(
                interaction_evaluator(cfg, policy.eval_mode, BaseEnvManagerV2(env_fn=make_env))
            )
            task.use(eps_greedy_handler(cfg))
            task.use(StepCollector(cfg, policy.collect_mode, BaseEnvManagerV2(env_fn=make_env)))
            for middleware in self.used:
                task.use(middleware)
            task.use(data_pusher(cfg, self.buffer))
            task.use(OffPolicyLearner(cfg, policy.learn_mode, self.buffer))
            task.use(online_logger(train_show_freq=10))
            task.use(CkptSaver(policy, cfg.exp_name, train_freq=4))
            task.run(max_step=max_step)
            return task.ctx


def test_a_program_learns_as_often_as_its_config_says(tmp_path: Path) -> None:
    program = Program()
    ctx = program.run(max_step=3)
    assert (ctx.env_step, ctx.train_iter) == (24, 6)
    assert len(program.buffer) == 24
    saved = torch.load(tmp_path / "cartpole" / "ckpt" / "final.pth.tar", weights_only=False)
    program.model.load_state_dict(saved["model"])


def test_ppg_learns_from_two_views_of_a_buffer() -> None:
    import gym
    from ding.config import compile_config
    from ding.data import DequeBuffer
    from ding.data.buffer.middleware import sample_range_view, use_time_check
    from ding.envs import BaseEnvManagerV2, DingEnvWrapper
    from ding.framework import OnlineRLContext, task
    from ding.framework.middleware import OffPolicyLearner, StepCollector, gae_estimator
    from ding.model import PPG
    from ding.policy import PPGOffPolicy

    policy_section = {**MAIN["policy"], "learn": {"batch_size": 8, "aux_freq": 2}}  # type: ignore[dict-item]
    policy_section["learn"]["update_per_collect"] = 2
    del policy_section["nstep"]
    main = {**MAIN, "policy": {**policy_section, "other": {}}}
    cfg = compile_config(main, create_cfg={**CREATE, "policy": {"type": "ppg_offpolicy"}})
    buffer = DequeBuffer(size=100)
    views = {"policy": buffer.view(), "value": buffer.view()}
    views["policy"].use(sample_range_view(views["policy"], start=-8))
    views["value"].use(use_time_check(views["value"], max_use=100))
    make_env = [lambda: DingEnvWrapper(gym.make("CartPole-v1"))] * 2
    with task.start(ctx=OnlineRLContext()):
        policy = PPGOffPolicy(cfg.policy, model=PPG(**cfg.policy.model))
        task.use(StepCollector(cfg, policy.collect_mode, BaseEnvManagerV2(env_fn=make_env)))
        task.use(gae_estimator(cfg, policy.collect_mode, buffer))
        task.use(OffPolicyLearner(cfg, policy.learn_mode, views))
        task.run(max_step=3)
        outputs = task.ctx.train_output
        assert task.ctx.train_iter == 6
    assert ["clone_kl" in output for output in outputs] == [False, True]
    assert len(buffer) == 24


def test_a_seed_gives_the_same_data_again() -> None:
    rewards = []
    for _ in range(2):
        program = Program(seed=3)
        program.run(max_step=2)
        rewards.append(torch.stack([item.data["obs"] for item in program.buffer]))
        close_folders()
    assert torch.equal(*rewards)


def test_a_middleware_of_the_user_sees_transitions_and_changes_them() -> None:
    def halve(ctx: Any) -> None:
        assert len(ctx.trajectories) == 8
        for transition in ctx.trajectories:
            transition.reward = transition.reward * 0.5

    program = Program(halve)
    program.run(max_step=1)
    assert {float(item.data["reward"]) for item in program.buffer} == {0.5}


def test_a_middleware_of_the_user_may_choose_transitions_and_yield() -> None:
    order = []

    def keep_half(ctx: Any) -> Iterator[None]:
        ctx.trajectories = [row for row in ctx.trajectories][:4]
        order.append("forward")
        yield
        order.append("back")

    program = Program(keep_half)
    program.run(max_step=1)
    assert len(program.buffer) == 4
    assert order == ["forward", "back"]


def test_what_the_config_gives_stays_under_its_own_names() -> None:
    from ding.config import compile_config

    cfg = compile_config(MAIN, create_cfg=CREATE, auto=True, seed=5, save_cfg=False)
    assert (cfg.seed, cfg.env.of_this_env, cfg.policy.collect.unroll_len) == (5, 3, 1)
    assert isinstance(cfg, EasyDict)


def test_a_task_must_be_started() -> None:
    from ding.framework import task

    with pytest.raises(TaskStateError, match=r"task.start|closed"):
        task.use(lambda ctx: None)


def test_a_void_middleware_is_left_out() -> None:
    from ding.framework import task

    with task.start():
        task.use(task.void())
        task.use(lambda ctx: ctx.keep("n"))
        task.run(max_step=1)


def test_the_exchanger_finds_the_policy_of_a_model() -> None:
    from ding.framework.middleware import ModelExchanger
    from ding.model import DQN
    from ding.policy import DQNPolicy

    model = DQN(4, 2, [16, 8])
    assert not isinstance(ModelExchanger(model), CoreModelExchanger)
    policy = DQNPolicy({"model": {"obs_shape": 4, "action_shape": 2}}, model=model)
    assert isinstance(ModelExchanger(model), CoreModelExchanger)
    assert policy is not None


class Scaled:
    """An env in DI-engine's style that scales actions itself and declares its own bounds."""

    def __init__(self, cfg: Any = None) -> None:
        self.observation_space = gymnasium.spaces.Box(-1, 1, (2,), np.float64)
        self.action_space = gymnasium.spaces.Box(-2, 2, (1,), np.float32)
        self.seeds: list[int] = []
        self.actions: list[float] = []

    def seed(self, seed: int, dynamic_seed: bool = True) -> None:
        self.seeds.append(seed)

    def reset(self) -> Any:
        return np.zeros(2)

    def step(self, action: Any) -> Any:
        from ding.envs import BaseEnvTimestep

        self.actions.append(float(action[0]))
        is_long = len(self.actions) == 3
        info = {"TimeLimit.truncated": True, "eval_episode_return": np.ones(1)} if is_long else {}
        return BaseEnvTimestep(np.zeros(2), np.ones(1), is_long, info)

    def close(self) -> None: ...


def test_actions_stay_in_unit_bounds_for_an_env_that_scales_them() -> None:
    env = AsGymnasium(Scaled)
    assert (env.action_space.low, env.action_space.high) == (-1, 1)
    assert env.observation_space.dtype == np.float32


def test_a_time_limit_is_no_terminal_state() -> None:
    env = AsGymnasium(Scaled)
    env.reset(seed=1)
    steps = [env.step(np.zeros(1, np.float32)) for _ in range(3)]
    assert [step[2:4] for step in steps] == [(False, False), (False, False), (False, True)]
    assert steps[-1][4]["eval_episode_return"] == 1.0


def test_each_reset_has_a_seed_of_its_own_which_follows_from_the_first() -> None:
    seeds = []
    for _ in range(2):
        env = AsGymnasium(Scaled)
        env.reset(seed=7)
        env.reset()
        seeds.append(env.env.seeds)
    assert seeds[0] == seeds[1]
    assert len(set(seeds[0])) == 2


def test_an_observation_space_is_that_of_what_the_env_returns() -> None:
    class Counting(Scaled):
        def __init__(self, cfg: Any = None) -> None:
            super().__init__(cfg)
            self.observation_space = gymnasium.spaces.Discrete(2)  # type: ignore[assignment]

    space = AsGymnasium(Counting).observation_space
    assert isinstance(space, gymnasium.spaces.Box) and space.shape == (2,)


def test_rows_of_steps_and_envs_keep_their_order_and_their_form() -> None:
    batch = as_tree({"done": torch.zeros(2, 3, dtype=torch.bool), "x": torch.arange(6).view(2, 3)})
    view = RowView(batch)
    assert [int(row.x) for row in view] == list(range(6))
    view[-1].x = torch.tensor(9)
    view[1]["new"] = torch.tensor(1.0)
    changed = view.batch()
    assert changed["x"].tolist() == [[0, 1, 2], [3, 4, 9]]
    assert changed["new"].tolist() == [[0.0, 1.0, 0.0], [0.0, 0.0, 0.0]]
    with pytest.raises(AttributeError, match="it has done, x, new"):
        _ = view[0].y


def test_a_network_takes_a_state_of_di_engine() -> None:
    from ding.model import DQN

    model = DQN(4, 2, [16, 8])
    shapes = {name: value.shape for name, value in model.state_dict().items()}
    assert shapes["head.0.weight"][0] == 8
    names = {"encoder": "encoder.init.", "head": "head.A.", "value_head": "head.V."}
    state = {}
    for name, value in model.state_dict().items():
        part, _, rest = name.partition(".")
        state[names[part] + rest] = torch.full_like(value, 0.5)
    model.load_state_dict(state)
    assert all(bool((value == 0.5).all()) for value in model.state_dict().values())


def test_refused_names_say_what_to_use() -> None:
    with pytest.raises(ImportError, match="use BehaviourCloningPolicy"):
        from ding.policy import ILPolicy  # noqa: F401
    with pytest.raises(ConfigError, match="world models"):
        from ding.config import compile_config

        compile_config(MAIN, create_cfg={**CREATE, "world_model": {"type": "mbpo"}}, auto=True)


def test_a_whole_config_trains_in_an_env_class_of_the_program() -> None:
    from ding.entry import serial_pipeline
    from ding.envs import DingEnvWrapper
    from ding.utils import ENV_REGISTRY

    @ENV_REGISTRY.register("an_env_of_the_program")
    class OwnEnv(DingEnvWrapper):
        def __init__(self, cfg: Any) -> None:
            assert cfg["of_this_env"] == 3
            super().__init__(gymnasium.make("CartPole-v1"))

    policy = serial_pipeline((MAIN, CREATE), seed=0, max_env_step=32)
    assert policy.learn_mode.state_dict()["train_iter"] > 0


def test_an_expert_is_imitated_in_an_env_class_of_the_program(tmp_path: Path) -> None:
    from ding.entry import serial_pipeline, serial_pipeline_gail, serial_pipeline_sqil
    from ding.entry.serial_entry_dqfd import serial_pipeline_dqfd
    from ding.envs import DingEnvWrapper

    class OwnEnv(DingEnvWrapper):
        def __init__(self, cfg: Any) -> None:
            assert cfg["of_this_env"] == 3
            super().__init__(gymnasium.make("CartPole-v1"))

    setting = [OwnEnv, [MAIN["env"]] * 2, [MAIN["env"]] * 2]
    expert = serial_pipeline((MAIN, CREATE), 0, setting, max_env_step=8)
    path = str(tmp_path / "expert.pth")
    torch.save(expert.collect_mode.state_dict(), path)
    main = copy.deepcopy(MAIN)
    main["policy"]["collect"]["model_path"] = path
    policy = serial_pipeline_sqil((main, CREATE), (MAIN, CREATE), 0, setting, max_train_iter=2)
    assert policy.learn_mode.state_dict()["train_iter"] >= 2
    policy = serial_pipeline_dqfd((main, CREATE), (MAIN, CREATE), 0, setting, max_train_iter=2)
    assert policy.learn_mode.state_dict()["train_iter"] >= 2
    main["reward_model"] = {"input_size": 5, "expert_model_path": path, "collect_count": 8}
    create = {**CREATE, "env": {"type": "CartPole-v1"}}
    policy = serial_pipeline_gail((main, create), (main, create), 0, max_train_iter=2)
    assert policy.learn_mode.state_dict()["train_iter"] >= 2
