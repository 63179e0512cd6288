"""Folders that somebody removes while a run lasts: it survives, or ends with the reason."""

from __future__ import annotations

from pathlib import Path

import pytest

from dmiddleware.launch import join_run
from dmiddleware.launch.hosts.interface import HostEvent
from dmiddleware.launch.hosts.local import LocalHost
from dmiddleware.launch.plan import NodeConfig, NodePlan, RankPlan, RunPlan
from dmiddleware.launch.supervisor import SupervisorOptions
from tests.dmiddleware.launch.scripted_host import ScriptedHost, failed, finished, supervised

SOCKET = "ipc:///gone/0"


def config(plan: NodePlan, run_dir: Path) -> NodeConfig:
    run = RunPlan(nodes=(plan,))
    return NodeConfig(run=run, main="program.main", package="", run_dir=str(run_dir))


@pytest.mark.parametrize(
    "plan",
    [
        NodePlan(0, listen=SOCKET),
        NodePlan(1, dial=("tcp://127.0.0.1:9", SOCKET)),
        NodePlan(2, ranks=RankPlan(0, 2, 1)),
    ],
    ids=["listens", "dials", "a rank"],
)
def test_no_process_starts_whose_sockets_have_no_folder(tmp_path: Path, plan: NodePlan) -> None:
    with LocalHost() as host, pytest.raises(OSError, match=r"sockets.*was removed.*TMPDIR"):
        host.start(config(plan, tmp_path / "gone"), n_restarts=1)


def test_no_process_starts_in_a_working_directory_that_was_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    with LocalHost() as host, pytest.raises(OSError, match="working directory was removed"):
        host.start(config(NodePlan(0), tmp_path), n_restarts=1)


def test_a_launcher_whose_working_directory_was_removed_still_restarts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class RemovingHost(ScriptedHost):
        def kill(self, node_id: int) -> None:
            raise AssertionError

        def start(self, config: NodeConfig, *, n_restarts: int) -> None:
            assert config.log == str(tmp_path / "gone" / "node-0.log")
            super().start(config, n_restarts=n_restarts)
            if gone.exists():
                gone.rmdir()

    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    script: list[tuple[float, HostEvent | float]] = [(5.0, event) for event in failed(0)]
    host = RemovingHost([*script, *((20.0, event) for event in finished(0))])
    options = SupervisorOptions(on_failure="restart", log_dir=Path())
    code, _ = supervised(host, [NodePlan(0)], options)
    assert (code, host.starts) == (0, [0, 0])


def test_a_node_does_without_shared_memory_whose_folder_was_removed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    plan = RunPlan(nodes=(NodePlan(0),), shared_memory=str(tmp_path / "gone"))
    assert join_run(plan, 0, lambda: "ran") == "ran"
    assert "was removed" in caplog.text
