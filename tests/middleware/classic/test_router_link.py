"""Messages of the classic parallel mode over real routers."""

from __future__ import annotations

import threading

import pytest
from easydict import EasyDict

from dmiddleware.errors import ConfigError, DeliveryTimeout, EncodeError
from dmiddleware.pipeline import Context, Task, current_node
from dmiddleware.worker.comm.link import create_coordinator_link
from dmiddleware.worker.coordinator.conversation import Answer, Ask
from dmiddleware.worker.coordinator.messages import Joined, Left
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


QUERY = Ask("1", "resource")


def test_messages_arrive_in_order_with_plain_values(pair):
    coordinator, worker = pair
    start = Ask("2", "collector_start_task", EasyDict(a={"b": [1, EasyDict(c=(2, 3))]}))
    coordinator.send("node_1", QUERY)
    coordinator.send("node_1", start)
    assert worker.receive(DEADLINE_S) == ("node_0", QUERY)
    sender, message = worker.receive(DEADLINE_S)
    assert (sender, message) == ("node_0", start)
    assert type(message.request["a"]["b"][1]) is dict
    worker.send("node_0", Answer("1", {"gpu": 1}))
    assert coordinator.receive(DEADLINE_S) == ("node_1", Answer("1", {"gpu": 1}))


def ready(*refs):
    first, *more = ({"data_id": ref, "object_ref": ref} for ref in refs)
    return Answer("1", {**first, "more": more})


def test_step_data_travels_with_its_metadata_and_leaves_the_collector(pair):
    coordinator, worker = pair
    for ref in ("d", "e"):
        worker.store.put(ref, {"x": [1, ref]})
    worker.send("node_0", ready("d", "e"))
    received(coordinator, Answer)
    for ref in ("d", "e"):
        assert coordinator.store.get(ref) == {"x": [1, ref]}
    # A coordinator that has just begun may not have got the answer.
    coordinator.send("node_1", QUERY)
    received(worker, Ask)
    assert worker.store.missing(["d", "e"]) == set()
    coordinator.send("node_1", Ask("2", "collector_data_task"))
    received(worker, Ask)
    assert worker.store.missing(["d", "e"]) == {"d", "e"}


def test_a_batch_brings_its_step_data_which_stays_at_the_coordinator_until_it_is_deleted(nodes):
    coordinator, learner = nodes.link(0, "coordinator"), nodes.link(1, "learner")
    received(coordinator, Joined)
    for seq in range(3):
        coordinator.store.put(f"d{seq}", {"x": seq})
        meta = {"data_id": f"d{seq}", "object_ref": f"d{seq}"}
        data = [meta, meta, {"data_id": "lost"}]
        coordinator.send("node_1", Ask(str(seq), "learner_learn_task", {"data": data}))
        assert received(learner, Ask)[1].id == str(seq)
        for _ in range(3):  # other requests replace no batch
            coordinator.send("node_1", Ask("", "learner_get_data_task"))
            received(learner, Ask)
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
        coordinator.send("node_1", QUERY)


def test_a_process_that_replaces_another_one_is_a_new_peer_without_its_messages(nodes):
    coordinator = nodes.link(0, "coordinator")
    with nodes.current(1, "learner") as router:
        first = RouterLink("learner")
        received(coordinator, Joined)
        # As if it was killed: it says no goodbye, and its peers keep what is for it.
        router.suspend()
        coordinator.send("node_1", Ask("stale", "resource"))
        router.close(deadline_s=0.1, goodbye=False)
        first.close(0.0)
    received(coordinator, Left)
    with nodes.current(1, "learner"):
        second = RouterLink("learner")
        assert received(coordinator, Joined)[0] == "node_1"
        coordinator.send("node_1", QUERY)
        while (found := second.receive(DEADLINE_S)) != ("node_0", QUERY):
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
    for kind, fields in (("NoSuch", {}), ("Answer", {"x": 1})):
        worker._task.emit(to, *content, kind, fields, {}, only_remote=True)
    worker.send("node_0", Answer("1"))
    assert coordinator.receive(DEADLINE_S) == ("node_1", Answer("1"))
    assert caplog.text.count("cannot be read") == 2


def test_an_answer_to_an_earlier_coordinator_is_not_delivered_to_the_next(pair):
    coordinator, worker = pair
    to = coordinator._event("node_0")
    content = tuple(worker._own), "token of another process"
    worker._task.emit(to, *content, "Answer", {"id": "1"}, {}, only_remote=True)
    worker.send("node_0", Answer("2"))
    assert coordinator.receive(DEADLINE_S) == ("node_1", Answer("2"))


def test_content_that_cannot_be_sent_is_an_error(pair):
    coordinator, _ = pair
    with pytest.raises(EncodeError):
        coordinator.send("node_1", Ask("1", "collector_start_task", {"task_info": object()}))


def test_without_a_router_the_error_says_how_to_start_the_program():
    with pytest.raises(ConfigError, match="ditask"):
        RouterLink("learner")
    with Task(Context()) as task, pytest.raises(ConfigError, match="ditask"):
        RouterLink("learner", task=task)
    with pytest.raises(ValueError, match="timeout_s"):
        RouterLink("learner", timeout_s=0)


def test_what_a_worker_does_is_shown_as_the_progress_of_its_node(nodes):
    coordinator = nodes.link(0, "coordinator")
    with nodes.current(1, "collector"):
        node = current_node()
        worker = RouterLink("collector")
        received(worker, Joined)
        for cur_step in (10, 25, 5):
            worker.send("node_0", Answer("1", {"cur_step": cur_step}))
        worker.send("node_0", Answer("1", {"batch_size": 4, "cur_learner_iter": 7}))
        progress = node.progress()
        assert (progress.step, progress.counters) == (4, {"updates": 7, "env steps": 30})
        received(coordinator, Answer)
        worker.close(1.0)
