"""The first example's training, with ledgers of all batches; started by ``ditask --main``.

It differs from :mod:`examples.cartpole_dqn` in its ledgers, in that a file ``enough`` in their
folder stops it, and in that the date of each restarted process is a minute before the last one's.
"""

from __future__ import annotations

import os
import time
import zlib
from pathlib import Path
from typing import Any

import numpy as np

from dmiddleware import Middleware, Task, middleware
from dmiddleware.data import TensorBuffer
from dmiddleware.distributed import data_parallel
from dmiddleware.env import make_env_manager
from dmiddleware.errors import RankLost
from dmiddleware.pipeline import current_node
from dmiddleware.worker import BaseLearner
from examples.cartpole_dqn import ENV, make_policy
from middleware import (
    ContextExchanger,
    Experiment,
    ModelExchanger,
    OffPolicyLearner,
    OnlineRLContext,
    Role,
    SnapshotSaver,
    StepCollector,
    data_pusher,
    eps_greedy_handler,
    interaction_evaluator,
    termination_checker,
)
from middleware.classic import LearnerRun
from tests.faults.ledger import Writer
from tests.faults.training_faults import ENV_STEPS, FOLDER, GROUP_S, SEED, SNAPSHOT_EVERY


def batch_recorder(write: Writer) -> Middleware[OnlineRLContext]:
    """Record each batch where it is collected and where it is learned from."""

    @middleware(reads=("trajectories",))
    def write_batch(ctx: Any) -> None:
        if ctx.trajectories is not None:
            obs = np.ascontiguousarray(ctx.trajectories.obs.numpy())
            reward = np.ascontiguousarray(ctx.trajectories.reward.numpy())
            write("batch", zlib.crc32(reward, zlib.crc32(obs)), ctx.train_iter)

    return write_batch


def stop_on_request(folder: Path) -> Middleware[OnlineRLContext]:
    """Stop the run when the test asks for it."""

    @middleware(roles=[Role.LEARNER])
    def look(ctx: Any) -> None:
        if (folder / "enough").exists():
            ctx.task.stop("the test asked for it")

    return look


def set_clock_back(seconds: float) -> None:
    """Let the date of this process be wrong, as after a restart on a host whose clock is behind."""
    right = time.time
    time.time = lambda: right() - seconds


def main() -> None:
    """Train as one node of the run."""
    folder, seed = Path(os.environ[FOLDER]), int(os.environ[SEED])
    node = current_node()
    assert node is not None, "this program is started by ditask"
    set_clock_back(60.0 * len(list(folder.glob(f"{node.node_id}-*.ledger"))))
    with Writer(folder / f"{node.node_id}-{os.getpid()}.ledger") as write:
        write("started", os.getpid(), list(node.roles))
        try:
            with data_parallel(timeout_s=GROUP_S) as rank:
                train(write, folder, seed, int(os.environ[ENV_STEPS]), rank)
        except RankLost as error:
            write("rank lost", str(error))
            raise


def train(write: Writer, folder: Path, seed: int, env_steps: int, rank: int) -> None:
    """Run the example's chain with ledgers."""
    policy = make_policy(seed=seed)
    experiment = Experiment("training", policy)
    run = experiment.run
    with Task(seed=seed, rank=rank) as task:
        collect_env = make_env_manager(ENV, seed=task.seed_for("collector"))
        eval_env = make_env_manager(ENV, env_num=8, seed=task.seed_for("evaluator"))
        buffer = TensorBuffer(60_000, seed=task.seed_for("buffer"))
        learner = LearnerRun(
            BaseLearner(policy=policy.learn_mode, tb_logger=run.tb_logger, exp_name=str(run.path))
        )
        for name in ("node.joined", "node.left", "node.rejoined"):
            task.on(name, lambda node_id, name=name, **_: write(name, node_id))
        task.use(ContextExchanger()).use(ModelExchanger(policy))
        task.use(eps_greedy_handler(policy))
        task.use(StepCollector(policy.collect_mode, collect_env, n_sample=128, random_steps=1000))
        task.use(batch_recorder(write))
        task.use(data_pusher(buffer))
        task.use(learner).use(OffPolicyLearner(learner, buffer, update_per_collect=64))
        task.use(
            interaction_evaluator(
                # Eight episodes would often choose a policy that is not the best.
                policy.eval_mode,
                eval_env,
                n_episode=40,
                every_train_iter=640,
                stop_value=1e9,
            )
        )
        task.use(experiment)
        snapshots = SnapshotSaver(run, every_train_iter=SNAPSHOT_EVERY)
        task.use(snapshots)
        task.use(stop_on_request(folder)).use(termination_checker(max_env_step=env_steps))
        snapshots.resume(task)
        write("ready")
        task.run()
    if not (folder / "enough").exists():
        write("returned", experiment.result.mean_return)
