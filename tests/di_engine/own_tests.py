"""Runs the test files of a checkout of DI-engine under the door.

``python -m tests.di_engine.own_tests CHECKOUT [FOLDER]``, where FOLDER is one of ``FOLDERS``,
prints a line for each test, and the counts.
"""

from __future__ import annotations

import ast
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

from tests.di_engine.rows import Outcome, Row, counts

__all__ = ["FOLDERS", "run"]

FOLDERS: Final = ("framework", "worker", "data", "league", "interaction", "rl_utils", "config")
"""The folders of ``ding`` whose tests run."""

_TEST_TIMEOUT_S: Final = 40
_FILE_TIMEOUT_S: Final = 150

_NETWORK: Final = "interaction/tests/base/test_network.py::TestInteractionBaseNetwork"
_MIDDLEWARE: Final = "framework/middleware/tests"
_TASK: Final = "framework/tests/test_task.py"

_NEVER_END: Final = (
    f"{_NETWORK}::test_get_host_ip",
    f"{_TASK}::test_wait_for",
    f"{_TASK}::test_async_exception",
)
"""Tests that wait without end, for a server or an event, and would take their file with them."""

_AT_ONCE: Final = (
    "it runs the middleware of a step at once by async_mode; they run in order here, and "
    "task.parallel(...) runs some at once"
)
_BY_THEMSELVES: Final = (
    "it starts each process by itself; here such processes join a run by its key and run id"
)
_NO_VALUE: Final = (
    "it expects eval_value to be -inf outside of middleware; it is None in a step without an "
    "evaluation, and -inf for the middleware of a program"
)
_OTHER_MODULE: Final = "it replaces what a module of DI-engine imports for itself, "
_PRIVATE_BUFFER: Final = "reads the private arrays of the buffer, such as _data and _tail"
_PRIVATE_LOADER: Final = "reads private attributes of the loader, such as _shm_callback"
_PRIVATE_TASK: Final = (
    "reads private attributes of the task, such as _backward_stack and _middleware"
)
_TOO_EARLY: Final = (
    "it expects the learner's first update before the collector's second step; a collector here "
    "may be two batches ahead"
)
_PRIVATE_COLLECTOR: Final = "reads private attributes of the collector, such as _collect_print_freq"

_REFUSED_FOR_GOOD: Final[Mapping[str, str]] = {
    f"{_NETWORK}::test_get_host_ip": (
        "ends its server by werkzeug.server.shutdown, which Werkzeug 2.1 has removed"
    ),
    f"{_MIDDLEWARE}/test_advantage_estimator.py::test_montecarlo_return_estimator": (
        "its policy has only private attributes, such as _gamma"
    ),
    f"{_MIDDLEWARE}/test_ckpt_handler.py": f"{_OTHER_MODULE}save_file",
    f"{_MIDDLEWARE}/test_data_processor.py::test_data_pusher": (
        "it expects an error in a step without new data, in which nothing is pushed here"
    ),
    f"{_MIDDLEWARE}/test_data_processor.py::test_offline_data_saver": (
        f"{_OTHER_MODULE}offline_data_save_type"
    ),
    f"{_MIDDLEWARE}/test_data_processor.py::test_offpolicy_data_fetcher": (
        "it fetches lists of any items; a fetcher here fetches batches of transitions"
    ),
    f"{_MIDDLEWARE}/test_distributer.py::test_context_exchanger": _TOO_EARLY,
    f"{_MIDDLEWARE}/test_logger.py::test_wandb": "it needs an account of Weights and Biases",
    "framework/tests/test_context.py": _NO_VALUE,
    "framework/tests/test_parallel.py::test_auto_recover": (
        "reads a private attribute of the router, _retries"
    ),
    "framework/tests/test_wrapper.py": _PRIVATE_TASK,
    f"{_TASK}::test_async_exception": _AT_ONCE,
    f"{_TASK}::test_async_yield_pipeline": _PRIVATE_TASK,
    f"{_TASK}::test_broadcast_finish": _BY_THEMSELVES,
    f"{_TASK}::test_serial_yield_pipeline": _PRIVATE_TASK,
    f"{_TASK}::test_use_lock": _AT_ONCE,
    f"{_TASK}::test_wait_for": _AT_ONCE,
    "worker/adapter/tests/": "its server listens on 0.0.0.0 and needs my_address here",
    "worker/collector/tests/test_episode_serial_collector.py": _PRIVATE_COLLECTOR,
    "worker/collector/tests/speed_test/": (
        "its policy does not call Policy.__init__, which makes the modes here"
    ),
    "worker/collector/tests/test_sample_serial_collector.py": _PRIVATE_COLLECTOR,
    "worker/learner/tests/test_base_learner.py": (
        "its config has a key that its class does not declare, and it expects files named "
        "iteration_<n>.pth.tar, where a learner here saves .safetensors files"
    ),
    "worker/learner/tests/test_learner_hook.py::TestLearnerHook::test_register": (
        "expects an AssertionError for a wrong type of hook, which is a TypeError here"
    ),
    "worker/replay_buffer/tests/test_advanced_buffer.py::TestDemonstrationBuffer": (
        "loads a dictionary with a list of items as the state of a buffer"
    ),
    "worker/replay_buffer/tests/test_naive_buffer.py::TestNaiveBuffer::test_track_used_data": (
        "expects the buffer to delete files; here take_deleted() names them"
    ),
    "worker/replay_buffer/tests/": _PRIVATE_BUFFER,
    "config/tests/test_config_formatted.py": "a config is saved as YAML, in <exp_name>/"
    "total_config.yaml, and not as a module to import",
    "data/buffer/tests/test_buffer_benchmark.py": "it measures for minutes, and has no bar",
    "data/tests/test_storage_loader.py": _PRIVATE_LOADER,
}
"""Why tests cannot run here, by the beginning of their id after ``ding/``."""

_REFUSAL: Final = "of DI-engine is not here: "
"""What the error for a name in a table of refused names says before its reason."""

_ERROR_TYPE: Final = "dmiddleware.ding.finder.NotHere: "

_NO_PACKAGE: Final = re.compile(
    r"No module named '(?!(?:ding|dmiddleware|middleware|tests)\b)(\w+)"
)

_SEVERITY: Final[Mapping[Outcome, int]] = {"runs": 0, "refused": 1, "fails": 2}


def run(checkout: Path, folders: tuple[str, ...] = FOLDERS) -> Iterator[Row]:
    """Run the test files of these folders, each in a process of its own.

    Packages that tests need and that are not installed may be on PYTHONPATH.

    Args:
        checkout: the root of a checkout of DI-engine.
        folders: which of ``FOLDERS``, or folders in them.

    Yields:
        A row for each test function, however many variants of it run. It runs if all of them do.
    """
    for folder in folders:
        for path in sorted((checkout / "ding" / folder).rglob("test_*.py")):
            if "tests" in path.parts:
                yield from _run_file(checkout, folder, path)


def _run_file(checkout: Path, folder: str, path: Path) -> list[Row]:
    file = path.relative_to(checkout).as_posix()
    outcomes, rest = _outcomes(checkout, path)
    names = dict.fromkeys(f"{file}::{name}" for name in _test_names(path))
    names |= dict.fromkeys(name for name in outcomes if name.startswith(f"{file}::"))
    return [_row(name, folder, outcomes.get(name, rest)) for name in names]


def _row(name: str, group: str, result: tuple[Outcome, str]) -> Row:
    outcome, reason = result
    reasons = _REFUSED_FOR_GOOD.items()
    refusal = next((why for start, why in reasons if name.startswith(f"ding/{start}")), None)
    if outcome == "fails" and refusal is not None:
        outcome, reason = "refused", refusal
    return Row(name, group, outcome, reason)


def _outcomes(
    checkout: Path, path: Path
) -> tuple[dict[str, tuple[Outcome, str]], tuple[Outcome, str]]:
    """Return the worst outcome of each test, and what became of those that have none."""
    with tempfile.TemporaryDirectory() as folder:
        record, settings = Path(folder, "outcomes"), Path(folder, "pytest.ini")
        record.touch()
        settings.touch()
        # Python imports it first in each process, so also in those that tests start.
        Path(folder, "sitecustomize.py").write_text("import dmiddleware.ding\n")
        command = [
            *(sys.executable, "-m", "pytest", "-p", "tests.di_engine.outcome_recorder"),
            *(
                "-p",
                "no:cacheprovider",
                "-p",
                "no:warnings",
                "-q",
                "--tb=short",
                f"--timeout={_TEST_TIMEOUT_S}",
            ),
            *(f"--rootdir={checkout}", "-c", str(settings)),
            *(f"--deselect=ding/{name}" for name in _NEVER_END),
            str(path),
        ]
        ending = _finish(command, checkout, record)
        lines = [json.loads(line) for line in record.read_text().splitlines()]
    outcomes: dict[str, tuple[Outcome, str]] = {}
    rest = _judged("failed", ending)
    for test, word, reason in lines:
        result = _judged(word, reason)
        if "::" not in test:
            rest = result  # The file could not be collected.
            continue
        name = test.partition("[")[0]
        if name not in outcomes or _SEVERITY[result[0]] > _SEVERITY[outcomes[name][0]]:
            outcomes[name] = result
    return outcomes, rest


def _judged(word: str, reason: str) -> tuple[Outcome, str]:
    if word == "passed":
        return "runs", ""
    if missing := _NO_PACKAGE.search(reason):
        return "refused", f"it needs the package {missing[1]}, which is not installed"
    if word == "skipped" or _REFUSAL in reason:
        return "refused", reason.removeprefix(_ERROR_TYPE)
    return "fails", reason.removeprefix(_ERROR_TYPE)


def _finish(command: list[str], checkout: Path, record: Path) -> str:
    """Run the command in an empty folder; say how it ended."""
    root = Path(__file__).parents[2]
    places = (str(record.parent), str(root), str(checkout), os.environ.get("PYTHONPATH", ""))
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(place for place in places if place),
        "OUTCOMES": str(record),
        "OMP_NUM_THREADS": "1",
    }
    with (
        tempfile.TemporaryDirectory() as folder,
        tempfile.TemporaryFile("w+", errors="replace") as output,
        subprocess.Popen(
            command,
            cwd=folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        ) as process,
    ):
        try:
            code = process.wait(_FILE_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            return f"the file did not end in {_FILE_TIMEOUT_S} s"
        finally:
            _kill_group(process.pid)
        output.seek(0)
        errors = [line for line in output.read().splitlines() if line.startswith("E  ")]
    return errors[-1].removeprefix("E").strip() if errors else f"pytest ended with code {code}"


def _kill_group(leader: int) -> None:
    """End a process that does not, and those that it started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(leader, signal.SIGKILL)


def _test_names(path: Path) -> Iterator[str]:
    """Read the names of a file's tests, which it has even if it cannot be imported."""
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test"):
            yield node.name
        elif isinstance(node, ast.ClassDef) and node.name.startswith("Test"):
            for part in node.body:
                if isinstance(part, ast.FunctionDef) and part.name.startswith("test"):
                    yield f"{node.name}::{part.name}"


def main(checkout: str, *folders: str) -> None:
    rows = []
    for row in run(Path(checkout).resolve(), folders or FOLDERS):
        rows.append(row)
        print(f"{row.outcome:8} {row.name} {row.reason}", flush=True)
    for group in dict.fromkeys(row.group for row in rows):
        print(group, counts(row for row in rows if row.group == group))
    print("all", counts(rows))


if __name__ == "__main__":
    main(*sys.argv[1:])
