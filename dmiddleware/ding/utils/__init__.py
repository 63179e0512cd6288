"""The face of ``ding.utils``."""

from dmiddleware.ding.utils.collections import *  # noqa: F403
