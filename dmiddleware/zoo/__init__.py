"""Tuned settings, by algorithm and environment, with the results that they gave.

Each algorithm has a file: its program, the defaults for any environment, and entries for those that
it was tuned on. :func:`middleware.programs.train` and ``ditask train`` take their settings from
here, and so does ``--config zoo:dqn/CartPole-v1`` of any program. Reading them imports neither
torch nor an environment.
"""

from dmiddleware.zoo.tuned import (
    Entry,
    Result,
    TunedAlgorithm,
    algorithms,
    tuned,
    tuned_options,
)

__all__ = ["Entry", "Result", "TunedAlgorithm", "algorithms", "tuned", "tuned_options"]
