"""Two policies that learn in one run, each in a part of its own, started by ``ditask --main``."""

from __future__ import annotations

from dmiddleware import Task
from dmiddleware.data import TensorBuffer
from dmiddleware.env import make_env_manager
from dmiddleware.policy import DQNPolicy, PPOPolicy
from dmiddleware.settings import Count
from middleware import (
    ContextExchanger,
    DataPusher,
    EpsGreedyHandler,
    Experiment,
    GAEEstimator,
    InteractionEvaluator,
    InteractionEvaluatorSettings,
    ModelExchanger,
    OffPolicyLearner,
    OnPolicyLearner,
    RunFolder,
    SnapshotSaver,
    StepCollector,
    TerminationChecker,
)

SMALL = {"encoder_hidden_sizes": [8]}


def main(max_train_iter: Count = 2000) -> None:
    """Learn CartPole with DQN, and Pendulum with PPO, until an evaluation after an update.

    Args:
        max_train_iter: updates of DQN at most.
    """
    envs, games = ({name: make_env_manager(name, env_num=2, seed=seed) for name in
                    ("CartPole-v1", "Pendulum-v1")} for seed in (0, 1))  # fmt: skip
    red = DQNPolicy.for_env(envs["CartPole-v1"], model=SMALL, batch_size=8)
    blue = PPOPolicy.for_env(envs["Pendulum-v1"], model=SMALL, batch_size=16, epoch_per_collect=1)
    buffer = TensorBuffer(500)
    run = RunFolder.create("parts")
    snapshots = SnapshotSaver(run)
    with Task(seed=0) as task:
        for name, policy in (("red", red), ("blue", blue)):
            task.use(ContextExchanger(name=name)).use(ModelExchanger(policy, name=name))
        # Its second evaluation ends the run.
        judge = InteractionEvaluatorSettings(
            n_episode=2, every_train_iter=5, stop_value=0, stop_evaluations=2
        )
        task.use(InteractionEvaluator.of(judge, red, games["CartPole-v1"], name="red"))
        task.use(InteractionEvaluator(blue, games["Pendulum-v1"], n_episode=2, name="blue"))
        task.use(EpsGreedyHandler(red, name="red"))
        task.use(StepCollector(red, envs["CartPole-v1"], n_sample=16, name="red"))
        task.use(DataPusher(buffer, name="red")).use(OffPolicyLearner(red, buffer, name="red"))
        task.use(StepCollector(blue, envs["Pendulum-v1"], n_sample=32, name="blue"))
        task.use(GAEEstimator(blue, name="blue")).use(OnPolicyLearner(blue, name="blue"))
        task.use(TerminationChecker(max_train_iter=max_train_iter, name="red"))
        task.use(Experiment(run, {"red": red, "blue": blue}, n_fresh_episode=2)).use(snapshots)
        snapshots.resume(task)
        task.run()
