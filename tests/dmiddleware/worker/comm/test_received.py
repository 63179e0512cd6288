"""A task that came over the wire makes a worker import only what its own config allows."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from dmiddleware.errors import ConfigError
from dmiddleware.worker.comm.received import named_modules
from dmiddleware.worker.errors import TaskFail
from tests.dmiddleware.worker.comm.comm_workers import Collector, Learner, collector_task

WORKERS = {"collector": lambda: Collector(lambda part: None), "learner": Learner}


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A module that leaves a file behind when it is imported."""
    mark = tmp_path / "ran"
    (tmp_path / "harmful_module.py").write_text(f"open({str(mark)!r}, 'w').close()\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "harmful_module", raising=False)
    return "harmful_module"


def configs(name: str) -> list[dict[str, Any]]:
    return [
        {"import_names": [name]},
        {"import_names": (name,)},
        {"import_names": name},
        {"import_names": ["sys", name]},
        {"policy": {"type": "dqn", "import_names": [name]}},
        {"policy": {"model": {"type": "m", "import_names": [name]}}},
        {"env": {"id": f"{name}:Env-v0"}},
        {"env": [{"env_id": f"{name}:Env-v0"}]},
        {"import_names": [7]},
        {"import_names": {"a": 1}},
    ]


@pytest.mark.parametrize("kind", WORKERS)
@pytest.mark.parametrize("index", range(len(configs("m"))))
def test_a_task_that_names_another_module_is_refused(
    module: str, tmp_path: Path, kind: str, index: int
) -> None:
    worker = WORKERS[kind]()
    task = {**collector_task(), "learner_cfg": {}, "policy": {}, "policy_id": "p"}
    task["collector_cfg"] = configs(module)[index]
    with pytest.raises(ConfigError, match="import_names"):
        getattr(worker, f"deal_with_{kind}_start")(task)
    with pytest.raises(TaskFail, match="import_names"):
        worker.process_task({"name": f"{kind}_start_task", "task_info": task})
    assert worker.job is None and module not in sys.modules
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("name", ["harmful_module", "json"])
def test_a_task_may_name_what_the_worker_allows_or_has_imported(module: str, name: str) -> None:
    worker = Collector(lambda part: None, {"import_names": [module]})
    task = {**collector_task(), "collector_cfg": {"import_names": [name]}}
    start = {"name": "collector_start_task", "task_info": task}
    assert "started" in worker.process_task(start)["message"]
    worker.close()


def test_all_named_modules_are_found() -> None:
    cfg = {
        "import_names": ["a"],
        "env": {"id": "b:Env-v0", "import_names": None},
        "parts": [{"x": {"import_names": ["c", "d"]}}, "import_names"],
        "task": {"id": "CartPole-v1"},
    }
    assert list(named_modules(cfg)) == ["a", "b", None, "c", "d"]
