"""SAC, TD3 and TQC on Gymnasium's MuJoCo environments; ``--algo`` and ``--env.id`` choose.

The settings are those that RL Baselines3 Zoo publishes for these environments. ``--policy.compile``
compiles the update, which takes a minute and makes training about a third faster. A run that was
stopped continues with ``--resume``.
"""

from dataclasses import replace
from typing import Annotated, Literal

from dmiddleware import Task
from dmiddleware.command_line import DefaultsBy
from dmiddleware.data import TensorBuffer, TensorBufferSettings
from dmiddleware.env import EnvSettings, make_env_manager
from dmiddleware.policy import (
    Policy,
    PolicySettings,
    SACSettings,
    TD3Settings,
    TQCSettings,
    get_policy_cls,
)
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
    RunFolder,
    SnapshotSaver,
    SnapshotSaverSettings,
    StepCollector,
    StepCollectorSettings,
    TerminationChecker,
)

ENV = EnvSettings("HalfCheetah-v5", env_num=1)
Algo = Literal["sac", "td3", "tqc"]
# The zoo uses the defaults of its libraries for SAC, which are ours, and for TQC.
POLICIES: dict[Algo, PolicySettings] = {
    "sac": SACSettings(),
    "td3": TD3Settings(
        learning_rate_critic=1e-3,
        learning_rate_actor=1e-3,
        noise_sigma=0.1,
        model={"actor_hidden_sizes": [400, 300], "critic_hidden_sizes": [400, 300]},
    ),
    "tqc": TQCSettings(model={"n_critics": 2, "critic_hidden_sizes": [256, 256]}),
}


def make_policy(
    env: EnvSettings = ENV,
    policy: PolicySettings | None = None,
    algo: Algo = "sac",
    seed: int = 0,
) -> Policy:
    """Build an actor and its critics."""
    settings = policy or POLICIES[algo]
    return get_policy_cls({"type": algo}).for_env(make_env_manager(env), settings, seed=seed)


def main(
    seed: Whole = 0,
    exp_name: str = "mujoco",
    max_env_step: Count = 200_000,
    algo: Algo = "sac",
    resume: bool = False,
    env: EnvSettings = ENV,
    eval_env_num: Count = 10,
    policy: Annotated[PolicySettings | None, DefaultsBy("algo", POLICIES)] = None,
    collector: StepCollectorSettings = StepCollectorSettings(n_sample=1, random_steps=10_000),
    buffer: TensorBufferSettings = TensorBufferSettings(1_000_000),
    learner: OffPolicyLearnerSettings = OffPolicyLearnerSettings(update_per_collect=1),
    evaluator: InteractionEvaluatorSettings = InteractionEvaluatorSettings(
        n_episode=10, every_train_iter=10_000
    ),
    experiment: ExperimentSettings = ExperimentSettings(),
    snapshots: SnapshotSaverSettings = SnapshotSaverSettings(every_train_iter=20_000),
) -> ExperimentResult:
    """Train SAC, TD3 or TQC on an environment of MuJoCo.

    Args:
        seed: seed of everything random.
        exp_name: folder of the run in runs/.
        max_env_step: maximum number of environment steps.
        algo: the algorithm.
        resume: continue the run in the folder, from its newest snapshot.
        eval_env_num: number of envs that evaluate.
    """
    agent = make_policy(env, policy, algo, seed)
    replay = TensorBuffer(**vars(replace(buffer, seed=seed)))
    run = RunFolder.create(exp_name, resume=resume)
    record = Experiment(run, agent, **vars(experiment))
    saver = SnapshotSaver(run, **vars(snapshots))
    with Task(seed=seed) as task:
        envs = make_env_manager(env, seed=task.seed_for("collector"))
        eval_envs = make_env_manager(env, env_num=eval_env_num, seed=task.seed_for("evaluator"))

        task.use(ContextExchanger()).use(ModelExchanger(agent))
        task.use(StepCollector(agent, envs, **vars(collector)))
        task.use(DataPusher(replay))
        task.use(OffPolicyLearner(agent, replay, **vars(learner)))
        task.use(InteractionEvaluator(agent, eval_envs, **vars(evaluator)))
        task.use(record).use(saver)
        task.use(TerminationChecker(max_env_step=max_env_step))
        saver.resume(task)  # a new run has no snapshot
        task.run()
    return record.result


if __name__ == "__main__":
    run_program(main, make_policy=make_policy)
