"""Proximal policy optimization on Gymnasium's MuJoCo environments; ``--env.id`` chooses one.

The settings are those that RL Baselines3 Zoo publishes for each environment. A run that was stopped
continues with ``--resume``.
"""

from typing import Annotated

from dmiddleware import Task
from dmiddleware.command_line import DefaultsBy
from dmiddleware.env import EnvSettings, make_env_manager
from dmiddleware.policy import PPOPolicy, PPOSettings
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
    RunFolder,
    SnapshotSaver,
    SnapshotSaverSettings,
    StepCollector,
    StepCollectorSettings,
    TerminationChecker,
)
from middleware.programs import tuned_arguments

ENV = EnvSettings("HalfCheetah-v5", env_num=1)
TUNED = {env_id: tuned_arguments("ppo", env_id) for env_id in ("HalfCheetah-v5", "Hopper-v5")}
"""The settings of our zoo; ``ditask train --list`` shows what they gave."""
POLICIES: dict[str, PPOSettings] = {env_id: one["policy"] for env_id, one in TUNED.items()}
EVALUATORS: dict[str, InteractionEvaluatorSettings] = {
    env_id: one["evaluator"] for env_id, one in TUNED.items()
}
"""Evaluations after 49,664 env steps each, for 20 of them in a run."""


def make_policy(
    env: EnvSettings = ENV, policy: PPOSettings | None = None, seed: int = 0
) -> PPOPolicy:
    """Build an actor and a critic with two hidden layers of 256 units each."""
    settings = policy or POLICIES[str(env.id)]
    return PPOPolicy.for_env(make_env_manager(env), settings, seed=seed)


def main(
    seed: Whole = 0,
    exp_name: str = "mujoco_ppo",
    max_env_step: Count = 1_000_000,
    resume: bool = False,
    env: EnvSettings = ENV,
    eval_env_num: Count = 10,
    policy: Annotated[PPOSettings | None, DefaultsBy("env.id", POLICIES)] = None,
    collector: StepCollectorSettings = StepCollectorSettings(n_sample=512),
    evaluator: Annotated[
        InteractionEvaluatorSettings | None, DefaultsBy("env.id", EVALUATORS)
    ] = None,
    experiment: ExperimentSettings = ExperimentSettings(),
    snapshots: SnapshotSaverSettings = SnapshotSaverSettings(every_train_iter=20_000),
) -> ExperimentResult:
    """Train PPO on an environment of MuJoCo.

    Args:
        seed: seed of everything random.
        exp_name: folder of the run in runs/.
        max_env_step: maximum number of environment steps.
        resume: continue the run in the folder, from its newest snapshot.
        eval_env_num: number of envs that evaluate.
    """
    agent = make_policy(env, policy, seed)
    run = RunFolder.create(exp_name, resume=resume)
    record = Experiment(run, agent, **vars(experiment))
    saver = SnapshotSaver(run, **vars(snapshots))
    with Task(seed=seed) as task:
        envs = make_env_manager(env, seed=task.seed_for("collector"))
        eval_envs = make_env_manager(env, env_num=eval_env_num, seed=task.seed_for("evaluator"))

        task.use(ContextExchanger(max_ahead=1)).use(ModelExchanger(agent))
        task.use(StepCollector(agent, envs, **vars(collector)))
        task.use(GAEEstimator(agent))
        task.use(OnPolicyLearner(agent))
        task.use(
            InteractionEvaluator(agent, eval_envs, **vars(evaluator or EVALUATORS[str(env.id)]))
        )
        task.use(record).use(saver)
        task.use(TerminationChecker(max_env_step=max_env_step))
        saver.resume(task)  # a new run has no snapshot
        task.run()
    return record.result


if __name__ == "__main__":
    run_program(main, make_policy=make_policy)
