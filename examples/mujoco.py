"""SAC, TD3 and TQC on Gymnasium's MuJoCo environments; ``--algo`` and ``--env`` choose.

The settings are those that RL Baselines3 Zoo publishes for these environments. ``--compiled``
compiles the update, which takes a minute and makes training about a third faster. A run that was
stopped continues with ``--resume``.
"""

from typing import Any, Literal

from dmiddleware import Task
from dmiddleware.data import TensorBuffer
from dmiddleware.env import make_env_manager
from dmiddleware.policy import Policy, get_policy_cls
from examples.common import command
from middleware import (
    ContextExchanger,
    DataPusher,
    Experiment,
    ExperimentResult,
    InteractionEvaluator,
    ModelExchanger,
    OffPolicyLearner,
    RunFolder,
    SnapshotSaver,
    StepCollector,
    TerminationChecker,
)

ENV = "HalfCheetah-v5"
Env = Literal["HalfCheetah-v5", "Hopper-v5", "Walker2d-v5", "Ant-v5"]
Algo = Literal["sac", "td3", "tqc"]
RANDOM_STEPS = 10_000
# The zoo uses the defaults of its libraries for SAC, which are ours, and for TQC.
SETTINGS: dict[Algo, dict[str, Any]] = {
    "sac": {},
    "td3": {
        "learning_rate_critic": 1e-3,
        "learning_rate_actor": 1e-3,
        "noise_sigma": 0.1,
        "model": {"actor_hidden_sizes": [400, 300], "critic_hidden_sizes": [400, 300]},
    },
    "tqc": {"model": {"n_critics": 2, "critic_hidden_sizes": [256, 256]}},
}


def make_policy(
    seed: int = 0, algo: Algo = "sac", env: Env = ENV, compiled: bool = False
) -> Policy:
    """Build an actor and its critics."""
    policy_cls = get_policy_cls({"type": algo})
    return policy_cls.for_env(
        make_env_manager(env, env_num=1), seed=seed, compile=compiled, **SETTINGS[algo]
    )


def main(
    seed: int = 0,
    exp_name: str = "mujoco",
    max_env_step: int = 200_000,
    algo: Algo = "sac",
    env: Env = ENV,
    compiled: bool = False,
    resume: bool = False,
) -> ExperimentResult:
    """Train SAC, TD3 or TQC on an environment of MuJoCo."""
    policy = make_policy(seed, algo, env, compiled)
    buffer = TensorBuffer(1_000_000, seed=seed)
    run = RunFolder.create(exp_name, resume=resume)
    experiment = Experiment(run, policy)
    snapshots = SnapshotSaver(run, every_train_iter=20_000)
    with Task(seed=seed) as task:
        collect_env = make_env_manager(env, env_num=1, seed=task.seed_for("collector"))
        eval_env = make_env_manager(env, env_num=10, seed=task.seed_for("evaluator"))

        task.use(ContextExchanger()).use(ModelExchanger(policy))
        task.use(StepCollector(policy, collect_env, n_sample=1, random_steps=RANDOM_STEPS))
        task.use(DataPusher(buffer))
        task.use(OffPolicyLearner(policy, buffer, update_per_collect=1))
        task.use(InteractionEvaluator(policy, eval_env, n_episode=10, every_train_iter=10_000))
        task.use(experiment).use(snapshots)
        task.use(TerminationChecker(max_env_step=max_env_step))
        snapshots.resume(task)  # a new run has no snapshot
        task.run()
    return experiment.result


if __name__ == "__main__":
    command(ENV, make_policy, main)()
