"""What a program of DI-engine keeps for itself alone: its seed, its run folders, its policies.

DI-engine's programs are written around globals (``task``, ``set_pkg_seed``, ``ding_init``), so the
door has these globals, too. They belong to the one program that runs behind it.
"""

from __future__ import annotations

import weakref
from pathlib import Path
from typing import Any, Final

from torch import nn

from dmiddleware.errors import ConfigError
from dmiddleware.pipeline.current_node import current_node
from dmiddleware.seeding import derive_seed
from middleware import RunFolder

__all__ = [
    "close_folders",
    "next_env_seed",
    "policy_with",
    "remember_policy",
    "remember_seed",
    "run_folder",
    "task_folder",
]


class _Program:
    def __init__(self) -> None:
        self.seed = 0
        self.n_managers = 0
        self.exp_name = ""
        self.folders: dict[str, RunFolder] = {}
        self.policies: weakref.WeakKeyDictionary[nn.Module, Any] = weakref.WeakKeyDictionary()


_PROGRAM: Final = _Program()


def remember_seed(seed: int) -> None:
    """Take the seed of the program's config, from which the envs' seeds are derived."""
    _PROGRAM.seed, _PROGRAM.n_managers = int(seed), 0


def next_env_seed() -> int:
    """Return the seed of the envs of the next manager, different in each process of a run."""
    _PROGRAM.n_managers += 1
    node = current_node()
    place = () if node is None else ("node", node.node_id)
    return derive_seed(_PROGRAM.seed, *place, "envs", _PROGRAM.n_managers)


def run_folder(exp_name: str | None = None) -> RunFolder:
    """Return the folder of a run, the same for each part of a program.

    Args:
        exp_name: its path, absolute or below the working folder; None: that of the program.

    Raises:
        ConfigError: if the program has named none.
    """
    name = _PROGRAM.exp_name if exp_name is None else exp_name
    if not name:
        raise ConfigError("the loggers need a run's folder; call ding_init(cfg) before them")
    if name not in _PROGRAM.folders:
        path = Path(name)
        root = Path(path.anchor) if path.is_absolute() else Path()
        relative = path.relative_to(path.anchor) if path.is_absolute() else path
        _PROGRAM.folders[name] = RunFolder.create(str(relative), root=root)
        _PROGRAM.exp_name = _PROGRAM.exp_name or name
    return _PROGRAM.folders[name]


def task_folder(exp_name: str) -> Path:
    """Return the path of a run's folder."""
    return run_folder(exp_name).path


def close_folders() -> None:
    """Flush what the loggers have written, and forget the folders."""
    for folder in _PROGRAM.folders.values():
        folder.close()
    _PROGRAM.folders.clear()
    _PROGRAM.exp_name = ""


def remember_policy(model: nn.Module, policy: Any) -> None:
    """Remember which policy has a model, for middleware that get only the model."""
    _PROGRAM.policies[model] = policy


def policy_with(model: nn.Module) -> Any:
    """Return the policy that was built with a model, or None."""
    return _PROGRAM.policies.get(model)
