"""Exchange between processes: collected data, evaluations, counters and weights."""

from middleware.exchange.context_exchanger import ContextExchanger, ContextExchangerSettings
from middleware.exchange.model_exchanger import (
    ModelExchanger,
    ModelExchangerSettings,
    PeriodicalModelExchanger,
    PeriodicalModelExchangerSettings,
)

__all__ = [
    "ContextExchanger",
    "ContextExchangerSettings",
    "ModelExchanger",
    "ModelExchangerSettings",
    "PeriodicalModelExchanger",
    "PeriodicalModelExchangerSettings",
]
