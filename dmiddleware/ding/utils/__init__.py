"""The face of ``ding.utils``."""

from __future__ import annotations

from dmiddleware.ding.program import remember_seed
from dmiddleware.ding.registries import ENV_REGISTRY, ENV_WRAPPER_REGISTRY
from dmiddleware.ding.utils.collections import *  # noqa: F403
from dmiddleware.model import MODEL_REGISTRY
from dmiddleware.policy import POLICY_REGISTRY
from dmiddleware.seeding import seed_libraries

__all__ = [
    "ENV_REGISTRY",
    "ENV_WRAPPER_REGISTRY",
    "MODEL_REGISTRY",
    "POLICY_REGISTRY",
    "set_pkg_seed",
]


def set_pkg_seed(seed: int, use_cuda: bool = True) -> None:
    """Seed Python's, NumPy's and torch's global generators."""
    remember_seed(seed)
    seed_libraries(seed)
