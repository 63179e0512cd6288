"""Arguments of networks under the names that they have in DI-engine's configs."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, Final

from torch import nn

from dmiddleware.env.team import AGENTS, STATE
from dmiddleware.errors import ConfigError
from dmiddleware.model import (
    MODEL_REGISTRY,
    Actor,
    ActorCritic,
    AgentActorCritic,
    PhasicActorCritic,
    QNetwork,
    RecurrentQNetwork,
    TeamNetwork,
    VDNNetwork,
)
from dmiddleware.model.model_registry import parameters_of

__all__ = ["in_own_names"]

_OURS: Final = "dmiddleware."

_RENAMED: Final = {
    "num_quantiles": "n_quantiles", "n_atom": "n_atoms", "agent_num": "n_agent",
    "quantile_embedding_size": "n_cosines",
    "state_dim": "obs_shape", "act_dim": "action_shape", "h_dim": "embed_size",
    "context_len": "context_length", "n_blocks": "n_layers", "drop_p": "dropout",
    "vae_hidden_dims": "vae_hidden_sizes", "res_link": "residual",
}  # fmt: skip

_SIZES: Final = (
    # A layer in front of the head belongs to the head here.
    ("actor_head_hidden_size", "actor_head_layer_num", "actor_hidden_sizes", 1),
    ("critic_head_hidden_size", "critic_head_layer_num", "critic_hidden_sizes", 1),
    ("head_hidden_size", "head_layer_num", "head_hidden_sizes", 0),
)
"""Width and number of layers there, the widths here, and how many more layers there are."""

_FIXED: Final[Mapping[str, tuple[Any, ...]]] = {
    "action_space": ("regression", "reparameterization"),
    "sigma_type": ("independent",),
    "bound_type": (None,),
    "critic_head_type": ("categorical",),
    "mixer": (True,),
    "impala_cnn_encoder": (False,),
    "res_link": (False,),
    "multi_pass": (False,),
    "share_encoder": (False,),
    "norm_type": (None,),
    "dropout": (None,),
}
"""Values that describe what the networks here are anyway."""

_INSTEAD: Final = {
    "bound_type": "this network does not bound the means of actions; give a network of your own",
    "sigma_type": "the standard deviation does not depend on the state here",
    "fixed_sigma_value": "set log_std_init",
    "norm_type": "set norm='layer'",
    "dropout": "give a network of your own",
    "res_link": "give a network of your own",
    "multi_pass": "every choice sees the numbers of all choices; leave it and action_mask out",
    "agent_obs_shape": "this network is for one agent: set obs_shape, or use mappo or qmix",
    "global_obs_shape": "this network is for one agent; several agents with a state learn by mappo "
    "or qmix",
    "share_encoder": "the actor and the critics have encoders of their own; give a network of your "
    "own",
    "mixer": "set policy.type='vdn' and leave it out",
    "lstm_type": "these agents have no memory, those of qmix_recurrent have one; leave it out",
}
"""What to write instead of an argument that no network here has."""

_HYBRID: Final[Mapping[str, tuple[str, str]]] = {
    "action_type_shape": ("action_type", "discrete"),
    "action_args_shape": ("action_args", "continuous"),
}
"""Names in the shape of a hybrid action, and the names and kinds of its parts."""

_HEAD: Final = "head_hidden_sizes"
_RESIDUAL: Final = (128, 128, 64)
"""The channels of IMPALA's network there, if none are given."""
_CONVOLUTIONS: Final = ((8, 4), (4, 2), (3, 1))
"""Kernel size and stride of the convolutions there."""


def in_own_names(model: Mapping[str, Any], default_type: str) -> dict[str, Any]:
    """Return a model's config, arguments of DI-engine under the names that they have here.

    Arguments that the network has itself stay as they are, and so do those of other networks than
    the ones of :mod:`dmiddleware.model`.

    Args:
        model: the config.
        default_type: the registered name of the network if the config has none.

    Raises:
        ConfigError: for a value that the network cannot have, with what to write instead.
    """
    name = model.get("type", default_type)
    if name not in MODEL_REGISTRY or not MODEL_REGISTRY.get(name).__module__.startswith(_OURS):
        return dict(model)
    build = MODEL_REGISTRY.get(name)
    if issubclass(build, TeamNetwork):
        model = _of_several_agents(model, build)
    elif issubclass(build, Actor) and not issubclass(build, ActorCritic):
        model = _of_cloning(model)
    elif issubclass(build, PhasicActorCritic):
        model = _of_phases(model)
    own = _renamed(model, parameters_of(build))
    if issubclass(build, QNetwork | RecurrentQNetwork) and "encoder_hidden_size_list" in model:
        # The head and the memory of DI-engine are as wide as its encoder.
        width = own["encoder_hidden_sizes"][-1]
        if _HEAD not in own:
            own[_HEAD] = [width] * own.pop("head_layer_num", 1)
        if issubclass(build, RecurrentQNetwork):
            own.setdefault("hidden_size", width)
    return own


def _of_several_agents(model: Mapping[str, Any], build: type[TeamNetwork]) -> dict[str, Any]:
    """Return a model's config with the shapes and the layers that a network of a team has."""
    own = dict(model)
    if own.get("mixer") is False and build is VDNNetwork:
        del own["mixer"]
    shape = own.pop("agent_obs_shape", None)
    if shape is not None:
        own["obs_shape"] = shape
    state = own.pop("global_obs_shape", None)
    if state is not None:
        if issubclass(build, AgentActorCritic):
            state = _states_of_all(state, own)
        own["obs_shape"] = {AGENTS: own.get("obs_shape"), STATE: state}
    elif "obs_shape" in own and not isinstance(own["obs_shape"], Mapping):
        own["obs_shape"] = {AGENTS: own["obs_shape"]}
    if "hidden_size_list" in own:
        own["encoder_hidden_size_list"] = own.pop("hidden_size_list")
    if issubclass(build, AgentActorCritic):
        head = _common_head(own, "encoder_hidden_size_list")
        if head:
            own.setdefault("encoder_hidden_size_list", [head[0], *head])
    return own


def _of_cloning(model: Mapping[str, Any]) -> dict[str, Any]:
    """Return a model's config with the layers of a network that clones continuous actions.

    There, it has a layer in front of its head, and the actions are the tanh of the last layer.
    """
    own = dict(model)
    if own.get("action_space") == "regression":
        own["action_space"] = "continuous"
        own.setdefault("tanh_mean", True)
        width = own.pop("actor_head_hidden_size", 64)
        own.setdefault("encoder_hidden_sizes", [width])
        own.setdefault("head_hidden_sizes", [width] * own.pop("actor_head_layer_num", 1))
    return own


def _of_phases(model: Mapping[str, Any]) -> dict[str, Any]:
    """Return a model's config without the choice of what PPG's auxiliary value reads.

    Raises:
        ConfigError: if it does not read the actor's features, for which it is there.
    """
    own = dict(model)
    if not own.pop("share_encoder", True):
        raise ConfigError(
            "model.share_encoder=False of DI-engine has no counterpart in PPG: the auxiliary value "
            "reads the actor's features; leave it out, or use ppo"
        )
    return own


def _states_of_all(shape: Any, own: Mapping[str, Any]) -> Any:
    """Return the shape of the states of all agents: there, each agent has a state of its own."""
    sizes = [shape] if isinstance(shape, int) else list(shape)
    n_agent = own.get("agent_num", own.get("n_agent"))
    if not isinstance(n_agent, int):
        raise ConfigError(f"model.agent_num must be the number of agents, got {n_agent!r}")
    return [n_agent * sizes[0]] if len(sizes) == 1 else sizes


def _plain_action_shape(options: Mapping[str, Any]) -> dict[str, int]:
    """Return the number for an action shape such as ``(1,)``."""
    shape: Any = options.get("action_shape")
    is_vector = isinstance(shape, list | tuple) and len(shape) == 1 and isinstance(shape[0], int)
    return {"action_shape": shape[0]} if is_vector else {}


def _renamed(options: Mapping[str, Any], parameters: Collection[str]) -> dict[str, Any]:
    own = {**options, **_plain_action_shape(options)}
    for old, new in _RENAMED.items():
        if old in own and old not in parameters and new in parameters:
            own[new] = own.pop(old)
    if "continuous" in own and "continuous" not in parameters and "action_space" in parameters:
        own["action_space"] = "continuous" if own.pop("continuous") else "discrete"
    for key, values in _FIXED.items():
        if key in own and own[key] in values and (key not in parameters or key == "action_space"):
            del own[key]
    _take_switches(own, parameters)
    _take_hybrid(own)
    for key in _INSTEAD.keys() & own.keys() - set(parameters):
        raise ConfigError(
            f"model.{key}={own[key]!r} of DI-engine has no counterpart here; {_INSTEAD[key]}"
        )
    _take_encoder(own, parameters)
    if "ensemble_num" in own and "n_critics" in parameters:
        _take_ensemble(own)
    _take_heads(own, parameters)
    if isinstance(own.get("activation"), nn.Module) and "activation" in parameters:
        own["activation"] = _name_of(own["activation"])
    return own


def _take_switches(own: dict[str, Any], parameters: Collection[str]) -> None:
    if own.get("bound_type") == "tanh" and "tanh_mean" in parameters:
        del own["bound_type"]
        own["tanh_mean"] = True
    if "twin_critic" in own and "n_critics" in parameters:
        own["n_critics"] = 2 if own.pop("twin_critic") else 1


def _take_encoder(own: dict[str, Any], parameters: Collection[str]) -> None:
    if "encoder_hidden_size_list" in parameters or "encoder_hidden_sizes" not in parameters:
        return
    sizes = own.pop("encoder_hidden_size_list", None)
    is_residual = own.pop("impala_cnn_encoder", False)
    if is_residual:
        own["conv_layers"] = list(sizes or _RESIDUAL)
        own["encoder_hidden_sizes"] = [own.get("actor_head_hidden_size", 64)]
    if sizes is None or is_residual:
        return
    shape = own.get("obs_shape")
    if not isinstance(shape, list | tuple) or len(shape) != len(_CONVOLUTIONS):
        own["encoder_hidden_sizes"] = list(sizes)
        return
    n_blocks = len(sizes) - 1 - len(_CONVOLUTIONS)
    if n_blocks < -1:
        raise ConfigError(
            f"encoder_hidden_size_list={list(sizes)} is too short for an image; give the sizes of "
            "three convolutions and of the linear layer, which is the last one if there are three"
        )
    if n_blocks > 0:
        raise ConfigError(
            f"encoder_hidden_size_list={list(sizes)} has {n_blocks} residual blocks, which no "
            "network here has; give four sizes, those of three convolutions and of the linear "
            "layer, or a network of your own"
        )
    convolutions = zip(sizes, _CONVOLUTIONS, strict=False)
    own["conv_layers"] = [[channel, *layer] for channel, layer in convolutions]
    own["encoder_hidden_sizes"] = [sizes[-1]]


def _take_heads(own: dict[str, Any], parameters: Collection[str]) -> None:
    for width, n_layers, new, n_more in _SIZES:
        if new not in parameters or width in parameters or width not in own:
            continue
        if isinstance(own[width], list | tuple):  # the widths of all layers
            own[new] = list(own.pop(width))
        else:
            own[new] = [own.pop(width)] * (own.pop(n_layers, 1) + n_more)
    if not {"share_encoder", "value_head_hidden_sizes"} & set(parameters):
        return
    if "head_hidden_sizes" not in parameters:
        return
    if "value_head_hidden_sizes" not in parameters:
        head = _common_head(own, "head_hidden_sizes")
        if head is not None:
            own.setdefault("head_hidden_sizes", head)
        return
    actor, critic = (_head(own, kind) for kind in ("actor", "critic"))
    if actor is not None or critic is not None:
        own.setdefault("head_hidden_sizes", critic if actor is None else actor)
    if actor is not None and critic is not None and critic != actor:
        own.setdefault("value_head_hidden_sizes", critic)


def _common_head(own: dict[str, Any], instead: str) -> list[int] | None:
    """Return the layers of actor and critic heads; None if none are set.

    Raises:
        ConfigError: if they differ, with the name to write instead.
    """
    heads = [_head(own, kind) for kind in ("actor", "critic")]
    given = [sizes for sizes in heads if sizes is not None]
    if given and any(sizes != given[0] for sizes in given):
        raise ConfigError(
            f"actor and critic heads have the same layers here, got {given[0]} and {given[1]}; "
            f"write {instead} instead, or give a network of your own"
        )
    return given[0] if given else None


def _take_hybrid(own: dict[str, Any]) -> None:
    """Take the action of a choice with numbers, whose parts have other names there."""
    shape = own.get("action_shape")
    if isinstance(shape, Mapping) and shape.keys() == _HYBRID.keys():
        own["action_shape"] = {_HYBRID[name][0]: size for name, size in shape.items()}
        own["action_space"] = dict(_HYBRID.values())
        sizes = own.pop("encoder_hidden_size_list", None)
        if sizes is not None:  # each of the two networks has such an encoder
            own |= {"actor_hidden_sizes": list(sizes), "critic_hidden_sizes": list(sizes)}


def _take_ensemble(own: dict[str, Any]) -> None:
    """Take an ensemble of critics, which has no layer in front of its head."""
    own["n_critics"] = own.pop("ensemble_num")
    if "critic_head_hidden_size" in own:
        n_layers = own.pop("critic_head_layer_num", 1)
        own["critic_hidden_sizes"] = [own.pop("critic_head_hidden_size")] * n_layers


def _head(own: dict[str, Any], kind: str) -> list[int] | None:
    width = own.pop(f"{kind}_head_hidden_size", None)
    n_layers = own.pop(f"{kind}_head_layer_num", None)
    if n_layers == 0:
        return []
    if width is None:
        width = (own.get("encoder_hidden_sizes") or [64])[-1] if n_layers else None
    return None if width is None else [width] * (n_layers or 1)


def _name_of(activation: nn.Module) -> str:
    name = type(activation).__name__
    return {"LeakyReLU": "leaky_relu"}.get(name, name.lower())
