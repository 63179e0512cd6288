"""Several learners that look like one to the coordinator."""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Final, Self

from dmiddleware.classic.config import Configurable, Option, mapping, positive, text
from dmiddleware.classic.keywords import also_named
from dmiddleware.errors import ConfigError, StructureError, WaitTimeout
from dmiddleware.process.closing import Closing
from dmiddleware.worker.comm.http import HttpTask, Master, Slave, SlaveConnection, read_key
from dmiddleware.worker.errors import RequestFailed, TaskFail

__all__ = ["LearnerAggregator"]

_RETRY_S: Final = 0.5
_COMMON: Final = ("learner_step", "buffer_id", "task_id", "learner_done", "cur_learner_iter")
"""The keys whose values all learners share."""


class _CoordinatorSide(Slave):
    """Gives the coordinator's tasks to the aggregator."""

    def __init__(
        self, process: Callable[[Mapping[str, Any]], dict[str, Any]], **options: Any
    ) -> None:
        super().__init__(**options)
        self._process = process

    def _process_task(self, task: dict[str, Any]) -> dict[str, Any]:
        return self._process(task)


class LearnerAggregator(Closing, Configurable):
    """Makes several learners look like one: a slave of the coordinator, and the learners' master.

    A task is given to all learners. Their demands for data are added, and the data is split in the
    same order. A round ends when all learners have demanded again, so that none gets ahead. If a
    learner fails or leaves, the others are closed, and the task fails as a whole.

    Args:
        cfg: what differs from ``default_config()``. ``slave`` has the arguments of
            :class:`~dmiddleware.worker.comm.http.Slave` (towards the coordinator), ``master`` those
            of :class:`~dmiddleware.worker.comm.http.Master` (towards the learners), and ``learner``
            the learners, ``{name: [id, host, port]}``.
        clock: seconds that never decrease.

    Raises:
        ConfigError: for an unusable config, or without learners.
    """

    config: ClassVar[dict[str, Any]] = {
        "slave": Option({}, mapping, "arguments of the slave, towards the coordinator"),
        "master": Option({}, mapping, "arguments of the master, towards the learners"),
        "learner": Option({}, mapping, "the learners: `{name: [id, host, port]}`"),
        "max_retry_second": Option(
            60.0, positive, "how long to wait for the learners at the start, in seconds"
        ),
        "timeout_s": Option(120.0, positive, "how long a learner's reply may take, in seconds"),
        "key_file": Option("", text, "file with the run's secret key; empty: none"),
    }

    def __init__(
        self, cfg: Mapping[str, Any], *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._cfg = self.merged_config(cfg)
        self._clock = clock
        if not self._cfg.learner:
            raise ConfigError(
                "LearnerAggregator has no learners; set learner to {name: [id, host, port]}"
            )
        key = read_key(self._cfg.key_file) if self._cfg.key_file else b""
        self._master = Master(**self._cfg.master, key=key)
        self._slave = _CoordinatorSide(self._process, **self._cfg.slave, key=key)
        self._learners: dict[str, SlaveConnection] = {}
        for name, address in self._cfg.learner.items():
            if not isinstance(address, list | tuple) or len(address) != 3:
                raise ConfigError(f"learner.{name} must be [id, host, port], got {address!r}")
            _, host, port = address
            self._learners[name] = self._master.new_connection(name, host, port)
        self._running: dict[str, Any] = {}
        self._demands: dict[str, dict[str, Any]] = {}
        self._infos: dict[str, deque[dict[str, Any]]] = {}
        self._n_demands = 0
        self._closing = threading.Event()

    @property
    def port(self) -> int:
        """The port at which the coordinator reaches the aggregator."""
        return self._slave.port

    def start(self) -> None:
        """Connect to all learners, and then listen to the coordinator.

        Raises:
            WaitTimeout: if learners have not connected after ``max_retry_second``; it names them.
            TransportError: if an address cannot be listened on.
        """
        self._master.start()
        try:
            self._connect_all()
            self._slave.start()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Release the learners, and end; may be called twice."""
        self._closing.set()
        self._slave.close()
        self._master.close()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __repr__(self) -> str:
        return f"LearnerAggregator({', '.join(self._learners)})"

    def deal_with_get_resource(self) -> dict[str, Any]:
        """Return the number of learners, as GPUs, and the ids of the task that they do, if any."""
        return {"gpu": len(self._learners), "cpu": 0, **self._running}

    def deal_with_learner_start(self, task: Mapping[str, Any]) -> dict[str, Any]:
        """Start a task on all learners.

        Raises:
            TaskFail: if one learner does not start it; the others are closed.
        """
        info = task.get("task_info", {})
        self._running = {
            "task_id": str(info.get("task_id", "")),
            "buffer_id": str(info.get("buffer_id", "")),
            "attempt": int(task.get("attempt", 0)),
        }
        self._demands.clear()
        self._infos = {name: deque() for name in self._learners}
        self._n_demands = 0
        for connection in self._learners.values():
            # One that left during an earlier task may be back.
            with contextlib.suppress(RequestFailed):
                connection.connect()
        self._ask_all(dict.fromkeys(self._learners, task))
        return {"message": f"{len(self._learners)} learners have started the task"}

    def deal_with_get_data(self, task: Mapping[str, Any]) -> dict[str, Any]:
        """Return the sum of the learners' demands, once all of them have one, until it is answered.

        Returns:
            ``task_id, buffer_id, batch_size, cur_learner_iter, seq, lost``; without
            ``batch_size``, but with ``pending``, while learners have not demanded. With ``info`` if
            all learners have reported.

        Raises:
            TaskFail: if a learner fails, or leaves.
        """
        waiting = [name for name in self._learners if name not in self._demands]
        answer: dict[str, Any] = {}
        for name, reply in self._ask_all(dict.fromkeys(waiting, task)).items():
            rest = self._without_info(name, reply)
            answer = {key: rest[key] for key in ("task_id", "buffer_id") if key in rest}
            if "batch_size" in reply:
                self._demands[name] = rest
        info = self._merged_infos()
        if info is not None:
            answer["info"] = info
        if len(self._demands) < len(self._learners):
            return {**answer, "pending": True}
        demands = [self._demands[name] for name in self._learners]
        shared = [{k: v for k, v in demand.items() if k in _COMMON} for demand in demands]
        return {
            **answer,
            **self._merged(shared),
            "batch_size": sum(demand["batch_size"] for demand in demands),
            "seq": self._n_demands,
            "lost": [one for demand in demands for one in demand.get("lost", ())],
        }

    def deal_with_learner_learn(self, task: Mapping[str, Any]) -> dict[str, Any]:
        """Split the data among the learners, and return their merged progress.

        Returns:
            ``{'info', 'task_id', 'buffer_id'}``; ``info`` is None if not all have reported.

        Raises:
            TaskFail: if a learner fails, or leaves, or the data is not what was demanded.
        """
        if len(self._demands) < len(self._learners):
            raise TaskFail(self._ids(), "not all learners have demanded data; ask for the demand")
        data = list(task["data"])
        demands = {name: self._demands[name] for name in self._learners}
        n_demanded = sum(demand["batch_size"] for demand in demands.values())
        if len(data) != n_demanded:
            raise TaskFail(
                self._ids(), f"the learners demanded {n_demanded} samples, and got {len(data)}"
            )
        self._demands.clear()
        self._n_demands += 1
        parts: dict[str, Mapping[str, Any]] = {}
        for name, demand in demands.items():
            size = demand["batch_size"]
            parts[name] = {**task, "data": data[:size], "seq": demand.get("seq")}
            del data[:size]
        replies = self._ask_all(parts)
        answer = self._merged([self._without_info(*item) for item in replies.items()])
        return {**answer, "info": self._merged_infos()}

    def deal_with_learner_close(self, task: Mapping[str, Any]) -> dict[str, Any]:
        """Close the task on all learners.

        Returns:
            ``task_id, buffer_id``, and ``info`` if all learners have reported.

        Raises:
            TaskFail: if a learner does not end the task in order; the others are closed.
        """
        close = {"name": task["name"]}  # without a time after which one of them may be pending
        replies = self._ask_all(dict.fromkeys(self._learners, close), closes_others=False)
        answer = self._merged([self._without_info(*item) for item in replies.items()])
        self._running = {}
        info = self._merged_infos()
        return answer if info is None else {**answer, "info": info}

    @staticmethod
    @also_named(info="infos")
    def merge_info(infos: Sequence[Any]) -> Any:
        """Merge what several learners report.

        Args:
            infos: one value for each learner: all dictionaries, lists, numbers, strings or None;
                as a keyword also ``info``.

        Returns:
            Of dictionaries, a dictionary of merged values; its ``learner_step``, ``buffer_id``,
            ``task_id``, ``learner_done`` and ``cur_learner_iter`` are those of the first learner.
            Of lists, one list. Of numbers and strings, the list of them. Of None, None.

        Raises:
            StructureError: if the learners differ in keys, in the kind of a value, or in a value
                that all share.

        Example:
            >>> LearnerAggregator.merge_info(
            ...     [{"learner_step": 5, "loss": 0.25}, {"learner_step": 5, "loss": 0.5}]
            ... )
            {'learner_step': 5, 'loss': [0.25, 0.5]}
        """
        return _merge(list(infos), "info")

    def _process(self, task: Mapping[str, Any]) -> dict[str, Any]:
        """Do a task of the coordinator."""
        callbacks: dict[str, Callable[[Mapping[str, Any]], dict[str, Any]]] = {
            "resource": lambda _: self.deal_with_get_resource(),
            "learner_start_task": self.deal_with_learner_start,
            "learner_get_data_task": self.deal_with_get_data,
            "learner_learn_task": self.deal_with_learner_learn,
            "learner_close_task": self.deal_with_learner_close,
        }
        name = task.get("name")
        if name not in callbacks:
            raise TaskFail(
                {"name": name}, f"unknown task {name!r}; the tasks are {', '.join(callbacks)}"
            )
        return callbacks[name](task)

    def _connect_all(self) -> None:
        deadline = self._clock() + self._cfg.max_retry_second
        while missing := [one for one in self._learners.values() if not one.is_connected]:
            for connection in missing:
                with contextlib.suppress(RequestFailed):
                    connection.connect()
            if all(connection.is_connected for connection in missing):
                return
            if self._clock() > deadline or self._closing.wait(_RETRY_S):
                absent = [name for name, one in self._learners.items() if not one.is_connected]
                raise WaitTimeout(
                    f"of {len(self._learners)} learners, {', '.join(absent)} did not connect "
                    f"within {self._cfg.max_retry_second:g} s; start them first, or correct their "
                    "addresses"
                )

    def _ask_all(
        self, tasks: Mapping[str, Mapping[str, Any]], *, closes_others: bool = True
    ) -> dict[str, dict[str, Any]]:
        """Give learners a task each, at the same time, and return their replies.

        Raises:
            TaskFail: if one of them fails, or has left.
        """
        asked = {name: self._learners[name].new_task(task) for name, task in tasks.items()}
        for one in asked.values():
            one.start()
        deadline = self._clock() + self._cfg.timeout_s
        failures: dict[str, str] = {
            name: "it has left" for name, one in self._learners.items() if not one.is_connected
        }
        for name, one in asked.items():
            try:
                one.join(max(0.0, deadline - self._clock()))
            except WaitTimeout as error:
                failures[name] = str(error)
            else:
                if one.status != "completed":
                    failures[name] = one.message
        if not failures:
            return {name: one.result or {} for name, one in asked.items()}
        if closes_others:
            self._close_others(failures)
        ids, self._running = self._ids(), {}
        reasons = "; ".join(f"learner {name}: {reason}" for name, reason in failures.items())
        raise TaskFail(ids, f"the task is lost. {reasons}")

    def _close_others(self, failures: Mapping[str, str]) -> None:
        """End the task of the learners that have not failed, so that none continues alone."""
        closing: list[HttpTask] = [
            connection.new_task({"name": "learner_close_task"}).start()
            for name, connection in self._learners.items()
            if name not in failures
        ]
        for one in closing:
            with contextlib.suppress(WaitTimeout):
                one.join(self._cfg.timeout_s)
        self._demands.clear()

    def _without_info(self, name: str, reply: Mapping[str, Any]) -> dict[str, Any]:
        """Keep a learner's progress until all have reported, and return the rest of its reply."""
        if reply.get("info"):
            self._infos[name].append(reply["info"])
        return {key: value for key, value in reply.items() if key != "info"}

    def _merged_infos(self) -> dict[str, Any] | None:
        if not all(self._infos.values()):
            return None
        return self._merged([self._infos[name].popleft() for name in self._learners])

    def _merged(self, infos: list[dict[str, Any]]) -> dict[str, Any]:
        try:
            merged: dict[str, Any] = self.merge_info(infos)
        except StructureError as error:
            self._close_others({})
            raise TaskFail(self._ids(), str(error)) from error
        return merged

    def _ids(self) -> dict[str, str]:
        return {key: self._running[key] for key in ("task_id", "buffer_id") if key in self._running}


def _merge(values: list[Any], path: str) -> Any:
    first = values[0]
    if first is None and all(value is None for value in values):
        return None
    if all(isinstance(value, Mapping) for value in values):
        return _merge_dicts(values, path)
    if all(isinstance(value, list | tuple) for value in values):
        return [item for value in values for item in value]
    if all(isinstance(value, int | float | str) for value in values):
        return values
    kinds = ", ".join(type(value).__name__ for value in values)
    raise StructureError(
        f"{path} cannot be merged, because the learners report {kinds}; all must report numbers, "
        "strings, lists, dictionaries or None"
    )


def _merge_dicts(values: list[Mapping[str, Any]], path: str) -> dict[str, Any]:
    merged: dict[str, Any] = {}
    given = [value for value in values if value] or values[:1]
    for value in given:
        if odd := value.keys() ^ given[0].keys():
            raise StructureError(f"not all learners report {path}.{min(odd)}; all must")
    for key in given[0]:
        column = [value[key] for value in given]
        if key not in _COMMON:
            merged[key] = _merge(column, f"{path}.{key}")
        elif any(value != column[0] for value in column):
            raise StructureError(
                f"the learners disagree on {path}.{key}: {column}; they must make the same updates"
            )
        else:
            merged[key] = column[0]
    return merged
