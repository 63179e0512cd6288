"""``--on-failure continue``: a run continues without any node but its last learner."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from dmiddleware.launch.hosts.interface import Ended, HostEvent
from dmiddleware.launch.plan import NodePlan
from dmiddleware.launch.supervisor import SupervisorOptions
from tests.dmiddleware.launch.scripted_host import (
    ScriptedHost,
    failed,
    finished,
    running,
    supervised,
)

LEARNER, COLLECTOR = NodePlan(0, ("learner",)), NodePlan(1, ("collector",))
COORDINATOR = NodePlan(2, ("coordinator",))


def run(
    nodes: list[NodePlan], *script: tuple[float, Sequence[HostEvent]]
) -> tuple[int, str, float]:
    host = ScriptedHost([(at, event) for at, events in script for event in events])
    options = SupervisorOptions(on_failure="continue", kill_after_s=5.0)
    code, notes = supervised(host, nodes, options)
    return code, "\n".join(notes), host.now


@pytest.mark.parametrize(
    "end", [failed(0), [Ended(0, -9)], [Ended(0, 0)]], ids=["error", "killed", "left early"]
)
def test_a_run_is_over_at_once_when_its_only_learner_has_failed(end: list[HostEvent]) -> None:
    code, text, took_s = run([LEARNER, COLLECTOR], (5.0, [running(0), running(1)]), (10.0, end))
    assert code == 1
    assert took_s < 16.0
    assert "stopping the run: node 0 (learner)" in text
    assert "no learner is left" in text
    assert text.splitlines()[-1].startswith("the run failed: node 0 (learner)")


def test_a_run_continues_while_another_learner_works() -> None:
    nodes = [LEARNER, NodePlan(1, ("learner",)), COORDINATOR]
    ends = [(20.0, [*finished(0), *finished(2)])]
    code, text, _ = run(nodes, (10.0, failed(1)), *ends)
    assert "the run continues without it" in text
    code, text, took_s = run(nodes, (10.0, failed(1)), (12.0, failed(0)))
    assert code == 1 and took_s < 18.0
    assert "no learner is left" in text


def test_a_run_continues_without_a_collector() -> None:
    code, text, _ = run([LEARNER, COLLECTOR], (10.0, failed(1)), (20.0, finished(0)))
    assert code == 0
    assert "the run continues without it (--on-failure continue)" in text
