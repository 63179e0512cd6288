"""Messages of the classic parallel mode over real routers."""

from __future__ import annotations

import threading

import pytest
from easydict import EasyDict

from dmiddleware.errors import ConfigError, DeliveryTimeout
from dmiddleware.pipeline import Context, Task, current_node
from dmiddleware.worker.comm.link import create_coordinator_link
from dmiddleware.worker.coordinator.messages import (
    CollectorInfo,
    DataDemand,
    Joined,
    LearnData,
    Left,
    ResourceQuery,
    Resources,
    StepDataReady,
    TaskDone,
    TaskOffer,
)
from middleware.classic import RouterLink
from tests.middleware.classic.router_nodes import DEADLINE_S, received


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_peers_learn_of_each_others_roles_whoever_starts_first(nodes, order):
    roles = ("coordinator", "learner")
    links = {node_id: nodes.link(node_id, roles[node_id]) for node_id in order}
    assert received(links[0], Joined) == ("node_1", Joined("learner"))
    assert received(links[1], Joined) == ("node_0", Joined("coordinator"))
    assert links[0].peers() == {"node_1": "learner"}
    assert links[0].uid == "node_0"


def test_a_link_that_opens_long_after_its_router_is_reported_when_it_opens(nodes):
    coordinator = nodes.link(0, "coordinator")
    task = nodes.task(1, "learner")
    task.router.wait_for_peers(1, timeout_s=DEADLINE_S)
    assert coordinator.peers() == {}
    RouterLink("learner", task=task)
    assert received(coordinator, Joined) == ("node_1", Joined("learner"))


@pytest.fixture
def pair(nodes):
    coordinator, worker = nodes.link(0, "coordinator"), nodes.link(1, "collector")
    received(coordinator, Joined)
    received(worker, Joined)
    return coordinator, worker


def test_messages_arrive_in_order_with_plain_values(pair):
    coordinator, worker = pair
    offer = TaskOffer("t", 0, "collector", EasyDict(a={"b": [1, EasyDict(c=(2, 3))]}))
    coordinator.send("node_1", ResourceQuery())
    coordinator.send("node_1", offer)
    assert worker.receive(DEADLINE_S) == ("node_0", ResourceQuery())
    sender, message = worker.receive(DEADLINE_S)
    assert (sender, message) == ("node_0", offer)
    assert type(message.task_info["a"]["b"][1]) is dict
    worker.send("node_0", Resources({"gpu": 1}))
    assert coordinator.receive(DEADLINE_S) == ("node_1", Resources({"gpu": 1}))


def ready(ref, seq=0):
    return StepDataReady("t", 0, seq, "b", ref, {"data_id": ref, "object_ref": ref})


def test_step_data_travels_with_its_metadata_and_leaves_the_collector(pair):
    coordinator, worker = pair
    worker.store.put("d", {"x": [1, 2]})
    worker.send("node_0", ready("d"))
    received(coordinator, StepDataReady)
    assert coordinator.store.get("d") == {"x": [1, 2]}
    assert worker.store.missing(["d"]) == {"d"}


def test_a_batch_brings_its_step_data_which_stays_at_the_coordinator_until_it_is_deleted(nodes):
    coordinator, learner = nodes.link(0, "coordinator"), nodes.link(1, "learner")
    received(coordinator, Joined)
    for seq in range(3):
        coordinator.store.put(f"d{seq}", {"x": seq})
        meta = {"data_id": f"d{seq}", "object_ref": f"d{seq}"}
        coordinator.send("node_1", LearnData("t", 0, seq, (meta, meta, {"data_id": "lost"})))
        assert received(learner, LearnData)[1].seq == seq
        assert learner.store.get(f"d{seq}") == {"x": seq}
        assert learner.store.missing(["lost"]) == {"lost"}
    assert learner.store.missing(["d0"]) == {"d0"}, "read before the next batch was demanded"
    assert coordinator.store.get("d0") == {"x": 0}


def test_a_peer_that_leaves_is_reported_and_takes_no_messages(nodes):
    coordinator = nodes.link(0, "coordinator")
    with nodes.current(1, "learner"):
        worker = RouterLink("learner")
        received(coordinator, Joined)
        worker.close(1.0)
    assert received(coordinator, Left)[0] == "node_1"
    assert coordinator.peers() == {}
    with pytest.raises(DeliveryTimeout, match="not connected"):
        coordinator.send("node_1", ResourceQuery())


def test_a_process_that_replaces_another_one_is_a_new_peer_without_its_messages(nodes):
    coordinator = nodes.link(0, "coordinator")
    with nodes.current(1, "learner") as router:
        first = RouterLink("learner")
        received(coordinator, Joined)
        # As if it was killed: it says no goodbye, and its peers keep what is for it.
        router.suspend()
        coordinator.send("node_1", TaskDone("stale", 0, {}))
        router.close(deadline_s=0.1, goodbye=False)
        first.close(0.0)
    received(coordinator, Left)
    with nodes.current(1, "learner"):
        second = RouterLink("learner")
        assert received(coordinator, Joined)[0] == "node_1"
        coordinator.send("node_1", ResourceQuery())
        while (found := second.receive(DEADLINE_S)) != ("node_0", ResourceQuery()):
            assert found == ("node_0", Joined("coordinator"))
        second.close(1.0)


def test_the_end_of_the_coordinators_link_stops_the_workers(nodes):
    joined, stopped = threading.Event(), []

    def work():
        with nodes.current(1, "learner"):
            link = RouterLink("learner")
            received(link, Joined)
            joined.set()
            stopped.append(link.wait_until_stopped(DEADLINE_S))
            link.close(1.0)

    worker = threading.Thread(target=work)
    worker.start()
    with nodes.current(0, "coordinator"):
        link, store = create_coordinator_link({"system": {"coordinator": {"type": "router"}}})
        assert store is link.store
        received(link, Joined)
        assert joined.wait(DEADLINE_S)
        link.close(5.0)
        link.close(5.0)
        worker.join(DEADLINE_S)
    assert stopped == [True]
    assert link.receive(DEADLINE_S) is None, "a closed link does not wait"


def test_a_message_that_cannot_be_read_is_ignored(pair, caplog):
    coordinator, worker = pair
    to = coordinator._event("node_0")
    content = tuple(worker._own), coordinator._own.token
    for kind, fields in (("NoSuch", {}), ("TaskDone", {"x": 1})):
        worker._task.emit(to, *content, kind, fields, {}, ("token", 1), only_remote=True)
    worker.send("node_0", DataDemand("t", 0, 0, "b", 4, 0))
    assert isinstance(coordinator.receive(DEADLINE_S)[1], DataDemand)
    assert caplog.text.count("cannot be read") == 2


def test_without_a_router_the_error_says_how_to_start_the_program():
    with pytest.raises(ConfigError, match="ditask"):
        RouterLink("learner")
    with Task(Context()) as task, pytest.raises(ConfigError, match="ditask"):
        RouterLink("learner", task=task)
    with pytest.raises(ValueError, match="timeout_s"):
        RouterLink("learner", timeout_s=0)


def test_a_peer_that_sends_a_lot_waits_and_does_not_delay_the_others(nodes):
    coordinator = nodes.link(0, "coordinator")
    loud, quiet = nodes.link(1, "collector"), nodes.link(2, "learner")
    for _ in range(2):
        received(coordinator, Joined)
    for link in (loud, quiet):
        while received(link, Joined)[0] != "node_0":
            pass
    sent = []

    def flood():
        for seq in range(100):
            loud.send("node_0", ready(f"d{seq}", seq))
            sent.append(seq)

    thread = threading.Thread(target=flood)
    thread.start()
    first = received(coordinator, StepDataReady)[1]
    quiet.send("node_0", DataDemand("t", 0, 0, "b", 4, 0))
    assert len(sent) < 40, "it has to wait"
    messages = [first]
    while len(messages) < 101:
        messages.append(coordinator.receive(DEADLINE_S)[1])
    thread.join(DEADLINE_S)
    data = [one.seq for one in messages if isinstance(one, StepDataReady)]
    assert data == list(range(100))
    position = next(n for n, one in enumerate(messages) if isinstance(one, DataDemand))
    assert position < 40, "the quiet peer has its turn"


def test_a_peer_that_takes_nothing_in_time_is_an_error(nodes):
    coordinator, worker = nodes.link(0, "coordinator", timeout_s=0.05), nodes.link(1, "collector")
    received(coordinator, Joined)
    with pytest.raises(DeliveryTimeout, match="has taken no message"):
        for _ in range(100):
            coordinator.send("node_1", ResourceQuery())
    assert worker.receive(DEADLINE_S) is not None


def test_what_a_worker_does_is_shown_as_the_progress_of_its_node(nodes):
    coordinator = nodes.link(0, "coordinator")
    with nodes.current(1, "collector"):
        node = current_node()
        worker = RouterLink("collector")
        received(worker, Joined)
        for cur_step in (10, 25, 5):
            worker.send("node_0", CollectorInfo("t", 0, cur_step, {"cur_step": cur_step}))
        worker.send("node_0", DataDemand("l", 0, 0, "b", 4, 7))
        progress = node.progress()
        assert (progress.step, progress.counters) == (4, {"updates": 7, "env steps": 30})
        received(coordinator, DataDemand)
        worker.close(1.0)


def test_messages_that_the_router_has_dropped_do_not_count_as_in_transit(nodes):
    task = nodes.task(0, "coordinator")
    coordinator = RouterLink("coordinator", task=task, timeout_s=0.05)
    worker = nodes.link(1, "learner", timeout_s=0.05)
    received(coordinator, Joined)
    with pytest.raises(DeliveryTimeout, match="has taken no message"):
        for _ in range(100):
            coordinator.send("node_1", ResourceQuery())
    task.emit("node.forgotten", 1, 16, only_local=True)
    task.sync(timeout_s=DEADLINE_S)
    coordinator.send("node_1", ResourceQuery())
    assert worker.receive(DEADLINE_S) is not None
