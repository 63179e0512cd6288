"""A causal transformer over returns to go, observations and actions."""

from __future__ import annotations

import torch
from torch import nn

from dmiddleware.errors import SpaceError
from dmiddleware.model.encoders import ConvLayers, make_encoder
from dmiddleware.model.model_registry import MODEL_REGISTRY
from dmiddleware.model.network import Network
from dmiddleware.model.spaces import ActionKind, ActionShape, ObsShape
from dmiddleware.model.transformer import TransformerLayer
from dmiddleware.settings import Count, checked
from dmiddleware.torch_private import call
from dmiddleware.tree import Nested

__all__ = ["DecisionTransformer"]

_INIT_STD = 0.02  # as in GPT-2, which the paper builds on


@MODEL_REGISTRY.register("decision_transformer")
class DecisionTransformer(Network):
    """The network of Chen et al., "Decision Transformer" (2021), section 3.

    Each step is three tokens: the return to go, the observation and the action, each embedded
    linearly (the observation after an encoder) and marked with the step of the episode. The output
    at an observation's token, which sees itself and what came before, predicts the action.

    Args:
        obs_shape: see :mod:`dmiddleware.model.spaces`.
        action_shape: see :mod:`dmiddleware.model.spaces`.
        action_space: ``"discrete"`` or ``"continuous"``.
        context_length: steps that it sees at most.
        embed_size: width of the tokens.
        n_layers: number of attention layers.
        n_heads: attention heads per layer, a divisor of ``embed_size``.
        dropout: share of the activations that are dropped while learning.
        max_timestep: steps of an episode that it distinguishes; later ones look like the last.
        conv_layers: see :class:`ImageEncoder`.

    Attributes:
        context_length: as given.
        embed_size: as given.

    Raises:
        SpaceError: if a shape is invalid, or the actions are neither Discrete nor a Box.
        ValueError: if another option is invalid.
    """

    def __init__(
        self,
        obs_shape: ObsShape,
        action_shape: ActionShape,
        *,
        action_space: ActionKind = "discrete",
        context_length: int = 20,
        embed_size: int = 128,
        n_layers: int = 3,
        n_heads: int = 1,
        dropout: float = 0.1,
        max_timestep: int = 1000,
        conv_layers: ConvLayers | None = None,
    ) -> None:
        super().__init__(obs_shape, action_shape, action_space=action_space)
        (part, *more) = self.action_parts
        if more or part.kind not in ("discrete", "continuous"):
            raise SpaceError(
                f"DecisionTransformer needs Discrete actions or a Box, got {action_space}; use PPO "
                "or behavior cloning for others"
            )
        sizes = {"context_length": context_length, "embed_size": embed_size, "n_layers": n_layers}
        for name, size in {**sizes, "n_heads": n_heads, "max_timestep": max_timestep}.items():
            checked(name, size, Count)
        if embed_size % n_heads:
            raise ValueError(
                f"embed_size must be a multiple of n_heads, got {embed_size} and {n_heads}"
            )
        if not 0.0 <= dropout < 1.0:
            raise ValueError(f"dropout must be at least 0 and less than 1, got {dropout}")
        self.context_length, self.embed_size, self.dropout = context_length, embed_size, dropout
        self._is_discrete = part.kind == "discrete"
        n_actions = part.sizes[0]
        self.encoder = make_encoder(obs_shape, (embed_size,), conv_layers=conv_layers)
        self.embed_obs = nn.Linear(self.encoder.out_features, embed_size)
        self.embed_return = nn.Linear(1, embed_size)
        self.embed_action: nn.Module = (
            nn.Embedding(n_actions, embed_size)
            if self._is_discrete
            else nn.Linear(n_actions, embed_size)
        )
        self.embed_timestep = nn.Embedding(max_timestep, embed_size)
        self.norm = nn.LayerNorm(embed_size)
        layers = [TransformerLayer(embed_size, n_heads, dropout) for _ in range(n_layers)]
        self.layers = nn.Sequential(*layers, nn.LayerNorm(embed_size))
        for module in self.layers.modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=_INIT_STD)
                nn.init.zeros_(module.bias)
        self.head = nn.Linear(embed_size, n_actions)

    def encode(self, obs: Nested) -> torch.Tensor:
        """Return the embeddings ``[…, embed_size]`` of observations ``[…, *obs_shape]``."""
        embedded: torch.Tensor = self.embed_obs(call(self.encoder, obs))
        return embedded

    def decode(
        self,
        obs_embedding: torch.Tensor,
        action: torch.Tensor,
        return_to_go: torch.Tensor,
        timestep: torch.Tensor,
    ) -> dict[str, torch.Tensor]:
        """Return ``{"logit"}`` ``[L, B, A]``, or ``{"mu"}`` in ``(-1, 1)``, for each step.

        Args:
            obs_embedding: ``[L, B, embed_size]`` from :meth:`encode`, at most ``context_length``
                steps.
            action: ``[L, B]`` int64, or ``[L, B, A]`` float32 in ``[-1, 1]``. The prediction for a
                step does not depend on its own action, nor on later ones.
            return_to_go: ``[L, B]`` float32.
            timestep: ``[L, B]`` int64, places in the episode.
        """
        place = self.embed_timestep(timestep.clamp(max=self.embed_timestep.num_embeddings - 1))
        embedded = (
            self.embed_return(return_to_go.unsqueeze(-1)),
            obs_embedding,
            self.embed_action(action),
        )
        # [L, B, 3, D] to [B, 3 L, D]
        tokens = (
            torch.stack([tokens_of_kind + place for tokens_of_kind in embedded], 2)
            .transpose(0, 1)
            .flatten(1, 2)
        )
        hidden = self.layers(self.norm(tokens))
        output: torch.Tensor = self.head(hidden[:, 1::3].transpose(0, 1))
        return {"logit": output} if self._is_discrete else {"mu": output.tanh()}

    def forward(
        self,
        obs: Nested,
        action: torch.Tensor,
        return_to_go: torch.Tensor,
        timestep: torch.Tensor,
    ) -> dict[str, torch.Tensor]:
        """Return :meth:`decode` of observations ``[L, B, *obs_shape]``."""
        return self.decode(self.encode(obs), action, return_to_go, timestep)
