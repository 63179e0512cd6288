"""The memory of a policy: what algorithms with a recurrent network have in common."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import nn

from dmiddleware.errors import PolicyError, StructureError
from dmiddleware.model import Recurrent
from dmiddleware.policy.action_codec import ActionCodec
from dmiddleware.tree import Batch, Columns, Nested, map_leaves

__all__ = ["Memory", "check_sequences", "with_successors"]


class Memory:
    """Runs a recurrent network over steps and sequences.

    The component that steps the envs holds the state, and stores it with each row. The network says
    whether the previous action and reward are collected too.

    Args:
        network: a :class:`~dmiddleware.model.Recurrent` network.
        codec: maps previous actions to what the network sees.
        act_inputs: what a policy of this class can see when it acts.
        user: the policy's name, for the message.

    Attributes:
        act_inputs: what the policy sees with this network.

    Raises:
        PolicyError: if the network is not recurrent, or asks for what the policy cannot see.
    """

    def __init__(
        self, network: nn.Module, codec: ActionCodec, *, act_inputs: Collection[str], user: str
    ) -> None:
        if not isinstance(network, Recurrent):
            raise PolicyError(
                f"{user} needs a recurrent model, but {type(network).__name__} is not "
                "a RecurrentNetwork; leave model out, or derive yours from RecurrentNetwork"
            )
        if unseen := [name for name in network.act_inputs if name not in act_inputs]:
            raise PolicyError(
                f"{user} does not see {', '.join(unseen)} when it acts, but "
                f"{type(network).__name__} asks for it; build the network with {unseen[0]}=False"
            )
        self._network = network
        self._codec = codec
        usable = {*network.act_inputs, "action_mask"}
        self.act_inputs: tuple[str, ...] = tuple(name for name in act_inputs if name in usable)

    def initial_state(self, n: int) -> torch.Tensor:
        """Return the state at the start of ``n`` episodes, ``[n, S]``: zeros."""
        return self._network.initial_state(n)

    def run(
        self,
        obs: Nested,
        seen: Columns | Mapping[str, Any],
        state: torch.Tensor,
        *,
        network: Recurrent | None = None,
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


def check_sequences(batch: Batch, *, burn_in: int, user: str, several_agents: bool = False) -> None:
    """Refuse a batch that does not consist of sequences with a state for each.

    Args:
        batch: what a buffer drew.
        burn_in: the rows of a sequence that are not learned from.
        user: the policy's name, for the message.
        several_agents: whether each agent of a sequence has a state.

    Raises:
        StructureError: with the shapes, and how such a batch is drawn.
    """
    shape, n_state_dims = tuple(batch["mask"].shape), batch["state"].dim()
    state_shape = "[B, A, S]" if several_agents else "[B, S]"
    if len(shape) != 2 or shape[0] <= burn_in or n_state_dims != 2 + several_agents:
        raise StructureError(
            f"{user} learns from sequences [T, B, …] of more than burn_in={burn_in} rows, with one "
            f"state {state_shape} for each, but the column mask has shape {shape} and the state "
            f"{n_state_dims} dimensions; build the buffer with unroll_len, and learn with "
            "OffPolicyLearner"
        )


def with_successors(column: Nested, successors: Nested) -> Any:
    """Return ``[T + 1, …]``: the first row of a column, and what follows each of its rows."""
    return map_leaves(lambda leaf, after: torch.cat([leaf[:1], after]), column, successors)
