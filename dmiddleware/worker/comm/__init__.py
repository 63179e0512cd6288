"""How the coordinator and its workers communicate: links, stores, and the communicating workers."""

from dmiddleware.worker.comm.base_collector import (
    COMM_COLLECTOR_REGISTRY,
    BaseCommCollector,
    create_comm_collector,
)
from dmiddleware.worker.comm.base_learner import (
    COMM_LEARNER_REGISTRY,
    BaseCommLearner,
    create_comm_learner,
    load_data_fn,
)
from dmiddleware.worker.comm.file_store import FileStore
from dmiddleware.worker.comm.flask_fs import FlaskFileSystemCollector, FlaskFileSystemLearner
from dmiddleware.worker.comm.hooks import SendLearnInfoHook, SendPolicyHook
from dmiddleware.worker.comm.http import Master, Slave
from dmiddleware.worker.comm.http_link import HttpLink
from dmiddleware.worker.comm.link import COORDINATOR_LINK_REGISTRY, create_coordinator_link
from dmiddleware.worker.comm.link_server import LinkServer
from dmiddleware.worker.comm.naive import NaiveCollector, NaiveLearner
from dmiddleware.worker.comm.store import Store
from dmiddleware.worker.coordinator.conversation import Answer, Ask, Link

__all__ = [
    "BaseCommCollector",
    "create_comm_collector",
    "COMM_COLLECTOR_REGISTRY",
    "BaseCommLearner",
    "create_comm_learner",
    "COMM_LEARNER_REGISTRY",
    "load_data_fn",
    "SendPolicyHook",
    "SendLearnInfoHook",
    "LinkServer",
    "FlaskFileSystemCollector",
    "FlaskFileSystemLearner",
    "NaiveCollector",
    "NaiveLearner",
    "Slave",
    "Master",
    "HttpLink",
    "FileStore",
    "Link",
    "Ask",
    "Answer",
    "Store",
    "COORDINATOR_LINK_REGISTRY",
    "create_coordinator_link",
]
