from easydict import EasyDict

parallel_dqn_config = dict(
    exp_name="parallel_dqn",
    env=dict(
        collector_env_num=2,
        collector_episode_num=2,
        evaluator_env_num=2,
        evaluator_episode_num=1,
        stop_value=5,
    ),
    policy=dict(
        cuda=False,
        model=dict(obs_shape=4, action_shape=2, encoder_hidden_size_list=[32, 32]),
        nstep=3,
        learn=dict(batch_size=32, learner=dict(learner_num=1, send_policy_freq=1)),
        collect=dict(n_sample=16, collector=dict(collector_num=1, update_policy_second=3)),
        eval=dict(evaluator=dict(eval_freq=50)),
        other=dict(
            eps=dict(type="exp", start=0.95, end=0.1, decay=100000),
            replay_buffer=dict(replay_buffer_size=100000, enable_track_used_data=False),
            commander=dict(collector_task_space=2, learner_task_space=1, eval_interval=5),
        ),
    ),
)
main_config = EasyDict(parallel_dqn_config)

create_config = EasyDict(
    env=dict(
        type="cartpole",
        import_names=["dizoo.classic_control.cartpole.envs.cartpole_env"],
    ),
    env_manager=dict(type="base"),
    policy=dict(type="dqn_command"),
    learner=dict(type="base", import_names=["ding.worker.learner.base_learner"]),
    collector=dict(
        type="zergling", import_names=["ding.worker.collector.zergling_parallel_collector"]
    ),
    commander=dict(type="solo", import_names=["ding.worker.coordinator.solo_parallel_commander"]),
    comm_learner=dict(type="flask_fs", import_names=["ding.worker.learner.comm.flask_fs_learner"]),
    comm_collector=dict(
        type="flask_fs", import_names=["ding.worker.collector.comm.flask_fs_collector"]
    ),
)

system_config = EasyDict(
    coordinator=dict(),
    path_data=f"./{main_config.exp_name}/data",
    path_policy=f"./{main_config.exp_name}/policy",
    communication_mode="auto",
    learner_gpu_num=1,
)

if __name__ == "__main__":
    from ding.entry.parallel_entry import parallel_pipeline

    parallel_pipeline((main_config, create_config, system_config), seed=0)
