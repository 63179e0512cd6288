"""The face of ``ding.model``: the networks here, with DI-engine's names and arguments."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any, Final

from torch import nn

from dmiddleware.classic.di_engine_state import in_own_names as state_in_own_names
from dmiddleware.classic.model_options import in_own_names
from dmiddleware.classic.model_wrappers import model_wrap
from dmiddleware.errors import ConfigError
from dmiddleware.model import MODEL_REGISTRY, create_model

_Q: Final = ("obs_shape", "action_shape", "encoder_hidden_size_list")
_HEADS: Final = (
    "actor_head_hidden_size", "actor_head_layer_num", "critic_head_hidden_size",
    "critic_head_layer_num",
)  # fmt: skip
_MODELS: Final[Mapping[str, tuple[str, tuple[str, ...]]]] = {
    "BCQ": ("bcq", ("obs_shape", "action_shape")),
    "C51DQN": ("categorical_q_network", _Q),
    "ContinuousBC": ("actor", ("obs_shape", "action_shape", "action_space")),
    "ContinuousQAC": ("actor_q", ("obs_shape", "action_shape", "action_space", "twin_critic")),
    "DQN": ("q_network", (*_Q, "dueling", "head_hidden_size", "head_layer_num")),
    "DRQN": ("recurrent_q_network", (*_Q, "dueling", "head_hidden_size", "head_layer_num")),
    "DecisionTransformer": ("decision_transformer", ("state_dim", "act_dim", "n_blocks", "h_dim",
                                                     "context_len", "n_heads", "drop_p")),
    "DiscreteBC": ("actor", _Q),
    "DiscreteQAC": ("discrete_actor_q", ("obs_shape", "action_shape", "twin_critic")),
    "EDAC": ("edac", ("obs_shape", "action_shape", "ensemble_num")),
    "FQF": ("fqf_network", _Q),
    "IQN": ("implicit_quantile_q_network", _Q),
    "MAVAC": ("centralized_actor_critic", ("agent_obs_shape", "global_obs_shape", "action_shape",
                                           "agent_num", *_HEADS)),
    "PDQN": ("pdqn", _Q),
    "PG": ("actor", ("obs_shape", "action_shape", "action_space")),
    "PPG": ("ppg", ("obs_shape", "action_shape", "action_space")),
    "QACDIST": ("categorical_actor_q", ("obs_shape", "action_shape", "action_space")),
    "QMix": ("qmix_network", ("agent_num", "obs_shape", "global_obs_shape", "action_shape")),
    "QRDQN": ("quantile_q_network", _Q),
    "RainbowDQN": ("categorical_q_network", _Q),
    "VAC": ("actor_critic", ("obs_shape", "action_shape", "action_space", "share_encoder")),
}  # fmt: skip
"""DI-engine's networks: the registered names of those here, and its arguments by position."""

_ALIASES: Final[Mapping[str, str]] = {"MAQAC": "DiscreteMAQAC", "QAC": "ContinuousQAC"}

_FIXED: Final[Mapping[str, Mapping[str, Any]]] = {
    "ContinuousBC": {"action_space": "continuous"},
    "RainbowDQN": {"dueling": True, "noisy": True},
}

REFUSED: Final[Mapping[str, str]] = {"Mixer": "QMix has it as a part"}


def _registered(name: str) -> bool:
    return name in MODEL_REGISTRY


@functools.cache
def _face(name: str) -> type[nn.Module]:
    """Return a class that builds a network here from DI-engine's arguments."""
    kind, positions = _MODELS[name]
    network = MODEL_REGISTRY.get(kind)

    def build(self: Any, *arguments: Any, **options: Any) -> None:
        if len(arguments) > len(positions):
            raise ConfigError(f"{name} takes {', '.join(positions)} by position, others by name")
        options = {**dict(zip(positions, arguments, strict=False)), **options}
        own = {**in_own_names(options, kind), **_FIXED.get(name, {})}
        network.__init__(self, **own)

    def load_state_dict(
        self: Any, state_dict: Mapping[str, Any], *more: Any, **options: Any
    ) -> Any:
        own = state_in_own_names(state_dict, self.state_dict())
        return network.load_state_dict(self, own, *more, **options)

    doc = f"DI-engine's {name}: :class:`~dmiddleware.model.{network.__name__}` here."
    body = {"__init__": build, "load_state_dict": load_state_dict, "__doc__": doc}
    return type(name, (network,), {**body, "__module__": __name__})


def __getattr__(name: str) -> Any:
    name = _ALIASES.get(name, name)
    if name in _MODELS and _registered(_MODELS[name][0]):
        return _face(name)
    raise AttributeError(name)


__all__ = ["MODEL_REGISTRY", "create_model", "model_wrap", *_MODELS, *_ALIASES]
