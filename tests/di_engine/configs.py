"""Runs the config files of a checkout of DI-engine.

``python -m tests.di_engine.configs CHECKOUT [PART]`` prints a line for each config file whose path
contains PART, and the counts. Each config is compiled, its env and its policy are built, and it
makes two updates, in a process of its own that is forked from a warm one.

What a run has of its own, so that two updates come soon, is in :func:`_shrunk`: two envs at most,
short episodes, small batches, few rows before the first update and a small replay buffer. Network,
algorithm, env and its wrappers are those of the file. A config for several ranks gets a process
group of one, and one that begins with a checkpoint begins without. A config that learns from
recorded data gets random rows of the spaces of its env, and one that imitates an expert gets a
checkpoint of an untrained policy of the expert's config, which the file itself names.
"""

from __future__ import annotations

import ast
import contextlib
import copy
import io
import logging
import multiprocessing as mp
import os
import runpy
import sys
import tempfile
import traceback
import warnings
from collections.abc import Iterator, Mapping
from multiprocessing.connection import Connection, wait
from pathlib import Path
from time import monotonic
from typing import Any, Final

import gymnasium

from tests.di_engine.rows import Row, counts

__all__ = ["config_files", "run"]

_N_AT_A_TIME: Final = 2
_LIMIT_S: Final = 600.0
_N_UPDATES: Final = 2
_N_ENVS: Final = 2
_EPISODE_STEPS: Final = 10
_N_ROWS: Final = 32
_N_SEQUENCES: Final = 4
_OF_SEQUENCES: Final = ("r2d2", "impala")
_REPLAY_SIZE: Final = 1000
_N_OFFLINE_ROWS: Final = 120
_IMITATION: Final = ("serial_sqil", "serial_dqfd", "serial_gail")
_OFFLINE: Final = ("serial_offline", "serial_bc", "bc", "serial_dt")
_ENTRIES: Final = ("serial_pipeline", "parallel_pipeline", "collect_demo_data")
_FOLDERS: Final = ("dizoo", "ding")
_NAMES: Final = frozenset(("main_config", "create_config"))


def config_files(checkout: Path) -> Iterator[Path]:
    """Yield the files of a checkout that define ``main_config`` and ``create_config``."""
    for folder in _FOLDERS:
        for path in sorted((checkout / folder).rglob("*.py")):
            if _assigned(path) >= _NAMES:
                yield path


def run(checkout: Path, part: str = "") -> list[Row]:
    """Run the config files of a checkout whose path contains ``part``.

    Returns:
        A row for each file, in their order.
    """
    _warm_up()
    files = [path for path in config_files(checkout) if part in str(path)]
    # Here, because a run that exceeds the limit is killed and leaves its folder behind.
    with tempfile.TemporaryDirectory(dir=_scratch()) as scratch:
        rows = _rows_of(files, checkout, scratch)
    return [rows[path] for path in files]


def _rows_of(files: list[Path], checkout: Path, scratch: str) -> dict[Path, Row]:
    context = mp.get_context("fork")
    rows: dict[Path, Row] = {}
    waiting, running = files[::-1], dict[Connection, tuple[Path, Any, float]]()
    while waiting or running:
        while waiting and len(running) < _N_AT_A_TIME:
            path = waiting.pop()
            reader, writer = context.Pipe(duplex=False)
            process = context.Process(target=_answer, args=(path, checkout, writer, scratch))
            process.start()
            writer.close()
            running[reader] = path, process, monotonic() + _LIMIT_S
        nearest = min(deadline for _, _, deadline in running.values())
        ready = wait(list(running), timeout=max(0.0, nearest - monotonic()))
        for reader, (path, process, deadline) in list(running.items()):
            if reader in ready or monotonic() >= deadline:
                rows[path] = _received(reader, path, checkout)
                process.kill()
                process.join()
                reader.close()
                del running[reader]
                print(f"{rows[path].outcome:8}{rows[path].name}: {rows[path].reason}", flush=True)
    return rows


def _assigned(path: Path) -> set[str]:
    """Return the names that a file assigns at its top level."""
    names = set()
    for statement in ast.parse(path.read_text(encoding="utf-8")).body:
        targets = statement.targets if isinstance(statement, ast.Assign) else ()
        names |= {target.id for target in targets if isinstance(target, ast.Name)}
    return names


def _warm_up() -> None:
    """Import what most configs need, before the first fork."""
    import torch

    import dmiddleware.ding  # opens the door: some files import names of ding at the top
    import dmiddleware.worker.commands  # noqa: F401

    torch.set_num_threads(1)
    os.environ.setdefault("MUJOCO_GL", "egl")  # draws without a display


def _received(reader: Connection, path: Path, checkout: Path) -> Row:
    with contextlib.suppress(EOFError):
        if reader.poll():
            answer: Row = reader.recv()
            return answer
        return Row(_name(path, checkout), "", "fails", f"no two updates in {_LIMIT_S:g} s")
    return Row(_name(path, checkout), "", "fails", "its process died")


def _name(path: Path, checkout: Path) -> str:
    return path.relative_to(checkout).as_posix()


def _answer(path: Path, checkout: Path, writer: Connection, scratch: str) -> None:
    """Run one config in this process, and send what became of it."""
    with tempfile.TemporaryDirectory(dir=scratch) as folder, contextlib.chdir(folder):
        name = _name(path, checkout)
        logging.disable(logging.WARNING)
        with Path(os.devnull).open("w", encoding="utf-8") as nowhere:
            os.dup2(nowhere.fileno(), 1)
            if "CONFIGS_SHOW" not in os.environ:
                os.dup2(nowhere.fileno(), 2)
        row = _row(path, name)
    writer.send(row)
    os._exit(0)


def _scratch() -> str | None:
    """Return a folder in memory, where there is one: a run writes checkpoints."""
    return "/dev/shm" if Path("/dev/shm").is_dir() else None


def _row(path: Path, name: str) -> Row:
    from dmiddleware.errors import DMiddlewareError

    group = str(Path(name).parent)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            from dmiddleware.worker.config_file import read_config_with_system

            main, create, system = read_config_with_system(path)
            _run(path, main, create, system)
    except DMiddlewareError as error:
        reason, _, _ = str(error).partition("Traceback (most recent call last)")
        return Row(name, group, "refused", " ".join(reason.split()))
    except BaseException as error:  # noqa: BLE001 (whatever it is, it is the row's reason)
        stream = io.StringIO()
        traceback.print_exc(file=stream)
        if "CONFIGS_SHOW" in os.environ:
            sys.stderr.write(stream.getvalue())
        place = traceback.extract_tb(error.__traceback__)[-1]
        where = f"{Path(place.filename).name}:{place.lineno}"
        return Row(name, group, "fails", f"{type(error).__name__}: {error} ({where})"[:300])
    return Row(name, group, "runs")


def _mode(path: Path) -> str | None:
    """Return the mode of the entry point that the file calls; None: it calls none."""
    calls = [
        node.func.id
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
    ]
    entries = [call for call in calls if call.startswith(_ENTRIES)]
    return entries[0].replace("_pipeline", "") if entries else None


def _run(
    path: Path, main: dict[str, Any], create: dict[str, Any], system: dict[str, Any] | None
) -> None:
    """Make two updates, as ``ditask classic`` does without its limits.

    Raises:
        RuntimeError: if the run ends without them.
    """
    from dmiddleware.worker import BaseLearner, classic_run
    from dmiddleware.worker.commands import checked_mode
    from dmiddleware.worker.entry import serial_run
    from dmiddleware.worker.offline_entry import offline_run

    n_updates = 0
    train = BaseLearner.train

    def counted(learner: BaseLearner, *args: Any, **kwargs: Any) -> Any:
        nonlocal n_updates
        output = train(learner, *args, **kwargs)
        n_updates = learner.train_iter
        return output

    BaseLearner.train = counted  # type: ignore[method-assign]
    main, create = _shrunk(main, create)
    if main["policy"].get("multi_gpu") or main["policy"]["learn"].get("multi_gpu"):
        _join_group_of_one()
    mode = checked_mode(_mode(path), main)
    if system is not None:
        # The learner is another process; the run ends when it has made its updates.
        main["env"].pop("wrappers")
        main["policy"]["learn"].setdefault("learner", {})["train_iterations"] = _N_UPDATES
        classic_run(main, system, create=create)
        return
    if mode in _OFFLINE:
        rows = Path("rows.safetensors")
        _save_random_rows(main, create, rows)
        offline_run(main, create, 0, _N_UPDATES, data=rows, show_progress=False)
    elif mode in _IMITATION:
        _imitate(mode, main, create, _expert_of(path, mode))
    else:
        is_direct = mode == "serial_reward_model_onpolicy"
        serial_run(main, create, 0, _N_UPDATES, is_direct=is_direct, show_progress=False)
    if n_updates < _N_UPDATES:
        raise RuntimeError(f"the run ended after {n_updates} updates")


def _expert_of(path: Path, mode: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the configs of the expert with which a file calls its entry point."""
    import dmiddleware.ding.entry
    from dmiddleware.ding import close_door, open_door

    class Called(BaseException):
        """Ends the file where it would begin to train."""

    def entry(input_cfg: Any, expert_cfg: Any, *args: Any, **kwargs: Any) -> None:
        raise Called(expert_cfg)

    import_path = list(sys.path)
    open_door(path.parent)  # for the file of the expert
    setattr(dmiddleware.ding.entry, mode.replace("serial", "serial_pipeline"), entry)
    try:
        runpy.run_path(str(path), run_name="__main__")
    except Called as called:
        main, create = called.args[0]
        return _shrunk(main, create)
    finally:
        close_door()
        open_door()
        sys.path[:] = import_path
    raise RuntimeError(f"the file does not call the entry point of {mode}")


def _imitate(
    mode: str,
    main: dict[str, Any],
    create: dict[str, Any],
    expert: tuple[dict[str, Any], dict[str, Any]],
) -> None:
    """Imitate an untrained policy, whose checkpoint stands for the expert's."""
    import torch

    from dmiddleware.classic import create_policy
    from dmiddleware.worker import compile_config, dqfd_run, gail_run, sqil_run

    path = str(Path("expert.pth.tar").resolve())
    policy = create_policy(compile_config(*expert, save=False).policy)
    torch.save(policy.collect_mode.state_dict(), path)
    expert[0]["policy"].pop("load_path", None)
    if mode != "serial_gail":
        main["policy"]["collect"]["model_path"] = path
        run = sqil_run if mode == "serial_sqil" else dqfd_run
        run(main, create, expert, 0, _N_UPDATES, show_progress=False)
        return
    main["reward_model"] |= {"expert_model_path": path, "collect_count": _N_OFFLINE_ROWS}
    main["reward_model"].pop("data_path", None)
    gail_run(main, create, expert, 0, _N_UPDATES, show_progress=False)


def _join_group_of_one() -> None:
    """Be the one rank of a process group, as torchrun starts it."""
    import torch.distributed

    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{Path('ranks').resolve()}", rank=0, world_size=1
    )


def _shrunk(
    main: Mapping[str, Any], create: Mapping[str, Any]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return a config that comes to its second update soon; see the module's docstring."""
    main, create = copy.deepcopy(dict(main)), copy.deepcopy(dict(create))
    env, policy = main.get("env", {}), main.get("policy", {})
    for key in ("collector_env_num", "env_num"):
        _limit(env, key, _N_ENVS)
    env["evaluator_env_num"] = env["n_evaluator_episode"] = 1
    env.pop("stop_value", None)  # a short episode may reach it
    env.pop("replay_path", None)
    n_steps = _EPISODE_STEPS + policy.get("burnin_step", 0)
    env["wrappers"] = [f"gymnasium.wrappers:TimeLimit(max_episode_steps={n_steps})"]
    create["env_manager"] = {"type": "base"}
    policy["cuda"] = False
    learn, collect = policy.setdefault("learn", {}), policy.setdefault("collect", {})
    replay = policy.get("other", {}).get("replay_buffer", {})
    if create.get("policy", {}).get("type") in _OF_SEQUENCES:
        _limit(collect, "n_sample", _N_SEQUENCES)
        _limit(learn, "batch_size", _N_SEQUENCES)
    learn.get("learner", {}).get("hook", {}).pop("load_ckpt_before_run", None)
    n_steps = max(_N_ROWS, 2 * _unroll_len(policy))
    for section, key, limit in (
        (policy, "random_collect_size", n_steps),
        (collect, "n_sample", n_steps),
        (collect, "n_episode", _N_ENVS),
        (learn, "batch_size", _N_ROWS // 2),
        (policy, "batch_size", _N_ROWS // 2),
        (learn, "update_per_collect", _N_UPDATES),
        (learn, "epoch_per_collect", _N_UPDATES),
        (learn, "expert_replay_buffer_size", n_steps),
        (replay, "replay_buffer_start_size", n_steps),
        (replay, "replay_buffer_size", _REPLAY_SIZE),
    ):
        _limit(section, key, limit)
    return main, create


def _unroll_len(policy: Mapping[str, Any]) -> int:
    sections = (policy, policy.get("learn", {}), policy.get("collect", {}))
    return max(int(section.get("unroll_len", 1)) for section in sections)


def _limit(section: dict[str, Any], key: str, limit: int) -> None:
    if isinstance(section.get(key), int) and section[key] > limit:
        section[key] = limit


def _save_random_rows(main: Mapping[str, Any], create: Mapping[str, Any], path: Path) -> None:
    """Save rows of random play in the config's env, in episodes of a few steps."""
    import numpy as np
    import torch

    from dmiddleware.data import as_tree, map_leaves, save_dataset
    from dmiddleware.worker.entry import compile_config
    from dmiddleware.worker.env_config import make_envs

    with make_envs(compile_config(main, create).env, "evaluator") as envs:
        observation, action = envs.observation_space, envs.action_space
    for space in (observation, action):
        space.seed(0)
    ends = np.arange(_N_OFFLINE_ROWS) % _EPISODE_STEPS == _EPISODE_STEPS - 1
    columns = {
        "obs": _samples(observation),
        "action": _samples(action),
        "next_obs": _samples(observation),
        "reward": np.linspace(-1, 1, _N_OFFLINE_ROWS, dtype=np.float32),
        "done": ends,
        "terminated": ends,
        "truncated": np.zeros_like(ends),
        "episode_id": np.arange(_N_OFFLINE_ROWS) // _EPISODE_STEPS,
    }
    save_dataset(path, as_tree(map_leaves(torch.as_tensor, columns)))


def _samples(space: Any) -> Any:
    import numpy as np

    if isinstance(space, gymnasium.spaces.Dict):
        return {key: _samples(part) for key, part in space.spaces.items()}
    samples = np.stack([space.sample() for _ in range(_N_OFFLINE_ROWS)])
    return np.clip(samples, -10, 10).astype(space.dtype) if samples.dtype.kind == "f" else samples


def main(arguments: list[str]) -> None:
    """Run the command."""
    rows = run(Path(arguments[0]).resolve(), *arguments[1:2])
    tally = counts(rows)
    print(", ".join(f"{number} {outcome}" for outcome, number in tally.items()))


if __name__ == "__main__":
    main(sys.argv[1:])
