"""What the states of all buffers have in common."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping

import numpy as np
import torch

from dmiddleware.errors import CheckpointMismatch, ConfigError

__all__ = ["check_state", "generator_from_text", "generator_to_text", "usable_device"]


def check_state(name: str, state: object, keys: Collection[str]) -> None:
    """Raise a :class:`~dmiddleware.errors.CheckpointMismatch` if a state lacks a key."""
    missing = [key for key in keys if not isinstance(state, Mapping) or key not in state]
    if missing:
        raise CheckpointMismatch(
            f"this is not the state of a {name}: it has no {', '.join(missing)}; pass what its "
            "state_dict() returned"
        )


def generator_to_text(generator: np.random.Generator) -> str:
    """Return the state of a generator as JSON (its integers have more than 64 bits)."""
    return json.dumps(generator.bit_generator.state)


def generator_from_text(text: str) -> np.random.Generator:
    """Return a generator in the state that :func:`generator_to_text` wrote."""
    bit_generator = np.random.PCG64()
    bit_generator.state = json.loads(text)
    return np.random.Generator(bit_generator)


def usable_device(name: str) -> torch.device:
    """Return a device of this machine, or raise a :class:`~dmiddleware.errors.ConfigError`."""
    try:
        return torch.empty(0, device=name).device
    except (AssertionError, RuntimeError) as error:
        raise ConfigError(
            f"device={name!r} cannot be used here: {str(error).splitlines()[0]}; pass a device "
            "that this machine has, or leave it out"
        ) from error
