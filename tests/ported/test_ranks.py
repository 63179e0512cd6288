"""A serial DQN on two ranks, as programs for DI-engine run it under torchrun."""

import functools

import pytest
from easydict import EasyDict

from dmiddleware.classic import create_buffer, create_policy
from dmiddleware.env import make_env_manager
from dmiddleware.worker import create_learner, create_serial_collector, create_serial_evaluator
from tests.dmiddleware.distributed.rank_processes import run_ranks

CONFIG = EasyDict(
    policy=dict(
        type="dqn",
        multi_gpu=True,
        model=dict(obs_shape=4, action_shape=2, encoder_hidden_sizes=[16]),
        learn=dict(batch_size=16),
    ),
    learner=dict(type="base", hook=dict(log_reduce_after_iter=True)),
    collector=dict(type="sample"),
    evaluator=dict(type="interaction", n_episode=2, stop_value=1000),
    replay_buffer=dict(type="naive", replay_buffer_size=500),
)


def train(rank, cfg, exp_name, iterations):
    env = make_env_manager("CartPole-v1", env_num=2, seed=rank)
    eval_env = make_env_manager("CartPole-v1", env_num=2, seed=100)
    policy = create_policy(cfg.policy)
    learner = create_learner(cfg.learner, policy=policy.learn_mode, exp_name=exp_name)
    collector = create_serial_collector(
        cfg.collector, env=env, policy=policy.collect_mode, exp_name=exp_name
    )
    evaluator = create_serial_evaluator(
        cfg.evaluator, env=eval_env, policy=policy.eval_mode, exp_name=exp_name
    )
    replay_buffer = create_buffer(cfg.replay_buffer, exp_name=exp_name, instance_name=f"b{rank}")
    learner.call_hook("before_run")
    stop, info = evaluator.eval(learner.save_checkpoint, learner.train_iter, collector.envstep)
    while learner.train_iter < iterations and not stop:
        new_data = collector.collect(
            n_sample=32, train_iter=learner.train_iter, policy_kwargs={"eps": 0.5}
        )
        replay_buffer.push(new_data, cur_collector_envstep=collector.envstep)
        for _ in range(4):
            learner.train(replay_buffer.sample(16, learner.train_iter), collector.envstep)
    learner.call_hook("after_run")
    weights = {name: x.tolist() for name, x in policy.learn_mode.state_dict()["model"].items()}
    for worker in (replay_buffer, learner, collector, evaluator):
        worker.close()
    return weights, collector.envstep, info["eval_episode_return_mean"], learner.rank


@pytest.mark.process
def test_two_ranks_train_one_policy(tmp_path):
    job = functools.partial(train, cfg=CONFIG, exp_name=str(tmp_path), iterations=12)
    first, second = run_ranks(job)
    assert first[:3] == second[:3]
    assert first[1] >= 2 * 3 * 32  # the environment steps of both ranks
    assert (first[3], second[3]) == (0, 1)
    # Rank 0 alone has saved its best policy.
    assert len(list(tmp_path.rglob("ckpt_best.safetensors"))) == 1
