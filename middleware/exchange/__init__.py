"""Exchange between processes: collected data, evaluations, counters and weights."""

from middleware.exchange.context_exchanger import ContextExchanger
from middleware.exchange.model_exchanger import ModelExchanger, PeriodicalModelExchanger

__all__ = ["ContextExchanger", "ModelExchanger", "PeriodicalModelExchanger"]
