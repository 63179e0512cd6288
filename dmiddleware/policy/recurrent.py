"""The memory of a policy: what recurrent PPO and R2D2 have in common."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from dmiddleware.errors import PolicyError
from dmiddleware.model import RecurrentNetwork
from dmiddleware.policy.action_codec import ActionCodec
from dmiddleware.tree import Columns, Nested

__all__ = ["Memory"]


class Memory:
    """Runs a recurrent network over steps and sequences.

    The component that steps the envs holds the state, and stores it with each row. The network says
    whether the previous action and reward are collected too.

    Args:
        network: a :class:`~dmiddleware.model.RecurrentNetwork`.
        codec: maps previous actions to what the network sees.
        user: the policy's name, for the message.

    Attributes:
        act_inputs: what a policy with this network sees when it acts.

    Raises:
        PolicyError: if the network is not recurrent.
    """

    def __init__(self, network: nn.Module, codec: ActionCodec, *, user: str) -> None:
        if not isinstance(network, RecurrentNetwork):
            raise PolicyError(
                f"{user} needs a recurrent model, but {type(network).__name__} is not "
                "a RecurrentNetwork; leave model out, or derive yours from RecurrentNetwork"
            )
        self._network = network
        self._codec = codec
        self.act_inputs: tuple[str, ...] = (*network.act_inputs, "action_mask")

    def initial_state(self, n: int) -> torch.Tensor:
        """Return the state at the start of ``n`` episodes, ``[n, S]``: zeros."""
        return self._network.initial_state(n)

    def run(
        self,
        obs: Nested,
        seen: Columns | Mapping[str, Any],
        state: torch.Tensor,
        *,
        network: RecurrentNetwork | None = None,
        within_episode: bool = False,
        acts_only: bool = False,
    ) -> dict[str, torch.Tensor]:
        """Run the network, or a copy of it, over sequences ``[T, B, …]`` or a step ``[B, …]``.

        Args:
            obs: what the network sees.
            seen: the act inputs, columns with the leading dimensions of ``obs``.
            state: ``[B, S]``, before the first step.
            network: the target network; None: the network itself.
            within_episode: as :meth:`RecurrentNetwork.forward` has it.
            acts_only: likewise.
        """
        network = self._network if network is None else network
        inputs = {name: seen[name] for name in network.act_inputs}
        if "prev_action" in inputs:
            inputs["prev_action"] = self._codec.to_raw(inputs["prev_action"])
        if acts_only:
            inputs["acts_only"] = True
        output: dict[str, torch.Tensor] = network(
            obs, state, within_episode=within_episode, **inputs
        )
        return output
