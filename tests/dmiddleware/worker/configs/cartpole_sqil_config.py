from easydict import EasyDict

cartpole_sqil_config = dict(
    exp_name="cartpole_sqil_seed0",
    env=dict(
        collector_env_num=8,
        evaluator_env_num=5,
        n_evaluator_episode=5,
        stop_value=195,
        replay_path=None,
        env_id="CartPole-v1",
    ),
    policy=dict(
        cuda=False,
        model=dict(
            obs_shape=4,
            action_shape=2,
            encoder_hidden_size_list=[128, 128, 64],
            dueling=True,
        ),
        nstep=1,
        discount_factor=0.97,
        learn=dict(update_per_collect=5, batch_size=64, learning_rate=0.001, alpha=0.12),
        collect=dict(n_sample=8, model_path="expert.pth.tar"),
        eval=dict(evaluator=dict(eval_freq=40)),
        other=dict(
            eps=dict(type="exp", start=0.95, end=0.1, decay=10000),
            replay_buffer=dict(replay_buffer_size=20000),
        ),
    ),
)
main_config = EasyDict(cartpole_sqil_config)

cartpole_sqil_create_config = dict(
    env=dict(
        type="cartpole",
        import_names=["dizoo.classic_control.cartpole.envs.cartpole_env"],
    ),
    env_manager=dict(type="base"),
    policy=dict(type="sql"),
)
create_config = EasyDict(cartpole_sqil_create_config)

if __name__ == "__main__":
    from cartpole_dqn_config import create_config as expert_create_config
    from cartpole_dqn_config import main_config as expert_config
    from ding.entry import serial_pipeline_sqil

    serial_pipeline_sqil(
        (main_config, create_config), (expert_config, expert_create_config), seed=0
    )
