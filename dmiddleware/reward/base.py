"""The base classes of what is learned beside the policy, from the rows that it collects."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import torch
from torch import nn

from dmiddleware.data import minibatches, n_minibatches, select_columns
from dmiddleware.errors import CheckpointMismatch, NonFiniteLoss
from dmiddleware.policy import Component
from dmiddleware.policy.component import broken_weights, take_flag
from dmiddleware.policy.component_attributes import set_components
from dmiddleware.policy.state import (
    check_model_state,
    component_state,
    load_component_state,
    optimizer_states,
)
from dmiddleware.settings import Count, checked
from dmiddleware.tree import Batch, flatten_lead, index_rows, to_device

__all__ = ["RewardModel", "RowLearner"]

_ROWS_AT_ONCE = 1024


class RowLearner(ABC):
    """Learns from collected rows, in minibatches, for several epochs.

    A subclass declares its components, as a policy does, and writes ``update_minibatch(batch)``,
    which learns from a minibatch ``[B, …]`` with :meth:`Component.step` and returns scalars to log.
    It receives the columns that ``columns`` names, on the device.

    :class:`RewardModel`, the public base class, describes the arguments.
    """

    columns: ClassVar[tuple[str, ...]]
    """The columns that it reads; those that a batch lacks are ignored."""

    def __init__(
        self,
        components: Mapping[str, Component[Any]],
        *,
        batch_size: int,
        epochs: int,
        device: torch.device | str = "cpu",
        seed: int = 0,
    ) -> None:
        self.components = dict(components)
        self._batch_size: int = checked("batch_size", batch_size, Count)
        self._epochs: int = checked("epochs", epochs, Count)
        self._device = torch.device(device)
        self.generator = torch.Generator().manual_seed(seed)
        self._not_finite = torch.zeros((), device=self._device)
        for component in self.components.values():
            if isinstance(component.module, nn.Module):
                component.module.to(self._device)
            component.prepare(not_finite=self._not_finite)
        set_components(self, self.components)

    @property
    def settings(self) -> dict[str, Any]:
        """What the run's config records."""
        return {"batch_size": self._batch_size, "epochs": self._epochs}

    @abstractmethod
    def update_minibatch(self, batch: Batch) -> dict[str, torch.Tensor]:
        """Learn from rows ``[B, …]``; return scalars to log."""

    def update(self, rows: Batch) -> dict[str, float]:
        """Learn from collected rows.

        Args:
            rows: ``[T, …]`` or ``[T, E, …]``.

        Returns:
            What to log, averaged over the minibatches.

        Raises:
            NonFiniteLoss: if a loss was not finite, or the norm of the gradient of a component that
                is clipped; its step and all later ones were skipped. Also if weights are not
                finite, because a gradient of a component that is not clipped was not.
        """
        batch = self._flat(rows, self.columns)
        n = n_minibatches(batch, self._batch_size)
        outputs = [
            self.update_minibatch(minibatch)
            for _ in range(self._epochs)
            for minibatch in minibatches(batch, n, generator=self.generator)
        ]
        if take_flag(self._not_finite):
            broken = broken_weights(self.components)
            raise NonFiniteLoss(
                f"a loss or gradient of {type(self).__name__} was NaN or infinite; its step and "
                "all later ones were skipped: check the observations for NaN, or lower the "
                "learning rate"
                if broken is None
                else f"{type(self).__name__}: {broken}"
            )
        return {
            name: torch.stack([output[name].detach().float() for output in outputs]).mean().item()
            for name in outputs[0]
        }

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed run needs."""
        return {
            "components": {
                name: component_state(component) for name, component in self.components.items()
            },
            "optimizer": optimizer_states(self.components),
            "generator": self.generator.get_state(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned.

        Raises:
            CheckpointMismatch: if it belongs to another reward; nothing was loaded.
        """
        saved = state["components"]
        if set(saved) != set(self.components):
            raise CheckpointMismatch(
                f"the state has the components {', '.join(saved)}, but {type(self).__name__} has "
                f"{', '.join(self.components)}; load a state of the same reward"
            )
        for name, component in self.components.items():
            if component.is_module:
                check_model_state(component.module, saved[name], name)
        for name, component in self.components.items():
            load_component_state(component, saved[name], name)
            if component.optimizer is not None:
                component.load_optimizer(state["optimizer"][name])
        self.generator.set_state(state["generator"].cpu())

    def _for_each(
        self, evaluate: Callable[[Batch], torch.Tensor], rows: Batch, columns: tuple[str, ...]
    ) -> torch.Tensor:
        """Return what a function returns for the rows, float32, in their shape, on the CPU.

        Args:
            evaluate: rows ``[N, …]`` to ``[N]``.
            rows: ``[T, …]`` or ``[T, E, …]``.
            columns: those that the function reads.
        """
        batch, n_rows = self._flat(rows, columns), rows["done"].numel()
        parts = (slice(at, at + _ROWS_AT_ONCE) for at in range(0, n_rows, _ROWS_AT_ONCE))
        values = [evaluate(index_rows(batch, part)) for part in parts]
        return torch.cat(values).float().cpu().reshape(rows["done"].shape)

    def _flat(self, rows: Batch, columns: tuple[str, ...]) -> Batch:
        """Return the columns that are read, ``[N, …]``, on the device."""
        n_lead = rows["done"].dim()
        return to_device(flatten_lead(select_columns(rows, columns), n_lead), self._device)


class RewardModel(RowLearner):
    """A reward that is learned from the rows that a policy collects.

    :class:`middleware.RewardLearner` trains it, and writes its rewards over those of the
    environment, or adds them. A subclass declares its components, as a policy does, and writes

    - ``reward_of(batch)``, the rewards ``[N]`` of rows ``[N, …]``;
    - ``update_minibatch(batch)``, which learns from a minibatch ``[B, …]`` with
      :meth:`Component.step` and returns scalars to log.

    Both receive the columns that ``columns`` names, on the device.

    Args:
        components: modules with their optimizers, and other objects with a state, by name. Those
            that the class declares by an annotation, such as ``net: Component[nn.Module]``, become
            attributes.
        batch_size: rows per update.
        epochs: passes over the collected rows.
        device: the device of the components.
        seed: of the order of the minibatches, and of ``self.generator``, from which a subclass
            draws.

    Raises:
        ConfigError: if ``batch_size`` or ``epochs`` is not a positive integer.
    """

    learns_first: ClassVar[bool] = False
    """Whether it learns from collected rows before it rewards them, not after."""

    @abstractmethod
    def reward_of(self, batch: Batch) -> torch.Tensor:
        """Return the rewards ``[N]`` of rows ``[N, …]``."""

    @torch.no_grad()
    def reward(self, rows: Batch) -> torch.Tensor:
        """Return the rewards of collected rows.

        Args:
            rows: ``[T, …]`` or ``[T, E, …]``.

        Returns:
            float32, in the shape of the column ``done``, on the CPU.
        """
        return self._for_each(self.reward_of, rows, self.columns)
