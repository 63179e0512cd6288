"""R2D2 on CartPole without velocities, which have to be inferred from what came before."""

from dmiddleware import Task
from dmiddleware.data import PrioritySampler, TensorBuffer
from dmiddleware.env import make_env_manager
from dmiddleware.policy import R2D2Policy
from dmiddleware.rl import Schedule
from examples.common import command
from middleware import (
    ContextExchanger,
    DataPusher,
    EpsGreedyHandler,
    Experiment,
    ExperimentResult,
    InteractionEvaluator,
    ModelExchanger,
    OffPolicyLearner,
    StepCollector,
    TerminationChecker,
)

ENV = "examples.memory_envs:CartPolePositions-v1"
UNROLL_LEN = 16


def make_policy(seed: int = 0) -> R2D2Policy:
    """Build a dueling Q-network on an LSTM."""
    return R2D2Policy.for_env(
        make_env_manager(ENV, env_num=1),
        seed=seed,
        model={"hidden_size": 64},
        discount=0.99,
        burn_in=8,
        learning_rate=1e-3,
        target_update_freq=200,
        eps=Schedule.linear(1.0, 0.05, decay=10_000),
        batch_size=32,
    )


def main(
    seed: int = 0, exp_name: str = "cartpole_memory_r2d2", max_env_step: int = 120_000
) -> ExperimentResult:
    """Train R2D2 on CartPole without velocities until it is solved."""
    policy = make_policy(seed)
    experiment = Experiment(exp_name, policy)
    with Task(seed=seed) as task:
        collect_env = make_env_manager(ENV, env_num=8, seed=task.seed_for("collector"))
        eval_env = make_env_manager(ENV, env_num=30, seed=task.seed_for("evaluator"))
        buffer = TensorBuffer(
            max_env_step,
            sampler=PrioritySampler(alpha=0.9, beta=0.6),
            unroll_len=UNROLL_LEN,
            burn_in=policy.burn_in,
            stride=UNROLL_LEN // 2,
            start_columns=("state",),
            seed=task.seed_for("buffer"),
        )

        task.use(ContextExchanger()).use(ModelExchanger(policy))
        task.use(EpsGreedyHandler(policy))
        task.use(StepCollector(policy, collect_env, n_sample=128, random_steps=1000))
        task.use(DataPusher(buffer))
        task.use(OffPolicyLearner(policy, buffer, update_per_collect=16, learn_start=1000))
        task.use(
            InteractionEvaluator(
                policy, eval_env, n_episode=50, every_train_iter=640, stop_value=495
            )
        )
        task.use(experiment)
        task.use(TerminationChecker(max_env_step=max_env_step))
        task.run()
    return experiment.result


if __name__ == "__main__":
    command(ENV, make_policy, main)()
