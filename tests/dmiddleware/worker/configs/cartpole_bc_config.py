from easydict import EasyDict

cartpole_bc_config = dict(
    exp_name="cartpole_bc_seed0",
    env=dict(
        collector_env_num=8,
        evaluator_env_num=5,
        n_evaluator_episode=5,
        stop_value=195,
        env_id="CartPole-v1",
    ),
    policy=dict(
        cuda=False,
        continuous=False,
        model=dict(obs_shape=4, action_shape=2, encoder_hidden_size_list=[64, 64, 128]),
        learn=dict(train_epoch=3, batch_size=64, learning_rate=0.01),
        eval=dict(evaluator=dict(eval_freq=40)),
    ),
)
main_config = EasyDict(cartpole_bc_config)

cartpole_bc_create_config = dict(
    env=dict(
        type="cartpole",
        import_names=["dizoo.classic_control.cartpole.envs.cartpole_env"],
    ),
    env_manager=dict(type="base"),
    policy=dict(type="bc"),
)
create_config = EasyDict(cartpole_bc_create_config)

if __name__ == "__main__":
    from ding.entry import serial_pipeline_bc

    serial_pipeline_bc((main_config, create_config), seed=0)
