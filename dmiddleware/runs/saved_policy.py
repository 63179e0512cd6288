"""Policies that runs have saved, to act without the program, the env or the config."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn

from dmiddleware.data import load_checkpoint
from dmiddleware.errors import CheckpointMismatch, RunFolderError
from dmiddleware.policy import HasModes, Policy, as_eval_mode
from dmiddleware.policy.policy_description import policy_from
from dmiddleware.rollout.acting_policy import ActingPolicy
from dmiddleware.settings import takes_options

__all__ = ["checkpoint_in", "load_into", "load_policy", "saved_policy"]


@takes_options
def load_policy(
    path: str | Path,
    *,
    name: str | None = None,
    policy: Policy | None = None,
    model: nn.Module | None = None,
    cuda: bool = False,
) -> ActingPolicy:
    """Load a policy that a run has saved, to act.

    It needs neither the program, nor the env, nor the config of the run, and runs no code of the
    files::

        policy = load_policy("runs/cartpole")
        action = policy(obs)

    Args:
        path: the folder of a run, whose best policy is loaded (the final one, if it was never
            evaluated), or a checkpoint of :class:`~middleware.CkptSaver`.
        name: the part of the chain that has learned it, in the folder of a run that has learned
            several policies; None: the only one.
        policy: a policy of a class of your own, built as that of the run, which takes the state;
            None: the file describes the policy.
        model: the network, if it was a module of the program's own, which files cannot describe.
        cuda: whether to act on the GPU.

    Returns:
        The policy: observations to the actions that it finds best. Observations are normalized as
        in training, and actions are within the bounds of the env.

    Raises:
        RunFolderError: if there is no checkpoint.
        CheckpointDamaged: if the file is not a checkpoint, is incomplete, or has changed.
        CheckpointMismatch: if no policy can be built from it, as when its algorithm or network is
            not known here; the message says what to do.
        ConfigError: for ``cuda=True`` without CUDA.
    """
    path = checkpoint_in(path, name=name)
    if policy is None:
        return ActingPolicy(saved_policy(path, model=model, cuda=cuda))
    load_into(policy, path)
    return ActingPolicy(policy)


def saved_policy(path: str | Path, *, model: nn.Module | None = None, cuda: bool = False) -> Policy:
    """Return the policy itself, with the mode ``"eval"``; see :func:`load_policy`."""
    state: Any = load_checkpoint(checkpoint_in(path))
    if not isinstance(state, Mapping):
        raise CheckpointMismatch(f"{path} is a checkpoint, but not that of a policy")
    if "parts" in state and "task" in state:
        raise CheckpointMismatch(
            f"{path} is a snapshot of a whole run, from which only ditask resume continues; pass "
            "the run's folder, or a file in its folder ckpt"
        )
    try:
        return policy_from(state, model=model, cuda=cuda)
    except Exception as error:
        error.add_note(f"while the policy in {path} was being built")
        raise


def load_into(policy: HasModes, path: str | Path) -> None:
    """Load what a run has saved into a policy that was built as that of the run.

    Args:
        policy: the policy.
        path: the folder of a run, or a checkpoint.

    Raises:
        RunFolderError: if there is no checkpoint.
        CheckpointDamaged: if the file is not a checkpoint, is incomplete, or has changed.
        CheckpointMismatch: if it belongs to another policy.
    """
    as_eval_mode(policy, user="load_policy").load_state_dict(load_checkpoint(checkpoint_in(path)))


def checkpoint_in(path: str | Path, *, name: str | None = None) -> Path:
    """Return the checkpoint of a run's folder: the best, or else the final one; a file as it is.

    Args:
        path: the folder, or the checkpoint.
        name: the part of the chain whose policy it is; None: the whole chain.

    Raises:
        RunFolderError: if there is none.
    """
    if not isinstance(path, str | os.PathLike):
        raise RunFolderError(
            f"the path of a run's folder, or of a checkpoint in it, is a text, got {path!r:.100}"
        )
    path = Path(path)
    if path.is_file():
        if name is not None:
            raise RunFolderError(f"{path} is the checkpoint of one policy; leave out name={name!r}")
        return path
    if not path.is_dir():
        raise RunFolderError(f"{path} does not exist; pass a run's folder, or a checkpoint in it")
    folder = path / "ckpt" if name is None else path / "ckpt" / name
    files = [folder / f"{stem}.safetensors" for stem in ("best", "final")]
    for file in files:
        if file.is_file():
            return file
    parts = sorted({file.parent.name for file in path.glob("ckpt/*/*.safetensors")})
    if parts:
        raise RunFolderError(
            f"{path} has no policy {'without a name' if name is None else repr(name)}; it has "
            f"those of {', '.join(parts)}: load one of them with name={parts[0]!r}, or from its "
            f"file in ckpt/{parts[0]}"
        )
    raise RunFolderError(
        f"{path} has neither {' nor '.join(str(file.relative_to(path)) for file in files)}; put "
        "CkptSaver or Experiment into the chain"
    )
