"""Reference scores, by which the scores of different tasks become comparable."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final, TypeAlias

import yaml

from dmiddleware.errors import ConfigError
from dmiddleware.foreign_names import unknown_name
from dmiddleware.zoo.reference_scores import REFERENCE_SCORES

__all__ = ["Reference", "normalized", "reference_scores"]

Reference: TypeAlias = Mapping[str, tuple[float, float]]
"""By task, the scores that become 0 and 1, such as those of a random and of a good policy."""

_ZOO: Final = "zoo"
_FORM: Final = "write a line for each task, such as: CartPole-v1: [22, 475]"


def reference_scores(
    source: str | Path | Mapping[str, Any], tasks: Iterable[str]
) -> dict[str, tuple[float, float]]:
    """Return the reference scores of tasks.

    Args:
        source: ``"zoo"``, for those of :mod:`dmiddleware.zoo.reference_scores`; a YAML or JSON file
            with two numbers for each task; or these numbers.
        tasks: the tasks.

    Raises:
        ConfigError: if a task has no two different numbers, or the file cannot be read.
    """
    name, scores = _read(source)
    chosen = {}
    for task in tasks:
        if task not in scores:
            raise ConfigError(
                f"{name} has no scores of {task or 'an env without an id'}; "
                f"{unknown_name(task, map(str, scores))}; {_FORM}"
            )
        try:
            zero, full = map(float, () if isinstance(scores[task], str) else scores[task])
        except (TypeError, ValueError):
            raise ConfigError(f"{name}: {task} has {scores[task]!r}; {_FORM}") from None
        if not (math.isfinite(zero) and math.isfinite(full)) or zero == full:
            raise ConfigError(
                f"{name}: {task} has {scores[task]!r}, which must be two different finite numbers"
            )
        chosen[task] = (zero, full)
    return chosen


def normalized(score: float, scores: tuple[float, float]) -> float:
    """Return a score on the scale on which the reference scores are 0 and 1."""
    zero, full = scores
    return (score - zero) / (full - zero)


def _read(source: str | Path | Mapping[str, Any]) -> tuple[str, Mapping[str, Any]]:
    """Return where scores are from, for messages, and the scores."""
    if isinstance(source, Mapping):
        return "the reference", source
    if source == _ZOO:
        return "the zoo", REFERENCE_SCORES
    try:
        scores = yaml.safe_load(Path(source).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(
            f"--reference {source}: {error.strerror}; name a file with reference scores, or zoo"
        ) from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"--reference {source} is not YAML: {error}; {_FORM}") from error
    if not isinstance(scores, Mapping):
        raise ConfigError(f"--reference {source} has no tasks; {_FORM}")
    return str(source), scores
