"""R2D2 on CartPole without velocities, which have to be inferred from what came before."""

from dataclasses import replace

from dmiddleware import Task
from dmiddleware.data import (
    PrioritySampler,
    PrioritySamplerSettings,
    TensorBuffer,
    TensorBufferSettings,
)
from dmiddleware.env import EnvSettings, make_env_manager
from dmiddleware.policy import R2D2Policy, R2D2Settings
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

ENV = EnvSettings("examples.memory_envs:CartPolePositions-v1", env_num=8)
POLICY = R2D2Settings(
    model={"hidden_size": 64},
    discount=0.99,
    burn_in=8,
    learning_rate=1e-3,
    target_update_freq=200,
    eps=Schedule.linear(1.0, 0.05, decay=10_000),
    batch_size=32,
)


def make_policy(env: EnvSettings = ENV, policy: R2D2Settings = POLICY, seed: int = 0) -> R2D2Policy:
    """Build a dueling Q-network on an LSTM."""
    return R2D2Policy.for_env(make_env_manager(env), policy, seed=seed)


def main(
    seed: Whole = 0,
    exp_name: str = "cartpole_memory_r2d2",
    max_env_step: Count = 120_000,
    env: EnvSettings = ENV,
    eval_env_num: Count = 30,
    policy: R2D2Settings = POLICY,
    collector: StepCollectorSettings = StepCollectorSettings(n_sample=128, random_steps=1000),
    buffer: TensorBufferSettings = TensorBufferSettings(120_000, unroll_len=16, stride=8),
    sampler: PrioritySamplerSettings = PrioritySamplerSettings(alpha=0.9, beta=0.6),
    learner: OffPolicyLearnerSettings = OffPolicyLearnerSettings(
        update_per_collect=16, learn_start=1000
    ),
    evaluator: InteractionEvaluatorSettings = InteractionEvaluatorSettings(
        n_episode=50, every_train_iter=640, stop_value=495
    ),
    experiment: ExperimentSettings = ExperimentSettings(),
) -> ExperimentResult:
    """Train R2D2 on CartPole without velocities until it is solved.

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
        replay = TensorBuffer(
            **vars(
                replace(
                    buffer,
                    sampler=PrioritySampler(**vars(sampler)),
                    burn_in=agent.burn_in,
                    start_columns=("state",),
                    seed=task.seed_for("buffer"),
                )
            )
        )

        task.use(ContextExchanger()).use(ModelExchanger(agent))
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
