"""The live table and the plain lines of a run."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from dmiddleware.launch.child import Child
from dmiddleware.launch.display import LiveDisplay, PlainDisplay, choose_display, make_table
from dmiddleware.launch.output import SteadyStream
from dmiddleware.launch.plan import NodeConfig, NodePlan, RunPlan
from dmiddleware.launch.status import NodeStatus


class Time:
    """A clock that tests set."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Terminal(io.StringIO):
    """A terminal that nobody looks at."""

    def isatty(self) -> bool:
        return True


class Running(Child):
    """A child that counts as alive without a process."""

    @property
    def alive(self) -> bool:
        return self.exit_code is None


def child(node_id: int, role: str, **status: object) -> Running:
    run = RunPlan(nodes=(NodePlan(node_id, roles=(role,)),))
    config = NodeConfig(run=run, main="program.main", package=".")
    return Running(config, status=NodeStatus(**{"phase": "running", **status}))  # type: ignore[arg-type]


@pytest.fixture
def time() -> Time:
    return Time()


def plain(time: Time) -> tuple[PlainDisplay, io.StringIO]:
    out = io.StringIO()
    return PlainDisplay(out, now=time), out


def test_plain_lines_name_their_node_and_are_not_cut(time: Time) -> None:
    display, out = plain(time)
    with display:
        display.line(child(2, "collector"), "[bold]" + "x" * 100)
        display.note("it starts")
    assert out.getvalue() == f"[node 2] [bold]{'x' * 100}\n[ditask] it starts\n"


def test_the_status_of_all_nodes_is_printed_every_ten_seconds(time: Time) -> None:
    display, out = plain(time)
    learner = child(
        0,
        "learner",
        step=3,
        counters={"env steps": 100, "updates": 50},
        peers={1: (), 2: ()},
        blocked_s=1.5,
    )
    display.update([learner])
    assert out.getvalue() == ""
    time.now = 10.0
    display.update([learner])
    learner.status.counters = {"env steps": 200, "updates": 80}
    time.now = 15.0
    display.update([learner])
    time.now = 20.0
    display.update([learner])
    first, second = out.getvalue().splitlines()
    assert first == (
        "[ditask] node 0 (learner): running, step 3, 100 env steps (0/s), 50 updates (0/s), "
        "blocked 1.5 s, peers: 2"
    )
    assert "200 env steps (10/s), 80 updates (3/s)" in second


def test_nodes_that_stopped_or_ended_get_no_status_line(time: Time) -> None:
    display, out = plain(time)
    ended = child(1, "collector")
    ended.exit_code = 0
    time.now = 10.0
    display.update([ended, child(0, "learner", reason="solved")])
    assert out.getvalue() == ""


def test_the_table_has_a_row_for_each_node(time: Time) -> None:
    failed = child(1, "collector", error="ValueError: no")
    failed.exit_code = 1
    again = child(2, "collector", phase="starting")
    again.restarts = 1
    waits = child(3, "evaluator")
    waits.restart_at = 5.0
    solved = child(0, "learner", reason="solved", counters={"env steps": 12_000})
    rows = [solved, failed, again, waits]
    out = io.StringIO()
    Console(file=out, width=200).print(make_table(rows, lambda one: {"env steps": 7.0}))
    lines = out.getvalue().splitlines()
    assert "env steps/s" in lines[1]
    assert "12,000 │           7 │" in lines[3] and "solved" in lines[3]
    assert "failed (1)" in lines[4] and "ValueError: no" in lines[4]
    assert "starting (restart 1)" in lines[5]
    assert "failed (restarting)" in lines[6]


@pytest.mark.parametrize("variable", ["FORCE_COLOR", "CLICOLOR_FORCE", "TTY_COMPATIBLE"])
def test_a_pipe_gets_lines_where_colors_are_forced_as_in_notebooks(
    monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    monkeypatch.setenv(variable, "1")
    monkeypatch.setenv("TERM", "xterm-color")
    assert isinstance(choose_display(SteadyStream(io.StringIO())), PlainDisplay)
    assert isinstance(choose_display(SteadyStream(Terminal())), LiveDisplay)


def test_a_terminal_gets_a_table_and_a_pipe_lines() -> None:
    out = io.StringIO()
    assert isinstance(choose_display(SteadyStream(out)), PlainDisplay)
    display = choose_display(SteadyStream(Terminal()))
    assert isinstance(display, LiveDisplay)


def test_a_live_table_shows_lines_above_it() -> None:
    out = io.StringIO()
    display = LiveDisplay(Console(file=out, force_terminal=True, width=160))
    with display:
        display.note("it starts")
        display.line(child(2, "collector"), "hello")
        display.update([child(0, "learner", step=41)])
    shown = out.getvalue()
    assert "ditask │ it starts" in shown
    assert "node 2 │" in shown and "hello" in shown
    assert "41" in shown


def test_the_last_state_of_the_table_stays(time: Time) -> None:
    out = io.StringIO()
    with LiveDisplay(Console(file=out, force_terminal=True, width=160), now=time) as display:
        display.update([child(0, "learner", step=41)])
        display.update([child(0, "learner", step=42)])
        assert "41" in out.getvalue() and "42" not in out.getvalue()
    assert "42" in out.getvalue()
