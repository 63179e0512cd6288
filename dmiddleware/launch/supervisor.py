"""Start, watch, restart and stop the processes of a run."""

from __future__ import annotations

import contextlib
import math
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec

from dmiddleware.launch.child import Child, Failure
from dmiddleware.launch.display import Display
from dmiddleware.launch.hosts.interface import Ended, Host, Note, Output, Reported, Started
from dmiddleware.launch.options import FailurePolicy
from dmiddleware.launch.other_nodes import OtherNodes, few_nodes
from dmiddleware.launch.output import LogFile
from dmiddleware.launch.pauses import Pauses
from dmiddleware.launch.plan import NodeConfig
from dmiddleware.launch.roles import leads
from dmiddleware.launch.status import NodeStatus
from dmiddleware.process.open_files import explained
from dmiddleware.process.signals import ENDING_SIGNALS, SignalHandler, signal_reason

__all__ = ["Supervisor", "SupervisorOptions"]

KILL_AFTER_S: Final = 20.0
RESTART_WINDOW_S: Final = 3600.0
SETTLE_S: Final = 5.0
"""Seconds within which each node must learn from its peers that the run is over."""
DUMP_S: Final = 1.0
FIRST_BACKOFF_S: Final = 0.5
LONGEST_BACKOFF_S: Final = 30.0
_STEP_S: Final = 0.2
_CHECK_S: Final = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class SupervisorOptions:
    """How nodes are started, and what happens when one fails.

    Attributes:
        on_failure: ``abort``: stop the run; ``continue``: continue without the node; ``restart``:
            restart the node.
        max_restarts: how often each node may be restarted within ``restart_window_s``.
        restart_window_s: seconds after which a restart no longer counts.
        startup_interval_s: pause between two starts.
        kill_after_s: how long nodes may take to finish after they were asked to stop, or after the
            run has ended.
        hang_timeout_s: a node that makes no progress for so long, while it does not wait for its
            peers, has failed; None: never.
        log_dir: folder for one log per node; None: no logs.
    """

    on_failure: FailurePolicy = "abort"
    max_restarts: int = 3
    restart_window_s: float = RESTART_WINDOW_S
    startup_interval_s: float = 0.0
    kill_after_s: float = KILL_AFTER_S
    hang_timeout_s: float | None = None
    log_dir: Path | None = None


class Supervisor:
    """Starts the nodes of a run on a host and watches them until all have ended.

    Args:
        configs: the configuration of each node.
        host: where the nodes run; its ``with`` block has been entered.
        options: how nodes are started, and what happens when one fails.
        display: shows the progress.
        now: a monotonic clock, in seconds.

    Attributes:
        children: the nodes.
        conclusion: why the run has failed or was stopped, the first cause last; empty after a
            success.
        display_error: the first error of the display; None: it raised none.
    """

    def __init__(
        self,
        configs: Sequence[NodeConfig],
        *,
        host: Host,
        options: SupervisorOptions,
        display: Display,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        folder = options.log_dir
        # The working directory may be removed while the run lasts.
        self._log_folder = None if folder is None else folder.absolute()
        self.children = [
            Child(config, None if folder is None else LogFile(folder / _log_name(config)))
            for config in configs
        ]
        self._options = options
        self._display = display
        self._host = host
        self._by_id = {child.plan.node_id: child for child in self.children}
        self._now = now
        # Nodes are not to blame for a pause of this process.
        self._pauses = Pauses(now)
        self._stopping_since: float | None = None
        self._checked_at = 0.0
        self._killed = False
        self._signal = 0
        self._signalled_at = 0.0
        self._asked_again = False
        self._over_since: float | None = None
        self._is_waiting_noted = False
        self._ended_since: float | None = None
        self._stopped_by_failure = False
        self._failed: list[Child] = []
        self._too_late: list[Child] = []
        self._others = OtherNodes(
            own=self._by_id,
            attached=any(config.run.attached for config in configs),
            decides=any(config.plan.decides for config in configs),
        )
        self.conclusion: list[str] = []
        self.display_error: Exception | None = None
        self._notes = None if folder is None else LogFile(folder / "ditask.log")

    def run(self) -> int:
        """Start all nodes, wait until they have ended, and return the exit code.

        Returns:
            0 if the run succeeded; 128 plus the number of the signal that stopped it, such as 130
            for Ctrl-C and 143 for SIGTERM; otherwise 1.
        """
        with self._signals():
            try:
                self._start_all()
                while self._is_running():
                    self._step()
            except Exception as error:
                self._host.leave(f"the launcher failed: {error!r}", self._options.kill_after_s)
                raise
        self._show(lambda: self._display.update(self.children))
        code = self._exit_code()
        self.conclusion = list(self._conclude(code))
        for line in self.conclusion:
            self._log(line)
        for log in self._logs():
            log.close()
        return code

    def _is_running(self) -> bool:
        return any(child.alive or child.restart_at is not None for child in self.children)

    def _start_all(self) -> None:
        for position, child in enumerate(self.children):
            if position and self._options.startup_interval_s:
                self._watch_for(self._options.startup_interval_s)
            if self._stopping_since is None and not self._signal:
                self._start(child)

    def _start(self, child: Child) -> None:
        child.started_at = self._now()
        child.expect_start()
        log = "" if self._log_folder is None else str(self._log_folder / _log_name(child.config))
        try:
            self._host.start(
                msgspec.structs.replace(child.config, log=log), n_restarts=child.restarts
            )
        except OSError as error:
            child.exit_code = 1
            error_text = f"cannot start its process: {explained(error)}"
            child.status = NodeStatus(phase="failed", error=error_text)
            self._on_failure(child)
            return
        child.heard_at = self._now()

    def _watch_for(self, duration_s: float) -> None:
        until = self._now() + duration_s
        while (remaining_s := until - self._now()) > 0 and self._stopping_since is None:
            self._step(min(remaining_s, _STEP_S))

    def _step(self, timeout_s: float = _STEP_S) -> None:
        self._take_events(timeout_s)
        self._pauses.tick()
        self._obey()
        # Each node is looked at here, and there can be hundreds that report often.
        if self._now() - self._checked_at >= _CHECK_S:
            self._check()
            self._checked_at = self._now()

    def _check(self) -> None:
        for child in self.children:
            if child.restart_at is None or self._now() < child.restart_at:
                continue
            # A process group cannot be rejoined: its ranks start again when all of them have ended.
            group = (child, *self._other_ranks(child))
            if not any(member.alive and member.restart_at is not None for member in group):
                self._start(child)
        self._fail_early_ends()
        self._end_with_the_run()
        self._enforce_deadline()
        self._end_hung_nodes()
        self._note_others()
        self._show(lambda: self._display.update(self.children))

    def _take_events(self, timeout_s: float) -> None:
        """Act on what has happened on the host."""
        for event in self._host.events(timeout_s):
            if isinstance(event, Note):
                self._note(event.text)
                continue
            child = self._by_id[event.node_id]
            match event:
                case Output(data=data, lines=lines):
                    if child.log is not None:
                        child.log.write(data)
                    for line in lines:
                        self._show_line(child, line)
                case Reported(status=status):
                    child.take_status(status, self._now())
                case Started(where=where):
                    child.note_start(where)
                case Ended(code=code, why=why):
                    child.why = why
                    self._take_end(child, code)

    def _show_line(self, child: Child, line: str) -> None:
        child.remember(line)
        self._show(lambda: self._display.line(child, line))

    def _note(self, text: str) -> None:
        self._log(text)
        self._show(lambda: self._display.note(text))

    def _log(self, text: str) -> None:
        if self._notes is not None:
            self._notes.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {text}\n".encode())

    def _show(self, show: Callable[[], None]) -> None:
        """Show something; a display that fails must not end the run."""
        try:
            show()
        except Exception as error:  # noqa: BLE001 (the launcher reports it at the end)
            self.display_error = self.display_error or error

    def _take_end(self, child: Child, code: int) -> None:
        """Act on the end of a process."""
        child.exit_code, child.ended_at = code, self._now()
        if child.exit_code == 0 and not self._may_end(child):
            child.exit_code = 1
            child.status.error = (
                "its process ended with exit code 0 before its program had finished, as by "
                "os._exit(0)"
            )
        if child.restart_at is not None:
            self._note(f"{child.name} has ended, to be restarted with the other learners")
        elif self._signal and child.ended_by == self._signal:
            pass  # a batch system has sent it to all processes of the run
        elif child.exit_code != 0 and child not in self._too_late:
            self._on_failure(child)

    def _fail_early_ends(self) -> None:
        """Fail the nodes that exited before their task, unless all do, as after --help."""
        if self._stopping_since is not None:
            return
        are_expected = any(
            sibling.alive and sibling.status.phase == "running" for sibling in self.children
        )
        for child in self.children:
            has_left = child.exit_code == 0 and child.status.left_early
            if has_left and are_expected and self._pauses.elapsed(child.ended_at) > SETTLE_S:
                child.exit_code, child.status.phase = 1, "failed"
                child.status.error = "it called sys.exit(0) before it built a task"
                self._on_failure(child)

    def _may_end(self, child: Child) -> bool:
        """Return whether a node that has ended without an error had nothing left to do."""
        is_asked = self._stopping_since is not None or child.asked_at is not None
        return is_asked or child.status.phase == "finished" or child.status.run_is_over

    def _on_failure(self, child: Child) -> None:
        failure = child.describe_failure()
        child.failure = Failure(self._failed_at(child), failure, child.ended_by)
        log = f"; log: {child.log_path}" if child.log_path is not None else ""
        if self._stopping_since is not None:
            self._note(failure + log)
            self._failed.append(child)
            return
        # A node that finished its program and reports a failed run would only fail again.
        has_crashed = child.status.phase != "finished"
        is_final = _repeats_at_each_start(child)
        policy = self._options.on_failure
        if policy == "restart" and has_crashed and child.plan.n_peers and self._is_over():
            self._note(failure + log)
            self._give_up(child)
        elif policy == "restart" and has_crashed and not is_final and self._may_restart(child):
            self._plan_restart(child, failure + log)
        elif policy == "continue" and not self._was_last_learner(child):
            self._failed.append(child)
            self._note(f"{failure}; the run continues without it (--on-failure continue){log}")
        else:
            self._failed.append(child)
            self._stopped_by_failure = True
            first = self._first_failure().text
            if first != failure:
                self._note(failure + log)
            self.stop(first)
            if has_crashed:
                self._note(self._why_not_restarted(child))

    def _why_not_restarted(self, child: Child) -> str:
        if _repeats_at_each_start(child):
            return "the program did not start, and would fail in the same way if it were restarted"
        if self._options.on_failure == "continue":
            return "no learner is left, without which the run cannot continue"
        if self._options.on_failure == "abort":
            return (
                "--on-failure abort (the default) ends the run; use continue or restart to keep it "
                "going"
            )
        return (
            f"--max-restarts {self._options.max_restarts} in --restart-window "
            f"{self._options.restart_window_s:g} allows no other restart"
        )

    def _was_last_learner(self, child: Child) -> bool:
        others = [
            sibling for sibling in self.children if sibling is not child and sibling.plan.learns
        ]
        return child.plan.learns and not any(sibling.alive for sibling in others)

    def _failed_at(self, child: Child) -> float:
        """Return when a node failed; for one that could not report it, the earliest time."""
        if child.status.failed_at:
            return child.status.failed_at
        if child.is_killed:
            return self._now() - child.hung_s
        # It may have been dead since its last status, and peers may have failed because of that.
        return child.status.sent_at or child.started_at

    def _may_restart(self, child: Child) -> bool:
        since = self._now() - self._options.restart_window_s
        child.restarted_at = [at for at in child.restarted_at if at > since]
        return len(child.restarted_at) < self._options.max_restarts

    def _plan_restart(self, child: Child, failure: str) -> None:
        pause_s = min(FIRST_BACKOFF_S * 2 ** len(child.restarted_at), LONGEST_BACKOFF_S)
        ranks = self._other_ranks(child)
        for restarted in (child, *ranks):
            restarted.restarts += 1
            restarted.restart_at = self._now() + pause_s
            restarted.restarted_at.append(restarted.restart_at)
        subject = "all learners" if ranks else "it"
        self._note(
            f"{failure}; restarting {subject} in {pause_s:g} s "
            f"(restart {len(child.restarted_at)} of {self._options.max_restarts})"
        )
        for rank in ranks:
            self._kill(rank)

    def _other_ranks(self, child: Child) -> list[Child]:
        """Return the nodes that learn as one with a node."""
        if child.plan.ranks is None:
            return []
        return [
            sibling
            for sibling in self.children
            if sibling is not child and sibling.plan.ranks is not None
        ]

    def _first_failure(self) -> Failure:
        """Return the failure that happened first; others may be consequences of it.

        A node that has failed can take long to end, so that others end before it.
        """
        failures = [child.failure for child in self._relevant() if child.failure is not None]
        failures += [
            Failure(child.status.failed_at, child.describe_failure())
            for child in self._relevant()
            if child.alive and child.status.failed_at
        ]
        return min(failures, key=lambda failure: failure.at)

    def _relevant(self) -> list[Child]:
        """Return the nodes whose failure is a failure of the run."""
        children = [child for child in self.children if child not in self._too_late]
        if self._options.on_failure == "continue":
            # The run succeeds if its learner does.
            return [child for child in children if child.plan.learns] or children
        return children

    def _is_over(self) -> bool:
        """Return whether a node that starts now would find nothing left to do.

        That is the case once the learner has finished, or a node has ended together with the run.
        """
        learners = [child for child in self.children if leads(child.plan.roles)]
        has_learned = bool(learners) and all(child.exit_code == 0 for child in learners)
        return has_learned or any(child.ended_with_run for child in self.children)

    def _end_with_the_run(self) -> None:
        """When the run is over, stop the nodes that cannot know it."""
        if self._stopping_since is not None:
            return
        self._end_late_nodes()
        if not self._is_over():
            return
        restarted = [child for child in self.children if child.alive and child.restarts > 0]
        if restarted:
            # One may have ended the run itself, which it reports before its peers can end.
            self._take_events(0.0)
        for child in self.children:
            is_restarted = child in restarted and child.alive
            status = child.status
            just_restarted = is_restarted and status.step == 0 and not status.decided_end
            if just_restarted and any(rank.exit_code == 0 for rank in self._other_ranks(child)):
                continue  # they were restarted together, and have taken the same steps since
            if (child.restart_at is not None or just_restarted) and child.asked_at is None:
                self._give_up(child)
        if any(child.ended_with_run for child in self.children):
            self._stop_disconnected_nodes()

    def _give_up(self, child: Child) -> None:
        """Stop restarting a node, and stop it if it was just restarted."""
        child.restart_at, child.asked_at = None, self._now()
        if child.plan.learns:
            failure = f"not restarting {child.name}: the run has ended without it"
            child.failure = child.failure or Failure(self._now(), failure)
            self._note(failure)
            self._failed.append(child)
        else:
            self._note(f"{child.name} is no longer needed: the run is over")
            self._too_late.append(child)
        self._ask_to_stop(child, "the run is over")

    def _stop_disconnected_nodes(self) -> None:
        """Stop the nodes that have not heard from their peers that the run is over."""
        if self._over_since is None:
            self._over_since = self._now()
        if self._pauses.elapsed(self._over_since) < self._patience_s:
            return
        for child in self.children:
            if child.alive and not child.status.run_is_over and child.asked_at is None:
                child.asked_at = self._now()
                self._note(f"{child.name} has not heard that the run is over; stopping it")
                if not child.plan.learns:
                    self._too_late.append(child)
                self._ask_to_stop(child, "the run is over")

    @property
    def _patience_s(self) -> float:
        """Seconds within which nodes should end with the run."""
        return min(SETTLE_S, self._options.kill_after_s / 2)

    def _end_late_nodes(self) -> None:
        """Kill the nodes that still run, after a while, when the run has ended."""
        if not self._has_ended():
            self._ended_since = None
            return
        late = [child for child in self.children if child.alive and not child.is_killed]
        if self._ended_since is None:
            self._ended_since, self._is_waiting_noted = self._now(), False
        waited_s, limit = self._pauses.elapsed(self._ended_since), self._options.kill_after_s
        if late and waited_s >= self._patience_s and not self._is_waiting_noted:
            self._is_waiting_noted = True
            self._note(
                f"the run has ended; waiting for {few_nodes([child.plan for child in late])}, at "
                f"most {limit:g} s (--kill-after)"
            )
        for child in late if waited_s >= limit else ():
            self._note(f"{child.name} did not end within {limit:g} s of the end of the run; killed")
            self._too_late.append(child)
            self._kill(child)

    def _has_ended(self) -> bool:
        """Return whether the nodes have ended without which the run is not complete.

        Their programs may continue for long after their tasks, to save something for example.
        """
        leads = [child for child in self.children if self._leads(child)]
        if any(child.alive or child.restart_at is not None for child in leads):
            return False
        if leads and all(child.exit_code == 0 for child in leads):
            return True
        # The learner may belong to another launcher.
        return any(
            child.ended_with_run
            or (child.alive and child.status.run_is_over and not _has_lead(child.status))
            for child in self.children
        )

    def _leads(self, child: Child) -> bool:
        """Return whether a node is a learner; without one, it has decided that the run ends."""
        if any(member.plan.learns for member in self.children):
            ranks = child.plan.ranks
            return child.plan.learns and (ranks is None or ranks.rank == 0)
        return child.status.decided_end

    def stop(self, reason: str) -> None:
        """Ask all nodes to stop; those that take longer than ``kill_after_s`` are killed.

        Args:
            reason: the stop reason that every node reports.
        """
        if self._stopping_since is not None:
            return
        self._stopping_since = self._now()
        self._note(f"stopping the run: {reason}")
        for child in self.children:
            child.restart_at = None
            self._ask_to_stop(child, reason)

    def _enforce_deadline(self) -> None:
        since = self._stopping_since
        limit = self._options.kill_after_s
        if since is None or self._killed or self._pauses.elapsed(since) < limit:
            return
        self._killed = True
        for child in self.children:
            if child.alive:
                self._note(f"{child.name} did not end within {limit:g} s; killed")
                self._kill(child)

    def _note_others(self) -> None:
        alive = [child for child in self.children if child.alive]
        is_ending = self._stopping_since is not None or any(
            member.status.reason for member in alive
        )
        if alive and not is_ending:
            for text in self._others.changes([child.status for child in alive], self._now()):
                self._note(text)

    def _end_hung_nodes(self) -> None:
        timeout_s = self._options.hang_timeout_s
        is_ending = self._stopping_since is not None or self._ended_since is not None
        if timeout_s is None or is_ending:
            return
        for child in self.children:
            if not child.alive or child.hung_s:
                continue
            hung_s = self._pauses.elapsed(child.heard_at - child.status.idle_s)
            if hung_s > timeout_s:
                self._end_hung_node(child, hung_s)

    def _end_hung_node(self, child: Child, hung_s: float) -> None:
        self._note(
            f"{child.name} has made no progress for {hung_s:.0f} s (--hang-timeout); its threads:"
        )
        self._host.dump_stacks(child.plan.node_id)
        child.hung_s, child.is_killed = hung_s, True
        until = self._now() + DUMP_S
        while child.alive and (remaining_s := until - self._now()) > 0:
            self._take_events(remaining_s)
        self._kill(child)

    def _kill(self, child: Child) -> None:
        if child.alive:
            child.is_killed = True
            self._host.kill(child.plan.node_id)

    def lost_logs(self) -> list[LogFile]:
        """Return the logs that could not be written completely."""
        return [log for log in self._logs() if log.n_lost]

    def _logs(self) -> list[LogFile]:
        logs = [self._notes, *(child.log for child in self.children)]
        return [log for log in logs if log is not None]

    def _ask_to_stop(self, child: Child, reason: str) -> None:
        if child.alive:
            self._host.stop(child.plan.node_id, reason)

    def _obey(self) -> None:
        """Act on a received signal."""
        if self._signal:
            self.stop(signal_reason(self._signal))
        if self._asked_again:
            # A second Ctrl-C: do not wait any longer.
            self._stopping_since = -math.inf

    @contextlib.contextmanager
    def _signals(self) -> Iterator[None]:
        def on_signal(number: int, frame: object) -> None:
            # Only set flags: the handler may have interrupted a print, and printing here would be
            # a reentrant call on the same stream.
            self._asked_again |= bool(self._signal) and number == signal.SIGINT
            if not self._signal:
                self._signal, self._signalled_at = number, self._now()

        handler = SignalHandler(on_signal)
        for number in ENDING_SIGNALS:
            # nohup ignores SIGHUP. A shell ignores Ctrl-C for its background processes, but other
            # processes than the terminal send it, too.
            if number == signal.SIGINT or signal.getsignal(number) != signal.SIG_IGN:
                handler.install(number)
        try:
            yield
        finally:
            handler.restore()

    def _is_stopped_by_signal(self) -> bool:
        if not self._signal or self._stopped_by_failure:
            return False
        return self._options.on_failure != "abort" or not any(
            child.failure is not None and child.failure.at < self._signalled_at
            for child in self.children
        )

    def _exit_code(self) -> int:
        if self._is_stopped_by_signal():
            return 128 + self._signal
        if not any(child.exit_code != 0 or child in self._failed for child in self._relevant()):
            return 0
        number = self._first_failure().number
        return 128 + number if number else 1

    def _conclude(self, code: int) -> Iterator[str]:
        if code == 0:
            return
        if self._is_stopped_by_signal():
            yield f"the run was stopped: {signal_reason(self._signal)}"
            return
        first = self._first_failure()
        for child in self.children:
            if child.failure == first and child.last_lines:
                log = f" (all of it: {child.log_path})" if child.log_path is not None else ""
                yield f"last output of {child.name}{log}:"
                yield from (f"  {line}" for line in child.last_lines)
        yield f"the run failed: {first.text}"


def _repeats_at_each_start(child: Child) -> bool:
    """Return whether a node has failed because of a mistake, and no start of it went further."""
    return child.status.is_final and not child.has_done_a_step


def _has_lead(status: NodeStatus) -> bool:
    """Return whether a node is connected to a learner."""
    return any(not roles or leads(roles) for roles in status.peers.values())


def _log_name(config: NodeConfig) -> str:
    return f"node-{config.plan.node_id}.log"
