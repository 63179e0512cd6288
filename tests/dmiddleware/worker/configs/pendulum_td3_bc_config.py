from easydict import EasyDict

pendulum_td3_bc_config = dict(
    exp_name="pendulum_td3_bc_seed0",
    env=dict(
        env_id="Pendulum-v1",
        evaluator_env_num=2,
        n_evaluator_episode=2,
        act_scale=True,
        stop_value=-250,
    ),
    policy=dict(
        cuda=False,
        model=dict(obs_shape=3, action_shape=1, twin_critic=True, action_space="regression"),
        learn=dict(
            train_epoch=2,
            batch_size=128,
            learning_rate_actor=1e-3,
            learning_rate_critic=1e-3,
            alpha=2.5,
            learner=dict(hook=dict(log_show_after_iter=10)),
        ),
        collect=dict(data_type="hdf5", data_path="./pendulum.hdf5"),
        eval=dict(evaluator=dict(eval_freq=10)),
        other=dict(replay_buffer=dict(replay_buffer_size=2000)),
    ),
)
main_config = EasyDict(pendulum_td3_bc_config)

pendulum_td3_bc_create_config = dict(
    env=dict(
        type="pendulum",
        import_names=["dizoo.classic_control.pendulum.envs.pendulum_env"],
    ),
    env_manager=dict(type="base"),
    policy=dict(type="td3_bc"),
    replay_buffer=dict(type="naive"),
)
create_config = EasyDict(pendulum_td3_bc_create_config)

if __name__ == "__main__":
    from ding.entry import serial_pipeline_offline

    serial_pipeline_offline((main_config, create_config), seed=0)
