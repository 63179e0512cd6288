"""PPO and A2C on LunarLander-v3: 200 points are a landing between the flags.

``--algo`` chooses one; the chain is the same. It needs the extra ``box2d``.
"""

from typing import Any, Literal

from dmiddleware import Task
from dmiddleware.env import make_env_manager
from dmiddleware.policy import A2CPolicy, PPOPolicy
from dmiddleware.rl import Schedule
from examples.common import command
from middleware import (
    ContextExchanger,
    Experiment,
    ExperimentResult,
    GAEEstimator,
    InteractionEvaluator,
    ModelExchanger,
    OnPolicyLearner,
    StepCollector,
    TerminationChecker,
)

ENV = "LunarLander-v3"
Algo = Literal["ppo", "a2c"]

PPO: dict[str, Any] = {
    "discount": 0.999,
    "gae_lambda": 0.98,
    "entropy_weight": 0.01,
    "batch_size": 64,
    "epoch_per_collect": 4,
}
A2C: dict[str, Any] = {
    "discount": 0.995,
    "gae_lambda": 0.98,
    "adv_norm": True,
    "obs_norm": True,
    "reward_norm": True,
    "learning_rate": Schedule.linear(3e-3, 0.0, by="progress"),
    "batch_size": 1024,
}
N_SAMPLE: dict[Algo, int] = {"ppo": 16_384, "a2c": 1024}
MAX_ENV_STEP: dict[Algo, int] = {"ppo": 1_500_000, "a2c": 5_000_000}
EVERY_TRAIN_ITER: dict[Algo, int] = {"ppo": 2048, "a2c": 50}
"""Updates from one evaluation to the next: 33,000 and 51,000 env steps."""


def make_policy(seed: int = 0, algo: Algo = "ppo") -> PPOPolicy | A2CPolicy:
    """Build the policy of an algorithm."""
    envs = make_env_manager(ENV, env_num=1)
    if algo == "ppo":
        return PPOPolicy.for_env(envs, seed=seed, **PPO)
    return A2CPolicy.for_env(envs, seed=seed, **A2C)


def main(
    seed: int = 0,
    exp_name: str = "lunarlander_onpolicy",
    max_env_step: int | None = None,
    algo: Algo = "ppo",
) -> ExperimentResult:
    """Train an on-policy algorithm on LunarLander-v3 until it lands softly.

    ``max_env_step`` is that of the algorithm by default, see :data:`MAX_ENV_STEP`.
    """
    max_env_step = max_env_step or MAX_ENV_STEP[algo]
    policy = make_policy(seed, algo)
    experiment = Experiment(exp_name, policy)
    with Task(seed=seed) as task:
        collect_env = make_env_manager(ENV, env_num=16, seed=task.seed_for("collector"))
        eval_env = make_env_manager(ENV, env_num=25, seed=task.seed_for("evaluator"))

        task.use(ContextExchanger(max_ahead=1)).use(ModelExchanger(policy))
        task.use(StepCollector(policy, collect_env, n_sample=N_SAMPLE[algo]))
        task.use(GAEEstimator(policy))
        task.use(OnPolicyLearner(policy))
        task.use(
            InteractionEvaluator(
                policy,
                eval_env,
                n_episode=50,
                every_train_iter=EVERY_TRAIN_ITER[algo],
                stop_value=240,
            )
        )
        task.use(experiment)
        task.use(TerminationChecker(max_env_step=max_env_step))
        task.run()
    return experiment.result


if __name__ == "__main__":
    command(ENV, make_policy, main)()
