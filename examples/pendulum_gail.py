"""Generative adversarial imitation learning on Pendulum-v1, from ten episodes of an expert.

The expert is the SAC policy of ``examples.make_offline_data``. All episodes have 200 steps, so a
reward for staying alive would teach nothing here. It needs the extra ``minari``.
"""

from dmiddleware import Task
from dmiddleware.data import Batch, index_rows
from dmiddleware.env import make_env_manager
from dmiddleware.policy import PPOPolicy
from dmiddleware.reward import GAIL
from dmiddleware.rl import Schedule
from examples import make_offline_data
from examples.common import command
from middleware import (
    ContextExchanger,
    Experiment,
    ExperimentResult,
    GAEEstimator,
    InteractionEvaluator,
    ModelExchanger,
    OnPolicyLearner,
    RewardLearner,
    StepCollector,
    TerminationChecker,
)

ENV = "Pendulum-v1"
N_EPISODE = 10


def make_policy(seed: int = 0) -> PPOPolicy:
    """Build the policy that imitates the expert."""
    return PPOPolicy.for_env(
        make_env_manager(ENV, env_num=1),
        seed=seed,
        discount=0.95,
        learning_rate=Schedule.linear(1e-3, 0.0, by="progress"),
        obs_norm=True,
        batch_size=128,
        epoch_per_collect=10,
    )


def expert_rows() -> Batch:
    """Return the expert's first episodes."""
    rows = make_offline_data.load(ENV, "expert")
    ends = rows["done"].nonzero().flatten()
    return index_rows(rows, slice(0, int(ends[N_EPISODE - 1]) + 1))


def main(
    seed: int = 0, exp_name: str = "pendulum_gail", max_env_step: int = 300_000
) -> ExperimentResult:
    """Imitate an expert of Pendulum-v1, without the rewards of the environment."""
    expert = expert_rows()
    policy = make_policy(seed)
    experiment = Experiment(exp_name, policy)
    with Task(seed=seed) as task:
        collect_env = make_env_manager(ENV, env_num=8, seed=task.seed_for("collector"))
        eval_env = make_env_manager(ENV, env_num=50, seed=task.seed_for("evaluator"))
        gail = GAIL.for_env(collect_env, expert, seed=seed, learning_rate=1e-3, epochs=5)

        task.use(ContextExchanger(max_ahead=1)).use(ModelExchanger(policy))
        task.use(StepCollector(policy, collect_env, n_sample=2048))
        task.use(RewardLearner(gail))
        task.use(GAEEstimator(policy))
        task.use(OnPolicyLearner(policy))
        task.use(
            InteractionEvaluator(
                policy, eval_env, n_episode=50, every_train_iter=1600, stop_value=-170
            )
        )
        task.use(experiment)
        task.use(TerminationChecker(max_env_step=max_env_step))
        task.run()
    return experiment.result


if __name__ == "__main__":
    command(ENV, make_policy, main)()
