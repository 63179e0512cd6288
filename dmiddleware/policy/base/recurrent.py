"""Policies with a memory: what recurrent PPO and R2D2 have in common."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch

from dmiddleware.data.batch import Nested
from dmiddleware.errors import PolicyError
from dmiddleware.model import RecurrentNetwork
from dmiddleware.policy.base.actions import CodecPolicy

__all__ = ["RecurrentPolicy"]


class RecurrentPolicy(CodecPolicy):
    """A policy whose model is a :class:`~dmiddleware.model.RecurrentNetwork`.

    The component that steps the envs holds the state, and stores it with each row. The model says
    whether the previous action and reward are collected too.

    Raises:
        PolicyError: if the model is not recurrent.
    """

    act_inputs: ClassVar[tuple[str, ...]] = (
        "is_first",
        "prev_action",
        "prev_reward",
        "action_mask",
    )

    def _init_common(self) -> None:
        super()._init_common()
        model = getattr(self, "_model", None)  # a policy with only the command mode has none
        if model is not None and not isinstance(model, RecurrentNetwork):
            raise PolicyError(
                f"{type(self).__name__} needs a recurrent model, but {type(model).__name__} is not "
                "a RecurrentNetwork; leave model out, or derive yours from RecurrentNetwork"
            )

    def _get_act_inputs(self) -> tuple[str, ...]:
        return (*self._network().act_inputs, "action_mask")

    def _network(self) -> RecurrentNetwork:
        assert isinstance(self._model, RecurrentNetwork)
        return self._model

    def initial_state(self, n: int) -> torch.Tensor:
        """Return the state at the start of ``n`` episodes, ``[n, S]``: zeros."""
        return self._network().initial_state(n)

    def _run(
        self,
        obs: Nested,
        seen: Mapping[str, Any],
        state: torch.Tensor,
        *,
        model: RecurrentNetwork | None = None,
        within_episode: bool = False,
    ) -> dict[str, torch.Tensor]:
        """Run the model, or its target network, over sequences ``[T, B, …]`` or a step ``[B, …]``.

        Args:
            obs: what the model sees.
            seen: the act inputs, columns with the leading dimensions of ``obs``.
            state: ``[B, S]``, before the first step.
            model: the target network; None: the model.
            within_episode: as :meth:`RecurrentNetwork.forward` has it.
        """
        network = self._network() if model is None else model
        inputs = {name: seen[name] for name in network.act_inputs}
        if "prev_action" in inputs:
            inputs["prev_action"] = self._codec.to_raw(inputs["prev_action"])
        output: dict[str, torch.Tensor] = network(
            obs, state, within_episode=within_episode, **inputs
        )
        return output
