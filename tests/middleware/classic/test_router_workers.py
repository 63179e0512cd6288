"""A real collector and a real learner, and a coordinator that the test plays, over real routers."""

from __future__ import annotations

import threading

import pytest
import torch

from dmiddleware.errors import ConfigError
from dmiddleware.worker import create_comm_collector, create_comm_learner
from dmiddleware.worker.coordinator.messages import (
    CollectorInfo,
    DataDemand,
    Joined,
    LearnData,
    LearnInfo,
    ResourceQuery,
    Resources,
    StepDataReady,
    TaskClose,
    TaskDone,
    TaskFailed,
    TaskOffer,
    TaskStarted,
)
from middleware.classic import RouterCollector, RouterLearner, RouterLink
from tests.dmiddleware.worker.comm.talking import Talking
from tests.middleware.classic.router_nodes import DEADLINE_S, received

POLICY = {
    "type": "dqn",
    "model": {"obs_shape": 4, "action_shape": 2, "encoder_hidden_sizes": [8]},
    "learn": {"batch_size": 8},
    "collect": {"n_sample": 8},
}
LEARNER_TASK = {
    "policy_id": "p",
    "buffer_id": "b",
    "learner_cfg": {
        "type": "base",
        "exp_name": "exp",
        "train_iterations": 3,
        "hook": {"save_ckpt_after_run": False},
    },
    "policy": POLICY,
}
COLLECTOR_TASK = {
    "buffer_id": "b",
    "collector_cfg": {
        "type": "zergling",
        "exp_name": "exp",
        "env": {"id": "CartPole-v1", "env_num": 2, "manager": {"episode_num": 2}, "seed": 0},
        "policy": POLICY,
        "policy_update_path": "p",
        "collect_setting": {"eps": 0.5},
        "eval_flag": False,
    },
}


@pytest.fixture(autouse=True)
def _alone(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def run(nodes):
    """Start a coordinator's link, and a learner and a collector on their threads."""
    threads = []

    def work(node_id, role, create):
        with nodes.current(node_id, role), create({"type": "router"}) as worker:
            assert worker.join(DEADLINE_S)

    with nodes.current(0, "coordinator"):
        link = Talking(RouterLink("coordinator"))
        for node_id, (role, create) in enumerate(
            [("learner", create_comm_learner), ("collector", create_comm_collector)], start=1
        ):
            thread = threading.Thread(target=work, args=(node_id, role, create))
            thread.start()
            threads.append(thread)
        joined = {received(link, Joined) for _ in threads}
        assert joined == {("node_1", Joined("learner")), ("node_2", Joined("collector"))}
        yield link
        link.close(5.0)
        for thread in threads:
            thread.join(DEADLINE_S)
            assert not thread.is_alive()


class Inbox:
    """Everything that has arrived at a coordinator's link, to be looked for in any order."""

    def __init__(self, link):
        self.link = link
        self.messages = []

    def take(self, kind, accepts=lambda message: True):
        """Remove and return the first message of a kind that is accepted; wait for it."""
        for message in self.messages:
            if isinstance(message, kind) and accepts(message):
                self.messages.remove(message)
                return message
        while True:
            found = self.link.receive(DEADLINE_S)
            assert found is not None, f"no {kind.__name__} among {self.messages}"
            if isinstance(found[1], kind) and accepts(found[1]):
                return found[1]
            self.messages.append(found[1])

    def offer(self, uid, kind, task_id, task):
        self.link.send(uid, TaskOffer(task_id, 0, kind, {"task_id": task_id, **task}))
        assert self.take(TaskStarted) == TaskStarted(task_id, 0)


def test_a_learner_learns_from_what_a_collector_collects_with_its_weights(run):
    link, inbox = run, Inbox(run)
    link.send("node_2", ResourceQuery())
    assert inbox.take(Resources).resource == {"gpu": 1, "cpu": 20}
    inbox.offer("node_1", "learner", "l", LEARNER_TASK)
    demand = inbox.take(DataDemand)
    assert (demand.batch_size, demand.cur_learner_iter) == (8, 0)
    inbox.offer("node_2", "collector", "c", COLLECTOR_TASK)
    ready = [inbox.take(StepDataReady) for _ in range(16)]
    assert [one.seq for one in ready] == sorted({one.seq for one in ready})
    first = link.link.store.get(ready[0].data["object_ref"])
    assert first["obs"].shape == (4,) and ready[0].data["policy_iter"] == 0
    data = tuple({**one.data, "replay_unique_id": one.data_id} for one in ready[:8])
    link.send("node_1", LearnData("l", 0, demand.seq, data))
    for seq in range(1, 3):
        demand = inbox.take(DataDemand)
        assert (demand.seq, demand.cur_learner_iter, demand.lost) == (seq, seq, ())
        link.send("node_1", LearnData("l", 0, seq, data))
    learned = inbox.take(LearnInfo, lambda message: message.info["learner_done"]).info
    assert learned["learner_step"] == 3
    link.send("node_1", TaskClose("l", 0))
    assert inbox.take(TaskDone).task_id == "l"
    progress = inbox.take(CollectorInfo, lambda message: message.info["collector_done"]).info
    assert progress["cur_episode"] == 4
    link.send("node_2", TaskClose("c", 0))
    result = inbox.take(TaskDone).result
    assert result["task_id"] == "c" and result["real_episode_count"] == 4


def test_a_task_that_fails_is_reported_over_the_router(run):
    inbox = Inbox(run)
    task = {**COLLECTOR_TASK, "collector_cfg": {"type": "no_such"}}
    inbox.offer("node_2", "collector", "c", task)
    failed = inbox.take(TaskFailed)
    assert failed.task_id == "c" and "no_such" in failed.message


@pytest.mark.parametrize("create", [create_comm_collector, create_comm_learner])
def test_without_a_router_the_error_says_how_to_start_the_program(create):
    with pytest.raises(ConfigError, match="ditask"):
        create({"type": "router"})


def test_a_wait_for_the_end_of_the_run_has_a_limit(nodes):
    with RouterCollector(task=nodes.task(0, "collector")) as worker:
        assert worker.join(0.01) is False
    with RouterLearner(task=nodes.task(1, "learner")) as learner:
        learner.start()
        assert learner.store is learner.store


def test_a_wait_without_a_limit_ends_when_the_process_is_asked_to_stop(nodes):
    task = nodes.task(0, "collector")
    with RouterCollector(task=task) as worker:
        threading.Timer(0.05, task.stop, ["the run is over"]).start()
        assert worker.join() is True


def test_several_ranks_over_the_router_are_refused(nodes):
    worker = RouterLearner(task=nodes.task(0, "learner"))
    worker._world_size = 2
    with pytest.raises(ConfigError, match="one of 2 ranks"):
        worker.start()
