"""The names of DI-engine's modules, as of its release 0.5.3.

The finder resolves these and no others: a module that a fork has added is read from its files.
"""

from __future__ import annotations

from typing import Final

__all__ = ["MODULE_NAMES"]

_SUBMODULES: Final = """
ding: bonus compatibility config data entry envs framework hpc_rl interaction league model policy
  reward_model rl_utils torch_utils utils worker world_model
ding.bonus: a2c c51 common config ddpg dqn model pg ppo_offpolicy ppof sac sql td3
ding.config: config utils
ding.data: buffer level_replay model_loader shm_buffer storage storage_loader
ding.data.buffer: buffer deque_buffer deque_buffer_wrapper middleware
ding.data.buffer.middleware: clone_object group_sample padding priority sample_range_view
  staleness_check use_time_check
ding.data.level_replay: level_sampler
ding.data.storage: file storage
ding.entry: application_entry application_entry_trex_collect_data cli cli_ditask cli_parsers
  dist_entry parallel_entry predefined_config serial_entry serial_entry_bc serial_entry_bco
  serial_entry_dqfd serial_entry_gail serial_entry_guided_cost serial_entry_mbrl serial_entry_ngu
  serial_entry_offline serial_entry_onpolicy serial_entry_onpolicy_ppg serial_entry_pc
  serial_entry_plr serial_entry_preference_based_irl serial_entry_preference_based_irl_onpolicy
  serial_entry_r2d3 serial_entry_reward_model_offpolicy serial_entry_reward_model_onpolicy
  serial_entry_sqil serial_entry_td3_vae utils
ding.entry.cli_parsers: k8s_parser slurm_parser
ding.envs: common env env_manager env_wrappers gym_env
ding.envs.common: common_function env_element env_element_runner
ding.envs.env: base_env default_wrapper ding_env_wrapper env_implementation_check
ding.envs.env_manager: base_env_manager ding_env_manager env_supervisor envpool_env_manager
  gym_vector_env_manager subprocess_env_manager
ding.envs.env_wrappers: env_wrappers
ding.framework: context event_loop message_queue middleware parallel supervisor task wrapper
ding.framework.message_queue: mq nng redis
ding.framework.middleware: barrier ckpt_handler collector data_fetcher distributer functional
  learner
ding.framework.middleware.functional: advantage_estimator collector ctx_helper data_processor
  enhancer evaluator explorer logger priority termination_checker timer trainer
ding.framework.wrapper: step_timer
ding.hpc_rl: wrapper
ding.interaction: base config exception master slave
ding.interaction.base: app common network threading
ding.interaction.config: base
ding.interaction.exception: base master slave
ding.interaction.master: base connection master task
ding.interaction.slave: action slave
ding.league: algorithm base_league metric one_vs_one_league player shared_payoff starcraft_player
ding.model: common template wrapper
ding.model.common: encoder head utils
ding.model.template: acer atoc bc bcq collaq coma decision_transformer diffusion ebm edac havac
  hpt language_transformer madqn maqac mavac ngu pdqn pg ppg procedure_cloning q_learning qac
  qac_dist qgpo qmix qtran qvac sqn vac vae wqmix
ding.model.wrapper: model_wrappers test_model_wrappers
ding.policy: a2c acer atoc base_policy bc bcq bdq c51 collaq coma command_mode_policy_instance
  common_utils cql d4pg ddpg dqfd dqn dt edac fqf happo ibc il impala iql iqn madqn mbpolicy mdqn
  ngu offppo_collect_traj pc pdqn pg plan_diffuser policy_factory ppg ppo ppof prompt_awr
  prompt_pg qgpo qmix qrdqn qtran r2d2 r2d2_collect_traj r2d2_gtrxl r2d3 rainbow sac sql sqn td3
  td3_bc td3_vae wqmix
ding.policy.mbpolicy: dreamer mbsac utils
ding.reward_model: base_reward_model drex_reward_model gail_irl_model guided_cost_reward_model
  her_reward_model icm_reward_model ngu_reward_model pdeil_irl_model pwil_irl_model red_irl_model
  rnd_reward_model trex_reward_model
ding.rl_utils: a2c acer adder beta_function coma exploration gae grpo happo isw log_prob_utils ppg
  ppo retrace rloo sampler td upgo value_rescale vtrace
ding.torch_utils: backend_helper checkpoint_helper data_helper dataparallel diffusion_SDE
  distribution loss lr_scheduler math_helper metric model_helper network nn_test_helper
  optimizer_helper parameter reshape_helper
ding.torch_utils.diffusion_SDE: dpm_solver_pytorch
ding.torch_utils.loss: contrastive_loss cross_entropy_loss multi_logits_loss
ding.torch_utils.network: activation diffusion dreamer gtrxl gumbel_softmax merge nn_module
  normalization popart res_block resnet rnn scatter_connection soft_argmax transformer
ding.utils: autolog bfs_helper collection_helper compression_helper data default_helper
  deprecation design_helper dict_helper fake_linklink fast_copy file_helper import_helper
  k8s_helper linklink_dist_helper loader lock_helper log_helper log_writer_helper memory_helper
  normalizer_helper orchestrator_launcher profiler_helper pytorch_ddp_dist_helper registry
  registry_factory render_helper scheduler_helper segment_tree slurm_helper system_helper
  time_helper time_helper_base time_helper_cuda type_helper
ding.utils.autolog: base data model time_ctl value
ding.utils.data: base_dataloader collate_fn dataloader dataset rlhf_offline_dataset
  rlhf_online_dataset structure
ding.utils.data.structure: cache lifo_deque
ding.utils.loader: base collection dict exception mapping norm number string types utils
ding.worker: adapter collector coordinator learner replay_buffer
ding.worker.adapter: learner_aggregator
ding.worker.collector: base_parallel_collector base_serial_collector base_serial_evaluator
  battle_episode_serial_collector battle_interaction_serial_evaluator
  battle_sample_serial_collector comm episode_serial_collector interaction_serial_evaluator
  marine_parallel_collector metric_serial_evaluator sample_serial_collector
  zergling_parallel_collector
ding.worker.collector.comm: base_comm_collector flask_fs_collector utils
ding.worker.coordinator: base_parallel_commander base_serial_commander comm_coordinator
  coordinator one_vs_one_parallel_commander operator_server resource_manager
  solo_parallel_commander
ding.worker.learner: base_learner comm learner_hook
ding.worker.learner.comm: base_comm_learner flask_fs_learner utils
ding.worker.replay_buffer: advanced_buffer base_buffer episode_buffer naive_buffer utils
ding.world_model: base_world_model ddppo dreamer idm mbpo model utils
ding.world_model.model: ensemble networks
"""
"""A package in each entry, and its modules."""


def _names(text: str) -> frozenset[str]:
    names, package = {"ding"}, ""
    for word in text.split():
        if word.endswith(":"):
            package = word[:-1]
        else:
            names.add(f"{package}.{word}")
    return frozenset(names)


MODULE_NAMES: Final = _names(_SUBMODULES)
