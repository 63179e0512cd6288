"""Whether a model fits an environment's spaces."""

from __future__ import annotations

from typing import Any


def check_spaces(model: Any, options: Any, observation_space: Any, action_space: Any) -> None:
    """Refuse spaces that the model does not fit."""
