"""The section ``env`` of a config in the classic shape: its keys, and its envs."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, MutableMapping
from typing import Any, Final

from easydict import EasyDict

from dmiddleware.classic.config import (
    READ_ELSEWHERE,
    Option,
    Range,
    anything,
    count,
    mapping,
    merge_config,
    optional,
    text,
    whole,
)
from dmiddleware.classic.import_names import import_named, without_di_engine
from dmiddleware.env import BaseEnvManager, make_env_manager
from dmiddleware.errors import ConfigError
from dmiddleware.registry import nearest
from dmiddleware.seeding import derive_seed
from dmiddleware.worker.dizoo_envs import is_dizoo_env, take_dizoo_env

__all__ = [
    "ENV_KEYS",
    "ENV_LIMITS",
    "check_sections",
    "drop_missing_modules",
    "make_envs",
    "name_env",
    "names_di_engine",
    "refuse_absent",
    "take_normalization",
    "take_unread",
    "take_unused",
    "unused_settings",
]

_log = logging.getLogger(__name__)

_MODES: Final = {
    "base": "sync", "subprocess": "async", "async_subprocess": "async", "gym_vector": "vector",
    "env_pool": "vector",
}  # fmt: skip
"""DI-engine's names of env managers."""

ENV_LIMITS: Final = {
    "max_retry": "max_retry", "step_timeout": "step_timeout_s", "reset_timeout": "reset_timeout_s",
}  # fmt: skip
_IGNORED_KEYS: Final = (
    "type", "cfg_type", "import_names", "episode_num", "auto_reset", "retry_type",
    "retry_waiting_time", "shared_memory", "copy_on_get", "context", "wait_num",
    "step_wait_timeout", "connect_timeout", "reset_inplace", "force_reproducibility",
)  # fmt: skip
"""Keys of ``env.manager`` that others read, or that change nothing here."""

_number = Range("a number", lambda value: isinstance(value, int | float))
_optional_count = optional(count)

_ENV: Final[Mapping[str, Any]] = {
    "id": Option(None, anything, "the id of a Gymnasium env"),
    "env_id": Option(None, anything, "the same"),
    "type": Option(None, anything, "the same"),
    "import_names": Option((), anything, "modules that register the env"),
    "kwargs": Option({}, optional(mapping), "arguments of the env"),
    "wrappers": Option((), anything, "functions that wrap the env"),
    "mode": Option("sync", text, "how the envs run"),
    "manager": {
        **dict.fromkeys(_IGNORED_KEYS, Option(None, anything, "of others, or without effect")),
        "max_retry": Option(None, anything, "restarts of an env that fails"),
        "step_timeout": Option(None, anything, "seconds that a step may take"),
        "reset_timeout": Option(None, anything, "seconds that a reset may take"),
    },
    "seed": Option(None, optional(whole), "seed of the envs"),
    "env_num": Option(None, _optional_count, "envs of collector and evaluator each"),
    "collector_env_num": Option(None, _optional_count, "envs of the collector"),
    "evaluator_env_num": Option(None, _optional_count, "envs of the evaluator"),
    "n_evaluator_episode": Option(None, _optional_count, "episodes of an evaluation"),
    "collector_episode_num": Option(None, _optional_count, "episodes of a collector task"),
    "evaluator_episode_num": Option(None, _optional_count, "episodes of an evaluation task"),
    "evaluator_id": Option(None, anything, "the env of evaluations, where it is another"),
    "stop_value": Option(None, optional(_number), "mean return at which training stops"),
    "reward_norm": Option(None, anything, "how offline_run scales the rewards of its data"),
    "replay_path": Option(None, optional(text), "folder for a video of each evaluation"),
    "cfg_type": Option(None, anything, "no effect"),
    "act_scale": Option(None, anything, "no effect: policies map actions to the bounds"),
    "use_act_scale": Option(None, anything, "the same"),
}
ENV_KEYS: Final = frozenset(_ENV)
"""The keys of ``env`` that the workers read; others are those of an env of the program's own."""

_MAIN: Final[Mapping[str, Any]] = {
    "exp_name": Option("default_experiment", anything, "the output folder"),
    "seed": Option(None, anything, "no effect: the seed is an argument"),
    "dataset": Option(None, anything, "recorded data; read by offline_run"),
    "env": _ENV,
    "policy": {},
}
"""The keys of a main config."""

_INSTEAD: Final = {
    "frame_stack": "stack frames by a function in env.wrappers",
    "clip_rewards": "clip rewards in env.wrappers",
    "rew_clip": "clip rewards in env.wrappers, or by an argument of the env in env.kwargs",
    "reward_model": "serial_run has it; else use middleware.RewardLearner in a chain",
    "world_model": "world models are not supported",
}
"""Keys of DI-engine's own envs, and what does the same here."""

_DI_ENGINE: Final = ("ding", "dizoo")

_UNUSED_OF_PARTS: Final[Mapping[str, Mapping[str, str]]] = {
    "learner": {"load_path": "to start from a checkpoint, set hook.load_ckpt_before_run"},
    "replay_buffer": {
        "max_use": "only an advanced buffer counts how often it has given something",
        "sliced": "sequences begin at any row of an episode, or every stride rows",
    },
    "collector": {"get_train_sample": "this collector returns training samples anyway"},
}
"""Settings of the parts that change nothing here, and what does instead."""


def unused_settings(part: str) -> Collection[str]:
    """Return the settings of DI-engine that a part has only if its class declares them."""
    return _UNUSED_OF_PARTS.get(part, {}).keys()


def take_unused(
    part: str, section: MutableMapping[str, Any], options: Collection[str]
) -> dict[str, Any]:
    """Take the settings of DI-engine that mean nothing here out of a part's section.

    They are logged once, with what does instead.

    Args:
        part: the part, such as ``"replay_buffer"``.
        section: its config.
        options: what its class declares.
    """
    unused = {
        key: section.pop(key)
        for key in _UNUSED_OF_PARTS.get(part, {})
        if key in section and key not in options
    }
    reasons = [f"{key} ({_UNUSED_OF_PARTS[part][key]})" for key in unused]
    if reasons and "cfg_type" not in section:  # a merged config has been logged before
        _log.warning("%s: these settings change nothing here: %s", part, "; ".join(reasons))
    return unused


def names_di_engine(create: Mapping[str, Any]) -> bool:
    """Return whether a create config is one of DI-engine: it names modules of ding or dizoo."""
    parts = [part for part in create.values() if isinstance(part, Mapping)]
    modules = [str(name) for part in parts for name in part.get("import_names") or ()]
    return any(name.partition(".")[0] in _DI_ENGINE for name in modules)


def take_unread(section: MutableMapping[str, Any], options: Collection[str]) -> None:
    """Take what no evaluator of DI-engine reads out of the section of one, with a warning.

    There, a key with a typo is ignored, and nothing of this section changes what is learned. An
    ``eval_freq`` below 1 evaluates whenever it is asked.

    Args:
        section: the config of an evaluator, from a config file of DI-engine.
        options: what its class declares, at the top of its config.
    """
    unread = [key for key in section if key not in (*options, *READ_ELSEWHERE)]
    for key in unread:
        del section[key]
        near = nearest(str(key), options, n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        _log.warning("evaluator: nothing reads %s, so it is left out%s", key, hint)
    freq = section.get("eval_freq")
    if isinstance(freq, int) and not isinstance(freq, bool) and freq < 1:
        section["eval_freq"] = 1
        _log.warning("evaluator: eval_freq=%d evaluates before every update, as 1 does", freq)


def refuse_absent(section: Mapping[str, Any], path: str) -> None:
    """Refuse what DI-engine's configs may have, and something else does here.

    Args:
        section: a part of the config.
        path: where it is, such as ``"env."``.

    Raises:
        ConfigError: naming what to use instead.
    """
    for key in _INSTEAD.keys() & section.keys():
        if not _is_off(section[key]):
            raise ConfigError(f"{path}{key} of DI-engine is not used here; {_INSTEAD[key]}")


def check_sections(cfg: Mapping[str, Any]) -> None:
    """Check all keys of a config but those of the policy, which its class checks.

    Raises:
        ConfigError: for an unknown key, with the nearest known one, or a wrong value.
    """
    for section, path in ((cfg, ""), (cfg["env"], "env."), (cfg["policy"], "policy.")):
        refuse_absent(section, path)
    env = {key: value for key, value in cfg["env"].items() if key not in _INSTEAD}
    own = [key for key in env if key not in _ENV and not nearest(str(key), ENV_KEYS)]
    if own:
        _log.warning(
            "env: %s would be read by the env itself, and has no effect on one that is made by its "
            "id; its arguments go into env.kwargs", ", ".join(own),
        )  # fmt: skip
    env = {key: value for key, value in env.items() if key not in own}
    others = {key: value for key, value in cfg.items() if key not in _INSTEAD}
    try:
        merge_config(
            _MAIN,
            {**others, "env": env},
            owner="the config",
            open_paths=("policy", "env.kwargs"),
        )
    except ConfigError as error:
        if "unknown key env." in str(error) and "env.manager" not in str(error):
            raise ConfigError(f"{error} (arguments of the env itself go into env.kwargs)") from None
        raise


def _is_off(value: Any) -> bool:
    return not value or (isinstance(value, Mapping) and not value.get("use_norm", True))


def name_env(env: dict[str, Any]) -> None:
    """Give an env's config the keys ``id`` and ``mode``, from the classic ones if need be.

    Raises:
        ConfigError: if the config names no env.
    """
    if "id" not in env and _names_dizoo(env):
        take_dizoo_env(env, _ENV)
    env["id"] = env.get("id", env.get("env_id", env.get("type")))
    if env["id"] is None:
        raise ConfigError(
            "the config has no env; set env.id to the id of an env, for example 'CartPole-v1'"
        )
    mode = env.get("mode", env.setdefault("manager", {}).get("type", "base"))
    env["mode"] = _MODES.get(mode, mode)


def _names_dizoo(env: Mapping[str, Any]) -> bool:
    """Return whether the env is one of dizoo, and dizoo's own file does not provide it."""
    modules = map(str, env.get("import_names") or ())
    return is_dizoo_env(env.get("type")) and not any(
        module.partition(".")[0] == "dizoo" for module in modules
    )


def take_normalization(cfg: MutableMapping[str, Any]) -> None:
    """Move the normalization that dizoo's envs do to the policy, which does it here."""
    for key, setting in (("norm_obs", "obs_norm"), ("norm_reward", "reward_norm")):
        value = cfg["env"].pop(key, None)
        if not _is_off(value):
            cfg["policy"].setdefault(setting, True)


def drop_missing_modules(section: MutableMapping[str, Any], path: str) -> None:
    """Leave out modules of DI-engine that are not installed; their names are registered here.

    Args:
        section: a part's config, with ``import_names`` maybe.
        path: where it is, for the log.
    """
    if section.get("import_names"):
        section["import_names"] = without_di_engine(section["import_names"], path)


def make_envs(cfg: EasyDict, kind: str) -> BaseEnvManager:
    """Return the envs of the collector or the evaluator.

    Args:
        cfg: the section ``env``, compiled.
        kind: ``"collector"`` or ``"evaluator"``.
    """
    import_named(cfg.get("import_names"))
    kwargs = dict(cfg.get("kwargs") or {})
    if kind == "evaluator" and cfg.get("replay_path"):
        kwargs.setdefault("render_mode", "rgb_array")
    manager = cfg.get("manager") or {}
    return make_env_manager(
        cfg.get(f"{kind}_id") or cfg.id,
        env_num=cfg.get(f"{kind}_env_num") or cfg.get("env_num") or 1,
        mode=cfg.mode,
        env_kwargs=kwargs or None,
        wrappers=cfg.get("wrappers") or (),
        seed=derive_seed(cfg.seed, kind),
        **{ENV_LIMITS[key]: value for key, value in manager.items() if key in ENV_LIMITS},
    )
