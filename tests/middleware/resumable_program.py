"""A program that ``ditask resume`` continues."""

from __future__ import annotations

from dmiddleware import Task
from dmiddleware.data import TensorBuffer, TensorBufferSettings
from dmiddleware.env import EnvSettings, make_env_manager
from dmiddleware.policy import DQNPolicy, DQNSettings
from dmiddleware.program import run_program
from dmiddleware.settings import Count, Whole
from middleware import (
    ContextExchanger,
    DataPusher,
    EpsGreedyHandler,
    Experiment,
    ModelExchanger,
    OffPolicyLearner,
    RunFolder,
    SnapshotSaver,
    StepCollector,
    TerminationChecker,
)


def main(
    seed: Whole = 0,
    max_env_step: Count = 512,
    policy: DQNSettings = DQNSettings(batch_size=16, model={"encoder_hidden_sizes": [16]}),
    buffer: TensorBufferSettings = TensorBufferSettings(2_000),
    env: EnvSettings = EnvSettings("CartPole-v1", env_num=4),
    asks: bool = True,
    exp_name: str = "resumable",
    every_train_iter: Count | None = None,
) -> None:
    """Train DQN for a moment.

    Args:
        seed: seed of everything random.
        max_env_step: maximum number of environment steps.
        asks: whether the program resumes snapshots.
        exp_name: folder of the run in runs/.
        every_train_iter: updates from one snapshot to the next; None: only at the end.
    """
    agent = DQNPolicy.for_env(make_env_manager(env), policy, seed=seed)
    run = RunFolder.create(exp_name)
    saver = SnapshotSaver(run, every_train_iter=every_train_iter)
    with Task(seed=seed) as task:
        envs = make_env_manager(env, seed=task.seed_for("collector"))
        replay = TensorBuffer.of(buffer, seed=task.seed_for("buffer"))
        task.use(ContextExchanger()).use(ModelExchanger(agent))
        task.use(EpsGreedyHandler(agent)).use(StepCollector(agent, envs, n_sample=64))
        task.use(DataPusher(replay)).use(OffPolicyLearner(agent, replay, update_per_collect=2))
        task.use(Experiment(run, agent)).use(saver)
        task.use(TerminationChecker(max_env_step=max_env_step))
        if asks:
            saver.resume(task)
        task.run()


if __name__ == "__main__":
    run_program(main)
