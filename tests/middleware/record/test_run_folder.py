import contextvars
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from easydict import EasyDict

from dmiddleware.errors import ConfigError
from dmiddleware.pipeline import CurrentNode, running_as
from middleware.record.run_folder import RunFolder


def test_folder_is_made_below_the_root(tmp_path: Path) -> None:
    run = RunFolder.create("cartpole", root=tmp_path / "runs")
    assert run.path == tmp_path / "runs" / "cartpole"
    assert run.path.is_dir()
    assert run.name == "cartpole"
    assert run.ckpt_dir.is_dir()
    assert run.ckpt_dir.parent == run.path


def test_name_that_is_taken_gets_the_next_free_number(tmp_path: Path) -> None:
    names = [RunFolder.create("a", root=tmp_path).name for _ in range(3)]
    assert names == ["a", "a-2", "a-3"]


def test_a_resumed_run_keeps_its_folder(tmp_path: Path) -> None:
    names = [RunFolder.create("a", root=tmp_path, resume=resume).name for resume in (True, True)]
    assert names == ["a", "a"]
    RunFolder.create("a", root=tmp_path)
    assert RunFolder.create("a", root=tmp_path, resume=True).name == "a"


def test_earlier_run_is_left_alone(tmp_path: Path) -> None:
    first = RunFolder.create("a", root=tmp_path)
    first.save_config({"seed": 1})
    second = RunFolder.create("a", root=tmp_path)
    second.save_config({"seed": 2})
    assert yaml.safe_load((first.path / "config.yaml").read_text()) == {"seed": 1}


def test_name_may_be_a_path_below_the_root(tmp_path: Path) -> None:
    assert RunFolder.create("dqn/seed0", root=tmp_path).path == tmp_path / "dqn" / "seed0"


@pytest.mark.parametrize("name", ["", "  ", ".", "..", "../outside", "/tmp/outside", "a/../../b"])
def test_name_that_leaves_the_root_is_rejected(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match=r"exp_name must be a folder name.*set root"):
        RunFolder.create(name, root=tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_config_is_plain_yaml(tmp_path: Path) -> None:
    run = RunFolder.create("a", root=tmp_path)
    cfg = EasyDict(
        lr=1e-3,
        hidden=(128, 64),
        name="dqn",
        path=Path("x"),
        n=np.int64(3),
        off=None,
        cls=RunFolder,
    )
    cfg.model = {"dueling": True, "scale": np.array([1.0, 2.0])}
    loaded = yaml.safe_load(run.save_config(cfg).read_text())
    assert loaded == {
        "lr": 1e-3,
        "hidden": [128, 64],
        "name": "dqn",
        "path": "x",
        "n": 3,
        "off": None,
        "cls": "middleware.record.run_folder.RunFolder",
        "model": {"dueling": True, "scale": [1.0, 2.0]},
    }
    assert [path.name for path in run.path.iterdir()] == ["config.yaml"]


def test_writer_is_opened_on_demand_and_closed_twice(tmp_path: Path) -> None:
    with RunFolder.create("a", root=tmp_path) as run:
        assert not (run.path / "tb").exists()
        run.tb_logger.add_scalar("x", 1.0, 1)
    run.close()
    events = list((run.path / "tb").glob("events.*"))
    assert len(events) == 1
    assert events[0].stat().st_size > 0


def create_as(root: Path, *, role: str, run_token: str = "run 1") -> RunFolder:
    """Make the folder as a process of a run would."""
    node = CurrentNode(roles=(role,), run_token=run_token)
    with running_as(node):
        return RunFolder.create("a", root=root)


def test_all_processes_of_a_run_share_one_folder(tmp_path: Path) -> None:
    folders = [create_as(tmp_path, role=role) for role in ("collector", "learner", "evaluator")]
    assert {run.path for run in folders} == {tmp_path / "a"}
    assert [run.is_lead for run in folders] == [False, True, False]
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_processes_that_start_at_once_share_one_folder(tmp_path: Path) -> None:
    ready = threading.Barrier(8)

    def create(_: int) -> Path:
        ready.wait(10)
        return create_as(tmp_path, role="collector").path

    with ThreadPoolExecutor(8) as pool:
        assert set(pool.map(create, range(8))) == {tmp_path / "a"}
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_processes_of_another_run_get_another_folder(tmp_path: Path) -> None:
    RunFolder.create("a", root=tmp_path)
    first = [create_as(tmp_path, role="learner", run_token="1").name for _ in range(2)]
    second = [create_as(tmp_path, role="learner", run_token="2").name for _ in range(2)]
    assert (first, second) == (["a-2", "a-2"], ["a-3", "a-3"])


def test_a_program_that_trains_twice_gets_two_folders(tmp_path: Path) -> None:
    for _ in range(2):
        with running_as(CurrentNode(run_token="run 1")):
            names = [RunFolder.create("a", root=tmp_path).name for _ in range(2)]
        assert names == ["a", "a-2"]


def test_only_the_learner_writes_files_that_exist_once(tmp_path: Path) -> None:
    learner, collector = (create_as(tmp_path, role=role) for role in ("learner", "collector"))
    collector.save_config({"who": "collector"})
    assert not (tmp_path / "a" / "config.yaml").exists()
    learner.save_config({"who": "learner"})
    assert (tmp_path / "a" / "config.yaml").exists()


def test_logs_of_several_processes_are_separate(tmp_path: Path) -> None:
    learner, collector = (create_as(tmp_path, role=role) for role in ("learner", "collector"))
    for run in (learner, collector):
        with run:
            run.tb_logger.add_scalar("x", 1.0, 1)
    assert len(list((tmp_path / "a" / "tb").glob("events.*"))) == 1
    assert len(list((tmp_path / "a" / "tb" / "node-0").glob("events.*"))) == 1
    assert (learner.log_path.name, collector.log_path.name) == ("log.txt", "log.node-0.txt")


@pytest.mark.parametrize("other", ["", "run 2"])
@pytest.mark.parametrize("moment", ["mkdir", "write_text", "rename"])
def test_runs_that_start_in_the_same_moment_never_share_a_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str, other: str
) -> None:
    """Another run makes its folder within any call by which this one makes its own."""
    others: list[Path] = []

    def create_by_other() -> Path:
        with running_as(CurrentNode(run_token=other)) if other else nullcontext():
            return RunFolder.create("a", root=tmp_path / "runs").path

    original = getattr(Path, moment)

    def create_other(self: Path, *args: Any, **kwargs: Any) -> Any:
        if self.name != "runs" and not others:
            others.append(self)
            others[0] = contextvars.Context().run(create_by_other)
        return original(self, *args, **kwargs)

    (tmp_path / "runs").mkdir()
    monkeypatch.setattr(Path, moment, create_other)
    mine = [create_as(tmp_path / "runs", role=role).path for role in ("learner", "collector")]
    assert others and {*mine, *others} == {tmp_path / "runs" / "a", tmp_path / "runs" / "a-2"}
    assert mine[0] == mine[1] != others[0]
    assert sorted(path.name for path in (tmp_path / "runs").iterdir()) == ["a", "a-2"]


@pytest.mark.parametrize("run_token", ["", "run 1"])
def test_resumed_runs_that_start_in_the_same_moment_share_the_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run_token: str
) -> None:
    """They then meet at the lock of the folder; neither gets a new one."""
    is_dir = Path.is_dir

    def make_it_now(self: Path) -> bool:
        found = is_dir(self)
        if self.name == "a" and not found:
            self.mkdir()
        return found

    monkeypatch.setattr(Path, "is_dir", make_it_now)
    with running_as(CurrentNode(run_token=run_token)) if run_token else nullcontext():
        run = RunFolder.create("a", root=tmp_path, resume=True)
    assert run.path == tmp_path / "a"
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_threads_of_several_runs_agree(tmp_path: Path) -> None:
    for trial in range(30):
        ready = threading.Barrier(6)

        def create(number: int, trial: int = trial, ready: Any = ready) -> tuple[int, Path]:
            ready.wait(10)
            root = tmp_path / str(trial)
            if number >= 4:  # a run of one process
                return number, RunFolder.create("a", root=root).path
            return number % 2, create_as(root, role="learner", run_token=f"{number % 2}").path

        # With two nodes in this process, threads without a node of their own run alone.
        others = [running_as(CurrentNode(roles=("learner",))) for _ in range(2)]
        with others[0], others[1], ThreadPoolExecutor(6) as pool:
            found = set(pool.map(create, range(6)))
        assert len(found) == len({path for _, path in found}) == 4
