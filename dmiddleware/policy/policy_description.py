"""What a checkpoint says about its policy, so that it can be built again to act."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

import gymnasium as gym
import torch
from torch import nn

from dmiddleware.env.space_data import space_data, space_from
from dmiddleware.errors import CheckpointError, CheckpointMismatch, SpaceError
from dmiddleware.model import MODEL_REGISTRY, obs_shape_of
from dmiddleware.policy.modes import PolicySpec
from dmiddleware.policy.policy import Policy
from dmiddleware.policy.policy_registry import POLICY_REGISTRY
from dmiddleware.policy.policy_settings import PolicySettings, device_for
from dmiddleware.settings import plain_values, values_from_plain
from dmiddleware.tree import leaves

__all__ = ["DESCRIPTION", "describe_policy", "policy_from"]

DESCRIPTION: Final = "policy"
"""The entry of a checkpoint that describes its policy."""

_MODEL_OPTION: Final = 4096
_MOST_NUMBERS: Final = 10_000_000
_MOST_TIMES: Final = 100
"""A network may have this many times as many numbers as the file has of the part that acts."""


def describe_policy(spec: PolicySpec) -> dict[str, Any]:
    """Return what :func:`policy_from` needs in addition to the state, as plain data.

    Args:
        spec: of the policy.
    """
    observation_space, action_space = map(_space_data, spec.spaces() or (None, None))
    names = [name for name in POLICY_REGISTRY if POLICY_REGISTRY.get(name) is spec.kind]
    network = type(spec.model) if spec.has_own_model else None
    return {
        "type": names[0] if names else None,
        "class": _dotted(spec.kind),
        "network": None if network is None else _dotted(network),
        "settings": plain_values(spec.settings) if names else None,
        "observation_space": observation_space,
        "action_space": action_space,
    }


def policy_from(
    state: Mapping[str, Any], *, model: nn.Module | None = None, cuda: bool = False
) -> Policy:
    """Build the policy of a checkpoint, to act.

    Only registered algorithms and networks are built, and no module is imported.

    Args:
        state: what the checkpoint holds, with its description.
        model: the network, if it was one of the program's own.
        cuda: whether to put it on the GPU.

    Returns:
        The policy, with the mode ``"eval"`` only, and its ``spaces``.

    Raises:
        CheckpointMismatch: if the description is missing or makes no policy, the algorithm or the
            network is not known here, or the state does not fit them.
        ConfigError: for ``cuda=True`` without CUDA.
    """
    described = state.get(DESCRIPTION)
    if not isinstance(described, Mapping):
        raise CheckpointMismatch(
            "the checkpoint does not say which policy it belongs to: it is not a file of CkptSaver "
            "or Experiment; build the policy in the program and call "
            "policy.eval_mode.load_state_dict(state)"
        )
    device_for(PolicySettings(cuda=cuda))
    try:
        return _built(_class_of(described, model), described, state, model, cuda=cuda)
    except CheckpointError:
        raise
    except Exception as error:  # whatever an algorithm makes of wrong settings
        raise CheckpointMismatch(
            "the policy cannot be built from what the checkpoint says about it; load it with the "
            f"version that saved it: {type(error).__name__}: {error!s:.300}"
        ) from error


def _class_of(described: Mapping[str, Any], model: nn.Module | None) -> type[Policy]:
    """Return the class of the policy, unless something that the file cannot hold is missing."""
    name, network = described.get("type"), described.get("network")
    if name not in list(POLICY_REGISTRY):
        raise CheckpointMismatch(
            f"the checkpoint is of {described.get('class')!r:.100}, an algorithm that is not "
            f"registered here{f' as {name!r:.60}' if name else ''}; build the policy and "
            "pass it as policy=... (ditask play and export: --policy), or decorate the class with "
            "@POLICY_REGISTRY.register(...) before training, and import its module before loading"
        )
    if network is not None and model is None:
        raise CheckpointMismatch(
            f"the policy was trained with a network of the program's own, {network!r:.100}, which "
            "the checkpoint does not describe; build the network and pass it as model=..., build "
            "the policy and pass it as policy=... (ditask play and export: --policy "
            "module:function), or train with a registered network (@MODEL_REGISTRY.register)"
        )
    if network is None and model is not None:
        raise CheckpointMismatch("the checkpoint describes its network, so leave model out")
    return POLICY_REGISTRY.get(str(name))


def _built(
    cls: type[Policy],
    described: Mapping[str, Any],
    state: Mapping[str, Any],
    model: nn.Module | None,
    *,
    cuda: bool,
) -> Policy:
    if described["observation_space"] is None or described["action_space"] is None:
        raise CheckpointMismatch(
            "the policy of the checkpoint never met an env, so its spaces are unknown; build it "
            "with for_env(env) before training"
        )
    spaces = tuple(space_from(described[f"{name}_space"]) for name in ("observation", "action"))
    here = {"cuda": cuda, "multi_gpu": False, "compile": False, "autocast": None}
    network = {key: option for key, option in described["settings"]["model"].items()}
    network.pop("import_names", None)  # loading imports nothing
    kind = network.get("type", cls.model_type)
    if model is None and kind and kind not in list(MODEL_REGISTRY):
        raise CheckpointMismatch(
            f"the network of the checkpoint, {kind!r:.60}, is not registered here; import the "
            "module that registers it before loading"
        )
    if model is not None:
        network.setdefault("obs_shape", obs_shape_of(spaces[0]))
    saved = {**described["settings"], **here, "model": network}
    settings = cls.settings_class()(**values_from_plain(cls.settings_class(), saved))
    if model is None:
        _check_size(cls, settings, state)
    policy = cls(settings, model, modes=["eval"])
    policy.check_spaces(*spaces)
    policy.eval_mode.load_state_dict(dict(state))
    return policy


def _check_size(cls: type[Policy], settings: Any, state: Mapping[str, Any]) -> None:
    """Refuse a network that has nothing to do with the state, before it takes memory."""
    n_saved = sum(
        leaf.numel() for _, leaf in leaves(state["model"]) if isinstance(leaf, torch.Tensor)
    )
    for number in _integers(settings.model):
        if number > max(n_saved, _MODEL_OPTION):
            raise CheckpointMismatch(
                f"the checkpoint describes a network with the size {number}, but has only "
                f"{n_saved} numbers"
            )
    blank = object.__new__(cls)
    blank.cfg = settings
    with torch.device("meta"):
        network = blank.make_model()
    n_built = sum(tensor.numel() for tensor in (*network.parameters(), *network.buffers()))
    if n_built > _MOST_NUMBERS + _MOST_TIMES * n_saved:
        raise CheckpointMismatch(
            f"the checkpoint describes a network of {n_built} numbers, but has only {n_saved}"
        )


def _integers(options: Any) -> Iterator[int]:
    if isinstance(options, Mapping):
        options = list(options.values())
    if isinstance(options, list | tuple):
        for option in options:
            yield from _integers(option)
    elif isinstance(options, int):
        yield abs(options)


def _space_data(space: gym.Space[Any] | None) -> dict[str, Any] | None:
    """Return a space as plain data; None if that is impossible."""
    try:
        return None if space is None else space_data(space)
    except SpaceError:
        return None


def _dotted(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"
