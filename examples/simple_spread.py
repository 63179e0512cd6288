"""IPPO, MAPPO or QMIX on simple_spread of MPE2: three agents share out three landmarks.

Half of an agent's reward is minus the sum of the distances from each landmark to its nearest agent;
the other half is minus the number of agents that it collides with. An episode has 25 steps. MPE2
comes with: pip install 'dmiddleware[pettingzoo]'.
"""

from dataclasses import replace
from typing import Annotated, Literal, get_args

from dmiddleware import Task
from dmiddleware.command_line import DefaultsBy
from dmiddleware.data import TensorBuffer, TensorBufferSettings
from dmiddleware.env import EnvSettings, make_env_manager
from dmiddleware.policy import Policy, PolicySettings, get_policy_cls
from dmiddleware.program import run_program
from dmiddleware.settings import Count, Whole
from middleware import (
    ContextExchanger,
    DataPusher,
    EpsGreedyHandler,
    Experiment,
    ExperimentResult,
    ExperimentSettings,
    GAEEstimator,
    InteractionEvaluator,
    InteractionEvaluatorSettings,
    ModelExchanger,
    OffPolicyLearner,
    OffPolicyLearnerSettings,
    OnPolicyLearner,
    StepCollector,
    StepCollectorSettings,
    TerminationChecker,
)
from middleware.programs import tuned_arguments

Algo = Literal["ippo", "mappo", "qmix"]


ENV = EnvSettings("mpe2.simple_spread_v3:parallel_env", env_num=32)
TUNED = {algo: tuned_arguments(algo, str(ENV.id)) for algo in get_args(Algo)}
"""The settings of the zoo; ``ditask train --list`` shows what they gave."""
POLICIES: dict[Algo, PolicySettings] = {algo: one["policy"] for algo, one in TUNED.items()}
COLLECTORS: dict[Algo, StepCollectorSettings] = {
    algo: one["collector"] for algo, one in TUNED.items()
}


def make_policy(
    env: EnvSettings = ENV,
    policy: PolicySettings | None = None,
    algo: Algo = "mappo",
    seed: int = 0,
) -> Policy:
    """Build the policy, with parameters that all agents share."""
    settings = policy or POLICIES[algo]
    return get_policy_cls({"type": algo}).for_env(make_env_manager(env), settings, seed=seed)


def main(
    seed: Whole = 0,
    exp_name: str = "simple_spread",
    max_env_step: Count = 1_000_000,
    algo: Algo = "mappo",
    env: EnvSettings = ENV,
    eval_env_num: Count = 32,
    policy: Annotated[PolicySettings | None, DefaultsBy("algo", POLICIES)] = None,
    collector: Annotated[StepCollectorSettings | None, DefaultsBy("algo", COLLECTORS)] = None,
    buffer: TensorBufferSettings = TensorBufferSettings(200_000),
    learner: OffPolicyLearnerSettings = OffPolicyLearnerSettings(update_per_collect=8),
    evaluator: InteractionEvaluatorSettings = InteractionEvaluatorSettings(
        n_episode=64, every_train_iter=1000
    ),
    experiment: ExperimentSettings = ExperimentSettings(),
) -> ExperimentResult:
    """Train IPPO, MAPPO or QMIX on simple_spread.

    Args:
        seed: seed of everything random.
        exp_name: folder of the run in runs/.
        max_env_step: maximum number of environment steps.
        algo: the algorithm; only QMIX has a buffer and the settings of its learner.
        eval_env_num: number of envs that evaluate.
    """
    agent = make_policy(env, policy, algo, seed)
    record = Experiment(exp_name, agent, **vars(experiment))
    with Task(seed=seed) as task:
        envs = make_env_manager(env, seed=task.seed_for("collector"))
        eval_envs = make_env_manager(env, env_num=eval_env_num, seed=task.seed_for("evaluator"))

        task.use(ContextExchanger(max_ahead=1)).use(ModelExchanger(agent))
        if algo == "qmix":
            task.use(EpsGreedyHandler(agent))
        task.use(StepCollector(agent, envs, **vars(collector or COLLECTORS[algo])))
        if algo == "qmix":
            replay = TensorBuffer(**vars(replace(buffer, seed=task.seed_for("buffer"))))
            task.use(DataPusher(replay))
            task.use(OffPolicyLearner(agent, replay, **vars(learner)))
        else:
            task.use(GAEEstimator(agent))
            task.use(OnPolicyLearner(agent))
        task.use(InteractionEvaluator(agent, eval_envs, **vars(evaluator)))
        task.use(record)
        task.use(TerminationChecker(max_env_step=max_env_step))
        task.run()
    return record.result


if __name__ == "__main__":
    run_program(main, make_policy=make_policy)
