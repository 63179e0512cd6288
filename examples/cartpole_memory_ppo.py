"""Recurrent PPO on CartPole without velocities, which have to be inferred from what came before."""

from dmiddleware import Task
from dmiddleware.env import EnvSettings, make_env_manager
from dmiddleware.policy import RecurrentPPOPolicy, RecurrentPPOSettings
from dmiddleware.program import run_program
from dmiddleware.settings import Count, Whole
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
    StepCollector,
    StepCollectorSettings,
    TerminationChecker,
)

ENV = EnvSettings("examples.memory_envs:CartPolePositions-v1", env_num=16)
POLICY = RecurrentPPOSettings(
    model={"hidden_size": 64},
    obs_norm=True,
    reward_norm=True,
    learning_rate=1e-3,
    batch_size=256,
    epoch_per_collect=8,
)


def make_policy(
    env: EnvSettings = ENV, policy: RecurrentPPOSettings = POLICY, seed: int = 0
) -> RecurrentPPOPolicy:
    """Build an actor and a critic on an LSTM."""
    return RecurrentPPOPolicy.for_env(make_env_manager(env), policy, seed=seed)


def main(
    seed: Whole = 0,
    exp_name: str = "cartpole_memory_ppo",
    max_env_step: Count = 200_000,
    env: EnvSettings = ENV,
    eval_env_num: Count = 30,
    policy: RecurrentPPOSettings = POLICY,
    collector: StepCollectorSettings = StepCollectorSettings(n_sample=1024),
    evaluator: InteractionEvaluatorSettings = InteractionEvaluatorSettings(
        n_episode=50, every_train_iter=320, stop_value=495
    ),
    experiment: ExperimentSettings = ExperimentSettings(),
) -> ExperimentResult:
    """Train recurrent PPO on CartPole without velocities until it is solved.

    Args:
        seed: seed of everything random.
        exp_name: folder of the run in runs/.
        max_env_step: maximum number of environment steps.
        eval_env_num: number of envs that evaluate.
    """
    agent = make_policy(env, policy, seed)
    record = Experiment(exp_name, agent, **vars(experiment))
    with Task(seed=seed) as task:
        envs = make_env_manager(env, seed=task.seed_for("collector"))
        eval_envs = make_env_manager(env, env_num=eval_env_num, seed=task.seed_for("evaluator"))

        task.use(ContextExchanger(max_ahead=1)).use(ModelExchanger(agent))
        task.use(StepCollector(agent, envs, **vars(collector)))
        task.use(GAEEstimator(agent))
        task.use(OnPolicyLearner(agent))
        task.use(InteractionEvaluator(agent, eval_envs, **vars(evaluator)))
        task.use(record)
        task.use(TerminationChecker(max_env_step=max_env_step))
        task.run()
    return record.result


if __name__ == "__main__":
    run_program(main, make_policy=make_policy)
