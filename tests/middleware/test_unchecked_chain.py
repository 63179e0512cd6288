"""A chain that nothing has checked is configured as one that was."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
import yaml
from rich.console import Console

from dmiddleware.data import TensorBuffer, load_checkpoint
from dmiddleware.env import make_env_manager
from dmiddleware.pipeline import Task
from dmiddleware.policy import DQNPolicy
from dmiddleware.schedule import Schedule
from middleware import (
    DataPusher,
    EpsGreedyHandler,
    Experiment,
    InteractionEvaluator,
    OffPolicyLearner,
    ProgressBar,
    SnapshotSaver,
    StepCollector,
    TerminationChecker,
)
from middleware.classic import OffPolicyDataFetcher, Trainer


class Unchecked(Task[Any]):
    """A task that runs its chain without a check."""

    def check(self) -> None:
        """Do nothing."""


def what_a_run_leaves(root: Path, kind: type[Task[Any]], *, classic: bool) -> dict[str, Any]:
    """Run a short training whose settings depend on the whole chain; return what it leaves."""
    envs, eval_envs = (make_env_manager("CartPole-v1", env_num=2, seed=n) for n in (0, 1))
    policy = DQNPolicy.for_env(
        envs,
        seed=0,
        model={"encoder_hidden_sizes": [16]},
        batch_size=8,
        n_step=2,
        discount=0.9,
        eps=Schedule.linear(1.0, 0.0, decay=1.0, by="progress"),
        learning_rate=Schedule.linear(1e-2, 1e-4, decay=1.0, by="progress"),
    )
    buffer = TensorBuffer(100, seed=0, n_step=2)
    experiment = Experiment("short", policy, root=root, every_env_step=16, n_fresh_episode=2)
    shown = io.StringIO()
    with kind(seed=0) as task:
        task.use(EpsGreedyHandler(policy))
        task.use(StepCollector(policy, envs, n_sample=16)).use(DataPusher(buffer))
        if classic:
            task.use(OffPolicyDataFetcher(buffer, batch_size=8)).use(Trainer(policy))
        else:
            task.use(OffPolicyLearner(policy, buffer))
        task.use(InteractionEvaluator(policy, eval_envs, n_episode=2, name="calm"))
        task.use(TerminationChecker(max_env_step=64))
        task.use(ProgressBar(console=Console(file=shown, width=200))).use(experiment)
        saver = SnapshotSaver(experiment.run)
        task.use(saver).run()
    rows = experiment.run.metrics.rows()
    config = yaml.safe_load(
        (experiment.run.path / "config.yaml").read_text().replace(str(root), "runs")
    )
    return {
        "discount": buffer.discount,
        "config": {name: config[name] for name in ("policy", "chain", "env")},
        "metrics": [
            {name: row[name] for name in row if not name.startswith(("speed/", "time"))}
            for row in rows
        ],
        "limit": "/64" in shown.getvalue(),
        "primary": "calm " in shown.getvalue(),
        "evaluations": experiment.result.evaluations,
        "parts": sorted(load_checkpoint(saver.paths[0])["parts"]),
    }


@pytest.mark.parametrize("classic", [False, True])
def test_a_run_without_a_check_is_configured_as_one_with_it(
    tmp_path: Path, *, classic: bool
) -> None:
    checked, unchecked = (
        what_a_run_leaves(tmp_path / kind.__name__, kind, classic=classic)
        for kind in (Task, Unchecked)
    )
    for name, value in checked.items():
        assert unchecked[name] == value, name
    assert checked["discount"] == 0.9
    assert checked["limit"]
    assert checked["primary"]
    assert checked["evaluations"]
    assert checked["metrics"][-1]["collect/eps"] == 0.25
    assert any("buffer" in part for part in checked["parts"])
