"""The face of ``ding.config``: read and compile configs."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from typing import Any, Final

from easydict import EasyDict

from dmiddleware.ding.program import remember_seed, run_folder
from dmiddleware.ding.registries import ENV_REGISTRY
from dmiddleware.errors import ConfigError
from dmiddleware.registry import import_modules
from dmiddleware.worker import compile_config as core_compile_config
from dmiddleware.worker import read_config
from dmiddleware.worker.config_file import read_config_with_system
from dmiddleware.worker.env_config import ENV_KEYS

__all__ = ["compile_config", "read_config", "read_config_with_system", "with_own_envs"]

REFUSED: Final[Mapping[str, str]] = {
    "compile_config_parallel": "use parallel_pipeline, or classic_run of dmiddleware.worker",
    "parallel_transform": "ditask places the processes",
    "parallel_transform_slurm": "ditask --platform slurm places the processes",
    "save_config": "the compiled config is written to the run's folder",
}
_CREATED: Final = ("env", "env_manager", "policy", "learner", "collector", "evaluator",
                   "replay_buffer")  # fmt: skip


def compile_config(
    cfg: Mapping[str, Any],
    env_manager: Any = None,
    policy: Any = None,
    learner: Any = None,
    collector: Any = None,
    evaluator: Any = None,
    buffer: Any = None,
    env: Any = None,
    reward_model: Any = None,
    world_model: Any = None,
    seed: int = 0,
    auto: bool = False,
    create_cfg: Mapping[str, Any] | None = None,
    save_cfg: bool = True,
    save_path: str = "total_config.py",
    renew_dir: bool = True,
) -> EasyDict:
    """Merge a config with the defaults of its classes, and check it.

    Args:
        cfg: the main config.
        env_manager: no effect.
        policy: the policy's class, if ``create_cfg`` does not name it.
        learner: no effect: programs build it themselves.
        collector: no effect.
        evaluator: no effect.
        buffer: no effect.
        env: no effect.
        reward_model: no effect.
        world_model: refused.
        seed: the seed of everything random.
        auto: no effect: ``create_cfg`` is read if there is one.
        create_cfg: the types of the parts.
        save_cfg: whether to write ``config.yaml`` to the run's folder.
        save_path: no effect.
        renew_dir: no effect: a run never writes into the folder of another.

    Returns:
        The whole config, with everything that was given under its own names.
    """
    if world_model is not None or "world_model" in (create_cfg or {}):
        raise ConfigError("world models are not here; use a model-free algorithm")
    main = copy.deepcopy(dict(cfg))
    main["env"] = {**_env_defaults(create_cfg), **main.get("env", {})}
    create = {name: (create_cfg or {})[name] for name in _CREATED if name in (create_cfg or {})}
    create = copy.deepcopy(create)
    if policy is not None:
        create["policy"] = {"type": policy}
    compiled = core_compile_config(with_own_envs(main), create, seed=seed, save=False)
    result = EasyDict(_with_missing(compiled, main))
    result.seed = seed
    result.policy.collect.setdefault("unroll_len", 1)
    remember_seed(seed)
    if save_cfg:
        run_folder(result.exp_name).save_config(result)
        result.exp_name = str(run_folder(result.exp_name).path)
    return result


def _env_defaults(create: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the defaults of the env class that a create config names, if its module is here."""
    env = dict((create or {}).get("env", {}))
    import_those_here(env.get("import_names") or ())
    env_cls = ENV_REGISTRY.get(env["type"]) if env.get("type") in ENV_REGISTRY else None
    return copy.deepcopy(dict(getattr(env_cls, "config", {})))


def import_those_here(names: Iterable[str]) -> None:
    """Import modules for the names that they register; those that are not here are left out."""
    for name in names:
        try:
            import_modules([name])
        except ModuleNotFoundError as error:
            if not str(name).startswith(str(error.name)):
                raise  # The module is here, and lacks another.


def with_own_envs(main: Mapping[str, Any]) -> dict[str, Any]:
    """Return a config for a program that makes its envs and its reward model itself."""
    env = {name: value for name, value in main.get("env", {}).items() if name in ENV_KEYS}
    rest = {name: value for name, value in main.items() if name != "reward_model"}
    return {**rest, "env": {**env, "id": "the program's own"}}


def _with_missing(compiled: Any, given: Any) -> Any:
    """Return a compiled config with the keys of the given one that it lacks."""
    merged = dict(compiled)
    for name, value in given.items():
        if name not in merged:
            merged[name] = value
        elif isinstance(value, Mapping) and isinstance(merged[name], Mapping):
            merged[name] = _with_missing(merged[name], value)
    return merged
