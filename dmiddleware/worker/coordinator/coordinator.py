"""The coordinator: gives tasks to workers, and passes step data from collectors to learners."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar, Final, Self

from easydict import EasyDict

from dmiddleware.classic.config import (
    Configurable,
    Option,
    Range,
    count,
    mapping,
    optional,
    positive,
    text,
    whole,
)
from dmiddleware.classic.keywords import also_named
from dmiddleware.classic.logs import TextLog
from dmiddleware.classic.replay_buffers import get_buffer_cls
from dmiddleware.data import check_saveable, load_checkpoint, save_checkpoint
from dmiddleware.errors import ConfigError
from dmiddleware.process.closing import Closing
from dmiddleware.worker.comm.link import create_coordinator_link
from dmiddleware.worker.comm.store import Store
from dmiddleware.worker.commander import BaseParallelCommander, create_parallel_commander
from dmiddleware.worker.coordinator.actions import (
    Action,
    CloseBuffer,
    Collected,
    CollectorReported,
    Demanded,
    Discard,
    Ended,
    LearnerReported,
    Note,
    OpenBuffer,
    Release,
    Remove,
    Send,
    WorkersChanged,
)
from dmiddleware.worker.coordinator.buffers import ReferenceBuffers, reference
from dmiddleware.worker.coordinator.conversation import Conversations, Link
from dmiddleware.worker.coordinator.core import CoordinatorCore
from dmiddleware.worker.coordinator.messages import (
    COLLECTOR,
    LEARNER,
    Message,
    TaskOffer,
)
from dmiddleware.worker.coordinator.tasks import Task, TaskState
from dmiddleware.worker.entry import check_parts
from dmiddleware.worker.errors import CoordinatorError

__all__ = ["Coordinator"]

_RECEIVE_S: Final = 0.1
"""How long the coordinator waits for a message before it looks at its deadlines, in seconds."""

_MOST_DATA_IDS: Final = 65_536
_LINK_CLOSE_S: Final = 5.0
_VERSION: Final = 1

_port = Range("a port", lambda value: type(value) is int and 0 <= value < 2**16)


class Coordinator(Closing, Configurable):
    """Gives the commander's tasks to workers, and passes step data from collectors to learners.

    The coordinator owns the link to the workers, the store of their step data, the commander and
    the replay buffers. The buffers hold the metadata of the step data. A task whose worker is lost
    is given to another one. A message about a task that a worker has lost is ignored, and the step
    data that it announces is deleted.

    :meth:`start` opens the link and starts a thread. The training is over when
    ``system_shutdown_flag`` is set; :meth:`wait` waits for that. :meth:`close` ends all tasks in
    order. The methods are thread-safe.

    With ``state_path`` the coordinator saves its state every ``state_every_s`` seconds. A new
    process with the same ``state_path`` continues from there, and adopts the tasks that workers
    still run. The file is removed when the training is over.

    Args:
        cfg: ``main`` (``exp_name``, ``env`` and ``policy``) and ``system``, where ``coordinator``
            has what differs from ``default_config()``.
        link: the link to the workers; the coordinator closes it. None: :meth:`start` opens the one
            that ``system.coordinator.type`` names.
        store: the store of the step data; needed with ``link``.
        clock: returns the time in seconds.

    Raises:
        ConfigError: for an unusable config, also of the commander, the replay buffer, the learner,
            and of a policy or collector that ``main`` names.
    """

    config: ClassVar[dict[str, Any]] = {
        "type": Option("router", text, "name of the link: `router` or `flask_fs`"),
        "collector_task_timeout": Option(
            30.0, positive, "seconds that a collector task waits for a worker, or takes to end"
        ),
        "learner_task_timeout": Option(
            600.0, positive, "seconds that a learner task waits for a worker, or takes to end"
        ),
        "task_silence_s": Option(
            30.0, positive, "seconds without a message of its worker after which a task is lost"
        ),
        "max_attempts": Option(3, count, "how often a task is started at most"),
        "state_path": Option(
            None, optional(text), "file for the coordinator's state; None saves none"
        ),
        "state_every_s": Option(30.0, positive, "seconds between two saves of the state"),
        "host": Option("127.0.0.1", text, "address to listen on (HTTP)"),
        "port": Option(7235, _port, "port to listen on (HTTP)"),
        "key_file": Option("", text, "file with the run's secret key (HTTP); empty: none"),
        "run_id": Option("run", text, "name of the run, also of its folder of step data (HTTP)"),
        "channel": Option(0, whole, "the workers' channel (HTTP)"),
        "my_address": Option(
            None, optional(text), "address at which workers reach this host (HTTP); None: host"
        ),
        "collector": Option({}, mapping, "`{name: [id, host, port]}` of the collectors (HTTP)"),
        "learner": Option({}, mapping, "`{name: [id, host, port]}` of the learners (HTTP)"),
        "operator_server": Option({}, mapping, "not supported; use `ditask --platform k8s`"),
    }

    def __init__(
        self,
        cfg: Mapping[str, Any],
        *,
        link: Link | None = None,
        store: Store | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._cfg, self._system = self._checked(cfg)
        if (link is None) != (store is None):
            raise ConfigError("pass link and store together, or neither of them")
        if not callable(clock):
            raise ConfigError(f"clock must be a function that returns seconds, got {clock!r:.100}")
        self._link, self._store, self._clock = link, store, clock
        self._conversations: Conversations | None = None
        self._main = self._system["main"]
        self._exp_name = str(self._main["exp_name"])
        self._logger = TextLog.of_worker(__name__, self._exp_name, "coordinator")
        self._commander = create_parallel_commander(self._main, clock=clock)
        self._core = CoordinatorCore(
            task_timeout_s={
                COLLECTOR: float(self._cfg.collector_task_timeout),
                LEARNER: float(self._cfg.learner_task_timeout),
            },
            task_silence_s=float(self._cfg.task_silence_s),
            max_attempts=int(self._cfg.max_attempts),
        )
        self._lock = threading.RLock()
        self._buffers = ReferenceBuffers(self._exp_name, clock=clock, delete=self._delete)
        self._seen_data: dict[str, dict[str, None]] = {}
        self._counters: Counter[str] = Counter()
        self._n_extra = 0
        self._flag = False
        self._keeps_data = False
        self._has_unsaved_offer = False
        self._state = "new"
        self._saved_at = clock()
        self._actions: deque[Action] = deque()
        self._outbox: deque[Send] = deque()
        self._thread: threading.Thread | None = None
        self._stopping = threading.Event()
        self._ended = threading.Event()
        self._error: BaseException | None = None

    @property
    def state(self) -> str:
        """``new``, ``starting``, ``running``, ``draining`` or ``closed``."""
        return self._state

    @property
    def system_shutdown_flag(self) -> bool:
        """Whether the commander has ended the training; once True, it stays True."""
        return self._flag

    @property
    def commander(self) -> BaseParallelCommander:
        """The commander, which ``main.policy.other.commander`` names."""
        return self._commander

    @property
    def counters(self) -> dict[str, int]:
        """Counts of tasks by their ends, lost attempts, late data, refused pushes and more."""
        with self._lock:
            return dict(self._core.counters + self._counters)

    @property
    def tasks(self) -> dict[str, str]:
        """The state of each task that has not ended, by the id that its worker knows."""
        with self._lock:
            return {task_id: str(task.state) for task_id, task in self._core.tasks.items()}

    @property
    def workers(self) -> dict[str, str]:
        """The state of each connected worker, by its uid."""
        with self._lock:
            return {uid: str(worker.state) for uid, worker in self._core.workers.items()}

    def start(self, *, in_thread: bool = True) -> None:
        """Open the link, restore a saved state, and start to work.

        Args:
            in_thread: whether a thread does the work; otherwise call :meth:`run_once` in a loop.

        Raises:
            CoordinatorError: if the coordinator was started or closed before.
            RegistryError: if no link is registered under the ``type``.
        """
        with self._lock:
            if self._state != "new":
                raise CoordinatorError(
                    f"the coordinator cannot be started: it is {self._state}; create another one"
                )
            self._state = "starting"
            try:
                if self._link is None:
                    self._link, self._store = create_coordinator_link(self._system)
                self._conversations = Conversations(self._link, clock=self._clock)
                if self._cfg.state_path is not None and Path(self._cfg.state_path).exists():
                    self.load_state_dict(load_checkpoint(self._cfg.state_path))
            except BaseException:
                self._state = "closed"
                self._close_all()
                raise
            self._saved_at = self._clock()
            self._state = "draining" if self._flag else "running"
        self.info(f"the coordinator is {self._state}")
        if in_thread:
            self._thread = threading.Thread(target=self._loop, name="coordinator", daemon=True)
            self._thread.start()

    def run_once(self, timeout_s: float = 0.0) -> None:
        """Take the answers that have arrived, look at deadlines, hand out tasks, and ask.

        Args:
            timeout_s: how long to wait for a first answer, in seconds.
        """
        conversations = self._open_conversations()
        told = conversations.receive(timeout_s)
        with self._lock:
            self._handle(told)
            self._perform(self._core.tick(self._clock()))
            self._ask_commander()
            self._answer_demands()
            self._save_when_due()
            if self._core.is_draining and not self._core.tasks:
                self._ended.set()
        self._ask(conversations)

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until the training is over and all tasks have ended.

        Args:
            timeout_s: the most seconds to wait; None means no limit.

        Returns:
            Whether it is over.

        Raises:
            CoordinatorError: if the coordinator's thread has failed.
        """
        is_over = self._ended.wait(timeout_s)
        self._raise_error()
        return is_over

    def close(self, deadline_s: float = 60.0) -> None:
        """Ask the workers to end their tasks, wait for them, and close the link.

        With a ``state_path``, and if the training is not over, the state is saved first and the
        step data stays, so that another process can continue. Otherwise all step data is deleted.
        May be called twice.

        Args:
            deadline_s: the most seconds to wait for the workers.

        Raises:
            CoordinatorError: if the coordinator's thread has failed.
        """
        deadline = self._clock() + deadline_s
        self._stopping.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(max(deadline_s, 1.0))
        with self._lock:
            was, self._state = self._state, "closed" if self._state == "new" else self._state
            if was in ("running", "draining") and self._error is None:
                if self._cfg.state_path is not None and not self._flag:
                    self.save_state()
                    self._keeps_data = True
                self._drain()
        while self._state == "draining" and self._core.tasks and self._clock() < deadline:
            self.run_once(_RECEIVE_S)
        if self._state == "draining" and self._conversations is not None:
            self._ask(self._conversations)
        with self._lock:
            if self._state == "draining" and self._core.tasks:
                self.error(f"these tasks have not ended in time: {', '.join(self._core.tasks)}")
            if was != "closed":
                self._state = "closed"
                self._close_all()
        self._ended.set()
        self._raise_error()

    def __enter__(self) -> Self:
        if self._state == "new":
            self.start()
        return self

    def __repr__(self) -> str:
        return f"Coordinator({self._exp_name!r}, {self._state})"

    def info(self, s: str) -> None:
        """Write a line to the text log."""
        self._logger.info("%s", s)

    def error(self, s: str) -> None:
        """Write an error to the text log."""
        self._logger.error("%s", s)

    # The callbacks.

    def deal_with_collector_send_data(
        self, task_id: str, buffer_id: str, data_id: str, data: Mapping[str, Any]
    ) -> None:
        """Push the metadata of step data into a buffer.

        Data of an unknown task, or for an unknown buffer, is logged and deleted from the store: it
        is a late message of a lost task. Data that was pushed before is ignored.

        Args:
            task_id: the collector task.
            buffer_id: the buffer.
            data_id: the id of the step data.
            data: its metadata; ``object_ref`` is the reference in the store, if it differs from the
                id.
        """
        with self._lock:
            seen = self._seen_data.setdefault(task_id, {}) if task_id in self._core.tasks else None
            if seen is None or buffer_id not in self._buffers:
                self._counters["late_data"] += 1
                self.info(f"deleted {data_id}, which came too late for {task_id} and {buffer_id}")
                self._delete([reference(data, data_id)])
                return
            if data_id in seen:
                self._counters["duplicates"] += 1
                self._buffers.discard(buffer_id, data_id, data)
                return
            seen[data_id] = None
            if len(seen) > _MOST_DATA_IDS:
                del seen[next(iter(seen))]
            if not self._buffers.push(buffer_id, data_id, data):
                self._counters["refused_pushes"] += 1
            self._answer_demands()

    def deal_with_collector_judge_finish(self, task_id: str, info: Mapping[str, Any]) -> bool:
        """Return whether the commander regards a collector task as done; it then ends in order."""
        return self._judge(task_id, info, self._commander.judge_collector_finish)

    def deal_with_collector_finish_task(
        self, task_id: str, finished_task: Mapping[str, Any]
    ) -> None:
        """Pass the result of a collector task to the commander, which may end the training."""
        self._conclude(task_id, finished_task)

    def deal_with_learner_get_data(
        self, task_id: str, buffer_id: str, batch_size: int, cur_learner_iter: int
    ) -> list[Any] | None:
        """Draw a batch for a learner; the batch before is no longer needed.

        If there is too little data, the request is parked: the learner gets the batch as soon as
        the buffer can give one.

        Args:
            task_id: the learner task.
            buffer_id: the buffer.
            batch_size: number of samples.
            cur_learner_iter: the learner's iteration.

        Returns:
            The metadata of each sample, or None.

        Raises:
            CoordinatorError: for an unknown task or buffer; the known ones are listed.
        """
        with self._lock:
            _check_known("learner task", task_id, self._of_kind(LEARNER))
            _check_known("buffer", buffer_id, self._buffers)
            actions = self._core.demand(task_id, batch_size, cur_learner_iter, self._clock())
            self._perform([one for one in actions if not isinstance(one, Demanded)])
            return self._draw(task_id, is_sent=False)

    def deal_with_learner_send_info(
        self, task_id: str, buffer_id: str, info: Mapping[str, Any]
    ) -> None:
        """Update priorities, and pass a learner's progress to the commander."""
        with self._lock:
            task = self._core.tasks.get(task_id)
            if task is None:
                self.info(f"ignored a report about {task_id}, which has ended")
                return
            if buffer_id in self._buffers and info.get("priority_info"):
                self._buffers.update(buffer_id, info["priority_info"])
            self._commander.update_learner_info(task.origin, info)

    def deal_with_learner_judge_finish(self, task_id: str, info: Mapping[str, Any]) -> bool:
        """Return whether the commander regards a learner task as done; it then ends in order."""
        return self._judge(task_id, info, self._commander.judge_learner_finish)

    def deal_with_learner_finish_task(self, task_id: str, finished_task: Mapping[str, Any]) -> None:
        """Pass the result of a learner task to the commander, and close the buffer it names.

        The collector tasks of the buffer end, too.
        """
        self._conclude(task_id, finished_task)

    def deal_with_increase_collector(self) -> None:
        """Let the commander give one more collector task at a time."""
        with self._lock:
            self._commander.increase_collector_task_space()

    def deal_with_decrease_collector(self) -> None:
        """Let the commander give one collector task fewer at a time."""
        with self._lock:
            self._commander.decrease_collector_task_space()

    # The state.

    def state_dict(self) -> dict[str, Any]:
        """Return everything another process needs to continue: tasks, buffers, commander, counters.

        Step data stays in the store; the buffers have references to it.
        """
        with self._lock:
            return {
                "version": _VERSION,
                "core": self._core.state_dict(),
                "commander": self._commander.state_dict(),
                "buffers": self._buffers.state_dict(),
                "counters": dict(self._counters),
                "n_extra": self._n_extra,
                "system_shutdown_flag": self._flag,
            }

    @also_named(state_dict="state")
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from what :meth:`state_dict` returned; references without data are removed.

        Args:
            state: the state; as a keyword also ``state_dict``.

        Raises:
            CoordinatorError: if the coordinator is running, or the state is of another version.
        """
        with self._lock:
            if self._state not in ("new", "starting"):
                raise CoordinatorError(
                    f"a state can only be loaded before start; the coordinator is {self._state}"
                )
            if state.get("version") != _VERSION:
                raise CoordinatorError(
                    f"the state has version {state.get('version')!r}, but this version reads "
                    f"{_VERSION}; remove the file and start again"
                )
            self._core.load_state_dict(state["core"], self._clock())
            self._commander.load_state_dict(state["commander"])
            self._counters = Counter(state["counters"])
            self._n_extra = state["n_extra"]
            self._flag = state["system_shutdown_flag"]
            self._buffers.load_state_dict(state["buffers"])
            if self._store is not None:
                self._counters["lost_data"] += self._buffers.remove_missing(self._store)

    def save_state(self) -> None:
        """Write the state to ``state_path``, atomically.

        Raises:
            ConfigError: without a ``state_path``.
            CheckpointWriteError: if the file cannot be written.
        """
        if self._cfg.state_path is None:
            raise ConfigError(
                "the coordinator has no state_path; set system.coordinator.state_path"
            )
        with self._lock:
            save_checkpoint(self._cfg.state_path, self.state_dict())
            self._saved_at = self._clock()
            self._has_unsaved_offer = False

    # The config.

    @classmethod
    def _checked(cls, cfg: Mapping[str, Any]) -> tuple[EasyDict, dict[str, Any]]:
        """Return the coordinator's own config, and the whole one with that merged in."""
        for part in ("main", "system"):
            if not isinstance(cfg, Mapping) or not isinstance(cfg.get(part), Mapping):
                raise ConfigError(
                    "a coordinator takes a config with main (exp_name, env, policy) and system "
                    f"(coordinator); {part} is missing in {cfg!r:.100}"
                )
        own = cls.merged_config(cfg["system"].get("coordinator", {}))
        main = {"exp_name": "default_experiment", **_plain(cfg["main"])}
        buffer_cfg = main.get("policy", {}).get("other", {}).get("replay_buffer", {})
        get_buffer_cls(buffer_cfg).merged_config(buffer_cfg)
        check_parts(main)
        if own.state_path is not None:
            try:
                check_saveable(main)
            except TypeError as error:
                raise ConfigError(
                    f"with state_path, the main config must have plain values only: {error}"
                ) from error
        system = {**_plain(cfg["system"]), "coordinator": _plain(own)}
        return own, {"main": main, "system": system}

    @classmethod
    def check_config(cls, cfg: EasyDict) -> None:
        """Refuse an operator server."""
        super().check_config(cfg)
        if cfg.operator_server:
            raise ConfigError(
                "operator_server is not supported; start the run with ditask --platform k8s, and "
                "leave operator_server empty"
            )

    # The thread.

    def _loop(self) -> None:
        try:
            while not self._stopping.is_set():
                self.run_once(_RECEIVE_S)
        except Exception as error:  # raised again by wait and close
            logging.getLogger(__name__).exception("the coordinator has failed")
            self.error(f"the coordinator has failed: {type(error).__name__}: {error}")
            self._error = error
            self._ended.set()

    def _raise_error(self) -> None:
        if self._error is not None:
            raise CoordinatorError(f"the coordinator has failed: {self._error}") from self._error

    def _open_conversations(self) -> Conversations:
        if self._conversations is None or self._state not in ("running", "draining"):
            raise CoordinatorError(f"the coordinator is {self._state}; call start() first")
        return self._conversations

    def _handle(self, told: Iterable[tuple[str, Message]]) -> None:
        for peer, message in told:
            self._perform(self._core.handle(peer, message, self._clock()))

    def _ask(self, conversations: Conversations) -> None:
        """Ask the workers, without holding the lock while the link waits."""
        is_settled = False
        while not is_settled:
            with self._lock:
                if self._has_unsaved_offer and self._cfg.state_path is not None:
                    # A process that continues must know the attempt, or it would offer it again.
                    self.save_state()
                while self._outbox:
                    send = self._outbox.popleft()
                    conversations.say(send.peer, send.message)
            told = conversations.ask()
            with self._lock:
                self._handle(told)
                is_settled = not self._outbox

    # What the commander decides.

    def _ask_commander(self) -> None:
        if self._state != "running":
            return
        now = self._clock()
        learner_task = self._commander.get_learner_task()
        if learner_task is not None:
            self._perform(self._core.submit(LEARNER, learner_task, now))
        collector_task = self._commander.get_collector_task()
        if collector_task is not None:
            self._perform(self._core.submit(COLLECTOR, collector_task, now))

    def _judge(
        self,
        task_id: str,
        info: Mapping[str, Any],
        is_done: Callable[[str, Mapping[str, Any]], bool],
    ) -> bool:
        with self._lock:
            task = self._core.tasks.get(task_id)
            if task is None:
                self.info(f"ignored a report about {task_id}, which has ended")
                return False
            if not is_done(task.origin, info):
                return False
            self._perform(self._core.finish(task_id, self._clock()))
        return True

    def _conclude(self, task_id: str, result: Mapping[str, Any]) -> None:
        with self._lock:
            if task_id not in self._core.tasks:
                self.info(f"ignored the result of {task_id}, which has ended")
            self._perform(self._core.conclude(task_id, result, self._clock()))

    def _end_training(self) -> None:
        if not self._flag:
            self._flag = True
            self.info("the commander has ended the training")
        self._drain()

    def _drain(self) -> None:
        if self._state == "running":
            self._state = "draining"
        if not self._core.is_draining:
            self._perform(self._core.drain(self._clock()))

    # What the core decides.

    def _perform(self, actions: Iterable[Action]) -> None:
        """Carry out what the core has decided, in order.

        An action can make the core decide further ones, which wait for those before them: the close
        of a task must not overtake its offer.
        """
        is_performing = bool(self._actions)
        self._actions.extend(actions)
        try:
            while self._actions and not is_performing:
                action = self._actions[0]  # there until it is done, so that others wait
                self._performers[type(action)](self, action)
                self._actions.popleft()
        except BaseException:
            self._actions.clear()
            raise

    def _send(self, action: Send) -> None:
        self._has_unsaved_offer |= isinstance(action.message, TaskOffer)
        self._outbox.append(action)

    def _note(self, action: Note) -> None:
        (self.error if action.is_error else self.info)(action.text)

    def _open_buffer(self, action: OpenBuffer) -> None:
        if action.buffer_id not in self._buffers:
            self.info(f"opened the buffer {action.buffer_id}")
            cfg = action.task.task_info.get("replay_buffer_cfg", {})
            self._buffers.open(action.buffer_id, cfg)

    def _close_buffer(self, action: CloseBuffer) -> None:
        if action.buffer_id in self._buffers:
            self.info(f"closed the buffer {action.buffer_id}")
            self._buffers.close(action.buffer_id)

    def _collected(self, action: Collected) -> None:
        message = action.message
        with self._tolerating("step data"):
            self.deal_with_collector_send_data(
                message.task_id, message.buffer_id, message.data_id, message.data
            )

    def _discard(self, action: Discard) -> None:
        message = action.message
        self._counters["late_data"] += 1
        self.info(f"{message.data_id} came too late or twice for {message.task_id}")
        self._buffers.discard(message.buffer_id, message.data_id, message.data)

    def _collector_reported(self, action: CollectorReported) -> None:
        self.deal_with_collector_judge_finish(action.task_id, action.info)

    def _learner_reported(self, action: LearnerReported) -> None:
        message = action.message
        with self._tolerating("a learner's report"):
            self.deal_with_learner_send_info(message.task_id, message.buffer_id, message.info)
        self.deal_with_learner_judge_finish(message.task_id, message.info)

    def _demanded(self, action: Demanded) -> None:
        self._draw(action.task_id, is_sent=True)

    def _release(self, action: Release) -> None:
        if action.buffer_id in self._buffers:
            self._buffers.release(action.buffer_id, action.data_ids)

    def _remove(self, action: Remove) -> None:
        if action.buffer_id in self._buffers:
            self._counters["lost_data"] += self._buffers.remove(action.buffer_id, action.data_ids)

    def _task_ended(self, action: Ended) -> None:
        task = action.task
        self._seen_data.pop(task.task_id, None)
        if task.state is not TaskState.FINISHED:
            if task.kind == COLLECTOR:
                self._commander.notify_fail_collector_task(task.task_info)
            else:
                self._commander.notify_fail_learner_task(task.task_info)
            return
        result = {**(action.result or {}), "task_id": task.origin}
        self.info(f"{task.kind} task {task.task_id} has finished")
        if task.kind == COLLECTOR:
            if self._commander.finish_collector_task(task.origin, result):
                self._end_training()
        else:
            result.setdefault("buffer_id", task.buffer_id)
            buffer_id = self._commander.finish_learner_task(task.origin, result)
            if buffer_id is not None:
                self._perform(self._core.close_buffer(buffer_id, self._clock()))

    def _workers_changed(self, action: WorkersChanged) -> None:
        """Adapt the commander to collectors beyond those that the config provides for."""
        n_extra = max(0, action.n_collectors - self._n_provided())
        while self._n_extra < n_extra:
            self._n_extra += 1
            self.deal_with_increase_collector()
        while self._n_extra > n_extra:
            self._n_extra -= 1
            self.deal_with_decrease_collector()

    _performers: ClassVar[dict[type, Callable[[Any, Any], None]]] = {
        Send: _send,
        Note: _note,
        OpenBuffer: _open_buffer,
        CloseBuffer: _close_buffer,
        Collected: _collected,
        Discard: _discard,
        CollectorReported: _collector_reported,
        LearnerReported: _learner_reported,
        Demanded: _demanded,
        Release: _release,
        Remove: _remove,
        Ended: _task_ended,
        WorkersChanged: _workers_changed,
    }

    # Demands and references.

    def _draw(self, task_id: str, *, is_sent: bool) -> list[Any] | None:
        """Answer a learner's demand, if its buffer can give a batch."""
        task = self._core.tasks[task_id]
        demand, buffer_id = task.demand, task.buffer_id
        if demand is None or buffer_id is None or buffer_id not in self._buffers:
            return None
        drawn: list[Any] | None = None
        with self._tolerating("a demand for data"):
            drawn = self._buffers.sample(buffer_id, demand.batch_size, demand.cur_learner_iter)
        if drawn is None:
            return None
        data_ids = [data["data_id"] for data in drawn]
        self._perform(
            self._core.answer(
                task_id, demand.seq, drawn, data_ids, buffer_id=buffer_id, is_sent=is_sent
            )
        )
        return drawn

    def _answer_demands(self) -> None:
        """Try the parked demands again: there is new data, or the rate control has changed."""
        for task_id in self._core.parked_demands():
            self._draw(task_id, is_sent=True)

    def _delete(self, refs: list[str]) -> None:
        if refs and self._store is not None and not self._keeps_data:
            with self._tolerating("a reference to delete"):
                self._store.delete(refs)

    @contextmanager
    def _tolerating(self, subject: str) -> Iterator[None]:
        """Log and count what is wrong with a worker's message, instead of raising it."""
        try:
            yield
        except (ValueError, TypeError, LookupError, OSError) as error:
            self._counters["bad_messages"] += 1
            self.error(f"{subject} cannot be used: {type(error).__name__}: {error}")

    # Helpers.

    def _of_kind(self, kind: str) -> dict[str, Task]:
        return {task_id: task for task_id, task in self._core.tasks.items() if task.kind == kind}

    def _n_provided(self) -> int:
        """Return the number of collectors that the config names, or has task spaces for."""
        other = self._main["policy"].get("other", {}).get("commander", {})
        default = type(self._commander).default_config().collector_task_space
        return max(len(self._cfg.collector), int(other.get("collector_task_space", default)))

    def _save_when_due(self) -> None:
        is_due = self._clock() - self._saved_at >= float(self._cfg.state_every_s)
        if self._cfg.state_path is not None and is_due and not self._keeps_data:
            self.save_state()

    def _close_all(self) -> None:
        """Close buffers, store, commander and link."""
        if self._cfg.state_path is not None and not self._flag:
            self._keeps_data = True  # for the process that continues
        for buffer_id in list(self._buffers):
            self._buffers.close(buffer_id)
        if self._store is not None and not self._keeps_data:
            self._store.clear()
        if self._flag and self._cfg.state_path is not None:
            Path(self._cfg.state_path).unlink(missing_ok=True)
        self._commander.close()
        if self._link is not None:
            self._link.close(_LINK_CLOSE_S)


def _check_known(what: str, name: str, known: Iterable[str]) -> None:
    names = sorted(known)
    if name not in names:
        raise CoordinatorError(
            f"the coordinator has no {what} {name!r}; it has: {', '.join(names) or 'none'}"
        )


def _plain(value: Any) -> Any:
    """Return a deep copy of the dictionaries and lists of a config, without EasyDict."""
    if isinstance(value, Mapping):
        return {key: _plain(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(entry) for entry in value]
    return value
