"""The error tree.

Every error that this project raises is a :class:`DMiddlewareError`, and also the built-in error
that fits it best, so that either can be caught::

    DMiddlewareError
    ├── ConfigError (ValueError)            a configuration that cannot be used
    ├── RegistryError (KeyError)            a name that is not registered
    ├── PipelineError
    │   ├── ChainError (ValueError)         a chain that cannot run, found before the first step
    │   ├── MiddlewareError (TypeError)     a middleware that breaks the protocol
    │   ├── ContextError (AttributeError)   a field of a context that was never set
    │   └── TaskStateError (RuntimeError)   a call that the task's state does not allow
    ├── EventError
    │   ├── WaitTimeout (TimeoutError)      an event that did not arrive in time
    │   ├── EventQueueFull (TimeoutError)   a queue that was still full at the deadline
    │   └── NoSubscriber (LookupError)      a required event that no handler receives
    ├── DataError
    │   ├── StructureError (ValueError)     a batch that differs from what was stored before
    │   ├── NotEnoughData (ValueError)      a buffer asked for more than it holds
    │   ├── NonFiniteData (ValueError)      a number that must be finite, and is not
    │   └── DatasetError (ValueError)       an offline dataset that cannot be read
    ├── EnvError
    │   ├── EnvCrashed (RuntimeError)       an environment that kept failing
    │   ├── EnvTimeout (TimeoutError)       an environment that did not answer in time
    │   ├── EnvProtocolError (TypeError)    an environment that breaks Gymnasium's interface
    │   ├── EnvStateError (RuntimeError)    an env manager used before launch or after close
    │   └── EnvCallError (RuntimeError)     an attribute or method of an env that cannot be used
    ├── PolicyError
    │   ├── SpaceError (ValueError)         a model that does not fit the environment's spaces
    │   ├── PolicyOutputError (TypeError)   a policy whose forward returns the wrong thing
    │   ├── NonFiniteLoss (ArithmeticError) a loss that is NaN or infinite
    │   └── RankLost (ConnectionError)      a rank that left the others of its process group
    ├── CheckpointError
    │   ├── CheckpointWriteError (OSError)  a checkpoint that could not be written
    │   ├── CheckpointDamaged (ValueError)  a file that is not a whole checkpoint
    │   └── CheckpointMismatch (ValueError) a checkpoint of another model
    ├── RunFolderError (OSError)            a run folder in use, deleted, or not writable
    ├── RouterError
    │   ├── EncodeError (TypeError)         a value that cannot be encoded
    │   ├── DecodeError (ValueError)        bytes that are not an encoded value
    │   ├── FrameError (ValueError)         bytes that are not a valid frame
    │   ├── FrameTooLarge (ValueError)      a frame larger than its receiver accepts
    │   ├── AuthError (PermissionError)     a peer or frame without the right key
    │   ├── HandshakeRefused (ConnectionError)  a listener that refuses a node
    │   ├── TopologyError (ValueError)      an invalid topology
    │   ├── TransportError (ConnectionError)    an address that cannot be reached or listened on
    │   ├── DeliveryTimeout (TimeoutError)  a peer that did not accept an event in time
    │   └── RouterStateError (RuntimeError) a router used before start, after close or after fork
    └── LaunchError (ValueError)            a run that cannot be started as asked

A message says what happened, with which value, and what to do. Those of the workers are in
``dmiddleware.worker.errors``.
"""

from __future__ import annotations

from collections.abc import Sequence

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
    "EnvError",
    "EnvCrashed",
    "EnvTimeout",
    "EnvProtocolError",
    "EnvStateError",
    "EnvCallError",
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


class EnvCallError(EnvError, RuntimeError):
    """An environment lacks an attribute or method that a program used, or raised in it."""


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


class LaunchError(DMiddlewareError, ValueError):
    """A run cannot be started: options contradict each other or the environment."""
