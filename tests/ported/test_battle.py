"""League-style training of one policy against a frozen one, as programs for DI-engine have it."""

import numpy as np
from easydict import EasyDict

from dmiddleware.classic import BattleEnvManager, create_buffer, create_policy
from dmiddleware.worker import (
    create_learner,
    create_serial_collector,
    create_serial_evaluator,
)

CONFIG = EasyDict(
    exp_name="rock_paper_scissors",
    policy=dict(
        type="dqn",
        discount_factor=0.9,
        model=dict(obs_shape=3, action_shape=3, encoder_hidden_sizes=[32]),
        learn=dict(
            batch_size=32,
            learning_rate=0.005,
            learner=dict(hook=dict(save_ckpt_after_run=False)),
        ),
        collect=dict(n_sample=64, collector=dict(type="sample_1v1")),
        eval=dict(evaluator=dict(type="battle_interaction", n_episode=10, stop_value=5)),
        other=dict(
            eps=dict(start=0.9, end=0.1, decay=1000),
            replay_buffer=dict(type="naive", replay_buffer_size=2000),
        ),
    ),
)


class RockPaperScissors:
    """Ten rounds; both players see what player 1 played last, and player 1 always plays paper."""

    def reset(self, seed=None):
        self.round = 0
        return self._obs(0)

    def step(self, actions):
        self.round += 1
        score = [0.0, 1.0, -1.0][(actions[0] - 1) % 3]
        obs = self._obs(int(actions[1]))
        return obs, [score, -score], self.round == 10, False, [{}, {}]

    def _obs(self, last):
        return [np.eye(3, dtype=np.float32)[last]] * 2

    def to_move(self):
        return (0, 1)

    def action_mask(self, player):
        return None

    def close(self):
        pass


class Paper(RockPaperScissors):
    def step(self, actions):
        return super().step([actions[0], 1])


def train(cfg, max_iterations):
    policy = create_policy(cfg.policy)
    opponent = create_policy(cfg.policy, enable_field=["collect", "eval"])
    learner = create_learner(
        EasyDict(type="base", **cfg.policy.learn.learner),
        policy=policy.learn_mode,
        exp_name=cfg.exp_name,
    )
    collector = create_serial_collector(
        cfg.policy.collect.collector,
        env=BattleEnvManager([Paper] * 4),
        policy=[policy.collect_mode, opponent.collect_mode],
        exp_name=cfg.exp_name,
    )
    collector.policy[1].set_attribute("collect_data", False)
    evaluator = create_serial_evaluator(
        cfg.policy.eval.evaluator,
        env=BattleEnvManager([Paper] * 2),
        policy=[policy.eval_mode, opponent.eval_mode],
        exp_name=cfg.exp_name,
    )
    replay_buffer = create_buffer(cfg.policy.other.replay_buffer, exp_name=cfg.exp_name)
    learner.call_hook("before_run")
    stop = False
    while not stop and learner.train_iter < max_iterations:
        if evaluator.should_eval(learner.train_iter):
            stop, return_info = evaluator.eval(
                learner.save_checkpoint, learner.train_iter, collector.envstep
            )
        eps = policy.command_mode.get_setting_collect({"envstep": collector.envstep})
        new_data, _ = collector.collect(train_iter=learner.train_iter, policy_kwargs=[eps, {}])
        assert new_data[1] == []
        replay_buffer.push(new_data[0], cur_collector_envstep=collector.envstep)
        for _ in range(10):
            train_data = replay_buffer.sample(policy.get_attribute("batch_size"), 0)
            learner.train(train_data, collector.envstep)
    learner.call_hook("after_run")
    for worker in (learner, collector, evaluator, replay_buffer):
        worker.close()
    return stop, return_info


def test_a_policy_learns_to_beat_a_frozen_opponent(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    stop, return_info = train(CONFIG, max_iterations=1000)
    assert stop
    mine, theirs = ([info["eval_episode_return"] for info in infos] for infos in return_info)
    assert mine == [-value for value in theirs]
    assert sum(mine) / len(mine) >= 5
