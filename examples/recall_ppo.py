"""Recurrent PPO on the recall of a cue, which no policy without a memory can solve."""

from typing import Annotated, Literal

from dmiddleware import Task
from dmiddleware.command_line import DefaultsBy
from dmiddleware.env import EnvSettings, make_env_manager
from dmiddleware.policy import PPOPolicy, PPOSettings, RecurrentPPOPolicy, RecurrentPPOSettings
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

ENV = EnvSettings("examples.memory_envs:Recall-v0", env_num=16)
Memory = Literal["lstm", "gru", "none"]


SIZE = {"hidden_size": 32}
MEMORY_FREE = PPOSettings(
    discount=0.9, learning_rate=5e-3, entropy_weight=0.01, batch_size=192, epoch_per_collect=4
)
POLICIES: dict[Memory, PPOSettings] = {
    "lstm": RecurrentPPOSettings(**vars(MEMORY_FREE) | {"model": {"core": "lstm", **SIZE}}),
    "gru": RecurrentPPOSettings(**vars(MEMORY_FREE) | {"model": {"core": "gru", **SIZE}}),
    "none": MEMORY_FREE,
}


def make_policy(
    env: EnvSettings = ENV,
    policy: PPOSettings | None = None,
    memory: Memory = "lstm",
    seed: int = 0,
) -> PPOPolicy:
    """Build an actor and a critic, on a memory or without one."""
    policy_cls = PPOPolicy if memory == "none" else RecurrentPPOPolicy
    return policy_cls.for_env(make_env_manager(env), policy or POLICIES[memory], seed=seed)


def main(
    seed: Whole = 0,
    exp_name: str = "recall_ppo",
    max_env_step: Count = 60_000,
    memory: Memory = "lstm",
    env: EnvSettings = ENV,
    eval_env_num: Count = 50,
    policy: Annotated[PPOSettings | None, DefaultsBy("memory", POLICIES)] = None,
    collector: StepCollectorSettings = StepCollectorSettings(n_sample=768),
    evaluator: InteractionEvaluatorSettings = InteractionEvaluatorSettings(
        n_episode=100, every_train_iter=160, stop_value=0.99
    ),
    experiment: ExperimentSettings = ExperimentSettings(),
) -> ExperimentResult:
    """Train PPO on the recall of one cue of four.

    Args:
        seed: seed of everything random.
        exp_name: folder of the run in runs/.
        max_env_step: maximum number of environment steps.
        memory: the recurrent core; none: the policy has no memory.
        eval_env_num: number of envs that evaluate.
    """
    agent = make_policy(env, policy, memory, seed)
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
