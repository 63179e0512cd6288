"""SAC and TD3 with memories, from sequences."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from dmiddleware.model import RecurrentNetwork
from dmiddleware.policy.ddpg import DDPGPolicy, TD3Settings
from dmiddleware.policy.policy_registry import POLICY_REGISTRY
from dmiddleware.policy.recurrent import Memory, check_sequences, with_successors
from dmiddleware.policy.sac import SACPolicy, SACSettings
from dmiddleware.policy.td import TD_COLUMNS, TDPolicy, TDSettings
from dmiddleware.rl import sequence_priority
from dmiddleware.settings import Fraction, Whole
from dmiddleware.tree import Batch, Columns, Nested, Value, index_rows, map_leaves

__all__ = [
    "RecurrentSACPolicy",
    "RecurrentSACSettings",
    "RecurrentTD3Policy",
    "RecurrentTD3Settings",
    "RecurrentTDPolicy",
    "RecurrentTDSettings",
]


class RecurrentTDSettings(TDSettings):
    """Settings of policies with memories of actor and critics."""

    batch_size = 32
    """Sequences per update."""
    n_step: Literal[1] = 1
    """Targets are those of one step."""
    burn_in: Whole = 0
    """Rows at the start of a sequence that only update the states."""
    priority_eta: Fraction = 0.9
    """With priority: weight of a sequence's largest error in its priority."""


class History(NamedTuple):
    """What memories see of sequences; it stands where an update has observations ``[B, …]``.

    Attributes:
        obs: ``[T, B, *obs_shape]``.
        inputs: the act inputs of the networks, raw, ``[T, B, …]``.
        state: ``[B, S]``, of the actor before the first row.
        start: the first row to learn from; those before it only update the states.
    """

    obs: Nested
    inputs: dict[str, Any]
    state: Tensor
    start: int

    def run(self, network: RecurrentNetwork, state: Tensor, **inputs: Any) -> dict[str, Tensor]:
        """Return a network's outputs for the rows from ``start`` on, ``[T - start, B, …]``.

        Args:
            network: the network.
            state: ``[B, S]``, before the first row.
            **inputs: further inputs of the rows from ``start`` on.
        """
        start = self.start
        if start:
            warm_up = index_rows(self.obs, slice(start)), index_rows(self.inputs, slice(start))
            with torch.no_grad():
                _, state = network.remember(warm_up[0], state, within_episode=True, **warm_up[1])
        obs, rows = (index_rows(columns, slice(start, None)) for columns in (self.obs, self.inputs))
        output: dict[str, Tensor] = network(obs, state, within_episode=True, **rows, **inputs)
        return output


class RecurrentTDPolicy(TDPolicy):
    """What recurrent SAC and recurrent TD3 have in common: how an update sees sequences.

    The update is that of the algorithm for single rows. It gets the rows of all sequences after
    their burn-in, one after the other, with weights of 0 for padding, and a :class:`History` where
    it expects observations.
    """

    cfg: RecurrentTDSettings
    model_type: ClassVar[str] = "recurrent_actor_q"
    act_inputs: tuple[str, ...] = ("is_first", "prev_action", "prev_reward")
    learn_columns: ClassVar[tuple[str, ...]] = (*TD_COLUMNS, "is_first", "mask", "state")

    def setup(self) -> None:
        """Build the memory that acts, and refuse critics without one."""
        super().setup()
        shared: dict[str, Any] = {"act_inputs": self.act_inputs, "user": type(self).__name__}
        Memory(self.submodule("critic"), self.codec, **shared)
        self.memory = Memory(self.submodule("actor"), self.codec, **shared)
        self.act_inputs = self.memory.act_inputs

    def initial_state(self, n: int) -> Tensor:
        """Return the actor's state at the start of ``n`` episodes, ``[n, S]``: zeros."""
        return self.memory.initial_state(n)

    @property
    def burn_in(self) -> int:
        """The rows at the start of a sequence that only update the states; the buffer's too."""
        return int(self.cfg.burn_in)

    def check_outputs(self, obs: Value, **inputs: Any) -> None:
        """Refuse an actor or critics of other actions; see :meth:`Policy.check_outputs`."""
        step = {name: map_leaves(lambda leaf: leaf.unsqueeze(0), inputs[name]) for name in inputs}
        obs = map_leaves(lambda leaf: leaf.unsqueeze(0), obs)
        super().check_outputs(self._history(obs, {**step, "state": inputs["state"]}, 0))

    def check_batch(self, batch: Batch) -> Batch:
        """Refuse a batch that does not consist of sequences."""
        check_sequences(batch, burn_in=self.burn_in, user=type(self).__name__)
        return super().check_batch(batch)

    def n_learned_rows(self, batch: Columns) -> int:
        """Return over how many rows the loss is a mean."""
        mask: Tensor = batch["mask"]
        return int(mask[self.burn_in :].sum())

    def draw(self, batch: Columns) -> dict[str, Any]:
        """Return the random numbers of an update, for its rows; see :meth:`Policy.draw`."""
        columns: dict[str, Any] = {**batch, "action": self._rows(batch["action"])}
        return super().draw(columns)

    def update(self, batch: Columns, **drawn: Any) -> dict[str, Any]:
        """Make one update; see :meth:`Policy.update`."""
        start = self.burn_in
        mask: Tensor = batch["mask"][start:]
        is_first: Tensor = batch["is_first"]
        before: dict[str, Tensor] = {"state": batch["state"], "is_first": is_first}
        after = {**before, "is_first": with_successors(is_first, torch.zeros_like(is_first))}
        for name, source in (("prev_action", "action"), ("prev_reward", "reward")):
            if name in self.act_inputs:
                before[name] = batch[name]
                after[name] = with_successors(batch[name], batch[source])
        both = with_successors(batch["obs"], batch["next_obs"])
        mean_1: Tensor = mask * (mask.numel() / mask.sum())
        rows = {
            **{name: self._rows(batch[name]) for name in ("action", "reward", "terminated")},
            "obs": self._history(batch["obs"], before, start),
            "next_obs": self._history(both, after, start + 1),
            "mask": mean_1.flatten(),
            "weight": (mean_1 * batch["weight"] if "weight" in batch else mean_1).flatten(),
        }
        output: dict[str, Any] = super().update(rows, **drawn)
        td_error: Tensor = output.pop("priority").view_as(mask)
        if "weight" in batch or self.cfg.priority:
            output["priority"] = sequence_priority(td_error, mask, eta=self.cfg.priority_eta)
        return output

    def row_mean(self, column: Tensor, batch: Columns) -> Tensor:
        """Return the mean of a column ``[…, N]`` over the rows that are not padding."""
        mask: Tensor = batch["mask"]
        return (column * mask).mean()

    def actor_outputs(self, actor: nn.Module, obs: Any) -> dict[str, Tensor]:
        """Return what an actor says of the rows of a history, ``[N, …]``."""
        assert isinstance(actor, RecurrentNetwork)
        history: History = obs
        output = history.run(actor, history.state)
        return {name: output[name].flatten(0, 1) for name in ("mu", "sigma") if name in output}

    def critics(self, critic: nn.Module, obs: Any, action: Tensor) -> Tensor:
        """Return ``[n_critics, N]``, the values of actions ``[N, A]`` in the rows of a history."""
        assert isinstance(critic, RecurrentNetwork)
        history: History = obs
        n_sequences = history.state.shape[0]
        state = history.state.new_zeros(n_sequences, critic.core.state_size)
        of_sequences = action.view(-1, n_sequences, action.shape[-1])
        q = history.run(critic, state, action=of_sequences)["q"]
        return q.flatten(-2)

    def _history(self, obs: Nested, seen: Mapping[str, Tensor], start: int) -> Any:
        """Return a :class:`History` of columns ``[T, B, …]`` and the actor's ``state``."""
        inputs = {name: seen[name] for name in self.act_inputs}
        if "prev_action" in inputs:
            inputs["prev_action"] = self.codec.to_raw(inputs["prev_action"])
        return History(obs, inputs, seen["state"], start)

    def _rows(self, column: Tensor) -> Tensor:
        """Return the rows ``[N, …]`` of all sequences ``[T, B, …]`` after their burn-in."""
        return column[self.burn_in :].flatten(0, 1)


class RecurrentSACSettings(RecurrentTDSettings, SACSettings):
    """The settings of SAC with memories."""


@POLICY_REGISTRY.register("sac_recurrent")
class RecurrentSACPolicy(RecurrentTDPolicy, SACPolicy):
    """SAC whose actor and critics have a memory each.

    Ni et al., "Recurrent Model-Free RL Can Be a Strong Baseline for Many POMDPs" (ICML 2022): the
    losses of :class:`SACPolicy` over sequences, with memories that actor and critics do not share,
    and that see the previous action and reward (section 4.2). From Kapturowski et al., "Recurrent
    Experience Replay in Distributed RL" (ICLR 2019), section 3: the actor's state at the start of a
    sequence is the one that was stored with its first row, and the first ``burn_in`` rows only
    bring the states up to date.

    The critics do not act, so nothing stores their state: their memory starts at zero at the first
    row of each sequence, whatever came before it in the episode.

    It learns from sequences ``[T, B, …]`` of one episode each, as a
    :class:`~dmiddleware.data.TensorBuffer` with ``unroll_len`` draws them: with the policy's
    ``burn_in``, and the state only where they start. Losses are means over the rows after the
    burn-in, without padding. With ``priority``, that of a sequence is a mixture of its largest and
    its mean error, as in :class:`R2D2Policy`. Actions are a Box of any shape.

    The model is a :class:`~dmiddleware.model.RecurrentActorQ`, or another one with such submodules.
    """

    cfg: RecurrentSACSettings

    def act_collect(
        self, obs: Value, env_id: np.ndarray, *, action_mask: Nested | None = None, **kwargs: Any
    ) -> dict[str, Any]:
        """Draw actions from what the actor says; see :meth:`Policy.act_collect`."""
        output: dict[str, Tensor] = self.memory.run(obs, kwargs, kwargs["state"])
        acted = self.acted(output, obs, None, self.generator)
        return {**acted, "state": output["state"]}

    def act_eval(
        self,
        obs: Value,
        env_id: np.ndarray,
        *,
        deterministic: bool = True,
        action_mask: Nested | None = None,
        **kwargs: Any,
    ) -> dict[str, Any]:
        """Take the most likely actions, or draw them; see :meth:`Policy.act_eval`."""
        output: dict[str, Tensor] = self.memory.run(obs, kwargs, kwargs["state"])
        generator = None if deterministic else self.eval_generator
        acted = self.acted(output, obs, None, generator)
        return {**acted, "state": output["state"]}


class RecurrentTD3Settings(RecurrentTDSettings, TD3Settings):
    """The settings of TD3 with memories."""

    noise: Literal["gaussian"] = "gaussian"
    """Noise on collected actions, independent from step to step."""
    noise_theta: Literal[1] = 1
    """All of the noise is lost in a step."""


@POLICY_REGISTRY.register("td3_recurrent")
class RecurrentTD3Policy(RecurrentTDPolicy, DDPGPolicy):
    """TD3 whose actor and critics have a memory each, as :class:`RecurrentSACPolicy` has them.

    The losses are those of :class:`TD3Policy` (Ni et al., 2022, compare both); noise on
    collected actions is Gaussian.
    """

    cfg: RecurrentTD3Settings
    model_defaults: ClassVar[Mapping[str, Any]] = {"deterministic": True, "n_critics": 2}

    def act_collect(
        self, obs: Value, env_id: np.ndarray, *, action_mask: Nested | None = None, **kwargs: Any
    ) -> dict[str, Any]:
        """Act with noise; see :meth:`Policy.act_collect`."""
        output: dict[str, Tensor] = self.memory.run(obs, kwargs, kwargs["state"])
        state = output.pop("state")
        raw, noise = self.raw_and_noise(output, obs)
        return {"action": self.codec.to_env(raw + noise), "state": state}

    def act_eval(
        self, obs: Value, env_id: np.ndarray, *, action_mask: Nested | None = None, **kwargs: Any
    ) -> dict[str, Any]:
        """Act without noise; see :meth:`Policy.act_eval`."""
        output: dict[str, Tensor] = self.memory.run(obs, kwargs, kwargs["state"])
        acted = self.acted(output, obs, None, None)
        return {**acted, "state": output["state"]}
