"""IPPO, MAPPO or QMIX on simple_spread of MPE2: three agents share out three landmarks.

Half of an agent's reward is minus the sum of the distances from each landmark to its nearest agent;
the other half is minus the number of agents that it collides with. An episode has 25 steps. MPE2
comes with: pip install 'dmiddleware[pettingzoo]'.
"""

from typing import Any, Literal

from mpe2 import simple_spread_v3

from dmiddleware import Task
from dmiddleware.data import TensorBuffer
from dmiddleware.env import BaseEnvManager, make_env_manager
from dmiddleware.policy import IPPOPolicy, MAPPOPolicy, QMIXPolicy
from dmiddleware.schedule import Schedule
from examples.common import command
from middleware import (
    ContextExchanger,
    DataPusher,
    EpsGreedyHandler,
    Experiment,
    ExperimentResult,
    GAEEstimator,
    InteractionEvaluator,
    ModelExchanger,
    OffPolicyLearner,
    OnPolicyLearner,
    StepCollector,
    TerminationChecker,
)

Algorithm = Literal["ippo", "mappo", "qmix"]


ENV = simple_spread_v3.parallel_env


def make_policy(seed: int = 0, algo: Algorithm = "mappo") -> IPPOPolicy | QMIXPolicy:
    """Build the policy, with parameters that all agents share."""
    env = make_env_manager(ENV, env_num=1)
    if algo == "qmix":
        return QMIXPolicy.for_env(
            env,
            seed=seed,
            model={"encoder_hidden_sizes": [64, 64]},
            learning_rate=5e-4,
            discount=0.9,  # with 0.99 agents learn to fly away, and their values diverge
            target_update_freq=1,
            target_tau=0.01,
            grad_clip_norm=10.0,
            batch_size=256,
            eps=Schedule.linear(1.0, 0.05, decay=50_000),
        )
    policy = MAPPOPolicy if algo == "mappo" else IPPOPolicy
    return policy.for_env(
        env,
        seed=seed,
        learning_rate=7e-4,
        value_norm=True,
        grad_clip_norm=10.0,
        batch_size=800,
        epoch_per_collect=10,
    )


def main(
    seed: int = 0,
    exp_name: str = "simple_spread",
    max_env_step: int = 1_000_000,
    algo: Algorithm = "mappo",
) -> ExperimentResult:
    """Train IPPO, MAPPO or QMIX on simple_spread."""
    policy = make_policy(seed, algo)
    experiment = Experiment(exp_name, policy)
    with Task(seed=seed) as task:
        collect_env = make_env_manager(ENV, env_num=32, seed=task.seed_for("collector"))
        eval_env = make_env_manager(ENV, env_num=32, seed=task.seed_for("evaluator"))

        task.use(ContextExchanger(max_ahead=1)).use(ModelExchanger(policy))
        use_algorithm(task, policy, collect_env)
        task.use(InteractionEvaluator(policy, eval_env, n_episode=64, every_train_iter=1000))
        task.use(experiment)
        task.use(TerminationChecker(max_env_step=max_env_step))
        task.run()
    return experiment.result


def use_algorithm(
    task: Task[Any], policy: IPPOPolicy | QMIXPolicy, collect_env: BaseEnvManager
) -> None:
    """Add what collects and learns."""
    if isinstance(policy, QMIXPolicy):
        buffer = TensorBuffer(200_000, seed=task.seed_for("buffer"))
        task.use(EpsGreedyHandler(policy))
        task.use(StepCollector(policy, collect_env, n_sample=128))
        task.use(DataPusher(buffer))
        task.use(OffPolicyLearner(policy, buffer, update_per_collect=8))
    else:
        task.use(StepCollector(policy, collect_env, n_sample=3200))  # whole episodes of 25 steps
        task.use(GAEEstimator(policy))
        task.use(OnPolicyLearner(policy))


if __name__ == "__main__":
    command(ENV, make_policy, main)()
