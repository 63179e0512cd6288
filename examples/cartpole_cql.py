"""Offline learning on CartPole-v1 from the play of a policy that takes many random actions.

The policy is that of ``examples.cartpole_dqn``; it takes a random action in half of all steps, so
no episode of the data is as long as those that the policy learns.
"""

from dmiddleware import Task
from dmiddleware.data import Batch
from dmiddleware.env import EnvSettings, make_env_manager
from dmiddleware.policy import DiscreteCQLPolicy, DiscreteCQLSettings, DQNSettings, Policy
from dmiddleware.program import run_program
from dmiddleware.rollout import RolloutCollector
from dmiddleware.settings import Count, Fraction, Whole
from examples import cartpole_dqn
from middleware import (
    Experiment,
    ExperimentResult,
    ExperimentSettings,
    InteractionEvaluator,
    InteractionEvaluatorSettings,
    OfflineRLContext,
    OffPolicyLearner,
    OffPolicyLearnerSettings,
    TerminationChecker,
)
from middleware.programs.offline import make_dataset_buffer

ENV = cartpole_dqn.ENV
POLICY = DiscreteCQLSettings(
    cql_alpha=8.0,
    n_step=3,
    model={"encoder_hidden_sizes": [128, 128], "norm": "layer"},
    target_update_freq=64,
)


def make_policy(
    env: EnvSettings = ENV, policy: DiscreteCQLSettings = POLICY, seed: int = 0
) -> DiscreteCQLPolicy:
    """Build the policy that learns from the data."""
    return DiscreteCQLPolicy.for_env(make_env_manager(env), policy, seed=seed)


def played_rows(player: Policy, env: EnvSettings, n_rows: int, eps: float, seed: int) -> Batch:
    """Return steps of a policy that takes random actions with the probability ``eps``."""
    with make_env_manager(env, seed=seed) as envs:
        return RolloutCollector(player, envs).collect(n_rows, policy_kwargs={"eps": eps})


def main(
    seed: Whole = 0,
    exp_name: str = "cartpole_cql",
    max_env_step: Count = 60_000,
    max_train_iter: Count = 10_000,
    n_rows: Count = 20_000,
    eps: Fraction = 0.5,
    env: EnvSettings = ENV,
    eval_env_num: Count = 30,
    player: DQNSettings = cartpole_dqn.POLICY,
    policy: DiscreteCQLSettings = POLICY,
    learner: OffPolicyLearnerSettings = OffPolicyLearnerSettings(update_per_collect=100),
    evaluator: InteractionEvaluatorSettings = InteractionEvaluatorSettings(
        n_episode=30, every_train_iter=500, stop_value=475, stop_evaluations=3
    ),
    experiment: ExperimentSettings = ExperimentSettings(),
) -> ExperimentResult:
    """Learn to balance the pole from the steps of a policy that lets it fall.

    Args:
        seed: seed of everything random.
        exp_name: folder of the run in runs/.
        max_env_step: maximum number of environment steps to train the player.
        max_train_iter: maximum number of updates.
        n_rows: steps of the player in the data.
        eps: probability of a random action of the player.
        eval_env_num: number of envs that evaluate.
    """
    trained = cartpole_dqn.main(
        seed, f"{exp_name}_player", max_env_step, env, policy=player, experiment=experiment
    )
    teacher = cartpole_dqn.make_policy(env, player, seed)
    teacher.collect_mode.load_state_dict(trained.load_best())
    rows = played_rows(teacher, env, n_rows, eps, seed)

    agent = make_policy(env, policy, seed)
    buffer = make_dataset_buffer(agent, rows, seed)
    record = Experiment.of(experiment, exp_name, agent)
    with Task(OfflineRLContext(), seed=seed) as task:
        eval_envs = make_env_manager(env, env_num=eval_env_num, seed=task.seed_for("evaluator"))
        task.use(OffPolicyLearner.of(learner, agent, buffer))
        task.use(InteractionEvaluator.of(evaluator, agent, eval_envs))
        task.use(record)
        task.use(TerminationChecker(max_train_iter=max_train_iter))
        task.run()
    return record.result


if __name__ == "__main__":
    run_program(main)
