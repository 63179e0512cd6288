"""A program in the shape of DI-engine's serial pipeline: two configs, and one call."""

import pytest

from dmiddleware.env import make_env_manager
from dmiddleware.rollout import evaluate_episodes
from dmiddleware.worker import serial_run

main_config = dict(
    exp_name="cartpole_dqn",
    env=dict(
        collector_env_num=8,
        evaluator_env_num=5,
        n_evaluator_episode=5,
        stop_value=130,
    ),
    policy=dict(
        cuda=False,
        model=dict(obs_shape=4, action_shape=2, encoder_hidden_sizes=[64, 64], dueling=True),
        nstep=3,
        discount_factor=0.97,
        priority=True,
        random_collect_size=256,
        learn=dict(update_per_collect=16, batch_size=64, learning_rate=0.002),
        collect=dict(n_sample=80),
        eval=dict(evaluator=dict(eval_freq=80)),
        other=dict(
            eps=dict(type="exp", start=0.95, end=0.1, decay=1500),
            replay_buffer=dict(replay_buffer_size=20000),
        ),
    ),
)
create_config = dict(
    env=dict(type="CartPole-v1"),
    env_manager=dict(type="base"),
    policy=dict(type="dqn"),
    replay_buffer=dict(type="advanced"),
)


@pytest.mark.slow
@pytest.mark.learning
def test_a_serial_pipeline_runs_with_its_configs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    policy = serial_run(main_config, create_config, seed=0, max_env_step=12000)
    assert (tmp_path / "cartpole_dqn" / "total_config.yaml").is_file()
    with make_env_manager("CartPole-v1", env_num=10, seed=123) as envs:
        returns = evaluate_episodes(policy.eval_mode, envs, 20).get_episode_return()
    assert sum(returns) / len(returns) > 100
