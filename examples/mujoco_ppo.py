"""Proximal policy optimization on Gymnasium's MuJoCo environments; ``--env`` chooses one.

The settings are those that RL Baselines3 Zoo publishes for each environment. A run that was stopped
continues with ``--resume``.
"""

from typing import Any, Literal

from dmiddleware import Task
from dmiddleware.env import make_env_manager
from dmiddleware.policy import PPOPolicy
from examples.common import command
from middleware import (
    ContextExchanger,
    Experiment,
    ExperimentResult,
    GAEEstimator,
    InteractionEvaluator,
    ModelExchanger,
    OnPolicyLearner,
    RunFolder,
    SnapshotSaver,
    StepCollector,
    TerminationChecker,
)

ENV = "HalfCheetah-v5"
Env = Literal["HalfCheetah-v5", "Hopper-v5"]
# The value weights are twice as large as theirs, because the value loss here is halved.
SETTINGS: dict[Env, dict[str, Any]] = {
    "HalfCheetah-v5": {
        "discount": 0.98,
        "gae_lambda": 0.92,
        "batch_size": 64,
        "epoch_per_collect": 20,
        "learning_rate": 2.0633e-05,
        "clip_ratio": 0.1,
        "entropy_weight": 0.000401762,
        "value_weight": 1.16192,
        "grad_clip_norm": 0.8,
    },
    "Hopper-v5": {
        "discount": 0.999,
        "gae_lambda": 0.99,
        "batch_size": 32,
        "epoch_per_collect": 5,
        "learning_rate": 9.80828e-05,
        "clip_ratio": 0.2,
        "entropy_weight": 0.00229519,
        "value_weight": 1.671342,
        "grad_clip_norm": 0.7,
    },
}
EVERY_TRAIN_ITER: dict[Env, int] = {"HalfCheetah-v5": 15_520, "Hopper-v5": 7_760}
"""Updates from one evaluation to the next: 49,664 env steps, for 20 evaluations in a run."""
MODEL = {
    "encoder_hidden_sizes": [256, 256],
    "activation": "relu",
    "init": None,
    "log_std_init": -2.0,
}


def make_policy(seed: int = 0, env: Env = ENV) -> PPOPolicy:
    """Build an actor and a critic with two hidden layers of 256 units each."""
    return PPOPolicy.for_env(
        make_env_manager(env, env_num=1),
        seed=seed,
        obs_norm=True,
        reward_norm=True,
        model=MODEL,
        **SETTINGS[env],
    )


def main(
    seed: int = 0,
    exp_name: str = "mujoco_ppo",
    max_env_step: int = 1_000_000,
    env: Env = ENV,
    resume: bool = False,
) -> ExperimentResult:
    """Train PPO on an environment of MuJoCo."""
    policy = make_policy(seed, env)
    run = RunFolder.create(exp_name, resume=resume)
    experiment = Experiment(run, policy)
    snapshots = SnapshotSaver(run, every_train_iter=20_000)
    with Task(seed=seed) as task:
        collect_env = make_env_manager(env, env_num=1, seed=task.seed_for("collector"))
        eval_env = make_env_manager(env, env_num=10, seed=task.seed_for("evaluator"))

        task.use(ContextExchanger(max_ahead=1)).use(ModelExchanger(policy))
        task.use(StepCollector(policy, collect_env, n_sample=512))
        task.use(GAEEstimator(policy))
        task.use(OnPolicyLearner(policy))
        task.use(
            InteractionEvaluator(
                policy, eval_env, n_episode=10, every_train_iter=EVERY_TRAIN_ITER[env]
            )
        )
        task.use(experiment).use(snapshots)
        task.use(TerminationChecker(max_env_step=max_env_step))
        snapshots.resume(task)  # a new run has no snapshot
        task.run()
    return experiment.result


if __name__ == "__main__":
    command(ENV, make_policy, main)()
