"""PPO and A2C on LunarLander-v3: 200 points are a landing between the flags.

``--algo`` chooses one; the chain is the same. It needs the extra ``box2d``.
"""

from typing import Annotated, Literal, get_args

from dmiddleware import Task
from dmiddleware.command_line import DefaultsBy
from dmiddleware.env import EnvSettings, make_env_manager
from dmiddleware.policy import Policy, PolicySettings, get_policy_cls
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
from middleware.programs import tuned_arguments

ENV = EnvSettings("LunarLander-v3", env_num=16)
Algo = Literal["ppo", "a2c"]

TUNED = {algo: tuned_arguments(algo, "LunarLander-v3") for algo in get_args(Algo)}
"""The settings of the zoo; ``ditask train --list`` shows what they gave."""
POLICIES: dict[Algo, PolicySettings] = {algo: one["policy"] for algo, one in TUNED.items()}
COLLECTORS: dict[Algo, StepCollectorSettings] = {
    algo: one["collector"] for algo, one in TUNED.items()
}
MAX_ENV_STEP: dict[Algo, int] = {algo: one["max_env_step"] for algo, one in TUNED.items()}
EVALUATORS: dict[Algo, InteractionEvaluatorSettings] = {
    algo: one["evaluator"] for algo, one in TUNED.items()
}


def make_policy(
    env: EnvSettings = ENV,
    policy: PolicySettings | None = None,
    algo: Algo = "ppo",
    seed: int = 0,
) -> Policy:
    """Build the policy of an algorithm."""
    settings = policy or POLICIES[algo]
    return get_policy_cls({"type": algo}).for_env(make_env_manager(env), settings, seed=seed)


def main(
    seed: Whole = 0,
    exp_name: str = "lunarlander_onpolicy",
    max_env_step: Count | None = None,
    algo: Algo = "ppo",
    env: EnvSettings = ENV,
    eval_env_num: Count = 25,
    policy: Annotated[PolicySettings | None, DefaultsBy("algo", POLICIES)] = None,
    collector: Annotated[StepCollectorSettings | None, DefaultsBy("algo", COLLECTORS)] = None,
    evaluator: Annotated[
        InteractionEvaluatorSettings | None, DefaultsBy("algo", EVALUATORS)
    ] = None,
    experiment: ExperimentSettings = ExperimentSettings(),
) -> ExperimentResult:
    """Train an on-policy algorithm on LunarLander-v3 until it lands softly.

    Args:
        seed: seed of everything random.
        exp_name: folder of the run in runs/.
        max_env_step: maximum number of environment steps; None: that of the algorithm.
        algo: the algorithm.
        eval_env_num: number of envs that evaluate.
    """
    max_env_step = max_env_step or MAX_ENV_STEP[algo]
    agent = make_policy(env, policy, algo, seed)
    record = Experiment(exp_name, agent, **vars(experiment))
    with Task(seed=seed) as task:
        envs = make_env_manager(env, seed=task.seed_for("collector"))
        eval_envs = make_env_manager(env, env_num=eval_env_num, seed=task.seed_for("evaluator"))

        task.use(ContextExchanger(max_ahead=1)).use(ModelExchanger(agent))
        task.use(StepCollector(agent, envs, **vars(collector or COLLECTORS[algo])))
        task.use(GAEEstimator(agent))
        task.use(OnPolicyLearner(agent))
        task.use(InteractionEvaluator(agent, eval_envs, **vars(evaluator or EVALUATORS[algo])))
        task.use(record)
        task.use(TerminationChecker(max_env_step=max_env_step))
        task.run()
    return record.result


if __name__ == "__main__":
    run_program(main, make_policy=make_policy)
