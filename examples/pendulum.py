"""TD3, DDPG and TQC on Pendulum-v1; ``--algo`` chooses one. SAC is in ``pendulum_sac``."""

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
    StepCollector,
    TerminationChecker,
)

ENV = "Pendulum-v1"
Algo = Literal["td3", "ddpg", "tqc"]
SETTINGS: dict[Algo, dict[str, Any]] = {
    "td3": {},
    # The noise of the paper.
    "ddpg": {"noise": "ou", "noise_theta": 0.15, "noise_sigma": 0.2},
    # Critics that are smaller than those of the paper.
    "tqc": {
        "learning_rate_q": 1e-3,
        "learning_rate_policy": 1e-3,
        "model": {"n_critics": 2, "critic_hidden_sizes": [256, 256]},
    },
}


def make_policy(seed: int = 0, algo: Algo = "td3") -> Policy:
    """Build an actor of torques and its critics."""
    policy_cls = get_policy_cls({"type": algo})
    return policy_cls.for_env(make_env_manager(ENV, env_num=1), seed=seed, **SETTINGS[algo])


def main(
    seed: int = 0,
    exp_name: str = "pendulum",
    max_env_step: int = 10_000,
    algo: Algo = "td3",
    stop_value: float = -150.0,
) -> ExperimentResult:
    """Train TD3, DDPG or TQC on Pendulum-v1 until it swings up and stays there."""
    policy = make_policy(seed, algo)
    buffer = TensorBuffer(max_env_step, seed=seed)
    experiment = Experiment(exp_name, policy)
    with Task(seed=seed) as task:
        collect_env = make_env_manager(ENV, env_num=1, seed=task.seed_for("collector"))
        eval_env = make_env_manager(ENV, env_num=50, seed=task.seed_for("evaluator"))

        task.use(ContextExchanger()).use(ModelExchanger(policy))
        task.use(StepCollector(policy, collect_env, n_sample=8, random_steps=256))
        task.use(DataPusher(buffer))
        task.use(OffPolicyLearner(policy, buffer, update_per_collect=8))
        task.use(
            InteractionEvaluator(
                policy, eval_env, n_episode=50, every_train_iter=2500, stop_value=stop_value
            )
        )
        task.use(experiment)
        task.use(TerminationChecker(max_env_step=max_env_step))
        task.run()
    return experiment.result


if __name__ == "__main__":
    command(ENV, make_policy, main)()
