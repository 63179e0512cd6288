"""The face of ``ding.entry``: run the whole program that a config describes."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from easydict import EasyDict
from torch import nn

from dmiddleware.ding.config import import_those_here, with_own_envs
from dmiddleware.ding.envs.base import get_vec_env_setting
from dmiddleware.ding.envs.by_type import env_ids
from dmiddleware.ding.envs.managers import get_env_manager_cls
from dmiddleware.ding.registries import ENV_REGISTRY
from dmiddleware.worker import (
    classic_run,
    dqfd_run,
    gail_run,
    offline_run,
    read_config,
    serial_run,
    sqil_run,
)
from dmiddleware.worker.config_file import read_config_with_system
from dmiddleware.worker.entry import NO_LIMIT

__all__ = [
    "parallel_pipeline",
    "serial_pipeline",
    "serial_pipeline_bc",
    "serial_pipeline_dqfd",
    "serial_pipeline_dt",
    "serial_pipeline_gail",
    "serial_pipeline_offline",
    "serial_pipeline_onpolicy",
    "serial_pipeline_onpolicy_ppg",
    "serial_pipeline_reward_model_offpolicy",
    "serial_pipeline_reward_model_onpolicy",
    "serial_pipeline_sqil",
]

_IRL: Final = "use a reward model of dmiddleware.reward in a chain (GAIL, ICM, RND)"
_WORLD: Final = "world models are not here; use a model-free algorithm"
_DEMO: Final = "use OfflineDataSaver in a chain, or ditask play with a saved policy"
REFUSED: Final[Mapping[str, str]] = {
    **dict.fromkeys(
        (
            "serial_pipeline_reward_model_ngu", "serial_pipeline_reward_model_trex",
            "serial_pipeline_reward_model_trex_onpolicy", "serial_pipeline_trex",
            "serial_pipeline_trex_onpolicy", "trex_collecting_data",
            "serial_pipeline_guided_cost", "serial_pipeline_preference_based_irl",
            "serial_pipeline_preference_based_irl_onpolicy",
            "collect_episodic_demo_data_for_trex",
        ),
        _IRL,
    ),
    **dict.fromkeys(
        ("serial_pipeline_dyna", "serial_pipeline_dream", "serial_pipeline_dreamer"), _WORLD
    ),
    **dict.fromkeys(
        (
            "collect_demo_data", "collect_episodic_demo_data", "episode_to_transitions",
            "episode_to_transitions_filter",
        ),
        _DEMO,
    ),
    "eval": "use ditask play RUN, or an evaluator in a chain",
    "random_collect": "use StepCollector(random_collect_size=...)",
    "serial_pipeline_bco": "behavior cloning from observations is not here; use serial_pipeline_bc",
    "serial_pipeline_ngu": "NGU is not here; use R2D2, or RND with PPO",
    "serial_pipeline_pc": "procedure cloning is not here",
    "serial_pipeline_plr": "prioritized level replay is not here; use middleware.Curriculum",
    "serial_pipeline_r2d3": "R2D3 is not here; use R2D2",
    "serial_pipeline_td3_vae": "latent actions are not here; use TD3",
}  # fmt: skip

Config = str | Path | tuple[Any, ...] | list[Any]


def serial_pipeline(
    input_cfg: Config,
    seed: int = 0,
    env_setting: Sequence[Any] | None = None,
    model: nn.Module | None = None,
    max_train_iter: float = NO_LIMIT,
    max_env_step: float = NO_LIMIT,
    dynamic_seed: bool = True,
    *,
    is_direct: bool = False,
) -> Any:
    """Train a policy in this process, as a config says.

    Args:
        input_cfg: the path of a config file, or the main config and the create config.
        seed: the seed of everything random.
        env_setting: the env class, and the configs of the collector's and the evaluator's envs;
            None: those that ``create_config.env`` names.
        model: the policy's network; None: the one that the config describes.
        max_train_iter: most updates.
        max_env_step: most env steps.
        dynamic_seed: no effect: each reset of an env has a seed of its own.
        is_direct: whether the policy learns from what was collected, without a replay buffer.

    Returns:
        The policy.
    """
    main, create = _configs(input_cfg)
    main, envs = _with_envs(main, create, env_setting)
    limits = int(max_train_iter), int(max_env_step)
    return serial_run(main, create, seed, *limits, model=model, is_direct=is_direct, **envs)


serial_pipeline_onpolicy = serial_pipeline
serial_pipeline_onpolicy_ppg = serial_pipeline
serial_pipeline_reward_model_offpolicy = serial_pipeline
serial_pipeline_reward_model_onpolicy = functools.partial(serial_pipeline, is_direct=True)


def serial_pipeline_sqil(
    input_cfg: Config,
    expert_cfg: Config,
    seed: int = 0,
    env_setting: Sequence[Any] | None = None,
    model: nn.Module | None = None,
    expert_model: nn.Module | None = None,
    max_train_iter: float = NO_LIMIT,
    max_env_step: float = NO_LIMIT,
    *,
    run: Callable[..., Any] = sqil_run,
) -> Any:
    """Imitate the expert of another config; see :func:`dmiddleware.worker.sqil_run`."""
    main, create = _configs(input_cfg)
    main, envs = _with_envs(main, create, env_setting)
    shown = _expert(expert_cfg, env_setting)
    limits = int(max_train_iter), int(max_env_step)
    return run(main, create, shown, seed, *limits, model=model, expert_model=expert_model, **envs)


serial_pipeline_dqfd = functools.partial(serial_pipeline_sqil, run=dqfd_run)


def serial_pipeline_gail(
    input_cfg: Config,
    expert_cfg: Config,
    seed: int = 0,
    model: nn.Module | None = None,
    max_train_iter: float = NO_LIMIT,
    max_env_step: float = NO_LIMIT,
    collect_data: bool = True,
) -> Any:
    """Imitate the expert of another config; see :func:`dmiddleware.worker.gail_run`.

    Args:
        input_cfg: as of :func:`serial_pipeline`, and also the other arguments.
        expert_cfg: the path of the expert's config file, or its main config and create config.
        seed: the seed of everything random.
        model: the policy's network.
        max_train_iter: most updates.
        max_env_step: most env steps.
        collect_data: whether the expert plays first; otherwise its transitions are in the file.
    """
    main, create = _configs(input_cfg)
    main, envs = _with_envs(main, create, None)
    shown = _expert(expert_cfg, None) if collect_data else None
    limits = int(max_train_iter), int(max_env_step)
    return gail_run(main, create, shown, seed, *limits, model=model, **envs)


def serial_pipeline_offline(
    input_cfg: Config,
    seed: int = 0,
    env_setting: Sequence[Any] | None = None,
    model: nn.Module | None = None,
    max_train_iter: float = NO_LIMIT,
) -> Any:
    """Learn from the recorded data that a config names; see :func:`serial_pipeline`."""
    main, create = _configs(input_cfg)
    return offline_run(main, create, seed, int(max_train_iter), model=model)


serial_pipeline_dt = serial_pipeline_offline


def serial_pipeline_bc(
    input_cfg: Config,
    seed: int,
    data_path: str,
    model: nn.Module | None = None,
    max_iter: float = 1e6,
) -> tuple[Any, bool]:
    """Clone the behavior in recorded data.

    Returns:
        The policy, and whether it has reached the stop value; that is not known here: False.
    """
    main, create = _configs(input_cfg)
    return offline_run(main, create, seed, int(max_iter), model=model, data=data_path), False


def parallel_pipeline(
    input_cfg: Config,
    seed: int = 0,
    enable_total_log: bool = False,
    disable_flask_log: bool = True,
) -> Any:
    """Train with a coordinator, learners and collectors.

    Args:
        input_cfg: the path of a config file, or the main, create and system configs.
        seed: the seed of everything random.
        enable_total_log: no effect: logs are in files below ``exp_name``.
        disable_flask_log: no effect: requests are logged at the level DEBUG.

    Returns:
        Whether the training has reached its goal; see :func:`dmiddleware.worker.classic_run`.
    """
    main, create, system = (
        read_config_with_system(Path(input_cfg)) if isinstance(input_cfg, str | Path) else input_cfg
    )
    described = _described(main, create)
    if described.get("type") in ENV_REGISTRY:
        main = with_own_envs(main)
        main["env"] |= env_ids(described)
        create = {name: section for name, section in create.items() if name != "env"}
    return classic_run(main, system, seed, create=create)


def _configs(input_cfg: Config) -> tuple[Any, Any]:
    if isinstance(input_cfg, str | Path):
        return read_config(Path(input_cfg))
    return input_cfg[0], input_cfg[1]


def _with_envs(
    main: Mapping[str, Any], create: Mapping[str, Any], setting: Sequence[Any] | None
) -> tuple[Mapping[str, Any], dict[str, Any]]:
    """Return the main config, and what makes the envs as an argument, if not those of an id."""
    envs = _envs(main, create, setting)
    if envs is None:
        return main, {}
    return {**main, "env": with_own_envs(main)["env"]}, {"envs": envs}


def _expert(cfg: Config, setting: Sequence[Any] | None) -> tuple[Any, Any]:
    """Return the configs of an expert, whose envs are made as those of the policy."""
    main, create = _configs(cfg)
    main, _ = _with_envs(main, create, setting)
    return main, create


def _envs(
    main: Mapping[str, Any], create: Mapping[str, Any], setting: Sequence[Any] | None
) -> Callable[[Any, str], Any] | None:
    """Return what makes the envs of a role from env classes of DI-engine; None: there are none."""
    if setting is None:
        described = _described(main, create)
        if described.get("type") not in ENV_REGISTRY:
            return None
        setting = get_vec_env_setting(described)
    env_cls, *configs = setting[0], setting[1] or [], setting[2] or []
    manager = get_env_manager_cls(dict(create.get("env_manager") or {"type": "base"}))

    def make(cfg: Any, role: str) -> Any:
        env_configs = configs[0] if role == "collector" else configs[1]
        return manager([functools.partial(env_cls, config) for config in env_configs], cfg.manager)

    return make


def _described(main: Mapping[str, Any], create: Mapping[str, Any]) -> EasyDict:
    """Return the whole config of an env, after importing the modules that it names."""
    described = EasyDict(copy.deepcopy({**main.get("env", {}), **create.get("env", {})}))
    import_those_here(described.get("import_names") or ())
    return described
