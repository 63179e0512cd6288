"""Registries of DI-engine for which the edge has none."""

from __future__ import annotations

from typing import Any, Final

from dmiddleware.registry import Registry

__all__ = ["LEAGUE_REGISTRY", "PLAYER_REGISTRY", "REWARD_MODEL_REGISTRY"]

LEAGUE_REGISTRY: Final = Registry[Any]("league")
PLAYER_REGISTRY: Final = Registry[Any]("player")
REWARD_MODEL_REGISTRY: Final = Registry[Any]("reward model")
