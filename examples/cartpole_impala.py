"""IMPALA on CartPole-v1.

In several processes (``ditask --main examples.cartpole_impala.main --parallel-workers 4``), the
collectors do not wait for the newest weights, and each may be several batches ahead of the learner.
"""

from dmiddleware import Task
from dmiddleware.env import make_env_manager
from dmiddleware.policy import IMPALAPolicy
from examples.common import command
from middleware import (
    ContextExchanger,
    Experiment,
    ExperimentResult,
    InteractionEvaluator,
    ModelExchanger,
    OnPolicyLearner,
    StepCollector,
    TerminationChecker,
)

ENV = "CartPole-v1"


def make_policy(seed: int = 0) -> IMPALAPolicy:
    """Build an actor and a critic with two hidden layers each."""
    return IMPALAPolicy.for_env(
        make_env_manager(ENV, env_num=1), seed=seed, learning_rate=2e-3, batch_size=256
    )


def main(
    seed: int = 0, exp_name: str = "cartpole_impala", max_env_step: int = 500_000
) -> ExperimentResult:
    """Train IMPALA on CartPole-v1 until it is solved."""
    policy = make_policy(seed)
    experiment = Experiment(exp_name, policy)
    with Task(seed=seed) as task:
        collect_env = make_env_manager(ENV, env_num=8, seed=task.seed_for("collector"))
        eval_env = make_env_manager(ENV, env_num=30, seed=task.seed_for("evaluator"))

        task.use(ContextExchanger(max_ahead=4)).use(ModelExchanger(policy))
        task.use(StepCollector(policy, collect_env, n_sample=256))
        task.use(OnPolicyLearner(policy))
        task.use(
            InteractionEvaluator(
                policy, eval_env, n_episode=50, every_train_iter=50, stop_value=495
            )
        )
        task.use(experiment)
        task.use(TerminationChecker(max_env_step=max_env_step))
        task.run()
    return experiment.result


if __name__ == "__main__":
    command(ENV, make_policy, main)()
