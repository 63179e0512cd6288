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
from dmiddleware.model import MODEL_REGISTRY, as_obs_shape, create_model

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
    "EDAC": ("actor_q", ("obs_shape", "action_shape", "ensemble_num")),
    "FQF": ("fraction_quantile_q_network", _Q),
    "IQN": ("implicit_quantile_q_network", _Q),
    "MAVAC": ("centralized_actor_critic", ("agent_obs_shape", "global_obs_shape", "action_shape",
                                           "agent_num", *_HEADS)),
    "PDQN": ("hybrid_q", _Q),
    "PG": ("actor", ("obs_shape", "action_shape", "action_space")),
    "PPG": ("phasic_actor_critic", ("obs_shape", "action_shape", "action_space", "share_encoder")),
    "QACDIST": ("categorical_actor_q", ("obs_shape", "action_shape", "action_space")),
    "QMix": ("qmix_network", ("agent_num", "obs_shape", "global_obs_shape", "action_shape")),
    "QRDQN": ("quantile_q_network", _Q),
    "RainbowDQN": ("categorical_q_network", _Q),
    "WQMix": ("wqmix_network", ("agent_num", "obs_shape", "global_obs_shape", "action_shape")),
    "VAC": ("actor_critic", ("obs_shape", "action_shape", "action_space", "share_encoder")),
}  # fmt: skip
"""DI-engine's networks: the registered names of those here, and its arguments by position."""

_ALIASES: Final[Mapping[str, str]] = {
    "QAC": "ContinuousQAC",
    "QACEnsemble": "EDAC",
}

_DEFAULTS: Final[Mapping[str, Mapping[str, Any]]] = {
    "DQN": {"dueling": True},
    "DRQN": {"dueling": True},
}
"""Where DI-engine's default is another than that here."""

_FIXED: Final[Mapping[str, Mapping[str, Any]]] = {
    "ContinuousBC": {"action_space": "continuous"},
    "RainbowDQN": {"dueling": True, "noisy": True},
}

_NO_TEAM: Final = "SAC is for one agent here; use MAVAC with PPO, or QMix"

REFUSED: Final[Mapping[str, str]] = {
    **dict.fromkeys(("ContinuousMAQAC", "DiscreteMAQAC", "MAQAC"), _NO_TEAM),
    "Mixer": "QMix has it as a part",
}


@functools.cache
def _face(name: str) -> type[nn.Module]:
    """Return a class that builds a network here from DI-engine's arguments."""
    kind, positions = _MODELS[name]
    network = MODEL_REGISTRY.get(kind)

    def build(self: Any, *arguments: Any, **options: Any) -> None:
        if len(arguments) > len(positions):
            raise ConfigError(f"{name} takes {', '.join(positions)} by position, others by name")
        by_position = dict(zip(positions, arguments, strict=False))
        options = {**_DEFAULTS.get(name, {}), **by_position, **options}
        encoder = options.pop("encoder", None)
        if encoder is not None:
            _build_around(self, network, encoder, kind, options)
            return
        network.__init__(self, **{**in_own_names(options, kind), **_FIXED.get(name, {})})

    def load_state_dict(
        self: Any, state_dict: Mapping[str, Any], *more: Any, **options: Any
    ) -> Any:
        state = state_in_own_names(state_dict, self.state_dict())
        return network.load_state_dict(self, state, *more, **options)

    doc = f"DI-engine's {name}: :class:`~dmiddleware.model.{network.__name__}` here."
    body = {"__init__": build, "load_state_dict": load_state_dict, "__doc__": doc}
    return type(name, (network,), {**body, "__module__": __name__})


def _build_around(
    model: Any, network: Any, encoder: nn.Module, kind: str, options: dict[str, Any]
) -> None:
    """Build an actor-critic whose two heads read the features of a program's own encoder."""
    shape = options["obs_shape"]
    width = options.get("actor_head_hidden_size", 64)
    options = {**options, "obs_shape": width, "share_encoder": True}
    options["encoder_hidden_size_list"] = [width]  # replaced below
    network.__init__(model, **in_own_names(options, kind))
    model.encoder = _OwnEncoder(encoder, shape, width)
    model.obs_shape = as_obs_shape(_without_scalars(shape))


class _OwnEncoder(nn.Module):
    """A program's encoder, which gets float32 in the shapes that its config gives."""

    def __init__(self, encoder: nn.Module, shape: Any, out_features: int) -> None:
        super().__init__()
        self.encoder, self.shape, self.out_features = encoder, shape, out_features

    def forward(self, obs: Any) -> Any:
        return self.encoder(_shaped(obs, self.shape))


def _shaped(obs: Any, shape: Any) -> Any:
    if isinstance(shape, Mapping):
        return {name: _shaped(obs[name], part) for name, part in shape.items()}
    sizes = (shape,) if isinstance(shape, int) else tuple(shape)
    return obs.float().reshape(len(obs), *sizes)


def _without_scalars(shape: Any) -> Any:
    """Return a shape in which ``()``, DI-engine's form of one number, is 1."""
    if isinstance(shape, Mapping):
        return {name: _without_scalars(part) for name, part in shape.items()}
    return shape if isinstance(shape, int) or len(shape) else 1


def __getattr__(name: str) -> Any:
    name = _ALIASES.get(name, name)
    if name in _MODELS and _MODELS[name][0] in MODEL_REGISTRY:
        return _face(name)
    raise AttributeError(name)


__all__ = ["MODEL_REGISTRY", "create_model", "model_wrap", *_MODELS, *_ALIASES]
