"""DQN on CartPole-v1 with prioritized replay, 5-step returns and a dueling network.

It differs from ``cartpole_dqn`` in the buffer's sampler and two settings of the policy.
"""

from dmiddleware import Task
from dmiddleware.data import (
    PrioritySampler,
    PrioritySamplerSettings,
    TensorBuffer,
    TensorBufferSettings,
)
from dmiddleware.env import EnvSettings, make_env_manager
from dmiddleware.policy import DQNPolicy, DQNSettings
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

ENV = EnvSettings("CartPole-v1", env_num=8)
POLICY = DQNSettings(
    n_step=5,
    model={"encoder_hidden_sizes": [128, 128], "dueling": True},
    learning_rate=2e-3,
    target_update_freq=64,
    eps=Schedule.linear(1.0, 0.04, decay=5_000),
)


def make_policy(env: EnvSettings = ENV, policy: DQNSettings = POLICY, seed: int = 0) -> DQNPolicy:
    """Build a DQN policy with a dueling network and 5-step returns."""
    return DQNPolicy.for_env(make_env_manager(env), policy, seed=seed)


def main(
    seed: Whole = 0,
    exp_name: str = "cartpole_dqn_per_nstep",
    max_env_step: Count = 60_000,
    env: EnvSettings = ENV,
    eval_env_num: Count = 30,
    policy: DQNSettings = POLICY,
    collector: StepCollectorSettings = StepCollectorSettings(n_sample=128, random_steps=1000),
    buffer: TensorBufferSettings = TensorBufferSettings(60_000),
    sampler: PrioritySamplerSettings = PrioritySamplerSettings(
        alpha=0.6, beta=Schedule.linear(0.4, 1.0, decay=20_000, by="update")
    ),
    learner: OffPolicyLearnerSettings = OffPolicyLearnerSettings(update_per_collect=64),
    evaluator: InteractionEvaluatorSettings = InteractionEvaluatorSettings(
        n_episode=50, every_train_iter=640, stop_value=495
    ),
    experiment: ExperimentSettings = ExperimentSettings(),
) -> ExperimentResult:
    """Train DQN on CartPole-v1 with prioritized replay and 5-step returns.

    Args:
        seed: seed of everything random.
        exp_name: folder of the run in runs/.
        max_env_step: maximum number of environment steps.
        eval_env_num: number of envs that evaluate.
    """
    agent = make_policy(env, policy, seed)
    record = Experiment.of(experiment, exp_name, agent)
    with Task(seed=seed) as task:
        envs = make_env_manager(env, seed=task.seed_for("collector"))
        eval_envs = make_env_manager(env, env_num=eval_env_num, seed=task.seed_for("evaluator"))
        replay = TensorBuffer.of(
            buffer, sampler=PrioritySampler.of(sampler), seed=task.seed_for("buffer")
        )

        task.use(ContextExchanger()).use(ModelExchanger(agent))
        task.use(EpsGreedyHandler(agent))
        task.use(StepCollector.of(collector, agent, envs))
        task.use(DataPusher(replay))
        task.use(OffPolicyLearner.of(learner, agent, replay))
        task.use(InteractionEvaluator.of(evaluator, agent, eval_envs))
        task.use(record)
        task.use(TerminationChecker(max_env_step=max_env_step))
        task.run()
    return record.result


if __name__ == "__main__":
    run_program(main)
