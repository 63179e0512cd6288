"""The players of a league."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

from dmiddleware.classic.config import Configurable, Option, Range, above, fraction

__all__ = ["NaiveSpPlayer", "Player", "PlayerOptions"]

INITIAL_RATING = 1000.0


def _are_difficulties(value: Any) -> bool:
    return isinstance(value, list | tuple) and len(value) > 0


class PlayerOptions(Configurable):
    """The options of a naive self-play player."""

    config: ClassVar[dict[str, Any]] = {
        "one_phase_step": Option(10, above(0), "learner iterations of a phase"),
        "branch_probs": {
            "pfsp": Option(0.5, fraction, "share of games against an earlier snapshot"),
            "sp": Option(0.5, fraction, "share of games against itself"),
        },
        "strong_win_rate": Option(
            0.7, fraction, "win rate against each snapshot that allows the next one after a phase"
        ),
        "eval_opponent_difficulty": Option(
            [None],
            Range("a list of the env's opponents, easiest first", _are_difficulties),
            "values of the env's argument `eval_opponent`; None passes no argument",
        ),
    }


@dataclasses.dataclass(kw_only=True)
class Player:
    """A player that does not learn: a snapshot of an active player, or a pretrained one.

    Attributes:
        player_id: its name in the league.
        category: its category.
        checkpoint_path: the name of its policy below the league's ``path_policy``.
        rating: its Elo rating.
        parent_id: the active player that it is a snapshot of; empty if there is none.
    """

    player_id: str
    category: str
    checkpoint_path: str
    rating: float = INITIAL_RATING
    parent_id: str = ""


@dataclasses.dataclass(kw_only=True)
class NaiveSpPlayer(Player):
    """A player that learns by self-play.

    Attributes:
        total_agent_step: learner iterations so far.
        last_enough_step: those at its last snapshot.
        eval_opponent_index: the difficulty of the env's opponent that it is evaluated against.
    """

    total_agent_step: int = 0
    last_enough_step: int = 0
    eval_opponent_index: int = 0
