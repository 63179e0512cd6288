"""Timers and traces."""

from __future__ import annotations

import io
import json
import resource
import threading

import pytest
from rich.console import Console

from dmiddleware import Context, StepTimer, Task, TraceFile
from dmiddleware.pipeline import merge_traces
from dmiddleware.testing import FakeClock, Tape


class Boom(Exception):
    pass


@pytest.fixture
def clock():
    return FakeClock(start_s=100.0, epoch_s=900.0)


def taking(clock, forward_s, back_s=None, *, name="part"):
    """Return a middleware that takes the given seconds in each direction."""

    def function(ctx):
        clock.advance(forward_s)

    def generator(ctx):
        clock.advance(forward_s)
        try:
            yield
        finally:
            clock.advance(back_s)

    mw = function if back_s is None else generator
    mw.__name__ = name
    return mw


def fail(ctx):
    raise Boom


def test_both_directions_of_every_middleware_are_measured(clock):
    timer = StepTimer(clock=clock)
    with Task(Context()) as task:
        task.use_wrapper(timer)
        task.use(taking(clock, 1.0, 0.5, name="a")).use(task.serial(taking(clock, 2.0, name="b")))
        task.run(max_step=3)
    a, b = timer.timings
    assert (a.name, a.calls, a.forward_s, a.back_s, a.total_s, a.mean_s) == (
        "a",
        3,
        3,
        1.5,
        4.5,
        1.5,
    )
    assert (b.name, b.calls, b.forward_s, b.back_s) == ("b", 3, 6, 0)


def test_an_error_is_measured_too(clock):
    timer = StepTimer(clock=clock)
    with pytest.raises(Boom), Task(Context()) as task:
        task.use_wrapper(timer).use(taking(clock, 1.0, 0.5)).use(fail).run()
    assert [(t.forward_s, t.back_s) for t in timer.timings] == [(1.0, 0.5), (0.0, 0.0)]


def test_times_add_up_over_several_runs_and_can_be_reset(clock):
    timer = StepTimer(clock=clock)
    part = taking(clock, 1.0)
    with Task(Context()) as task:
        task.use_wrapper(timer).use(part)
        task.run(max_step=1)
        task.use(part).run(max_step=1)  # compiled again; the same middleware twice
    (timing,) = timer.timings
    assert (timing.calls, timing.forward_s) == (3, 3.0)
    timer.reset()
    assert (timing.calls, timing.total_s, timing.mean_s) == (0, 0.0, 0.0)


def test_middleware_with_the_same_name_are_distinguished(clock):
    timer = StepTimer(clock=clock)
    with Task(Context()) as task:
        task.use_wrapper(timer).use(taking(clock, 1.0)).use(taking(clock, 2.0)).run(max_step=1)
    assert [timing.name for timing in timer.timings] == ["part", "part#2"]


def test_functions_that_are_created_in_each_step_share_a_row(clock):
    class Counter:
        def count(self, ctx):
            clock.advance(0.5)

    timer, counter = StepTimer(clock=clock), Counter()

    def call_by_hand(ctx):
        task.forward(lambda ctx: clock.advance(2.0))
        task.forward(counter.count)

    with Task(Context()) as task:
        task.use_wrapper(timer).use(call_by_hand).run(max_step=50)
    assert [(timing.calls, timing.forward_s) for timing in timer.timings] == [
        (50, 125.0),
        (50, 100.0),
        (50, 25.0),
    ]


def test_the_seconds_can_be_logged(clock):
    logged = Tape()
    with Task(Context()) as task:
        task.use_wrapper(StepTimer(log=True, clock=clock))
        task.use(lambda ctx: (yield logged(dict(ctx.logged))))
        task.use(taking(clock, 1.0, 0.5, name="a"))
        task.use(lambda ctx: logged(dict(ctx.logged))).run(max_step=1)
        assert task.ctx.logged["time_s/a"] == 1.5
        assert task.ctx.logged["time_s/_lambda_"] == 0.0  # as loggers take it
    assert list(logged)[1]["time_s/a"] == 1.0


def test_the_table_shows_means_and_shares(clock):
    timer = StepTimer(clock=clock)
    with Task(Context()) as task:
        task.use_wrapper(timer).use(taking(clock, 0.75, name="learn"))
        task.use(taking(clock, 0.25, name="log")).run(max_step=2)
    heading, learn, log = str(timer).splitlines()
    assert heading.split("  ")[0] == "middleware"
    assert learn.split() == ["learn", "2", "750.000", "1.500", "0.000", "75.0%"]
    assert log.split() == ["log", "2", "250.000", "0.500", "0.000", "25.0%"]
    console = Console(file=io.StringIO(), width=100)
    console.print(timer)
    assert "75.0%" in console.file.getvalue()


def spans_of(path):
    return [event for event in json.loads(path.read_text()) if event["ph"] == "X"]


def test_a_trace_has_a_span_for_each_direction_of_each_middleware(clock, tmp_path):
    path = tmp_path / "trace.json"
    with Task(Context()) as task:
        task.use_wrapper(TraceFile(path, clock=clock, process_name="learner"))
        task.use(taking(clock, 1.0, 0.25, name="a")).use(taking(clock, 2.0, name="b"))
        task.run(max_step=2)
    spans = spans_of(path)
    assert [(s["name"], s["dur"], s["args"]) for s in spans[:3]] == [
        ("a", 1e6, {"step": 0}),
        ("b", 2e6, {"step": 0}),
        ("a (back)", 0.25e6, {"step": 0}),
    ]
    assert [span["args"]["step"] for span in spans] == [0, 0, 0, 1, 1, 1]
    assert spans[1]["ts"] - spans[0]["ts"] == 1e6
    assert spans[0]["ts"] == 1000e6, "the calendar's time, in microseconds"
    assert all(span["pid"] == spans[0]["pid"] for span in spans)


def test_a_trace_names_its_process_and_threads(tmp_path):
    path = tmp_path / "trace.json"
    with Task(Context()) as task:
        task.use_wrapper(TraceFile(path, process_name="collector 0"))
        task.use(task.parallel(lambda ctx: None, lambda ctx: None)).run(max_step=2)
    events = json.loads(path.read_text())
    names = [(e["name"], e["args"]["name"]) for e in events if e["ph"] == "M"]
    assert names[0] == ("process_name", "collector 0")
    threads = [name for what, name in names if what == "thread_name"]
    assert len(threads) == len(set(threads)) == 2
    assert all("parallel" in name for name in threads)
    tids = {e["tid"] for e in events if e["ph"] == "X"}
    assert tids == {e["tid"] for e in events if e["name"] == "thread_name"}


def test_a_trace_is_complete_json_after_each_flush(clock, tmp_path):
    path = tmp_path / "trace.json"
    with TraceFile(path, clock=clock, flush_every=4) as trace:
        assert spans_of(path) == []
        for n in range(5):
            with trace.span(f"span {n}", value=n):
                clock.advance(0.001)
            json.loads(path.read_text())
        assert 0 < len(spans_of(path)) < 5
        trace.flush()
        assert [span["name"] for span in spans_of(path)] == [f"span {n}" for n in range(5)]
    trace.close()
    with trace.span("after closing"):
        pass
    trace.flush()
    assert len(spans_of(path)) == 5


def test_a_trace_is_complete_json_after_an_error(clock, tmp_path):
    path = tmp_path / "trace.json"
    with pytest.raises(Boom), Task(Context()) as task:
        task.use_wrapper(TraceFile(path, clock=clock))
        task.use(taking(clock, 1.0, 0.5, name="a")).use(fail).run()
    assert [span["name"] for span in spans_of(path)] == ["a", "fail", "a (back)"]


def test_several_threads_can_write_one_trace(tmp_path):
    path = tmp_path / "trace.json"
    with TraceFile(path, flush_every=7) as trace:

        def work():
            for n in range(50):
                with trace.span("work", n=n):
                    pass

        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20)
    assert len(spans_of(path)) == 200


def test_traces_of_several_processes_are_merged(clock, tmp_path):
    paths = [tmp_path / f"{n}.json" for n in range(2)]
    for n, path in enumerate(paths):
        with TraceFile(path, clock=clock, process_name=f"node {n}") as trace, trace.span("x"):
            pass
    target = tmp_path / "all.json"
    merge_traces(paths, target)
    assert len(spans_of(target)) == 2
    paths[0].write_text("{}")
    with pytest.raises(ValueError, match="is not a trace: it has a dict"):
        merge_traces(paths, target)


def test_a_trace_that_cannot_be_written_is_refused_at_once(tmp_path):
    with pytest.raises(FileNotFoundError):
        TraceFile(tmp_path / "missing" / "trace.json")


def test_a_full_disk_does_not_end_the_run_and_leaves_a_complete_file(tmp_path, caplog):
    path = tmp_path / "trace.json"
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    steps = []
    with Task(Context()) as task:
        task.use_wrapper(TraceFile(path, flush_every=4)).use(lambda ctx: steps.append(ctx))
        task.run(max_step=10)
        resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 40, before[1]))
        try:
            task.run(max_step=20)
            full = len(json.loads(path.read_text()))
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
        task.run(max_step=10)
    assert len(steps) == 40
    assert full < len(json.loads(path.read_text())) < 40
    assert caplog.text.count("cannot write the trace") == 1
