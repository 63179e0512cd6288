"""The classic parallel mode over the router: links, stores and workers.

They are registered as ``router``, so configs find them without an import.
"""

from middleware.classic.roles import role_of_this_process
from middleware.classic.router_link import RouterLink, open_coordinator_link
from middleware.classic.router_store import RouterStore
from middleware.classic.workers import RouterCollector, RouterLearner

__all__ = [
    "RouterLink",
    "RouterStore",
    "RouterCollector",
    "RouterLearner",
    "open_coordinator_link",
    "role_of_this_process",
]
