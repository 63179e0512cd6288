"""PPO and A2C on LunarLander-v3: 200 points are a landing between the flags.

``--algo`` chooses one; the chain is the same. It needs the extra ``box2d``.
"""

from typing import Annotated, Literal

from dmiddleware import Task
from dmiddleware.command_line import DefaultsBy
from dmiddleware.env import EnvSettings, make_env_manager
from dmiddleware.policy import A2CSettings, Policy, PolicySettings, PPOSettings, get_policy_cls
from dmiddleware.program import run_program
from dmiddleware.rl import Schedule
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

ENV = EnvSettings("LunarLander-v3", env_num=16)
Algo = Literal["ppo", "a2c"]

POLICIES: dict[Algo, PPOSettings | A2CSettings] = {
    "ppo": PPOSettings(
        discount=0.999,
        gae_lambda=0.98,
        entropy_weight=0.01,
        batch_size=64,
        epoch_per_collect=4,
    ),
    "a2c": A2CSettings(
        discount=0.995,
        gae_lambda=0.98,
        adv_norm=True,
        obs_norm=True,
        reward_norm=True,
        learning_rate=Schedule.linear(3e-3, 0.0, by="progress"),
        batch_size=1024,
    ),
}
COLLECTORS: dict[Algo, StepCollectorSettings] = {
    "ppo": StepCollectorSettings(n_sample=16_384),
    "a2c": StepCollectorSettings(n_sample=1024),
}
MAX_ENV_STEP: dict[Algo, int] = {"ppo": 1_500_000, "a2c": 5_000_000}
EVALUATORS: dict[Algo, InteractionEvaluatorSettings] = {
    "ppo": InteractionEvaluatorSettings(n_episode=50, every_train_iter=2048, stop_value=240),
    "a2c": InteractionEvaluatorSettings(n_episode=50, every_train_iter=50, stop_value=240),
}
"""Evaluations after 33,000 and 51,000 env steps each."""


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
