"""DI-engine's envs by their types, as ids of Gymnasium, for the processes of a parallel run."""

from __future__ import annotations

import copy
import functools
from collections.abc import Mapping
from typing import Any

import gymnasium
from easydict import EasyDict

from dmiddleware.ding.envs.adapter import AsGymnasium
from dmiddleware.ding.envs.base import get_vec_env_setting

__all__ = ["env_ids"]


def env_ids(cfg: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys of the section ``env`` that let any process make an env.

    Args:
        cfg: the env's whole config, with its ``type`` and ``import_names``; plain values.
    """
    ids = {
        f"{role}_id": f"{__name__}:ding/{role.title()}-v0" for role in ("collector", "evaluator")
    }
    return {"id": ids["collector_id"], **ids, "kwargs": {"cfg": copy.deepcopy(dict(cfg))}}


def _make(role: str, cfg: Mapping[str, Any], **options: Any) -> AsGymnasium:
    is_collector = role == "collector"
    env_cls, collectors, evaluators = get_vec_env_setting(
        EasyDict(copy.deepcopy(dict(cfg))), collect=is_collector, eval_=not is_collector
    )
    config = (collectors or evaluators or [])[0]
    return AsGymnasium(functools.partial(env_cls, config))


for _role in ("collector", "evaluator"):
    gymnasium.register(
        f"ding/{_role.title()}-v0",
        functools.partial(_make, _role),
        disable_env_checker=True,
        order_enforce=False,
    )
