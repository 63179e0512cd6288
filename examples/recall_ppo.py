"""Recurrent PPO on the recall of a cue, which no policy without a memory can solve."""

from typing import Literal

from dmiddleware import Task
from dmiddleware.env import make_env_manager
from dmiddleware.policy import PPOPolicy, RecurrentPPOPolicy
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

ENV = "examples.memory_envs:Recall-v0"
Memory = Literal["lstm", "gru", "none"]


def make_policy(seed: int = 0, memory: Memory = "lstm") -> PPOPolicy:
    """Build an actor and a critic, on a memory or without one."""
    envs = make_env_manager(ENV, env_num=1)
    options = {
        "discount": 0.9,
        "learning_rate": 5e-3,
        "entropy_weight": 0.01,
        "batch_size": 192,
        "epoch_per_collect": 4,
    }
    if memory == "none":
        return PPOPolicy.for_env(envs, seed=seed, **options)
    model = {"core": memory, "hidden_size": 32}
    return RecurrentPPOPolicy.for_env(envs, seed=seed, model=model, **options)


def main(
    seed: int = 0,
    exp_name: str = "recall_ppo",
    max_env_step: int = 60_000,
    memory: Memory = "lstm",
) -> ExperimentResult:
    """Train PPO on the recall of one cue of four."""
    policy = make_policy(seed, memory)
    experiment = Experiment(exp_name, policy)
    with Task(seed=seed) as task:
        collect_env = make_env_manager(ENV, env_num=16, seed=task.seed_for("collector"))
        eval_env = make_env_manager(ENV, env_num=50, seed=task.seed_for("evaluator"))

        task.use(ContextExchanger(max_ahead=1)).use(ModelExchanger(policy))
        task.use(StepCollector(policy, collect_env, n_sample=768))
        task.use(GAEEstimator(policy))
        task.use(OnPolicyLearner(policy))
        task.use(
            InteractionEvaluator(
                policy, eval_env, n_episode=100, every_train_iter=160, stop_value=0.99
            )
        )
        task.use(experiment)
        task.use(TerminationChecker(max_env_step=max_env_step))
        task.run()
    return experiment.result


if __name__ == "__main__":
    command(ENV, make_policy, main)()
