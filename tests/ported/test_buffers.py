"""A serial DQN with a prioritized replay buffer, as programs for DI-engine have it."""

from easydict import EasyDict

from dmiddleware.classic import create_buffer, create_policy
from dmiddleware.env import make_env_manager
from dmiddleware.worker import create_learner, create_serial_collector

CONFIG = EasyDict(
    policy=dict(
        type="dqn",
        priority=True,
        model=dict(obs_shape=4, action_shape=2),
        learn=dict(batch_size=16),
    ),
    learner=dict(type="base", hook=dict(save_ckpt_after_run=False)),
    collector=dict(type="sample"),
    replay_buffer=dict(
        type="advanced",
        replay_buffer_size=200,
        max_use=50,
        monitor=dict(sampled_data_attr=dict(print_freq=10)),
    ),
)


def train(cfg, exp_name, iterations):
    env = make_env_manager("CartPole-v1", env_num=2, seed=0)
    policy = create_policy(cfg.policy)
    learner = create_learner(cfg.learner, policy=policy.learn_mode, exp_name=exp_name)
    collector = create_serial_collector(
        cfg.collector, env=env, policy=policy.collect_mode, exp_name=exp_name
    )
    replay_buffer = create_buffer(cfg.replay_buffer, exp_name=exp_name, instance_name="replay")
    replay_buffer.start()
    learner.call_hook("before_run")
    while learner.train_iter < iterations:
        new_data = collector.collect(
            n_sample=32, train_iter=learner.train_iter, policy_kwargs={"eps": 0.5}
        )
        replay_buffer.push(new_data, cur_collector_envstep=collector.envstep)
        for _ in range(4):
            train_data = replay_buffer.sample(
                learner.policy.get_attribute("batch_size"), learner.train_iter
            )
            if train_data is None:
                break
            learner.train(train_data, collector.envstep)
            replay_buffer.update(learner.priority_info)
    learner.call_hook("after_run")
    state = replay_buffer.state_dict()
    push_count = replay_buffer.push_count
    for worker in (replay_buffer, learner, collector):
        worker.close()
    return state, push_count


def test_a_serial_program_trains_with_priorities(tmp_path):
    state, push_count = train(CONFIG, str(tmp_path), iterations=20)
    priorities = [meta["priority"] for _, _, meta in state["items"]["items"]]
    assert push_count == 160
    assert len({round(priority, 5) for priority in priorities}) > 50
    assert "priority_avg" in (tmp_path / "log" / "replay" / "replay_logger.txt").read_text()
