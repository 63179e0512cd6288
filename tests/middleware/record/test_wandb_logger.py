"""Weights & Biases, with its real client in offline mode."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from middleware import RunFolder, WandbLogger
from tests.dmiddleware.env.optional import skip_without
from tests.middleware.tracked_training import train_tracked
from tests.waiting import wait_until

skip_without("wandb")

pytestmark = pytest.mark.process


@pytest.fixture(autouse=True)
def _offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    for name in ("CONFIG", "CACHE", "DATA"):
        monkeypatch.setenv(f"WANDB_{name}_DIR", str(tmp_path / name.lower()))
    import wandb

    yield
    wandb.teardown()


def train(run: RunFolder, **options: Any) -> None:
    train_tracked(run, WandbLogger(run, project="toys", group="seeds", tags=["small"]), **options)


def records(run: RunFolder, *, n_runs: int = 1) -> list[Any]:
    """Return what the client has recorded for its service, of all its runs, in order.

    Its own process writes the files, and may still do so when the run has ended.
    """
    from wandb.proto import wandb_internal_pb2 as pb

    recorded: list[Any] = []

    def are_whole() -> bool:
        files = run.path.glob("wandb/offline-run-*/*.wandb")
        data = [chunk for file in sorted(files) for chunk in chunks(file.read_bytes())]
        recorded[:] = map(pb.Record.FromString, data)
        return sum(row.WhichOneof("record_type") == "exit" for row in recorded) == n_runs

    wait_until(are_whole, f"the records of {n_runs} whole runs in {run.path}")
    return recorded


def chunks(data: bytes, block: int = 2**15) -> Iterator[bytes]:
    """Yield the records of a file in LevelDB's log format, behind a header of 7 bytes."""
    at, record = 7, b""
    while at < len(data):
        if block - at % block < 7:
            at += block - at % block  # no header fits into the rest of a block
            continue
        if at + 7 > len(data):
            return
        size, kind = struct.unpack_from("<HB", data, at + 4)
        record += data[at + 7 : at + 7 + size]
        at += 7 + size
        if at > len(data):
            return
        if kind in (1, 4):  # whole, or the last part
            yield record
            record = b""


def history(run: RunFolder) -> list[dict[str, Any]]:
    rows = []
    for record in records(run):
        if record.WhichOneof("record_type") == "history":
            items = record.history.item
            names = (item.key or "/".join(item.nested_key) for item in items)
            rows.append({n: json.loads(i.value_json) for n, i in zip(names, items, strict=True)})
    return rows


def test_metrics_settings_videos_and_checkpoints_are_sent(tmp_path: Path) -> None:
    run = RunFolder.create("toy", root=tmp_path)
    train(run)
    of_kind: dict[str, list[Any]] = {}
    for record in records(run):
        kind = record.WhichOneof("record_type")
        of_kind.setdefault(kind, []).append(getattr(record, kind))
    (begun,) = of_kind["run"][:1]
    assert (begun.project, begun.run_group, begun.display_name) == ("toys", "seeds", "toy")
    assert list(begun.tags) == ["small"]
    settings = {one.key: one.value_json for part in of_kind["config"] for one in part.update}
    assert json.loads(settings["policy"])["type"] == "dqn"
    rows = history(run)
    evaluations = [row for row in rows if "eval/return_mean" in row]
    assert [row["env_step"] for row in evaluations] == [40, 80]
    assert evaluations[0]["eval/return_mean"] == 40 and evaluations[0]["eval/return_std"] == 1
    assert all(row["eval/video/_type"] == "video-file" for row in evaluations)
    assert any("learn/total_loss" in row for row in rows)
    (artifact,) = of_kind["artifact"]
    assert artifact.type == "model"
    assert "final.safetensors" in {entry.path for entry in artifact.manifest.contents}


def test_a_resumed_run_continues_under_its_id(tmp_path: Path) -> None:
    run = RunFolder.create("toy", root=tmp_path)
    train(run)
    train(RunFolder(run.path), env_step=80)
    begun = [
        one.run.run_id for one in records(run, n_runs=2) if one.WhichOneof("record_type") == "run"
    ]
    assert len(begun) >= 2 and set(begun) == {(run.path / "wandb_id").read_text()}


def test_the_checkpoints_of_a_run_with_an_odd_name_are_sent(tmp_path: Path) -> None:
    run = RunFolder.create("lr 0.1, größer", root=tmp_path)
    train_tracked(run, WandbLogger(run, project="odd/ü: 1", tags=["x" * 99]))
    of_kind = {one.WhichOneof("record_type"): one for one in records(run)}
    begun = of_kind["run"].run
    assert (begun.display_name, begun.project) == ("lr 0.1, größer", "odd-ü- 1")
    artifact = of_kind["artifact"].artifact
    assert artifact.name.startswith("lr-0.1-gro-er-")
    assert "final.safetensors" in {entry.path for entry in artifact.manifest.contents}
