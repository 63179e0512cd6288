"""Where DI-engine's parallel configs say what the configs here say elsewhere."""

from __future__ import annotations

import copy
import logging
from collections.abc import Mapping, MutableMapping
from typing import Any, Final

from dmiddleware.errors import ConfigError

__all__ = ["parallel_configs"]

_MOVED: Final = (
    ("learn", "learner", "learner_num", ()),
    ("learn", "learner", "send_policy_freq", ("learner",)),
    ("collect", "collector", "collector_num", ()),
)
"""Keys of a worker's config in ``policy``, and their sections of ``system``."""

_COMM: Final = {"comm_learner": "learner", "comm_collector": "collector"}
"""Keys of ``create``, and their sections of ``system``."""

_STOCK_TYPES: Final = ("flask_fs", "router")

_log = logging.getLogger(__name__)


def parallel_configs(
    main: Mapping[str, Any], create: Mapping[str, Any] | None, system: Mapping[str, Any] | None
) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """Return copies of the three configs, in which each key is where it belongs here.

    ``system`` takes the numbers of workers and ``send_policy_freq`` from ``main``, and the types of
    communicating workers from ``create``, unless it has them already. DI-engine's workers always
    communicate by ``flask_fs``; here that is for ``communication`` to say. An ``operator_server``,
    which starts the workers of DI-engine on Kubernetes, is not asked; its numbers count.

    Args:
        main: ``exp_name``, ``env`` and ``policy``.
        create: what to create.
        system: the config of the processes.
    """
    main, create, system = (_copied(cfg) for cfg in (main, create or {}, system or {}))
    for field, worker, key, places in _MOVED:
        section = _section(main, "policy", field, worker)
        if key in section:
            _section(system, *places).setdefault(key, section.pop(key))
    for key, role in _COMM.items():
        comm = create.pop(key, {})
        if comm.get("type") not in (None, *_STOCK_TYPES):
            for name, value in comm.items():
                _section(system, role).setdefault(name, value)
    operator = _section(system, "coordinator").pop("operator_server", None)
    if operator:
        _provide(operator, main, system)
    return main, create, system


def _provide(operator: Mapping[str, Any], main: dict[str, Any], system: dict[str, Any]) -> None:
    """Provide for as many collectors as an operator's server starts."""
    n_collectors = operator.get("collector_target_num")
    if n_collectors is None:
        n_collectors = _replicas(operator)
    _log.warning(
        "operator_server is not asked for %s collectors; ditask or classic_run starts the workers",
        n_collectors,
    )
    system.setdefault("collector_num", n_collectors)
    commander = _section(main, "policy", "other", "commander")
    commander["collector_task_space"] = max(
        int(commander.get("collector_task_space", 0)), int(system["collector_num"])
    )


def _replicas(operator: Mapping[str, Any]) -> int:
    request = operator.get("init_replicas_request", {})
    return int(request.get("collectors", {}).get("replicas", 1))


def _copied(cfg: Any) -> dict[str, Any]:
    """Return a copy of dictionaries; what else they hold is shared."""
    if not isinstance(cfg, Mapping):
        raise ConfigError(f"a config must be a dictionary, got {cfg!r:.100}")
    return {
        key: _copied(value) if isinstance(value, Mapping) else copy.copy(value)
        for key, value in cfg.items()
    }


def _section(cfg: MutableMapping[str, Any], *path: str) -> MutableMapping[str, Any]:
    """Return the dictionary at a path, created if it is missing.

    Raises:
        ConfigError: if there is something else on the way.
    """
    for key in path:
        cfg = cfg.setdefault(key, {})
        if not isinstance(cfg, MutableMapping):
            raise ConfigError(f"{'.'.join(path)} must be a dictionary, but {key} is {cfg!r:.100}")
    return cfg
