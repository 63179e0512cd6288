"""The face of ``gym.envs``."""

from dmiddleware.ding.gym.envs.registration import make, register, registry, spec

__all__ = ["make", "register", "registry", "spec"]
