"""Value-based algorithms on LunarLander-v3: 200 points are a landing between the flags.

``--algo`` chooses one. Those that do not explore by themselves take ε-greedy actions, and Rainbow
draws rows by their priorities; everything else is the same chain. ``--policy.compile`` compiles the
update, which takes half a minute at most and pays in long trainings.
"""

from dataclasses import replace
from typing import Annotated, Literal, get_args

from dmiddleware import Task
from dmiddleware.command_line import DefaultsBy
from dmiddleware.data import (
    PrioritySampler,
    PrioritySamplerSettings,
    TensorBuffer,
    TensorBufferSettings,
)
from dmiddleware.env import EnvSettings, make_env_manager
from dmiddleware.policy import Policy, PolicySettings, get_policy_cls
from dmiddleware.program import run_program
from dmiddleware.rl import Schedule
from dmiddleware.settings import Count, Whole
from middleware import (
    ContextExchanger,
    DataPusher,
    EpsGreedyHandler,
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
from middleware.programs import tuned_arguments

ENV = EnvSettings("LunarLander-v3", env_num=8)
Algo = Literal["dqn", "c51", "qrdqn", "iqn", "rainbow", "discrete_sac"]

POLICIES: dict[Algo, PolicySettings] = {
    algo: tuned_arguments(algo, "LunarLander-v3")["policy"] for algo in get_args(Algo)
}
"""The settings of the zoo; ``ditask train --list`` shows what they gave."""


def make_policy(
    env: EnvSettings = ENV,
    policy: PolicySettings | None = None,
    algo: Algo = "dqn",
    seed: int = 0,
) -> Policy:
    """Build the policy of an algorithm."""
    settings = policy or POLICIES[algo]
    return get_policy_cls({"type": algo}).for_env(make_env_manager(env), settings, seed=seed)


def main(
    seed: Whole = 0,
    exp_name: str = "lunarlander",
    max_env_step: Count = 400_000,
    algo: Algo = "dqn",
    env: EnvSettings = ENV,
    eval_env_num: Count = 25,
    policy: Annotated[PolicySettings | None, DefaultsBy("algo", POLICIES)] = None,
    collector: StepCollectorSettings = StepCollectorSettings(n_sample=64, random_steps=1000),
    buffer: TensorBufferSettings = TensorBufferSettings(100_000),
    sampler: PrioritySamplerSettings = PrioritySamplerSettings(
        alpha=0.5, beta=Schedule.linear(0.4, 1.0, by="progress")
    ),
    learner: OffPolicyLearnerSettings = OffPolicyLearnerSettings(update_per_collect=32),
    evaluator: InteractionEvaluatorSettings = InteractionEvaluatorSettings(
        n_episode=50, every_train_iter=3200, stop_value=235
    ),
    experiment: ExperimentSettings = ExperimentSettings(),
) -> ExperimentResult:
    """Train a value-based algorithm on LunarLander-v3 until it lands softly.

    Args:
        seed: seed of everything random.
        exp_name: folder of the run in runs/.
        max_env_step: maximum number of environment steps.
        algo: the algorithm.
        eval_env_num: number of envs that evaluate.
    """
    agent = make_policy(env, policy, algo, seed)
    draws = PrioritySampler(**vars(sampler)) if agent.cfg.priority else None
    record = Experiment(exp_name, agent, **vars(experiment))
    with Task(seed=seed) as task:
        envs = make_env_manager(env, seed=task.seed_for("collector"))
        eval_envs = make_env_manager(env, env_num=eval_env_num, seed=task.seed_for("evaluator"))
        replay = TensorBuffer(
            **vars(
                replace(buffer, sampler=draws, n_step=agent.n_step, seed=task.seed_for("buffer"))
            )
        )

        task.use(ContextExchanger()).use(ModelExchanger(agent))
        if not agent.explores:
            task.use(EpsGreedyHandler(agent))
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
