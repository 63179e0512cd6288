"""Many nodes in a simulated cluster: they form, and cost as little as they should."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import partial

import numpy as np
import pytest

from dmiddleware.pipeline import Context, Event, Task
from dmiddleware.router.protocol import node
from dmiddleware.router.protocol.node import NodeProtocol
from dmiddleware.router.protocol.topology import TopologyName
from dmiddleware.router.wire import envelope
from dmiddleware.router.wire.envelope import EncodedEvent
from dmiddleware.router.wire.frame import FrameContents
from dmiddleware.testing import Cluster, Delivered

N = 12
NEWS = Event("news")


def count_peers() -> int:
    with Task(Context()) as task:
        task.use(lambda ctx: None).run(max_step=1)
        return len(task.router.peer_ids())


def wait_for_the_end() -> None:
    """Receive events until the cluster is closed."""
    with Task(Context()) as task:
        task.on(NEWS, lambda *args: None)
        task.use(lambda ctx: task.wait_for("never", timeout_s=1e6)).run(max_step=1)


def formed(cluster: Cluster) -> bool:
    routers = [node.router for node in cluster.nodes.values()]
    return all(router is not None and len(router.peer_ids()) >= 1 for router in routers)


def frames(cluster: Cluster, since: float) -> Counter[str]:
    return Counter(
        one.kind for one in cluster.tape if isinstance(one, Delivered) and one.at_s > since
    )


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("topology", "n"),
    [
        ("star", 100),
        ("mesh", 10),
        pytest.param("star", 1000, marks=pytest.mark.slow),
        pytest.param("mesh", 60, marks=pytest.mark.slow),
    ],
)
def test_many_nodes_form_a_cluster(topology: TopologyName, n: int) -> None:
    with Cluster(count_peers, n=n, topology=topology) as cluster:
        cluster.run()
        assert cluster.now() < 5.0
        kinds = frames(cluster, 0.0)
    n_links = n - 1 if topology == "star" else n * (n - 1) // 2
    assert kinds["HELLO"] >= n_links
    assert kinds.total() < 40 * n_links


def test_an_idle_peer_exchanges_one_heartbeat_a_second_and_nothing_else(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ticks: Counter[str] = Counter()
    tick = NodeProtocol.tick

    def record(node: NodeProtocol, now: float) -> list[tuple[str, int]]:
        ticks[node.identity.node_id] += 1
        return tick(node, now)

    monkeypatch.setattr(NodeProtocol, "tick", record)
    with Cluster(wait_for_the_end, n=N, topology="star") as cluster:
        cluster.start()
        assert cluster.wait_until(lambda: formed(cluster), 10.0)
        cluster.run_for(3.0)
        since = cluster.now()
        ticks.clear()
        cluster.run_for(10.0)
        kinds = frames(cluster, since)
        assert ticks.pop("0") <= 42 and all(9 <= n <= 11 for n in ticks.values())
    assert set(kinds) == {"HEARTBEAT"}
    assert kinds["HEARTBEAT"] == pytest.approx(2 * 10 * (N - 1), abs=2 * (N - 1))


def test_a_broadcast_takes_three_frames_a_peer_and_is_laid_out_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    packed: list[str] = []
    make = envelope.frame_contents

    def record(events: Sequence[EncodedEvent]) -> FrameContents:
        packed.extend(event.event for event in events if event.contents is None)
        return make(events)

    for module in (envelope, node):
        monkeypatch.setattr(module, "frame_contents", record)
    with Cluster(wait_for_the_end, n=N, topology="star") as cluster:
        cluster.start()
        assert cluster.wait_until(lambda: formed(cluster), 10.0)
        cluster.run_for(3.5)
        hub = cluster.nodes[0].router
        assert hub is not None
        for content in (1, np.zeros(100_000, np.uint8)):
            packed.clear()
            since = cluster.now()
            cluster.simulation.spawn(partial(hub.emit, NEWS, (content,), {}), name="e", group="0")
            cluster.run_for(0.3)
            assert packed == ["news"]
            kinds = frames(cluster, since)
            assert kinds["DATA"] == N - 1
            assert kinds.total() <= 4 * (N - 1)
