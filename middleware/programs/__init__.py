"""Whole training programs: the stock chains as functions, and training in two lines.

:func:`train` looks up tuned settings in :mod:`dmiddleware.zoo`, and calls the program of the
algorithm: :func:`off_policy`, :func:`on_policy` or :func:`offline`. Each is a program like the
examples: its parameters are the options of a command line.
"""

from middleware.programs.off_policy import off_policy
from middleware.programs.offline import offline
from middleware.programs.on_policy import on_policy
from middleware.programs.train import TrainResult, train, tuned_arguments

__all__ = ["TrainResult", "off_policy", "offline", "on_policy", "train", "tuned_arguments"]
