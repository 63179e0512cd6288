"""Decision Transformer."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from torch import nn

from dmiddleware.data.minibatches import MinibatchUnit
from dmiddleware.errors import PolicyError
from dmiddleware.model import DecisionTransformer
from dmiddleware.policy.action_codec import ActorSettings
from dmiddleware.policy.component import Component, adam, adamw
from dmiddleware.policy.obs_norm import DatasetNormSettings
from dmiddleware.policy.policy import Policy
from dmiddleware.policy.policy_registry import POLICY_REGISTRY
from dmiddleware.rl import bc_hits, bc_loss
from dmiddleware.schedule import LearningRate
from dmiddleware.settings import NonNegative, Number, Positive
from dmiddleware.torch_seeding import torch_seeded
from dmiddleware.tree import Batch, Columns, Nested, Value

__all__ = ["DecisionTransformerPolicy", "DecisionTransformerSettings"]


class LargestReturn(nn.Module):
    """The largest return of an episode in the data that was learned from; -inf before."""

    value: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("value", torch.tensor(-math.inf))

    def add(self, ret: torch.Tensor, counts: torch.Tensor) -> None:
        """Take the returns ``[…]`` where ``counts``; values that are not finite are ignored."""
        largest = ret.masked_fill(~counts | ~ret.isfinite(), -math.inf).amax()
        self.value.copy_(torch.maximum(self.value, largest))


class DecisionTransformerSettings(ActorSettings, DatasetNormSettings):
    """The settings of the decision transformer."""

    batch_size = 64
    """Sequences per update."""
    action_bounding: Literal["rescale"] = "rescale"
    """The actions of the network are bounded already, and are mapped to the bounds."""
    target_return: Number | None = None
    """Return to ask for when acting; None: the largest of an episode in the data."""
    return_scale: Positive = 1000.0
    """Returns are divided by it before the network sees them."""
    learning_rate: LearningRate = 1e-4
    """Adam's learning rate."""
    weight_decay: NonNegative = 0.0
    """Fraction of the weights that an update takes away, times the learning rate: AdamW's."""
    grad_clip_norm: Positive | None = 0.25
    """Largest norm of the gradient; None does not clip."""


@POLICY_REGISTRY.register("decision_transformer")
class DecisionTransformerPolicy(Policy):
    """Decision Transformer (Chen et al., "Reinforcement Learning via Sequence Modeling", 2021).

    A causal transformer learns which action followed, in the data, on the steps before and the
    return that was still to come (section 3). Acting asks for ``target_return``, subtracts each
    reward from it, and passes the last steps as the recurrent state. Observations have mean 0 and
    standard deviation 1 over the data set: call :meth:`observe` with them before learning.

    Learns from sequences ``[L, B, …]`` with the columns ``obs``, ``action``, ``mask``, and
    ``return_to_go`` and ``timestep`` from :func:`~dmiddleware.rl.with_returns_to_go`: build the
    buffer with ``unroll_len=policy.context_length``. Discrete actions have the cross-entropy for
    their loss, a Box of any shape the mean squared error. Collecting acts like evaluating.

    Differences from the paper: observations pass through an encoder, sequences are padded at their
    ends instead of their beginnings (which a causal network does not see), and weights do not
    decay unless ``weight_decay`` says so; a warm-up is a schedule of the learning rate.
    """

    cfg: DecisionTransformerSettings
    transformer: Component[DecisionTransformer]
    largest_return: Component[LargestReturn]
    reports: ClassVar[tuple[str, ...]] = (
        "total_loss",
        "accuracy",
        "largest_return",
        "grad_norm",
        "cur_lr",
    )
    model_type: ClassVar[str] = "decision_transformer"

    act_inputs: tuple[str, ...] = ("action_mask", "prev_reward")
    minibatch_unit: ClassVar[MinibatchUnit] = "lanes"
    learn_columns: ClassVar[tuple[str, ...]] = (
        "obs",
        "action",
        "return_to_go",
        "timestep",
        "mask",
    )

    @property
    def context_length(self) -> int:
        """Steps that the network sees at most: the ``unroll_len`` of the buffer."""
        return self.transformer.module.context_length

    def make_components(self) -> dict[str, Component[Any]]:
        """Return the networks, and how each is trained."""
        cfg = self.cfg
        clip, optimizer = cfg.grad_clip_norm, adam(cfg.learning_rate)
        if cfg.weight_decay:
            optimizer = adamw(cfg.learning_rate, weight_decay=cfg.weight_decay)
        return {
            "transformer": Component(self.model, optimizer, grad_clip_norm=clip, acts=True),
            "largest_return": Component(LargestReturn(), acts=True),
        }

    def learn(self, batch: Batch, **kwargs: Any) -> Mapping[str, Any] | list[Mapping[str, Any]]:
        """Make one update; see :meth:`Policy.learn`."""
        # Dropout draws from torch's generator. Seeded like this, a resumed run is exact.
        seed = int(torch.randint(2**62, (), generator=self.learn_generator))
        with torch_seeded(seed, self.device):
            return super().learn(batch, **kwargs)

    def n_learned_rows(self, batch: Columns) -> int:
        """Return over how many rows the loss is a mean."""
        return int(batch["mask"].sum())

    def update(self, batch: Columns) -> dict[str, torch.Tensor]:
        """Make one update; see :meth:`Policy.update`."""
        mask, ret, timestep = batch["mask"], batch["return_to_go"], batch["timestep"]
        raw = self.codec.to_raw(batch["action"])
        scaled = ret / self.cfg.return_scale
        output: dict[str, torch.Tensor] = self.model(batch["obs"], raw, scaled, timestep)
        distribution = self.codec.distribution(output)
        loss = bc_loss(distribution, raw, weight=mask / mask.float().mean())
        norm = self.transformer.step(loss)
        largest = self.largest_return.module
        largest.add(ret, mask & (timestep == 0))
        if self.reducer is not None:
            self.reducer.agree_on_largest(largest.value)
        logged = {"total_loss": loss.detach(), "largest_return": largest.value.clone()}
        hits = bc_hits(distribution, raw)
        if hits is not None:
            logged["accuracy"] = (hits & mask).sum() / mask.sum()
        if self.cfg.grad_clip_norm is not None:
            logged["grad_norm"] = norm
        return logged

    def initial_state(self, n: int) -> dict[str, torch.Tensor]:
        """Return the state at the start of ``n`` episodes: an empty window of steps.

        Returns:
            The window, oldest step first: ``obs_embedding`` ``[n, K, D]``, ``action`` ``[n, K, …]``
            and ``return_to_go`` ``[n, K]``; ``timestep`` ``[n]``, the number of steps before.
        """
        network = self.transformer.module
        window = (n, self.context_length)
        (part,) = network.action_parts
        is_discrete = part.kind == "discrete"
        return {
            "obs_embedding": torch.zeros(*window, network.embed_size),
            "action": torch.zeros(window, dtype=torch.int64)
            if is_discrete
            else torch.zeros(*window, *part.sizes),
            "return_to_go": torch.zeros(window),
            "timestep": torch.zeros(n, dtype=torch.int64),
        }

    def act_eval(
        self, obs: Value, env_id: np.ndarray, *, deterministic: bool = True, **kwargs: Any
    ) -> dict[str, Any]:
        """Act while evaluating; see :meth:`Policy.act_eval`."""
        return self._next_step(obs, None if deterministic else self.eval_generator, **kwargs)

    def act_collect(
        self, obs: Value, env_id: np.ndarray, *, deterministic: bool = True, **kwargs: Any
    ) -> dict[str, Any]:
        """Act while collecting; see :meth:`Policy.act_collect`."""
        return self._next_step(obs, None if deterministic else self.generator, **kwargs)

    def _next_step(
        self,
        obs: Value,
        generator: torch.Generator | None,
        *,
        state: Nested | None = None,
        prev_reward: torch.Tensor | None = None,
        action_mask: Nested | None = None,
        **kwargs: Any,
    ) -> dict[str, Any]:
        """Return the actions after the steps before, and the state with this step in its window."""
        if state is None or prev_reward is None:
            raise PolicyError(
                "a decision transformer acts on the steps before; pass prev_reward= and state=, at "
                "first policy.initial_state(n_envs), and then what forward returned as state"
            )
        network, length = self.transformer.module, self.context_length
        timestep: torch.Tensor = state["timestep"]
        row = torch.arange(timestep.shape[0], device=timestep.device)
        # Steps fill the window from its beginning; a full one drops its oldest step.
        is_full, slot = timestep >= length, timestep.clamp(max=length - 1)
        embedding, action, ret = (
            _without_oldest(state[name], is_full)
            for name in ("obs_embedding", "action", "return_to_go")
        )
        remaining = ret[row, (slot - 1).clamp(min=0)] - prev_reward
        ret[row, slot] = torch.where(timestep == 0, self._asked_return(), remaining)
        embedding[row, slot] = network.encode(obs)
        places = (timestep - slot).unsqueeze(0) + torch.arange(
            length, device=slot.device
        ).unsqueeze(1)
        output = network.decode(
            embedding.transpose(0, 1),
            action.transpose(0, 1),
            ret.T / self.cfg.return_scale,
            places,
        )
        last = {name: column[slot, row] for name, column in output.items()}
        distribution = self.acting_distribution(last, obs, action_mask)
        raw = distribution.mode() if generator is None else distribution.sample(generator)
        assert isinstance(raw, torch.Tensor)
        action[row, slot] = raw.to(action.device)
        next_state = {
            "obs_embedding": embedding,
            "action": action,
            "return_to_go": ret,
            "timestep": timestep + 1,
        }
        return {"action": self.codec.to_env(raw), "state": next_state}

    def _asked_return(self) -> torch.Tensor:
        """Return what to ask for at the start of an episode, a scalar."""
        target, largest = self.cfg.target_return, self.largest_return.module.value
        if target is not None:
            return torch.full_like(largest, target)
        # A policy that has not learned knows no return.
        return largest.masked_fill(largest.isinf(), 0.0)


def _without_oldest(column: torch.Tensor, is_full: torch.Tensor) -> torch.Tensor:
    """Return a window ``[n, K, …]`` that has dropped its oldest step where it is full, ``[n]``."""
    full = is_full.view(-1, *(1,) * (column.dim() - 1))
    return torch.where(full, column.roll(-1, 1), column)
