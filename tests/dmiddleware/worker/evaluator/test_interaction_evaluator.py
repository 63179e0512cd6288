from __future__ import annotations

import logging
import math

import pytest
import torch

from dmiddleware.env import VectorEnvManager, make_env_manager
from dmiddleware.errors import ConfigError, RegistryError, SpaceError
from dmiddleware.rollout import evaluate_episodes
from dmiddleware.worker.evaluator import (
    InteractionSerialEvaluator,
    ISerialEvaluator,
    create_serial_evaluator,
    get_serial_evaluator_cls,
)
from tests.tensorboard_events import values_in

LENGTHS = [(2,), (3, 5), (4,)]
RETURNS = {2: 3.0, 3: 6.0, 4: 10.0, 5: 15.0}


@pytest.fixture
def evaluator(counting_envs, batched_policy, tmp_path):
    with InteractionSerialEvaluator(
        {"n_episode": 6, "stop_value": 7.0, "eval_freq": 10},
        counting_envs(LENGTHS),
        batched_policy.eval_mode,
        exp_name=str(tmp_path),
    ) as evaluator:
        yield evaluator


def test_every_env_plays_its_share_and_then_pauses(counting_envs, batched_policy):
    with counting_envs(LENGTHS) as envs:
        monitor = evaluate_episodes(batched_policy.eval_mode, envs, 7)
        assert monitor.get_episode_return() == [3.0, 3.0, 3.0, 15.0, 6.0, 10.0, 10.0]
        assert monitor.mean_info()["eval_episode_length"] == (2 * 3 + 5 + 3 + 4 * 2) / 7
        assert [env.t for env in envs.envs] == [0, 0, 0]


def test_envs_in_lockstep_give_the_same_shares(batched_policy):
    import gymnasium as gym
    import numpy as np

    class Short(gym.Env):
        observation_space = gym.spaces.Box(-np.inf, np.inf, (3,), np.float32)
        action_space = gym.spaces.Discrete(2)

        def __init__(self, length):
            self.length = length

        def reset(self, *, seed=None, options=None):
            self.t = 0
            return np.zeros(3, np.float32), {}

        def step(self, action):
            self.t += 1
            return np.zeros(3, np.float32), 1.0, self.t == self.length, False, {}

    for mode in gym.vector.AutoresetMode:

        def make(mode=mode):
            fns = [lambda: Short(2), lambda: Short(15)]
            return gym.vector.SyncVectorEnv(fns, autoreset_mode=mode)

        with VectorEnvManager(make, 2) as envs:
            monitor = evaluate_episodes(batched_policy.eval_mode, envs, 4)
        assert monitor.get_episode_return() == [2.0, 2.0, 15.0, 15.0]


def test_the_episode_of_a_failed_env_does_not_count(counting_envs, batched_policy):
    with counting_envs(LENGTHS, {2: [(0, 2)]}) as envs:
        monitor = evaluate_episodes(batched_policy.eval_mode, envs, 3)
    # All envs are in their second episode, since evaluating starts with a reset.
    assert monitor.get_episode_return() == [3.0, 15.0, 10.0]


def test_the_policy_acts_greedily_and_is_reset_when_episodes_end(counting_envs):
    from torch import nn

    from dmiddleware.classic import Policy

    told = []

    class Told(Policy):
        def _forward_learn(self, batch, **kwargs):
            return {}

        def _forward_collect(self, data, **kwargs):
            raise AssertionError("evaluating does not collect")

        def _forward_eval(self, data, *, mark=None, **kwargs):
            told.append((sorted(data), mark))
            return {env_id: {"action": torch.tensor(0)} for env_id in data}

        def _reset_eval(self, data_id=None):
            told.append(("reset", data_id))

        def check_spaces(self, observation_space, action_space):
            pass

    policy = Told({}, nn.Linear(1, 1))
    with counting_envs([(1,), (2,)]) as envs:
        evaluate_episodes(policy.eval_mode, envs, 2, policy_kwargs={"mark": 1})
    assert told == [
        ("reset", None),
        ([0, 1], 1),
        ("reset", [0]),
        ([1], 1),
        ("reset", [1]),
    ]


def test_eval_returns_the_stop_flag_and_the_returns(evaluator):
    stop, info = evaluator.eval(train_iter=0)
    assert not stop  # no training yet
    # The envs were not launched before, so their first episodes count.
    assert info["episode_return"] == [3.0, 3.0, 6.0, 15.0, 10.0, 10.0]
    assert info["episode_count"] == 6
    assert info["return_mean"] == pytest.approx(47 / 6)
    assert (info["return_min"], info["return_max"]) == (3.0, 15.0)
    assert info["return_std"] == pytest.approx(
        math.sqrt(sum((x - 47 / 6) ** 2 for x in info["episode_return"]) / 6)
    )
    assert info["eval_episode_return_mean"] == pytest.approx(47 / 6)
    stop, _ = evaluator.eval(train_iter=1)
    assert stop


def test_training_continues_below_the_stop_value(counting_envs, batched_policy, tmp_path):
    with InteractionSerialEvaluator(
        {"n_episode": 3, "stop_value": 100.0},
        counting_envs(LENGTHS),
        batched_policy.eval_mode,
        exp_name=str(tmp_path),
    ) as evaluator:
        assert evaluator.eval(train_iter=5)[0] is False


def test_only_a_new_best_is_saved(evaluator, counting_envs):
    saved = []
    evaluator.eval(saved.append, train_iter=1)
    evaluator.eval(saved.append, train_iter=2)  # the same returns
    assert saved == ["ckpt_best.safetensors"]
    evaluator.reset_env(counting_envs([(9,), (9,), (9,)]))
    evaluator.eval(saved.append, train_iter=3)
    assert saved == ["ckpt_best.safetensors"] * 2
    assert evaluator.best_return == 45.0
    evaluator.reset_env(counting_envs([(1,), (1,), (1,)]))
    evaluator.eval(saved.append, train_iter=4)
    assert len(saved) == 2


def test_evaluations_are_due_at_iteration_0_and_every_eval_freq_iterations(evaluator):
    times = [i for i in range(0, 41) for _ in range(2) if evaluator.should_eval(i)]
    assert times == [0, 10, 20, 30, 40]
    evaluator.reset()
    assert [i for i in (3, 9, 12, 15, 21, 22) if evaluator.should_eval(i)] == [12, 22]


def test_the_state_holds_the_best_return_and_the_last_evaluation(evaluator):
    assert evaluator.should_eval(13)
    evaluator.eval(train_iter=13)
    state = evaluator.state_dict()
    evaluator.reset()
    assert evaluator.best_return == -math.inf
    evaluator.load_state_dict(state)
    assert evaluator.best_return == pytest.approx(47 / 6)
    assert not evaluator.should_eval(22)
    assert evaluator.should_eval(23)


def test_results_are_logged(evaluator, caplog, tmp_path):
    caplog.set_level(logging.INFO)
    evaluator.eval(train_iter=3, envstep=50)
    assert "iteration 3, env step 50" in caplog.text
    assert "return_mean" in caplog.text
    assert "has reached stop_value 7" in caplog.text
    assert list((tmp_path / "log" / "evaluator").glob("events*"))


def test_the_number_of_episodes_is_required(counting_envs, batched_policy, tmp_path):
    with InteractionSerialEvaluator(
        {}, counting_envs(LENGTHS), batched_policy.eval_mode, exp_name=str(tmp_path)
    ) as evaluator:
        with pytest.raises(ConfigError, match="n_episode"):
            evaluator.eval()
        with pytest.raises(ConfigError, match="2 episode"):
            evaluator.eval(n_episode=2)
        assert evaluator.eval(n_episode=3)[1]["episode_count"] == 3


def test_envs_that_do_not_fit_the_policy_are_rejected(dqn_policy, tmp_path):
    with (
        make_env_manager("Acrobot-v1", env_num=2) as envs,
        InteractionSerialEvaluator(
            {"n_episode": 2}, envs, dqn_policy.eval_mode, exp_name=str(tmp_path)
        ) as evaluator,
        pytest.raises(SpaceError),
    ):
        evaluator.eval()


def images(folder):
    for step, value in values_in(folder):
        if value.HasField("image"):
            yield value.tag, step, value.image


def test_videos_are_recorded_every_render_freq_iterations(dqn_policy, tmp_path):
    import io

    from PIL import Image, ImageSequence

    envs = make_env_manager(
        "CartPole-v1", env_num=3, seed=0, env_kwargs={"render_mode": "rgb_array"}
    )
    cfg = {"n_episode": 3, "render": {"render_freq": 10, "max_frames": 4}}
    with InteractionSerialEvaluator(
        cfg, envs, dqn_policy.eval_mode, exp_name=str(tmp_path)
    ) as evaluator:
        for train_iter in (5, 10, 15):
            evaluator.eval(train_iter=train_iter, envstep=8 * train_iter)
        evaluator.eval(train_iter=16, envstep=128, force_render=True)
    found = list(images(tmp_path))
    assert [(tag, step) for tag, step, _ in found] == [
        ("evaluator_iter/video", 10),
        ("evaluator_iter/video", 16),
    ]
    film = Image.open(io.BytesIO(found[0][2].encoded_image_string))
    assert film.size == (3 * 600, 400)
    # Equal frames are stored once, with a longer duration.
    assert sum(frame.info["duration"] for frame in ImageSequence.Iterator(film)) == 4 * 50


def test_the_returns_are_plotted(counting_envs, batched_policy, tmp_path):
    from PIL import Image

    path = tmp_path / "figures" / "returns.png"
    with InteractionSerialEvaluator(
        {"n_episode": 3, "figure_path": str(path)},
        counting_envs(LENGTHS),
        batched_policy.eval_mode,
        exp_name=str(tmp_path),
    ) as evaluator:
        evaluator.eval(train_iter=0)
        first = path.read_bytes()
        evaluator.eval(train_iter=1)
    assert path.read_bytes() != first
    with Image.open(path) as picture:
        assert picture.format == "PNG"


def test_reset_takes_another_policy(evaluator, per_env_policy):
    evaluator.reset(_policy=per_env_policy.eval_mode)
    assert evaluator.policy == per_env_policy.eval_mode
    assert evaluator.eval()[1]["episode_count"] == 6


def test_a_policy_is_accepted_as_its_eval_mode(evaluator, batched_policy):
    evaluator.reset_policy(batched_policy)
    assert evaluator.policy.spec is batched_policy.spec
    created = InteractionSerialEvaluator({}, policy=batched_policy)
    assert created.policy.spec is batched_policy.spec


def test_an_argument_of_the_wrong_type_is_rejected(evaluator, batched_policy):
    with pytest.raises(ConfigError, match="make_env_manager"):
        InteractionSerialEvaluator({}, [batched_policy], batched_policy)
    with pytest.raises(ConfigError, match="eval_mode"):
        InteractionSerialEvaluator({}, policy=batched_policy.collect_mode)
    with pytest.raises(ConfigError, match="make_env_manager"):
        evaluator.reset_env(batched_policy)
    with pytest.raises(ConfigError, match="eval_mode"):
        evaluator.reset(batched_policy.collect_mode)
    with pytest.raises(ConfigError, match="save_ckpt_fn"):
        evaluator.eval("best")


def test_evaluators_are_created_by_name():
    assert get_serial_evaluator_cls({"type": "interaction"}) is InteractionSerialEvaluator
    assert isinstance(
        create_serial_evaluator({"type": "interaction", "eval_freq": 5}), InteractionSerialEvaluator
    )
    with pytest.raises(RegistryError, match="interaction"):
        create_serial_evaluator({"type": "interactions"})
    with pytest.raises(ConfigError, match=r"render\.mode"):
        create_serial_evaluator({"type": "interaction", "render": {"mode": "never"}})


def test_defaults_are_those_of_the_classic_evaluator():
    cfg = InteractionSerialEvaluator.default_config()
    assert (cfg.eval_freq, cfg.render.render_freq, cfg.render.mode) == (1000, -1, "train_iter")
    assert cfg.figure_path is None


def test_an_evaluator_is_written_with_the_methods_of_the_interface(batched_policy, tmp_path):
    class Constant(ISerialEvaluator):
        def reset_env(self, _env=None):
            self._env = _env or self._env

        def reset_policy(self, _policy=None):
            self._policy = _policy or self._policy

        def eval(self, save_ckpt_fn=None, train_iter=-1, envstep=-1):
            return train_iter >= 2, {"eval_episode_return": 1.0}

        def close(self):
            self.reset_env("closed")

    with Constant({"eval_freq": 2}, "env", batched_policy, exp_name=str(tmp_path)) as evaluator:
        assert [evaluator.should_eval(train_iter) for train_iter in (0, 1, 2)] == [
            True,
            False,
            True,
        ]
        assert evaluator.eval(train_iter=2)[0]
        assert evaluator.env == "env"
        assert "action" in evaluator.policy.forward(torch.zeros(1, 3))
        evaluator.reset(_env="another")
        assert evaluator.env == "another"
