"""Eight nodes find each other in any start order, with any pauses."""

from __future__ import annotations

import random
import threading

import pytest

from dmiddleware.pipeline import Context, Task
from dmiddleware.testing import Cluster

N_NODES = 8
SEEDS = [
    pytest.param(seed, marks=[] if seed < 3 else pytest.mark.slow, id=str(seed))
    for seed in range(50)
]


@pytest.mark.parametrize("seed", SEEDS)
def test_the_order_in_which_nodes_start_does_not_matter(seed: int) -> None:
    def program() -> tuple[float, int]:
        changed = threading.Condition()
        with Task(Context()) as task, changed:
            task.use(lambda ctx: None).run(max_step=1)
            assert task.router is not None
            formed_at, n_peers = task.clock.now(), len(task.router.peer_ids())
            # Stay until the others have counted this node, too.
            task.clock.wait_for(changed, lambda: False, 5.0)
            return formed_at, n_peers

    chance = random.Random(seed)
    order = chance.sample(range(N_NODES), N_NODES)
    with Cluster(program, n=N_NODES, seed=seed, delay_s=(0.0, 0.02)) as cluster:
        for node_id in order:
            cluster.run_for(chance.choice([0.0, 0.1, 1.0]))
            cluster.start(node_id)
        all_started_at = cluster.now()
        formed = cluster.join()
    assert {n_peers for _, n_peers in formed.values()} == {N_NODES - 1}
    assert max(formed_at for formed_at, _ in formed.values()) <= all_started_at + 5.0
