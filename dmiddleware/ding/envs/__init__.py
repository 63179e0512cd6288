"""The face of ``ding.envs``: envs by DI-engine's interface, their wrappers and their managers."""

from dmiddleware.ding.envs.base import (
    BaseEnv,
    BaseEnvTimestep,
    DingEnvWrapper,
    create_model_env,
    get_default_wrappers,
    get_env_cls,
    get_vec_env_setting,
)
from dmiddleware.ding.envs.common import *  # noqa: F403
from dmiddleware.ding.envs.common import __all__ as _common
from dmiddleware.ding.envs.managers import *  # noqa: F403
from dmiddleware.ding.envs.managers import __all__ as _managers
from dmiddleware.ding.envs.wrappers import *  # noqa: F403
from dmiddleware.ding.envs.wrappers import __all__ as _wrappers

__all__ = [
    "BaseEnv",
    "BaseEnvTimestep",
    "DingEnvWrapper",
    "create_model_env",
    "get_default_wrappers",
    "get_env_cls",
    "get_vec_env_setting",
    *_common,
    *_managers,
    *_wrappers,
]
