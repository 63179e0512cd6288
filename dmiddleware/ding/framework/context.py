"""The face of ``ding.framework.context``."""

from __future__ import annotations

from dataclasses import dataclass

from dmiddleware.pipeline import Context as CoreContext
from dmiddleware.pipeline import renewed
from middleware import OfflineRLContext as CoreOfflineContext
from middleware import OnlineRLContext as CoreOnlineContext

__all__ = ["Context", "OfflineRLContext", "OnlineRLContext"]

Context = CoreContext


@dataclass
class OnlineRLContext(CoreOnlineContext):
    """The context of learning from an env, with the fields that only DI-engine has.

    Attributes:
        eval_value_min: the least return of an evaluation in this step.
        eval_value_max: the greatest.
        eval_value_std: their standard deviation.
    """

    eval_value_min: float | None = renewed(None)
    eval_value_max: float | None = renewed(None)
    eval_value_std: float | None = renewed(None)


@dataclass
class OfflineRLContext(CoreOfflineContext):
    """The context of learning from a dataset, with the fields that only DI-engine has.

    Attributes:
        eval_value_min: the least return of an evaluation in this step.
        eval_value_max: the greatest.
        eval_value_std: their standard deviation.
    """

    eval_value_min: float | None = renewed(None)
    eval_value_max: float | None = renewed(None)
    eval_value_std: float | None = renewed(None)
