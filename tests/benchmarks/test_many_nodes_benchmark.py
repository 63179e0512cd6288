"""The benchmark of many nodes: its model, its meter, its page, and a small run of it."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from dmiddleware.testing import Simulation
from tests.benchmarks.bench_many_nodes import (
    BATCH_BYTES,
    PROGRAM,
    WEIGHTS_BYTES,
    Costs,
    SimulatedStar,
)
from tests.benchmarks.bench_nodes import ROOT, free_port, star
from tests.benchmarks.cpu_meter import CpuMeter, MeteredClock
from tests.benchmarks.hub_cost import HubCost, Line, Load
from tests.benchmarks.report import Page

COST = HubCost(idle_s=100e-6, batch=Line(200e-6, 1e-9), weights=Line(50e-6, 0.5e-9))
LOAD = Load(batches=2, batch_bytes=100_000, weights_bytes=1_000_000, weights_every_s=10)


def test_a_line_goes_through_both_measurements():
    line = Line.through((1000, 0.002), (5000, 0.004))
    assert line.at(1000) == pytest.approx(0.002)
    assert line.at(5000) == pytest.approx(0.004)
    assert line == Line(pytest.approx(0.0015), pytest.approx(5e-7))


def test_noise_does_not_make_a_byte_or_an_empty_event_cheaper_than_nothing():
    assert Line.through((1000, 0.004), (5000, 0.002)) == Line(0.004, 0.0)
    assert Line.through((1000, 0.001), (2000, 0.004)).fixed_s == 0.0
    with pytest.raises(ValueError, match="not larger"):
        Line.through((1000, 0.002), (1000, 0.004))


def test_the_share_of_a_core_is_the_sum_over_all_collectors():
    share = COST.share(100, LOAD)
    assert share.idle == pytest.approx(100 * 100e-6)
    assert share.batches == pytest.approx(100 * 2 * (200e-6 + 100e-6))
    assert share.weights == pytest.approx(100 * (50e-6 + 500e-6) / 10)
    assert share.total == pytest.approx(0.01 + 0.06 + 0.0055)


def test_a_core_is_full_with_the_most_collectors_and_not_before():
    most = COST.most_collectors(LOAD)
    assert most == 1324
    assert COST.share(most, LOAD).total <= 1 < COST.share(most + 1, LOAD).total


def test_batches_get_what_heartbeats_and_weights_leave():
    # 1,000 collectors: 10% for heartbeats and 5.5% for weights, and 300 µs for each batch.
    assert COST.most_batches(1000, LOAD) == pytest.approx(0.845 / 300e-6)
    assert COST.most_batches(10_000, LOAD) == 0


def test_the_parts_of_a_cost_are_added_for_each_size():
    router = Costs(1.0, {1: 2.0, 2: 3.0}, {4: 4.0, 8: 6.0})
    below = Costs(0.5, {1: 1.0, 2: 1.5}, {4: 0.0, 8: 1.0})
    whole = router + below
    assert whole == Costs(1.5, {1: 3.0, 2: 4.5}, {4: 4.0, 8: 7.0})
    assert whole - below == router
    assert whole.model().batch == Line(1.5, 1.5)


def test_the_meter_counts_a_thread_only_while_it_is_inside():
    now = 0.0
    meter = CpuMeter(thread_time=lambda: now)

    def work(seconds: float) -> None:
        nonlocal now
        now += seconds

    def router() -> None:
        work(1)
        meter.outside(work)(10)
        work(2)
        # A transport below calls the router back.
        meter.outside(lambda: (work(20), meter.inside(work)(4)))()

    work(100)
    meter.inside(router)()
    work(100)
    assert meter.cpu_s == 7
    meter.outside(work)(1)
    meter.inside(meter.inside(work))(1)
    assert meter.cpu_s == 8


def test_a_metered_clock_counts_predicates_and_threads_but_no_waits():
    now = 0.0
    meter = CpuMeter(thread_time=lambda: now)
    condition = threading.Condition()

    def work(seconds: float) -> bool:
        nonlocal now
        now += seconds
        return False

    with Simulation() as simulation:
        clock = MeteredClock(simulation, meter)

        def wait() -> None:
            work(1)
            with condition:
                clock.wait_for(condition, lambda: work(10), 5.0)

        clock.spawn(wait, name="waiting")
        simulation.spawn(lambda: work(1000) and None, name="other")
        simulation.run_for(10.0)
        assert simulation.now() == clock.now() == 10.0
    # The predicate is evaluated before the wait and at its deadline.
    assert meter.cpu_s == 21


def test_a_page_gets_the_figures_between_its_comments():
    page = Page(Path("page.md"), "| new |\n")
    text = "before\n<!-- measured: x -->\n{}<!-- end of what was measured -->\nafter\n"
    filled = page.fill(text.format("| old |\n"))
    assert filled == text.format("\n| new |\n\n")
    assert page.fill(filled) == filled
    with pytest.raises(ValueError, match="one place"):
        page.fill("no place")


def test_a_simulated_star_forms_and_its_hub_receives_every_batch():
    with Simulation() as simulation:
        cluster = SimulatedStar(simulation, 5)
        formed = cluster.form()
        assert 0 < formed.simulated_s < 5
        assert 0 < formed.hub_cpu_s < formed.total_cpu_s
        cluster.settle()
        assert cluster.idle_s() > 0
        for n_bytes in BATCH_BYTES:
            assert cluster.batch_s(n_bytes, 0.0, count=3) > 0
        for version, n_bytes in enumerate(WEIGHTS_BYTES):
            assert cluster.weights_s(version, n_bytes, 0.0) > 0
        assert cluster.learner.n_batches == len(BATCH_BYTES) * 3 * 5
        cluster.end()


@pytest.mark.process
def test_the_hub_of_a_real_star_takes_more_time_than_its_router():
    with star(ROOT, f"tcp://127.0.0.1:{free_port()}", 2, program=PROGRAM) as hub:
        hub.ask("form", 2)
        found = hub.ask("batches", 1024, 0.05, 10)
    assert 0 < found["router_s"] < found["process_s"]
