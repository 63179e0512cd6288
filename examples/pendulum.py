"""TD3, DDPG and TQC on Pendulum-v1; ``--algo`` chooses one. SAC is in ``pendulum_sac``."""

from dataclasses import replace
from typing import Annotated, Literal

from dmiddleware import Task
from dmiddleware.command_line import DefaultsBy
from dmiddleware.data import TensorBuffer, TensorBufferSettings
from dmiddleware.env import EnvSettings, make_env_manager
from dmiddleware.policy import (
    DDPGSettings,
    Policy,
    PolicySettings,
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
    StepCollector,
    StepCollectorSettings,
    TerminationChecker,
)

ENV = EnvSettings("Pendulum-v1", env_num=1)
Algo = Literal["td3", "ddpg", "tqc"]
POLICIES: dict[Algo, PolicySettings] = {
    "td3": TD3Settings(),
    # The noise of the paper.
    "ddpg": DDPGSettings(noise="ou", noise_theta=0.15, noise_sigma=0.2),
    # Critics that are smaller than those of the paper.
    "tqc": TQCSettings(
        learning_rate_q=1e-3,
        learning_rate_policy=1e-3,
        model={"n_critics": 2, "critic_hidden_sizes": [256, 256]},
    ),
}


def make_policy(
    env: EnvSettings = ENV,
    policy: PolicySettings | None = None,
    algo: Algo = "td3",
    seed: int = 0,
) -> Policy:
    """Build an actor of torques and its critics."""
    settings = policy or POLICIES[algo]
    return get_policy_cls({"type": algo}).for_env(make_env_manager(env), settings, seed=seed)


def main(
    seed: Whole = 0,
    exp_name: str = "pendulum",
    max_env_step: Count = 10_000,
    algo: Algo = "td3",
    env: EnvSettings = ENV,
    eval_env_num: Count = 50,
    policy: Annotated[PolicySettings | None, DefaultsBy("algo", POLICIES)] = None,
    collector: StepCollectorSettings = StepCollectorSettings(n_sample=8, random_steps=256),
    buffer: TensorBufferSettings = TensorBufferSettings(10_000),
    learner: OffPolicyLearnerSettings = OffPolicyLearnerSettings(update_per_collect=8),
    evaluator: InteractionEvaluatorSettings = InteractionEvaluatorSettings(
        n_episode=50, every_train_iter=2500, stop_value=-150
    ),
    experiment: ExperimentSettings = ExperimentSettings(),
) -> ExperimentResult:
    """Train TD3, DDPG or TQC on Pendulum-v1 until it swings up and stays there.

    Args:
        seed: seed of everything random.
        exp_name: folder of the run in runs/.
        max_env_step: maximum number of environment steps.
        algo: the algorithm.
        eval_env_num: number of envs that evaluate.
    """
    agent = make_policy(env, policy, algo, seed)
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
