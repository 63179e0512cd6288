"""Generative adversarial imitation learning on Pendulum-v1, from ten episodes of an expert.

The expert is the SAC policy of ``examples.make_offline_data``. All episodes have 200 steps, so a
reward for staying alive would teach nothing here. It needs the extra ``minari``.
"""

from dmiddleware import Task
from dmiddleware.data import Batch, index_rows
from dmiddleware.env import EnvSettings, make_env_manager
from dmiddleware.policy import PPOPolicy, PPOSettings
from dmiddleware.program import run_program
from dmiddleware.reward import GAIL
from dmiddleware.rl import Schedule
from dmiddleware.settings import Count, Whole
from examples import make_offline_data
from middleware import (
    ContextExchanger,
    Experiment,
    ExperimentResult,
    ExperimentSettings,
    GAEEstimator,
    InteractionEvaluator,
    InteractionEvaluatorSettings,
    ModelExchanger,
    OnPolicyLearner,
    RewardLearner,
    StepCollector,
    StepCollectorSettings,
    TerminationChecker,
)

ENV = EnvSettings("Pendulum-v1", env_num=8)
N_EPISODE = 10
POLICY = PPOSettings(
    discount=0.95,
    learning_rate=Schedule.linear(1e-3, 0.0, by="progress"),
    obs_norm=True,
    batch_size=128,
    epoch_per_collect=10,
)


def make_policy(env: EnvSettings = ENV, policy: PPOSettings = POLICY, seed: int = 0) -> PPOPolicy:
    """Build the policy that imitates the expert."""
    return PPOPolicy.for_env(make_env_manager(env), policy, seed=seed)


def expert_rows(env: EnvSettings) -> Batch:
    """Return the expert's first episodes."""
    rows = make_offline_data.load(str(env.id), "expert")
    ends = rows["done"].nonzero().flatten()
    return index_rows(rows, slice(0, int(ends[N_EPISODE - 1]) + 1))


def main(
    seed: Whole = 0,
    exp_name: str = "pendulum_gail",
    max_env_step: Count = 300_000,
    env: EnvSettings = ENV,
    eval_env_num: Count = 50,
    policy: PPOSettings = POLICY,
    collector: StepCollectorSettings = StepCollectorSettings(n_sample=2048),
    evaluator: InteractionEvaluatorSettings = InteractionEvaluatorSettings(
        n_episode=50, every_train_iter=1600, stop_value=-170
    ),
    experiment: ExperimentSettings = ExperimentSettings(),
) -> ExperimentResult:
    """Imitate an expert of Pendulum-v1, without the rewards of the environment.

    Args:
        seed: seed of everything random.
        exp_name: folder of the run in runs/.
        max_env_step: maximum number of environment steps.
        eval_env_num: number of envs that evaluate.
    """
    expert = expert_rows(env)
    agent = make_policy(env, policy, seed)
    record = Experiment.of(experiment, exp_name, agent)
    with Task(seed=seed) as task:
        envs = make_env_manager(env, seed=task.seed_for("collector"))
        eval_envs = make_env_manager(env, env_num=eval_env_num, seed=task.seed_for("evaluator"))
        gail = GAIL.for_env(envs, expert, seed=seed, learning_rate=1e-3, epochs=5)

        task.use(ContextExchanger(max_ahead=1)).use(ModelExchanger(agent))
        task.use(StepCollector.of(collector, agent, envs))
        task.use(RewardLearner(gail))
        task.use(GAEEstimator(agent))
        task.use(OnPolicyLearner(agent))
        task.use(InteractionEvaluator.of(evaluator, agent, eval_envs))
        task.use(record)
        task.use(TerminationChecker(max_env_step=max_env_step))
        task.run()
    return record.result


if __name__ == "__main__":
    run_program(main)
