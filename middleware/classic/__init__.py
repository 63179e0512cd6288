"""The middleware of DI-engine's older pipeline, and its parallel mode over the router.

The links, stores and workers of the parallel mode are registered as ``router``, so configs find
them without an import.
"""

from middleware.classic.fetchers import (
    OfflineDataFetcher,
    OffPolicyDataFetcher,
    offline_data_fetcher,
    offpolicy_data_fetcher,
)
from middleware.classic.learner_run import LearnerRun
from middleware.classic.roles import role_of_this_process
from middleware.classic.router_link import RouterLink, open_coordinator_link
from middleware.classic.router_store import RouterStore
from middleware.classic.trainer import MultistepTrainer, Trainer, multistep_trainer, trainer
from middleware.classic.workers import RouterCollector, RouterLearner

__all__ = [
    "Trainer",
    "trainer",
    "MultistepTrainer",
    "multistep_trainer",
    "OffPolicyDataFetcher",
    "offpolicy_data_fetcher",
    "OfflineDataFetcher",
    "offline_data_fetcher",
    "LearnerRun",
    "RouterLink",
    "RouterStore",
    "RouterCollector",
    "RouterLearner",
    "open_coordinator_link",
    "role_of_this_process",
]
