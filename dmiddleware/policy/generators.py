"""The random generators of a policy: on the CPU, and on the device where its data are."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import torch

from dmiddleware.seeding import derive_seed

__all__ = ["PolicyGenerators"]

_ACT: Final = "generator"
_EVAL: Final = "eval_generator"
_LEARN: Final = "learn_generator"
_ON_DEVICE: Final = "device_generators"


class PolicyGenerators:
    """Draws where the data are: on the CPU for arrays of the host, otherwise on their device.

    So a run in envs of the host draws the same numbers with and without a GPU, and one in envs on a
    device moves no numbers there.

    Args:
        seed: from which all seeds are derived.

    Attributes:
        device: where draws are made now.
    """

    def __init__(self, seed: int) -> None:
        act = derive_seed(seed, "policy", "act")
        self._on_cpu = {
            _ACT: torch.Generator().manual_seed(act),
            _EVAL: torch.Generator().manual_seed(derive_seed(seed, "policy", "eval")),
            _LEARN: torch.Generator().manual_seed(derive_seed(act, "learn")),
        }
        self._on_device: dict[str, torch.Generator] = {}
        self.device = torch.device("cpu")

    @property
    def act(self) -> torch.Generator:
        """Of the random numbers of collecting."""
        return self._here(_ACT)

    @property
    def eval(self) -> torch.Generator:
        """Of those of evaluating."""
        return self._here(_EVAL)

    @property
    def learn(self) -> torch.Generator:
        """Of those of updates."""
        return self._here(_LEARN)

    def _here(self, name: str) -> torch.Generator:
        if self.device.type == "cpu":
            return self._on_cpu[name]
        if name not in self._on_device:
            seed = derive_seed(self._on_cpu[name].initial_seed(), self.device.type)
            self._on_device[name] = torch.Generator(self.device).manual_seed(seed)
        return self._on_device[name]

    def seed(self, *, act: int | None = None, eval: int | None = None) -> None:
        """Seed collecting and evaluating, on the CPU and on the device."""
        for name, seed in ((_ACT, act), (_EVAL, eval)):
            if seed is not None:
                self._on_cpu[name].manual_seed(seed)
                self._on_device.pop(name, None)

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the states that every policy has."""
        return tuple(self._on_cpu)

    def state_dict(self) -> dict[str, Any]:
        """Return the states by name; those of a device where it has drawn."""
        states: dict[str, Any] = {name: g.get_state() for name, g in self._on_cpu.items()}
        if self._on_device:
            states[_ON_DEVICE] = {name: g.get_state() for name, g in self._on_device.items()}
        return states

    def load_state_dict(self, states: Mapping[str, Any], device: torch.device | str) -> None:
        """Restore what :meth:`state_dict` returned, for data on a device of this kind."""
        for name, generator in self._on_cpu.items():
            generator.set_state(states[name].cpu())
        self._on_device.clear()
        for name, state in states.get(_ON_DEVICE, {}).items():
            if torch.device(device).type != "cpu":
                self._on_device[name] = torch.Generator(device)
                self._on_device[name].set_state(state.cpu())
