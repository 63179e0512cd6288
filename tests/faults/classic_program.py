"""A classic parallel training with ledgers of its tasks and data; started by ``ditask --main``.

The commander ends the training when a file ``enough`` is in the folder of the ledgers.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch

from dmiddleware.pipeline import current_node
from dmiddleware.worker import Coordinator
from dmiddleware.worker.commander import NaiveCommander
from dmiddleware.worker.commander.base import COMMANDER_REGISTRY
from middleware.classic import RouterCollector, RouterLearner
from tests.faults.ledger import Writer
from tests.faults.training_faults import FOLDER

_LOOK_S = 0.2


@COMMANDER_REGISTRY.register("one_learner_task")
class OneLearnerTask(NaiveCommander):
    """Ends its one learner task when the test asks for it, and then the training."""

    has_learned = False

    def get_learner_task(self) -> Any:
        return super().get_learner_task() if self._n_learner_tasks == 0 else None

    def get_collector_task(self) -> Any:
        task = None if self.has_learned else super().get_collector_task()
        # A coordinator that continues from a saved state must not give an id twice.
        return task and {**task, "task_id": f"collector_task_{uuid.uuid4().hex}"}

    def judge_learner_finish(self, task_id: str, info: Mapping[str, Any]) -> bool:
        return (Path(os.environ[FOLDER]) / "enough").exists()

    def finish_learner_task(self, task_id: str, result: Mapping[str, Any]) -> str | None:
        self.has_learned = True
        return super().finish_learner_task(task_id, result)

    def finish_collector_task(self, task_id: str, result: Mapping[str, Any]) -> bool:
        super().finish_collector_task(task_id, result)
        return self.has_learned

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "has_learned": self.has_learned}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self.has_learned = state["has_learned"]


class RecordedCollector(RouterCollector):
    """Records its tasks and samples."""

    def __init__(self, write: Writer) -> None:
        super().__init__()
        self._write = write

    def deal_with_collector_start(
        self, task_info: Mapping[str, Any], attempt: int = 0
    ) -> dict[str, Any]:
        self._write("task", task_info["task_id"], attempt)
        return super().deal_with_collector_start(task_info, attempt)

    def send_metadata(self, metadata: Mapping[str, Any]) -> None:
        super().send_metadata(metadata)
        self._write("sample", metadata.get("data_id", ""))


class RecordedLearner(RouterLearner):
    """Records its tasks and batches."""

    def __init__(self, write: Writer) -> None:
        super().__init__()
        self._write = write

    def deal_with_learner_start(
        self, task_info: Mapping[str, Any], attempt: int = 0
    ) -> dict[str, Any]:
        self._write("task", task_info["task_id"], attempt)
        return super().deal_with_learner_start(task_info, attempt)

    def get_data(self, batch_size: int) -> list[Callable[[], Any]]:
        loads = super().get_data(batch_size)
        self._write("batch", [load()["data_id"] for load in loads])
        return loads


def config(folder: Path) -> dict[str, Any]:
    """Return the coordinator's config."""
    env = {"id": "CartPole-v1", "env_num": 4, "manager": {"episode_num": 1000}, "seed": 0}
    policy = {
        "type": "dqn",
        "model": {"obs_shape": 4, "action_shape": 2, "encoder_hidden_sizes": [32]},
        "learn": {
            "batch_size": 16,
            "learner": {
                "type": "base",
                "hook": {"save_ckpt_after_run": False},
            },
        },
        "collect": {"n_sample": 16, "collector": {"type": "zergling"}},
        "other": {
            "replay_buffer": {"type": "naive", "replay_buffer_size": 2000},
            "commander": {"type": "one_learner_task", "collector_task_space": 2},
        },
    }
    coordinator = {
        "type": "router",
        "state_path": str(folder / "coordinator.safetensors"),
        "state_every_s": 0.5,
        "task_silence_s": 10.0,
        # More than the test kills workers of one task.
        "max_attempts": 20,
    }
    main = {"exp_name": str(folder / "exp"), "env": env, "policy": policy}
    return {"main": main, "system": {"coordinator": coordinator}}


def coordinate(write: Writer, folder: Path) -> None:
    """Run the coordinator until the training is over."""
    with Coordinator(config(folder)) as coordinator:
        while not coordinator.wait(_LOOK_S):
            write("counters", coordinator.counters)
        write("ended", coordinator.system_shutdown_flag, coordinator.counters)


def main() -> None:
    """Take part in the training as one node of the run."""
    torch.set_num_threads(1)
    folder = Path(os.environ[FOLDER])
    node = current_node()
    assert node is not None, "this program is started by ditask"
    (role,) = node.roles
    with Writer(folder / f"{node.node_id}-{os.getpid()}.ledger") as write:
        write("started", os.getpid(), role)
        if role == "coordinator":
            coordinate(write, folder)
            return
        create = partial(RecordedLearner if role == "learner" else RecordedCollector, write)
        with create() as worker:
            worker.join()
