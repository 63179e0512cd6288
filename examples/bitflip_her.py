"""Deep Q-learning on 30 bits that must be flipped to a goal, with hindsight experience replay."""

from typing import Literal

from dmiddleware import Task
from dmiddleware.data import HindsightReplay, TensorBuffer, TensorBufferSettings
from dmiddleware.env import EnvSettings, make_env_manager
from dmiddleware.policy import DQNPolicy, DQNSettings
from dmiddleware.program import run_program
from dmiddleware.rl import Schedule
from dmiddleware.settings import Count, Whole
from examples.bit_flipping import compute_reward, reached
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

ENV = EnvSettings("examples.bit_flipping:BitFlipping-v0", env_num=16, mode="vector")
POLICY = DQNSettings(
    model={"encoder_hidden_sizes": [256]},
    discount=0.98,
    target_update_freq=1,
    target_tau=0.05,
    eps=Schedule.linear(0.2, 0.02, decay=150_000),
    batch_size=128,
)


def make_policy(env: EnvSettings = ENV, policy: DQNSettings = POLICY, seed: int = 0) -> DQNPolicy:
    """Build a DQN policy that sees the bits and the goal."""
    return DQNPolicy.for_env(make_env_manager(env), policy, seed=seed)


def main(
    seed: Whole = 0,
    exp_name: str = "bitflip_her",
    max_env_step: Count = 300_000,
    algo: Literal["her", "dqn"] = "her",
    env: EnvSettings = ENV,
    eval_env_num: Count = 50,
    policy: DQNSettings = POLICY,
    collector: StepCollectorSettings = StepCollectorSettings(n_sample=480),
    buffer: TensorBufferSettings = TensorBufferSettings(200_000, follow_episodes=True),
    learner: OffPolicyLearnerSettings = OffPolicyLearnerSettings(update_per_collect=40),
    evaluator: InteractionEvaluatorSettings = InteractionEvaluatorSettings(
        n_episode=100, every_train_iter=2000, stop_value=-14.5
    ),
    experiment: ExperimentSettings = ExperimentSettings(),
) -> ExperimentResult:
    """Train DQN to flip 30 bits to a goal, with hindsight (her) or without (dqn).

    Args:
        seed: seed of everything random.
        exp_name: folder of the run in runs/.
        max_env_step: maximum number of environment steps.
        algo: DQN with hindsight (her) or without (dqn).
        eval_env_num: number of envs that evaluate.
    """
    agent = make_policy(env, policy, seed)
    record = Experiment.of(experiment, exp_name, agent)
    hindsight = HindsightReplay(compute_reward, compute_terminated=reached)
    transform = hindsight if algo == "her" else None
    replay = TensorBuffer.of(buffer, transform=transform, seed=seed)
    with Task(seed=seed) as task:
        envs = make_env_manager(env, seed=task.seed_for("collector"))
        eval_envs = make_env_manager(env, env_num=eval_env_num, seed=task.seed_for("evaluator"))

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
