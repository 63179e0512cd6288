"""The pipeline floor: contexts, middleware, tasks and events, without a word of learning."""

from dmiddleware.pipeline.by_hand import Layer, Wrapped
from dmiddleware.pipeline.clock import Clock, Running, SystemClock
from dmiddleware.pipeline.context import (
    Context,
    FieldKind,
    Vocabulary,
    kept,
    produced,
    renewed,
)
from dmiddleware.pipeline.current_node import CurrentNode, Progress, current_node, running_as
from dmiddleware.pipeline.describe import ChainRow, ChainTable
from dmiddleware.pipeline.event import Delivery, Emission, Event, EventCounters
from dmiddleware.pipeline.event_bus import EventBus, EventRouter
from dmiddleware.pipeline.lifecycle import Stateful
from dmiddleware.pipeline.middleware import (
    Declarations,
    Middleware,
    Wrapper,
    middleware,
    middleware_location,
    middleware_name,
)
from dmiddleware.pipeline.onion import SkipRest, around
from dmiddleware.pipeline.patience import Patience
from dmiddleware.pipeline.plan import Group, Lock
from dmiddleware.pipeline.preflight import ChainView
from dmiddleware.pipeline.running_task import RunningTask
from dmiddleware.pipeline.task import Task
from dmiddleware.pipeline.timing import StepTimer, Timing, TraceFile, merge_traces

__all__ = [
    "Task",
    "RunningTask",
    "Context",
    "Vocabulary",
    "FieldKind",
    "kept",
    "renewed",
    "produced",
    "Middleware",
    "Wrapper",
    "Declarations",
    "Stateful",
    "middleware",
    "middleware_name",
    "middleware_location",
    "around",
    "SkipRest",
    "Group",
    "Wrapped",
    "Layer",
    "Lock",
    "ChainView",
    "ChainTable",
    "ChainRow",
    "Event",
    "Delivery",
    "Emission",
    "EventBus",
    "EventCounters",
    "EventRouter",
    "Clock",
    "Running",
    "SystemClock",
    "Patience",
    "StepTimer",
    "Timing",
    "TraceFile",
    "merge_traces",
    "CurrentNode",
    "Progress",
    "running_as",
    "current_node",
]
