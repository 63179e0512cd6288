"""No task runs twice at once, every task ends, every lease ends: whatever happens."""

from __future__ import annotations

from hypothesis import HealthCheck, settings
from hypothesis.stateful import run_state_machine_as_test

from tests.dmiddleware.worker.coordinator.core_machine import CoreMachine


def test_no_task_runs_twice_at_once_and_every_task_and_lease_ends():
    run_state_machine_as_test(
        CoreMachine,
        settings=settings(
            max_examples=80,
            stateful_step_count=60,
            deadline=None,
            database=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
