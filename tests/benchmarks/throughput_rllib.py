"""RLlib's side of the throughput benchmark, a file for an environment of its own.

These settings suit its speed: environments without Gymnasium's checker, no KL penalty, the learner
in the process of the algorithm, and results compiled after every ten batches.
"""

from __future__ import annotations

import math

import ray
import throughput_setting as S
import torch
from ray.rllib.algorithms.ppo import PPO, PPOConfig
from ray.rllib.core.rl_module.default_model_config import DefaultModelConfig

NODE_IP = "127.0.0.2"  # the benchmark runs this in a network namespace
N_CPUS = 16  # of Ray's book-keeping: all EnvRunners get one each
STORE_BYTES = 200 * 2**20
BATCHES_PER_RESULT = 10


def make_algorithm() -> PPO:
    """Build PPO with an EnvRunner for each process that collects; 0: it collects itself."""
    config = (
        PPOConfig()
        .environment(S.ENV, env_config={"disable_env_checker": True})
        .framework("torch")
        .env_runners(
            num_env_runners=S.n_collectors(),
            num_envs_per_env_runner=S.envs_per_process(),
            rollout_fragment_length="auto",
        )
        .learners(num_learners=0)
        .training(
            train_batch_size_per_learner=S.BATCH_SIZE,
            minibatch_size=S.MINIBATCH_SIZE,
            num_epochs=S.EPOCHS,
            lr=S.LEARNING_RATE,
            gamma=S.DISCOUNT,
            lambda_=S.GAE_LAMBDA,
            clip_param=S.CLIP_RATIO,
            vf_clip_param=math.inf,
            vf_loss_coeff=S.VALUE_WEIGHT,
            entropy_coeff=S.ENTROPY_WEIGHT,
            use_kl_loss=False,
            grad_clip=S.GRAD_CLIP_NORM,
        )
        .rl_module(
            model_config=DefaultModelConfig(
                fcnet_hiddens=list(S.HIDDEN_SIZES), fcnet_activation="tanh", vf_share_layers=True
            )
        )
        .reporting(min_sample_timesteps_per_iteration=BATCHES_PER_RESULT * S.BATCH_SIZE)
        .debugging(log_level="ERROR", seed=0)
    )
    return config.build_algo()


def main() -> None:
    """Train PPO on CartPole."""
    torch.set_num_threads(1)
    ray.init(
        num_cpus=N_CPUS,
        object_store_memory=STORE_BYTES,
        include_dashboard=False,
        log_to_driver=False,
        logging_level="ERROR",
        _node_ip_address=NODE_IP,
    )
    algorithm = make_algorithm()
    meter, rate = S.Meter.from_environment(), None
    while rate is None:
        # A batch that was sampled has been learned from when train() returns.
        result = algorithm.train()
        rate = meter.rate(int(result["env_runners"]["num_env_steps_sampled_lifetime"]))
    S.print_rate(rate)
    algorithm.stop()
    ray.shutdown()


if __name__ == "__main__":
    main()
