"""Deep Q-learning from demonstrations on CartPole-v1: a few episodes of an expert come first.

The expert is the DQN policy of ``examples.cartpole_dqn``.
"""

import torch

from dmiddleware import Task
from dmiddleware.data import Batch, MixedReplay, TensorBuffer, TensorBufferSettings
from dmiddleware.env import EnvSettings, make_env_manager
from dmiddleware.policy import DQfDPolicy, DQfDSettings, DQNSettings
from dmiddleware.program import run_program
from dmiddleware.rl import Schedule
from dmiddleware.settings import Count, Whole
from dmiddleware.tree import with_columns
from examples import cartpole_dqn, cartpole_sqil
from middleware import (
    DataPusher,
    EpsGreedyHandler,
    Experiment,
    ExperimentResult,
    ExperimentSettings,
    InteractionEvaluator,
    InteractionEvaluatorSettings,
    OffPolicyLearner,
    OffPolicyLearnerSettings,
    StepCollector,
    StepCollectorSettings,
    TerminationChecker,
)

ENV = cartpole_dqn.ENV
POLICY = DQfDSettings(
    model={"encoder_hidden_sizes": [128, 128], "norm": "layer"},
    learning_rate=1e-3,
    target_update_freq=64,
    batch_size=128,
    n_step=5,
    eps=Schedule.linear(0.1, 0.02, decay=5_000),
)


def make_policy(env: EnvSettings = ENV, policy: DQfDSettings = POLICY, seed: int = 0) -> DQfDPolicy:
    """Build the policy that learns from the expert."""
    return DQfDPolicy.for_env(make_env_manager(env), policy, seed=seed)


def learn_from(demonstrations: Batch, policy: DQfDPolicy, n_updates: int, seed: int) -> None:
    """Make updates from demonstrations alone, before the policy acts (algorithm 1)."""
    n_rows = demonstrations["reward"].numel()
    shown = TensorBuffer(n_rows, n_step=policy.n_step, discount=policy.discount, seed=seed)
    shown.push(with_columns(demonstrations, is_expert=torch.ones_like(demonstrations["done"])))
    for _ in range(n_updates):
        policy.learn_mode.forward(shown.sample(policy.cfg.batch_size))


def main(
    seed: Whole = 0,
    exp_name: str = "cartpole_dqfd",
    max_env_step: Count = 60_000,
    n_demonstration: Count = 2_000,
    n_update_before: Whole = 1_000,
    env: EnvSettings = ENV,
    eval_env_num: Count = 30,
    expert: DQNSettings = cartpole_dqn.POLICY,
    policy: DQfDSettings = POLICY,
    share: float = 0.25,
    collector: StepCollectorSettings = StepCollectorSettings(n_sample=128),
    buffer: TensorBufferSettings = TensorBufferSettings(60_000),
    learner: OffPolicyLearnerSettings = OffPolicyLearnerSettings(update_per_collect=32),
    evaluator: InteractionEvaluatorSettings = InteractionEvaluatorSettings(
        n_episode=30, every_train_iter=320, stop_value=475, stop_evaluations=3
    ),
    experiment: ExperimentSettings = ExperimentSettings(),
) -> ExperimentResult:
    """Learn CartPole-v1 from a few episodes of an expert that was trained with DQN, and by play.

    Args:
        seed: seed of everything random.
        exp_name: folder of the run in runs/.
        max_env_step: maximum number of environment steps, of the expert and of the learner.
        n_demonstration: steps of the expert that are shown.
        n_update_before: updates from these alone, before the first step.
        eval_env_num: number of envs that evaluate.
        share: which share of each later sample is shown by the expert.
    """
    trained = cartpole_dqn.main(
        seed, f"{exp_name}_expert", max_env_step, env, policy=expert, experiment=experiment
    )
    teacher = cartpole_dqn.make_policy(env, expert, seed)
    teacher.collect_mode.load_state_dict(trained.load_best())

    agent = make_policy(env, policy, seed)
    rows = agent.train_batch(cartpole_sqil.expert_rows(teacher, env, n_demonstration, seed))
    learn_from(rows, agent, n_update_before, seed)
    record = Experiment.of(experiment, exp_name, agent)
    with Task(seed=seed) as task:
        envs = make_env_manager(env, seed=task.seed_for("collector"))
        eval_envs = make_env_manager(env, env_num=eval_env_num, seed=task.seed_for("evaluator"))
        own = TensorBuffer.of(buffer, seed=task.seed_for("buffer"))
        replay = MixedReplay(own, rows, share=share)
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
