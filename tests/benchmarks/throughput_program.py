"""Our program of the throughput benchmark: in one process, or in those that ``ditask`` starts."""

from __future__ import annotations

import torch

from dmiddleware import Task
from dmiddleware.env import make_env_manager
from dmiddleware.pipeline import Middleware, middleware
from dmiddleware.policy import PPOPolicy
from middleware import (
    ContextExchanger,
    ModelExchanger,
    OnlineRLContext,
    OnPolicyLearner,
    Role,
    StepCollector,
    gae_estimator,
)
from tests.benchmarks import setting
from tests.benchmarks import throughput_setting as S


def measure_rate() -> Middleware[OnlineRLContext]:
    """Stop at the end of the measurement, and print the rate."""
    meter = S.Meter.from_environment()

    @middleware(roles=(Role.LEARNER,), reads=("env_step",))
    def measure_rate(ctx: OnlineRLContext) -> None:
        rate = meter.rate(ctx.env_step)
        if rate is not None:
            S.print_rate(rate)
            ctx.task.stop("measured")

    return measure_rate


def main() -> None:
    """Train PPO on CartPole."""
    torch.set_num_threads(1)
    with Task(OnlineRLContext(), seed=0) as task:
        envs = make_env_manager(
            setting.make_env, env_num=S.envs_per_process(), seed=task.seed_for("collector")
        )
        policy = PPOPolicy.for_env(
            envs,
            seed=0,
            model={
                "share_encoder": True,
                "encoder_hidden_sizes": S.HIDDEN_SIZES,
                "activation": "tanh",
            },
            learning_rate=S.LEARNING_RATE,
            discount=S.DISCOUNT,
            gae_lambda=S.GAE_LAMBDA,
            clip_ratio=S.CLIP_RATIO,
            value_weight=S.VALUE_WEIGHT,
            entropy_weight=S.ENTROPY_WEIGHT,
            grad_clip_norm=S.GRAD_CLIP_NORM,
            batch_size=S.MINIBATCH_SIZE,
            epoch_per_collect=S.EPOCHS,
        )
        task.use(ContextExchanger(max_ahead=1)).use(ModelExchanger(policy))
        task.use(StepCollector(policy, envs, n_sample=S.BATCH_SIZE))
        task.use(gae_estimator(policy))
        task.use(OnPolicyLearner(policy))
        task.use(measure_rate())
        task.run()


if __name__ == "__main__":
    main()
