"""Soft actor-critic on Pendulum-v1."""

from dataclasses import replace

from dmiddleware import Task
from dmiddleware.data import TensorBuffer, TensorBufferSettings
from dmiddleware.env import EnvSettings, make_env_manager
from dmiddleware.policy import SACPolicy, SACSettings
from dmiddleware.program import run_program
from dmiddleware.settings import Count, Whole
from middleware import (
    ContextExchanger,
    DataPusher,
    Experiment,
    ExperimentResult,
    ExperimentSettings,
    InteractionEvaluator,
    InteractionEvaluatorSettings,
    ModelExchanger,
    OffPolicyLearner,
    OffPolicyLearnerSettings,
    StepCollector,
    StepCollectorSettings,
    TerminationChecker,
)

ENV = EnvSettings("Pendulum-v1", env_num=1)
POLICY = SACSettings(learning_rate_q=1e-3, learning_rate_policy=1e-3)


def make_policy(env: EnvSettings = ENV, policy: SACSettings = POLICY, seed: int = 0) -> SACPolicy:
    """Build an actor of torques and two critics."""
    return SACPolicy.for_env(make_env_manager(env), policy, seed=seed)


def main(
    seed: Whole = 0,
    exp_name: str = "pendulum_sac",
    max_env_step: Count = 10_000,
    env: EnvSettings = ENV,
    eval_env_num: Count = 50,
    policy: SACSettings = POLICY,
    collector: StepCollectorSettings = StepCollectorSettings(n_sample=8, random_steps=256),
    buffer: TensorBufferSettings = TensorBufferSettings(10_000),
    learner: OffPolicyLearnerSettings = OffPolicyLearnerSettings(update_per_collect=8),
    evaluator: InteractionEvaluatorSettings = InteractionEvaluatorSettings(
        n_episode=50, every_train_iter=2500, stop_value=-150
    ),
    experiment: ExperimentSettings = ExperimentSettings(),
) -> ExperimentResult:
    """Train SAC on Pendulum-v1 until it swings up and stays there.

    Args:
        seed: seed of everything random.
        exp_name: folder of the run in runs/.
        max_env_step: maximum number of environment steps.
        eval_env_num: number of envs that evaluate.
    """
    agent = make_policy(env, policy, seed)
    replay = TensorBuffer(**vars(replace(buffer, seed=seed)))
    record = Experiment(exp_name, agent, **vars(experiment))
    with Task(seed=seed) as task:
        envs = make_env_manager(env, seed=task.seed_for("collector"))
        eval_envs = make_env_manager(env, env_num=eval_env_num, seed=task.seed_for("evaluator"))

        task.use(ContextExchanger()).use(ModelExchanger(agent))
        task.use(StepCollector(agent, envs, **vars(collector)))
        task.use(DataPusher(replay))
        task.use(OffPolicyLearner(agent, replay, **vars(learner)))
        task.use(InteractionEvaluator(agent, eval_envs, **vars(evaluator)))
        task.use(record)
        task.use(TerminationChecker(max_env_step=max_env_step))
        task.run()
    return record.result


if __name__ == "__main__":
    run_program(main, make_policy=make_policy)
