"""The error tree.

Every error that this project raises is a :class:`DMiddlewareError`, and also the built-in error
that fits it best, so that either can be caught::

    DMiddlewareError
    ├── ConfigError, RegistryError, RunFolderError, LaunchError
    ├── PipelineError: ChainError, MiddlewareError, ContextError, TaskStateError
    ├── EventError: WaitTimeout, EventQueueFull, NoSubscriber
    ├── DataError: StructureError, NotEnoughData, NonFiniteData, DatasetError, StepDataLost
    ├── EnvError: EnvCrashed, EnvTimeout, EnvProtocolError, EnvStateError
    ├── PolicyError: SpaceError, PolicyOutputError, NonFiniteLoss, RankLost
    ├── CheckpointError: CheckpointWriteError, CheckpointDamaged, CheckpointMismatch
    ├── RouterError: EncodeError, DecodeError, FrameError, FrameTooLarge, AuthError,
    │       HandshakeRefused, TopologyError, TransportError, DeliveryTimeout, RouterStateError
    └── of the workers: CoordinatorError, TaskFail, TaskRefuse, ConnectionRefuse,
            DisconnectionRefuse, RequestFailed

A message says what happened, with which value, and what to do.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

__all__ = [
    "DMiddlewareError",
    "ConfigError",
    "RegistryError",
    "PipelineError",
    "ChainError",
    "MiddlewareError",
    "ContextError",
    "TaskStateError",
    "EventError",
    "WaitTimeout",
    "EventQueueFull",
    "NoSubscriber",
    "DataError",
    "StructureError",
    "NotEnoughData",
    "NonFiniteData",
    "DatasetError",
    "StepDataLost",
    "EnvError",
    "EnvCrashed",
    "EnvTimeout",
    "EnvProtocolError",
    "EnvStateError",
    "PolicyError",
    "SpaceError",
    "PolicyOutputError",
    "NonFiniteLoss",
    "RankLost",
    "CheckpointError",
    "CheckpointWriteError",
    "CheckpointDamaged",
    "CheckpointMismatch",
    "RunFolderError",
    "RouterError",
    "EncodeError",
    "DecodeError",
    "FrameError",
    "FrameTooLarge",
    "AuthError",
    "HandshakeRefused",
    "TopologyError",
    "TransportError",
    "DeliveryTimeout",
    "RouterStateError",
    "CoordinatorError",
    "TaskFail",
    "ConnectionRefuse",
    "DisconnectionRefuse",
    "TaskRefuse",
    "RequestFailed",
    "LaunchError",
]


class DMiddlewareError(Exception):
    """The base class of every error of this project."""


class ConfigError(DMiddlewareError, ValueError):
    """A configuration has an unknown key, a wrong type or an impossible value."""


class RegistryError(DMiddlewareError, KeyError):
    """A name is not registered, or is registered twice."""

    def __str__(self) -> str:
        # KeyError would show the message quoted, as if it were the key.
        return str(self.args[0]) if self.args else ""


class PipelineError(DMiddlewareError):
    """A mistake in the way a chain is built or run."""


class ChainError(PipelineError, ValueError):
    """The chain cannot run; every problem found before the first step is listed."""


class MiddlewareError(PipelineError, TypeError):
    """A middleware breaks the protocol: it is not callable, or it yields twice."""


class ContextError(PipelineError, AttributeError):
    """A field of the context was read before it was set."""


class TaskStateError(PipelineError, RuntimeError):
    """A task was used after it was closed, or changed while it runs."""


class EventError(DMiddlewareError):
    """A mistake in the use of events."""


class WaitTimeout(EventError, TimeoutError):
    """An awaited event did not arrive before the deadline."""


class EventQueueFull(EventError, TimeoutError):
    """A bounded event queue was still full at the emitter's deadline."""


class NoSubscriber(EventError, LookupError):
    """No handler receives an event that is declared as required; nothing was sent."""


class DataError(DMiddlewareError):
    """Data cannot be stored or returned."""


class StructureError(DataError, ValueError):
    """A batch differs in keys, shapes or dtypes from the ones before."""


class NotEnoughData(DataError, ValueError):
    """A buffer was asked for more than it holds."""


class NonFiniteData(DataError, ValueError):
    """A number that must be finite is NaN or infinite."""


class DatasetError(DataError, ValueError):
    """An offline dataset is missing, damaged or of another format."""


class StepDataLost(DataError, LookupError):
    """Step data is missing or damaged in its store.

    Attributes:
        data_id: the id of the data; empty if it is unknown.
    """

    def __init__(self, message: str, *, data_id: str = "") -> None:
        super().__init__(message)
        self.data_id = data_id


class EnvError(DMiddlewareError):
    """An environment failed."""


class EnvCrashed(EnvError, RuntimeError):
    """An environment kept failing after as many restarts as allowed."""


class EnvTimeout(EnvError, TimeoutError):
    """An environment did not answer before the deadline."""


class EnvProtocolError(EnvError, TypeError):
    """An environment does not follow Gymnasium's interface, or has spaces without a shape."""


class EnvStateError(EnvError, RuntimeError):
    """An env manager was used before ``launch`` or after ``close``."""


class PolicyError(DMiddlewareError):
    """A policy cannot do what it was asked to do."""


class SpaceError(PolicyError, ValueError):
    """The policy's model does not fit the environment's spaces."""


class PolicyOutputError(PolicyError, TypeError):
    """A policy's forward returned something other than its interface says."""


class NonFiniteLoss(PolicyError, ArithmeticError):
    """A loss or gradient is NaN or infinite; its step, and those after it, changed nothing."""


class RankLost(PolicyError, ConnectionError):
    """A rank of a data-parallel run was killed, failed, or did not take part in time."""


class CheckpointError(DMiddlewareError):
    """A checkpoint cannot be written or read."""


class CheckpointWriteError(CheckpointError, OSError):
    """A checkpoint could not be written; the file that was there before is intact."""


class CheckpointDamaged(CheckpointError, ValueError):
    """A file is not a complete checkpoint."""


class CheckpointMismatch(CheckpointError, ValueError):
    """A checkpoint belongs to another model."""


class RunFolderError(DMiddlewareError, OSError):
    """A run folder is in use by another task, was deleted during the run, or cannot be written."""


class RouterError(DMiddlewareError):
    """Events could not be exchanged between processes."""


class EncodeError(RouterError, TypeError):
    """A value has a type that cannot be sent."""


class DecodeError(RouterError, ValueError):
    """Received bytes are not an encoded value."""


class FrameError(RouterError, ValueError):
    """Received bytes are not a valid frame of this version."""


class FrameTooLarge(RouterError, ValueError):
    """A frame is larger than its receiver accepts; nothing was sent."""


class AuthError(RouterError, PermissionError):
    """A peer or a frame is not signed with the right key."""


class HandshakeRefused(RouterError, ConnectionError):
    """A listener refuses a node.

    Attributes:
        code: the kind of reason, for example ``version``, ``run``, ``key`` or ``node_id_taken``.
        verified: whether the listener has proved that it has the run's key.
    """

    def __init__(self, reason: str, *, code: str = "unknown", verified: bool = False) -> None:
        super().__init__(reason)
        self.code = code
        self.verified = verified


class TopologyError(RouterError, ValueError):
    """These arguments do not define a valid topology."""


class TransportError(RouterError, ConnectionError):
    """An address cannot be reached or listened on, or did not answer in time."""


class DeliveryTimeout(RouterError, TimeoutError):
    """Peers had no room for an event before the emitter's deadline.

    To send it to those only, emit it again with ``to=error.refused``.

    Attributes:
        accepted: node ids of the peers that receive the event.
        refused: node ids of the peers that do not.
    """

    def __init__(
        self, message: str, *, accepted: Sequence[int] = (), refused: Sequence[int] = ()
    ) -> None:
        super().__init__(message)
        self.accepted = tuple(accepted)
        self.refused = tuple(refused)


class RouterStateError(RouterError, RuntimeError):
    """A router was used before its start, after its close, or in a forked process."""


class CoordinatorError(DMiddlewareError, RuntimeError):
    """A coordinator was asked for an unknown task or buffer, or at the wrong time."""


class TaskFail(DMiddlewareError, RuntimeError):
    """A task that a worker was given has failed, or the worker does not have it.

    Attributes:
        result: plain values for the sender of the task, such as its id.
        message: why; the traceback, if an error ended the task.
    """

    def __init__(self, result: Mapping[str, Any] | None = None, message: str = "") -> None:
        super().__init__(result, message)
        self.result = dict(result or {})
        self.message = message

    def __str__(self) -> str:
        return self.message


class ConnectionRefuse(DMiddlewareError, PermissionError):
    """A slave does not accept this master; its ``_before_connection`` raises it."""


class DisconnectionRefuse(DMiddlewareError, PermissionError):
    """A slave does not release its master; its ``_before_disconnection`` raises it."""


class TaskRefuse(DMiddlewareError, PermissionError):
    """A slave does not take this task; its ``_before_task`` raises it."""


class RequestFailed(DMiddlewareError, ConnectionError):
    """An HTTP request was refused, or not answered.

    Attributes:
        status: the HTTP status of the reply; None if there was none.
        code: the ``code`` in the reply; None unless the reply was signed with the run's key.
    """

    def __init__(self, message: str, *, status: int | None = None, code: int | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.code = code


class LaunchError(DMiddlewareError, ValueError):
    """A run cannot be started: options contradict each other or the environment."""
