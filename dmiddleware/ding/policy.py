"""The face of ``ding.policy``: the policies here, with DI-engine's names and configs."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from typing import Any, Final

from torch import nn

from dmiddleware.classic import CommandModePolicy, Policy, create_policy, get_policy_cls
from dmiddleware.classic.learn_inputs import default_preprocess_learn
from dmiddleware.ding.program import remember_policy
from dmiddleware.model import CentralizedActorCritic
from dmiddleware.policy import POLICY_REGISTRY

_POLICIES: Final[Mapping[str, str]] = {
    "A2CPolicy": "a2c",
    "BCQPolicy": "bcq",
    "BehaviourCloningPolicy": "bc",
    "C51Policy": "c51",
    "CQLPolicy": "cql",
    "D4PGPolicy": "d4pg",
    "DDPGPolicy": "ddpg",
    "DQFDPolicy": "dqfd",
    "DQNPolicy": "dqn",
    "DTPolicy": "decision_transformer",
    "DiscreteCQLPolicy": "discrete_cql",
    "DiscreteSACPolicy": "discrete_sac",
    "EDACPolicy": "edac",
    "FQFPolicy": "fqf",
    "IMPALAPolicy": "impala",
    "IQLPolicy": "iql",
    "IQNPolicy": "iqn",
    "MDQNPolicy": "mdqn",
    "PDQNPolicy": "pdqn",
    "PGPolicy": "pg",
    "PPGOffPolicy": "ppg_offpolicy",
    "PPGPolicy": "ppg",
    "PPOOffPolicy": "ppo_offpolicy",
    "PPOPolicy": "ppo",
    "QMIXPolicy": "qmix",
    "QRDQNPolicy": "qrdqn",
    "R2D2Policy": "r2d2",
    "RainbowDQNPolicy": "rainbow",
    "SACDiscretePolicy": "discrete_sac",
    "SACPolicy": "sac",
    "SQILSACPolicy": "sac",
    "SQLPolicy": "sql",
    "TD3BCPolicy": "td3_bc",
    "TD3Policy": "td3",
    "WQMIXPolicy": "wqmix",
}
"""DI-engine's classes, and the registered names of the policies here."""

REFUSED: Final[Mapping[str, str]] = {
    "ILPolicy": "use BehaviourCloningPolicy",
    "PPOFPolicy": "use PPOPolicy, which learns the same actions",
    "PPOPGPolicy": "use PGPolicy",
    "PolicyFactory": "StepCollector(random_collect_size=...) acts at random",
    "get_random_policy": "StepCollector(random_collect_size=...) acts at random",
}


class _Remembered:
    """Remembers which policy was built with a model."""

    def __init__(
        self,
        cfg: Mapping[str, Any] | None = None,
        model: nn.Module | None = None,
        enable_field: Iterable[str] | None = None,
    ) -> None:
        super().__init__(cfg, model, enable_field)  # type: ignore[call-arg]
        if model is not None:
            remember_policy(model, self)


@functools.cache
def _face(name: str, registered: str) -> type[Any]:
    stock = get_policy_cls({"type": registered})
    body = {"__doc__": stock.__doc__, "__module__": __name__, "config": stock.default_config()}
    if registered == "ppo":
        body["__new__"] = _choose_ppo
    return type(name, (_Remembered, stock), body)


def _choose_ppo(
    cls: type[Any], cfg: Any = None, model: Any = None, enable_field: Any = None
) -> Any:
    """Return MAPPO for several agents, which DI-engine's PPOPolicy learns too."""
    is_several = bool((cfg or {}).get("multi_agent")) and model is None
    is_several |= isinstance(model, CentralizedActorCritic)
    if cls.__name__ == "PPOPolicy" and is_several:
        return _face("MAPPOPolicy", "mappo")(cfg, model, enable_field)
    return object.__new__(cls)


def __getattr__(name: str) -> Any:
    registered = _POLICIES.get(name)
    if registered in POLICY_REGISTRY:
        return _face(name, registered)
    command = name.replace("CommandModePolicy", "Policy")
    if command != name and _POLICIES.get(command) in POLICY_REGISTRY:
        return _face(command, _POLICIES[command])
    raise AttributeError(name)


__all__ = [
    "POLICY_REGISTRY",
    "CommandModePolicy",
    "Policy",
    "create_policy",
    "default_preprocess_learn",
    "get_policy_cls",
    *(name for name, registered in _POLICIES.items() if registered in POLICY_REGISTRY),
]
