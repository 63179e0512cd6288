"""What all loggers do that send metrics, and Trackio with its real client and without a network."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dmiddleware.errors import ChainError, ConfigError
from dmiddleware.pipeline import Task
from middleware import OnlineRLContext, RunFolder, TrackioLogger, WandbLogger, online_logger
from tests.dmiddleware.env.optional import skip_without
from tests.middleware.tracked_training import evaluate, train_tracked

skip_without("wandb")
skip_without("trackio")

pytestmark = pytest.mark.process

BOTH = pytest.mark.parametrize("kind", [WandbLogger, TrackioLogger])


@pytest.fixture(scope="module", autouse=True)
def data(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Keep what Trackio writes apart; it reads the variable when it is imported."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "trackio"]:
        del sys.modules[name]
    with pytest.MonkeyPatch.context() as patch:
        path = tmp_path_factory.mktemp("trackio")
        patch.setenv("TRACKIO_DIR", str(path))
        patch.setenv("HF_HUB_OFFLINE", "1")
        yield path


def records(project: str) -> list[dict[str, Any]]:
    from trackio.sqlite_storage import SQLiteStorage

    return list(SQLiteStorage.get_run_records(project))


def rows(project: str, run: str) -> list[dict[str, Any]]:
    from trackio.sqlite_storage import SQLiteStorage

    return list(SQLiteStorage.get_logs(project, run))


def test_metrics_settings_videos_and_checkpoints_are_in_trackio(tmp_path: Path, data: Path) -> None:
    from trackio.sqlite_storage import SQLiteStorage

    run = RunFolder.create("toy", root=tmp_path)
    train_tracked(run, TrackioLogger(run, project="toys", group="seeds"))
    (record,) = records("toys")
    assert record["name"] == f"toy-{(run.path / 'trackio_id').read_text()}"
    found = rows("toys", record["name"])
    evaluations = [row for row in found if "eval/return_mean" in row]
    assert [(row["step"], row["eval/return_mean"]) for row in evaluations] == [(40, 40), (80, 80)]
    for row in evaluations:
        assert (data / "media" / row["eval/video"]["file_path"]).read_bytes()[:3] == b"GIF"
    assert any("learn/total_loss" in row for row in found)
    settings = SQLiteStorage.get_run_config("toys", record["name"])
    assert settings is not None
    assert (settings["policy"]["type"], settings["_Group"]) == ("dqn", "seeds")
    (artifact,) = SQLiteStorage.list_artifacts("toys")
    assert (artifact["name"], artifact["type"]) == (record["name"], "model")
    assert artifact["versions"][0]["num_files"] == len([*run.ckpt_dir.glob("*.safetensors")])


def test_a_resumed_run_continues_in_trackio_and_another_of_its_name_does_not(
    tmp_path: Path,
) -> None:
    run = RunFolder.create("toy", root=tmp_path)
    train_tracked(run, TrackioLogger(run, project="again"))
    again = RunFolder(run.path)
    train_tracked(again, TrackioLogger(again, project="again"), env_step=80)
    (record,) = records("again")
    steps = [row["step"] for row in rows("again", record["name"]) if "eval/return_mean" in row]
    assert steps == [40, 80, 120, 160]
    other = RunFolder.create("toy", root=tmp_path / "others")
    train_tracked(other, TrackioLogger(other, project="again"))
    assert len(records("again")) == 2


def test_two_loggers_both_get_every_row(tmp_path: Path) -> None:
    run = RunFolder.create("toy", root=tmp_path)
    first = TrackioLogger(run, project="first")
    seen = list[float]()
    run.metrics.on_row.append(lambda row: seen.append(float(row["env_step"] or 0)))
    train_tracked(run, first)
    (record,) = records("first")
    assert [row["step"] for row in rows("first", record["name"])] == seen


@BOTH
def test_a_chain_without_a_logger_is_refused(kind: Any, tmp_path: Path) -> None:
    with RunFolder.create("toy", root=tmp_path) as run, Task(OnlineRLContext()) as task:
        task.use(kind(run))
        with pytest.raises(ChainError, match="add an Experiment or a MetricsLogger"):
            task.run(max_step=1)


@BOTH
def test_a_client_that_fails_costs_a_warning_only(
    kind: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def fail(*args: object, **kwargs: object) -> None:
        raise RuntimeError("no service")

    monkeypatch.setattr(f"{kind.client_name}.init", fail)
    with RunFolder.create("toy", root=tmp_path) as run, Task(OnlineRLContext()) as task:
        task.use(online_logger(run)).use(evaluate).use(kind(run)).run(max_step=5)
    assert caplog.text.count(f"cannot send metrics to {kind.title} (no service)") == 1


@BOTH
def test_without_the_client_the_error_says_what_to_install(
    kind: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, kind.client_name, None)
    with (
        RunFolder.create("toy", root=tmp_path) as run,
        pytest.raises(ConfigError, match=rf"pip install 'dmiddleware\[{kind.client_name}\]'"),
    ):
        kind(run)


ODD_NAMES = [
    "lr 0.1",
    "größe",
    "Übung 3 (最高)",
    "a/b",
    "100%: is it #1?",
    "x" * 200,
    "ü" * 120,
    "tab\tand\nline",
    b"na\xefve".decode("utf-8", "surrogateescape"),
    "🚀",
    "registry-a",
    "all_configs",
    "some_artifact_versions",
    "(registry)-my_[traces]",
]


@BOTH
@pytest.mark.parametrize("name", ODD_NAMES)
def test_names_become_acceptable_at_the_start_of_the_run(
    name: str,
    kind: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The service's own checks of names, of which clients make some only when they send."""
    begun: dict[str, Any] = {}
    sent: list[Any] = []

    class Begun:
        config = dict[str, Any]()

        def define_metric(self, *_: Any, **__: Any) -> None: ...
        def log(self, *_: Any, **__: Any) -> None: ...
        def finish(self) -> None: ...
        def log_artifact(self, artifact: Any) -> None:
            sent.append(artifact)

    def init(**options: Any) -> Begun:
        begun.update(options)
        return Begun()

    monkeypatch.setattr(f"{kind.client_name}.init", init)
    monkeypatch.setattr(f"{kind.client_name}.finish", lambda: None)
    folder = tmp_path / os.fsdecode(os.fsencode(name.replace("/", "-"))[:200])
    folder.mkdir()
    options = {"tags": [name]} if kind is WandbLogger else {}
    with RunFolder(folder) as run, Task(OnlineRLContext()) as task:
        (run.ckpt_dir / "best.safetensors").write_bytes(b"1")
        tracker = kind(run, project=name, group=name, **options)
        task.use(online_logger(run)).use(evaluate).use(tracker).run(max_step=5)
    assert "cannot send" not in caplog.text
    (artifact,) = sent
    assert re.fullmatch(r"[A-Za-z0-9._-]{1,128}", artifact.name)
    for text in (begun["name"], begun["project"], begun["group"], *begun.get("tags", ())):
        assert 0 < len(text.encode()) <= 128 and text.isprintable()
    check_project(kind, begun["project"])
    changed = {option for option in ("project", "group") if begun[option] != name}
    assert all(f"does not take the {option}" in caplog.text for option in changed)


def check_project(kind: Any, name: str) -> None:
    """Let the client check the name of a project."""
    if kind is WandbLogger:
        import wandb

        wandb.Settings(project=name, run_tags=(name[:64],))
    else:
        from trackio.sqlite_storage import SQLiteStorage

        SQLiteStorage.validate_project_name(name)


@BOTH
@pytest.mark.parametrize("name", ["toy", "größe 1", "Übung (最高)"])
def test_names_that_both_services_take_stay(name: str, kind: Any) -> None:
    from middleware.record.tracker import shown_name

    assert shown_name(name) == name


def test_the_checkpoints_of_a_run_with_an_odd_name_are_in_trackio(tmp_path: Path) -> None:
    from trackio.sqlite_storage import SQLiteStorage

    run = RunFolder.create("lr 0.1, größer", root=tmp_path)
    train_tracked(run, TrackioLogger(run, project="odd / ü"))
    (record,) = records("odd / ü")
    assert record["name"].startswith("lr 0.1, größer-")
    (artifact,) = SQLiteStorage.list_artifacts("odd / ü")
    assert artifact["name"].startswith("lr-0.1-gro-er-")
    assert artifact["versions"][0]["num_files"] == len([*run.ckpt_dir.glob("*.safetensors")])


@pytest.mark.parametrize("left", [b"", b"\n", b"\xff\xfe"])
def test_an_id_that_a_full_disk_has_cut_is_replaced(left: bytes, tmp_path: Path) -> None:
    run = RunFolder.create("toy", root=tmp_path)
    (run.path / "trackio_id").write_bytes(left)
    train_tracked(run, TrackioLogger(run, project="cut"))
    known = (run.path / "trackio_id").read_text()
    assert re.fullmatch("[0-9a-f]{8}", known)
    assert f"toy-{known}" in {record["name"] for record in records("cut")}
