"""The random generators of a policy: on the CPU, and on the device where its data are."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, NamedTuple

import torch

from dmiddleware.seeding import derive_seed

__all__ = ["Generators", "PolicyGenerators"]

_ON_DEVICE: Final = "device_generators"


class Generators(NamedTuple):
    """Those of collecting, of evaluating and of updates, on one device."""

    generator: torch.Generator
    eval_generator: torch.Generator
    learn_generator: torch.Generator


class PolicyGenerators:
    """The generators on the CPU, and those of a device from when a policy draws there.

    A policy draws where its data are: so a run in envs of the host draws the same numbers with and
    without a GPU, and one in envs on a device moves no numbers there.

    Args:
        seed: from which all seeds are derived.
        device: the policy's device.

    Attributes:
        on_cpu: those for data of the host.
    """

    def __init__(self, seed: int, device: str) -> None:
        act = derive_seed(seed, "policy", "act")
        seeds = (act, derive_seed(seed, "policy", "eval"), derive_seed(act, "learn"))
        self.on_cpu = Generators(*(torch.Generator().manual_seed(number) for number in seeds))
        self._device = torch.device(device)
        self._on_device: Generators | None = None

    @property
    def on_device(self) -> Generators:
        """Those for data on the policy's device."""
        if self._device.type == "cpu":
            return self.on_cpu
        if self._on_device is None:
            self._on_device = Generators(*(torch.Generator(self._device) for _ in self.on_cpu))
            for name, generator in self.on_cpu._asdict().items():
                self._seed_on_device(name, generator.initial_seed())
        return self._on_device

    def seed(self, name: str, seed: int) -> None:
        """Seed a generator, on the CPU and on the device."""
        getattr(self.on_cpu, name).manual_seed(seed)
        if self._on_device is not None:
            self._seed_on_device(name, seed)

    def _seed_on_device(self, name: str, seed: int) -> None:
        getattr(self._on_device, name).manual_seed(derive_seed(seed, self._device.type))

    def state_dict(self) -> dict[str, Any]:
        """Return the states by name; those of a device if it has drawn."""
        states: dict[str, Any] = _states(self.on_cpu)
        if self._on_device is not None:
            states[_ON_DEVICE] = _states(self._on_device)
        return states

    def load_state_dict(self, states: Mapping[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned."""
        _load(self.on_cpu, states)
        if _ON_DEVICE in states and self._device.type != "cpu":
            _load(self.on_device, states[_ON_DEVICE])


def _states(generators: Generators) -> dict[str, Any]:
    return {name: generator.get_state() for name, generator in generators._asdict().items()}


def _load(generators: Generators, states: Mapping[str, Any]) -> None:
    for name, generator in generators._asdict().items():
        generator.set_state(states[name].cpu())
