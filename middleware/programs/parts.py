"""What the programs have in common: policies by name, their default settings, buffers."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, Final

from dmiddleware.callable_names import short_name
from dmiddleware.data import (
    PrioritySampler,
    PrioritySamplerSettings,
    TensorBuffer,
    TensorBufferSettings,
)
from dmiddleware.env import EnvSettings, make_env_manager
from dmiddleware.env.env_record import env_name
from dmiddleware.policy import (
    Policy,
    PolicySettings,
    R2D2Settings,
    TDSettings,
    get_policy_cls,
)
from middleware.record.experiment import ExperimentSettings
from middleware.record.run_folder import RunFolder

__all__ = [
    "default_settings",
    "draws_by_priority",
    "eval_settings",
    "make_policy",
    "make_replay",
    "make_run",
    "name_of_run",
]

_NO_NAME: Final = re.compile(r"\W+")


def default_settings(names: Iterable[str]) -> dict[str, PolicySettings]:
    """Return the default settings of algorithms, by name."""
    return {name: get_policy_cls({"type": name}).settings_class()() for name in names}


def make_policy(algo: str, env: EnvSettings, policy: PolicySettings, seed: int) -> Policy:
    """Build the policy of an algorithm for an environment."""
    return get_policy_cls({"type": algo}).for_env(make_env_manager(env), policy, seed=seed)


def eval_settings(
    env: EnvSettings, env_kwargs: Mapping[str, Any], env_num: int | None = None
) -> EnvSettings:
    """Return the settings of the envs that evaluate.

    Args:
        env: those of the envs to collect from.
        env_kwargs: keyword arguments that differ.
        env_num: number of envs; None: as many.
    """
    return replace(env, env_num=env_num or env.env_num, env_kwargs={**env.env_kwargs, **env_kwargs})


def draws_by_priority(policy: PolicySettings) -> bool:
    """Return whether a policy with these settings returns priorities, by which rows are drawn."""
    always = type(policy) is R2D2Settings  # of the algorithms with this base, it alone
    return always or (isinstance(policy, TDSettings) and policy.priority)


def make_replay(
    policy: Policy, buffer: TensorBufferSettings, sampler: PrioritySamplerSettings, seed: int
) -> TensorBuffer:
    """Build the buffer that a policy learns from."""
    draws = PrioritySampler.of(sampler) if draws_by_priority(policy.cfg) else buffer.sampler
    return TensorBuffer.of(buffer, sampler=draws, seed=seed)


def name_of_run(algo: str, env: EnvSettings) -> str:
    """Return the name of a run's folder if none is given, such as ``dqn-CartPole-v1``."""
    game = env.env_kwargs.get("game")
    name = game if isinstance(game, str) else env_name(env)
    text = (
        name.rpartition(":")[2] if isinstance(env.id, str) and "(" not in name else short_name(name)
    )
    text = _NO_NAME.sub("-", text.removesuffix(" object")).strip("-")
    return f"{algo}-{text or 'env'}"


def make_run(name: str, experiment: ExperimentSettings, *, resume: bool) -> RunFolder:
    """Make the folder of a run, or find the folder of the run to resume."""
    return RunFolder.create(name, root=experiment.root, resume=resume)
