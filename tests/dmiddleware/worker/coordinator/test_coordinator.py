"""The coordinator with a link, a store, buffers and workers, on a fake clock."""

from __future__ import annotations

import pytest

from dmiddleware.classic.replay_buffers import BUFFER_REGISTRY, NaiveReplayBuffer
from dmiddleware.errors import CheckpointDamaged, ConfigError, RegistryError
from dmiddleware.worker.comm.file_store import FileStore
from dmiddleware.worker.comm.link import COORDINATOR_LINK_REGISTRY
from dmiddleware.worker.comm.memory_link import MemoryNetwork
from dmiddleware.worker.coordinator.coordinator import Coordinator
from dmiddleware.worker.coordinator.messages import LEARNER
from dmiddleware.worker.errors import CoordinatorError
from tests.dmiddleware.worker.coordinator.local_cluster import LocalCluster, config

NAMED = {"c0": ["c0", "127.0.0.1", 1], "c1": ["c1", "127.0.0.1", 2]}


@pytest.fixture
def cluster(tmp_path):
    return LocalCluster(tmp_path)


def test_a_learner_learns_from_what_collectors_collect(cluster):
    cluster.start()
    learner = cluster.learner()
    cluster.collector()
    cluster.run(lambda: ("finished", "learner_task_0") in cluster.tape)
    assert learner.taken[0] == "learner_task_0"
    assert ("finished", "collector_task_0") in cluster.tape
    assert [one for one in cluster.tape if one[0] == "info"][:3] == [
        ("info", "learner_task_0", step) for step in (1, 2, 3)
    ]


def test_nothing_is_left_when_the_commander_ends_the_training(cluster):
    coordinator = cluster.start()
    cluster.learner(n_learn=1000)
    cluster.collector(result={"converged": True})
    cluster.run(lambda: coordinator.system_shutdown_flag)
    assert coordinator.state == "draining"
    cluster.run(lambda: not coordinator.tasks)
    assert coordinator.wait(0)
    coordinator.close()
    assert (coordinator.state, cluster.files()) == ("closed", [])
    assert all(worker.task is None for worker in cluster.workers.values())


def test_a_task_that_is_offered_as_the_training_ends_is_closed_after_its_offer(tmp_path):
    cluster = LocalCluster(tmp_path, commander={"collector_task_space": 2})
    coordinator = cluster.start()
    cluster.learner(n_learn=1000)
    worker = cluster.collector(result={"converged": True})
    cluster.run(lambda: coordinator.system_shutdown_flag and not coordinator.tasks)
    coordinator.close()
    names = [ask.name for ask in worker.asked if ask.name != "collector_data_task"]
    assert names == ["resource", *2 * ["collector_start_task", "collector_close_task"]]
    assert (coordinator.counters.get("lost"), worker.task, cluster.files()) == (None, None, [])


def test_the_shutdown_flag_stays_set(cluster):
    coordinator = cluster.start()
    cluster.learner(n_learn=1000)
    cluster.collector("c0", result={"converged": True})
    cluster.collector("c1", n_data=1000)
    cluster.run(lambda: coordinator.system_shutdown_flag and not coordinator.tasks)
    ends = [one for one in cluster.tape if one[0] == "finished" and "collector" in one[1]]
    assert ends == [("finished", "collector_task_0"), ("finished", "collector_task_1")]
    assert coordinator.system_shutdown_flag


# A dead worker.


def test_the_task_of_a_killed_worker_is_given_to_another(cluster):
    coordinator = cluster.start()
    learner = cluster.learner(n_learn=1000)
    first = cluster.collector("c0", n_data=1000)
    cluster.run(lambda: first.taken)
    second = cluster.collector("c1")
    first.kill()
    cluster.run(lambda: second.taken)
    assert second.taken[0] == f"{first.taken[0]}-2"
    assert coordinator.counters["lost"] == 1
    assert learner.taken == ["learner_task_0"]


def test_the_task_of_a_silent_worker_is_lost_after_its_time(cluster):
    coordinator = cluster.start()
    cluster.learner(n_learn=1000)
    silent = cluster.collector("c0", n_data=1000)
    cluster.run(lambda: silent.task is not None and silent.seq > 1)
    other = cluster.collector("c1", n_data=1000)
    cluster.run_for(5)
    silent.is_hung = True
    silent_task = silent.task_id
    cluster.run_for(29)
    assert silent_task in coordinator.tasks
    cluster.run(lambda: silent_task not in coordinator.tasks, most_s=3)
    assert coordinator.counters["lost"] == 1
    assert silent_task in coordinator.workers or coordinator.workers["c0"] == "joining"
    assert other.uid in coordinator.workers


def test_a_worker_that_wakes_up_ends_the_task_that_it_has_lost(cluster):
    coordinator = cluster.start()
    cluster.learner(n_learn=1000)
    worker = cluster.collector("c0", n_data=1000)
    cluster.run(lambda: worker.seq > 1)
    worker.is_hung = True
    cluster.run(lambda: coordinator.counters.get("lost"))
    worker.is_hung = False
    cluster.run(lambda: len(worker.taken) == 2)
    names = [one.name for one in worker.asked if one.name != "collector_data_task"]
    assert names[:3] == ["resource", "collector_start_task", "collector_close_task"]
    assert worker.taken[0] == worker.asked[1].request["task_info"]["task_id"]
    assert worker.task_id == worker.taken[1] == "collector_task_0-2"


def test_a_task_that_is_lost_too_often_fails(cluster):
    coordinator = cluster.start()
    cluster.learner(n_learn=1000)
    for attempt in range(3):
        worker = cluster.collector(f"c{attempt}", n_data=1000)
        cluster.run(lambda worker=worker: worker.taken)
        worker.kill()
    cluster.run(lambda: ("failed", "collector_task_0") in cluster.tape)
    assert (coordinator.counters["lost"], coordinator.counters["failed"]) == (3, 1)


def test_a_worker_whose_task_raises_gets_the_next_attempt_after_a_pause(cluster):
    cluster.start()
    cluster.learner(n_learn=1000)
    worker = cluster.collector(n_data=1000)
    cluster.run(lambda: worker.task)
    worker.fail()
    assert cluster.run(lambda: len(worker.taken) == 2) >= 1.0
    assert worker.taken[1] == "collector_task_0-2"


def test_a_task_without_a_worker_expires(cluster):
    coordinator = cluster.start()
    cluster.learner(n_learn=1000)
    took = cluster.run(lambda: ("failed", "collector_task_0") in cluster.tape)
    assert 30 <= took < 35
    assert coordinator.counters["expired"] == 1


def test_the_timeout_also_ends_tasks_that_have_begun_to_end(cluster):
    coordinator = cluster.start()
    cluster.learner(n_learn=1000)
    cluster.collector(n_data=1, ignores_close=True)
    cluster.run(lambda: "finishing" in coordinator.tasks.values())
    took = cluster.run(lambda: coordinator.counters.get("lost"), most_s=35)
    assert took >= 29


def test_an_offer_without_an_answer_is_withdrawn(tmp_path):
    cluster = LocalCluster(tmp_path, collector=NAMED)
    coordinator = cluster.start()
    deaf = cluster.collector("c0")
    cluster.run(lambda: coordinator.workers.get("c0") == "idle")
    deaf.is_hung = True
    cluster.learner(n_learn=1000)
    cluster.run(lambda: "offered" in coordinator.tasks.values())
    other = cluster.collector("c1")
    took = cluster.run(lambda: other.taken, most_s=15)
    assert took >= 9
    assert coordinator.workers["c0"] == "joining"
    assert coordinator.counters.get("lost", 0) == 0


def test_a_worker_that_refuses_is_asked_again_after_a_pause(cluster):
    coordinator = cluster.start()
    cluster.learner(n_learn=1000)
    worker = cluster.collector(refuses=True)
    cluster.run_for(10)
    assert 3 <= coordinator.counters["refused"] <= 10
    worker.refuses = False
    cluster.run(lambda: worker.taken, most_s=5)
    assert coordinator.counters.get("lost", 0) == 0


def test_close_waits_no_longer_than_the_living_workers_need(cluster):
    coordinator = cluster.start()
    cluster.learner(n_learn=1000)
    dead = cluster.collector(n_data=1000)
    cluster.run(lambda: dead.seq > 1)
    dead.kill()
    began = cluster.clock.now()
    coordinator.close(deadline_s=60)
    assert cluster.clock.now() - began < 3
    assert coordinator.state == "closed"


def test_close_gives_up_a_silent_worker_at_its_deadline(cluster):
    coordinator = cluster.start()
    cluster.learner(n_learn=1000)
    silent = cluster.collector(n_data=1000)
    cluster.run(lambda: silent.seq > 1)
    silent.is_hung = True
    began = cluster.clock.now()
    coordinator.close(deadline_s=10)
    assert 10 <= cluster.clock.now() - began < 12
    assert cluster.files() == []


# Data.


def test_late_data_of_a_lost_task_is_deleted(cluster):
    coordinator = cluster.start()
    cluster.learner(n_learn=1000)
    worker = cluster.collector(n_data=1000)
    cluster.run(lambda: worker.seq > 1)
    worker.is_hung = True
    cluster.run(lambda: coordinator.counters.get("lost"))
    ref = cluster.store.put("late", {"obs": 1})
    worker.report(data_id="late", object_ref=ref)
    worker.is_hung = False
    cluster.run(lambda: coordinator.counters.get("late_data"))
    assert cluster.store.missing([ref]) == {ref}


def test_data_that_arrives_twice_is_pushed_once(cluster):
    coordinator = cluster.start()
    cluster.learner(n_learn=1000, batch_size=1000)
    worker = cluster.collector(n_data=3)
    sent = []
    report = worker.report
    worker.report = lambda **data: [report(**data), sent.append(worker.reports[-1])]
    cluster.run(lambda: worker.seq >= 3 and not worker.reports)
    worker.reports = [dict(one) for one in sent if "data_id" in one]
    cluster.run(lambda: coordinator.counters.get("duplicates") == 3)
    state = coordinator.state_dict()["buffers"]["buffer_naive"]
    assert len(state["refs"]) == state["items"]["push_count"] == 3


def test_step_data_is_kept_until_the_learner_has_acknowledged_it(tmp_path):
    cluster = LocalCluster(tmp_path, buffer={"replay_buffer_size": 2})
    cluster.start()
    learner = cluster.learner(n_learn=1000)
    collector = cluster.collector(n_data=1000)
    # It reads the batch, while others overwrite the buffer.
    learner.take_data = lambda data: setattr(learner, "demanded", {"pending": True})
    cluster.run(learner.batches)
    refs = [meta["object_ref"] for meta in learner.batches()[0]]
    begin = collector.seq
    cluster.run(lambda: collector.seq > begin + 10)
    (held,) = learner.batches()
    assert cluster.store.missing(meta["object_ref"] for meta in held) == set()
    assert len(cluster.files()) <= 2 + 2 + 1 + len(collector.reports)
    del learner.take_data
    learner.demand()
    cluster.run(lambda: cluster.store.missing(refs) == set(refs))


def test_a_lost_sample_is_replaced_and_forgotten(cluster):
    coordinator = cluster.start()
    learner = cluster.learner(n_learn=1000, batch_size=4)
    collector = cluster.collector(n_data=3)
    cluster.run(lambda: collector.seq >= 3)
    for path in (cluster.folder / "data").rglob("*.safetensors"):
        path.unlink()
    cluster.run(lambda: learner.n_learned > 0)
    assert coordinator.counters["lost_data"] == len(set(learner.lost)) == 3


def test_a_demand_is_parked_until_there_is_enough_data(cluster):
    cluster.start()
    learner = cluster.learner(batch_size=4)
    cluster.run(lambda: learner.is_waiting)
    cluster.run_for(20)
    assert learner.n_learned == 0
    collector = cluster.collector(n_data=4)
    cluster.run(lambda: learner.n_learned == 1)
    assert collector.seq >= 4


def test_a_refused_push_is_counted_and_its_data_deleted(tmp_path):
    limit = {"push_sample_rate_limit": {"max": 1, "min": 0}, "window_seconds": 1000}
    cluster = LocalCluster(tmp_path, buffer={"type": "advanced", "thruput_controller": limit})
    coordinator = cluster.start()
    cluster.learner(n_learn=1000).take_data = lambda data: None
    cluster.collector(n_data=1000)
    cluster.run(lambda: coordinator.counters.get("refused_pushes", 0) > 3)
    (buffer,) = coordinator.state_dict()["buffers"].values()
    cluster.run_for(1)
    assert len(buffer["refs"]) <= 4
    assert len(cluster.files()) <= 4 + len(cluster.workers["c0"].reports)


def test_late_data_is_deleted_by_the_callback_too(cluster):
    coordinator = cluster.start()
    ref = cluster.store.put("late", {"obs": 1})
    coordinator.deal_with_collector_send_data("gone", "gone", "late", {"object_ref": ref})
    assert cluster.files() == []


def test_data_for_a_closed_buffer_is_deleted(cluster):
    coordinator = cluster.start()
    learner = cluster.learner(n_learn=1000, batch_size=1000)
    collector = cluster.collector(n_data=1000)
    cluster.run(lambda: collector.seq > 1)
    coordinator.deal_with_learner_finish_task(learner.task_id, {})
    ref = cluster.store.put("late", {"obs": 1})
    task_id = collector.task_id
    coordinator.deal_with_collector_send_data(task_id, "buffer_naive", "late", {"object_ref": ref})
    assert cluster.store.missing([ref]) == {ref}


@BUFFER_REGISTRY.register("patient_for_a_test")
class PatientBuffer(NaiveReplayBuffer):
    """Gives nothing in the first minute, as a rate control could."""

    def sample(self, size, cur_learner_iter, sample_range=None, replace=False):
        if self._clock() < 60:
            return None
        return super().sample(size, cur_learner_iter, sample_range, replace)


def test_a_parked_demand_is_answered_when_the_rate_control_changes(tmp_path):
    cluster = LocalCluster(tmp_path, buffer={"type": "patient_for_a_test"})
    cluster.start()
    learner = cluster.learner(n_learn=1000)
    collector = cluster.collector(n_data=4)
    cluster.run(lambda: collector.seq > 4)
    collector.is_hung = True
    cluster.run(lambda: learner.n_learned == 1)
    assert 60 <= cluster.clock.now() < 62


def test_a_finished_learner_closes_its_buffer_and_ends_its_collectors(cluster):
    coordinator = cluster.start()
    cluster.learner(n_learn=2)
    cluster.collector(n_data=1000)
    cluster.run(lambda: ("finished", "learner_task_0") in cluster.tape)
    cluster.run(lambda: ("finished", "collector_task_0") in cluster.tape)
    assert coordinator.counters.get("lost", 0) == 0


def test_unusable_priorities_are_logged_and_the_run_continues(tmp_path):
    cluster = LocalCluster(tmp_path, buffer={"type": "advanced"})
    coordinator = cluster.start()
    learner = cluster.learner(n_learn=1000)
    cluster.collector()
    cluster.run(lambda: learner.n_learned > 0)
    sample = learner.batches()[0][0]
    names = ("replay_unique_id", "replay_buffer_idx", "priority")
    learner.priority_info = {name: [sample[name]] for name in names}
    cluster.run_for(2)
    assert coordinator.counters.get("bad_messages", 0) == 0
    learner.priority_info["priority"] = [float("nan")]
    cluster.run(lambda: coordinator.counters.get("bad_messages"))
    learned = learner.n_learned
    cluster.run(lambda: learner.n_learned > learned + 3)


# Workers that come and go.


def test_further_collectors_widen_the_task_space_and_narrow_it_when_they_leave(cluster):
    coordinator = cluster.start()
    cluster.learner(n_learn=1000)
    workers = [cluster.collector(f"c{i}", n_data=1000) for i in range(3)]
    cluster.run(lambda: all(worker.taken for worker in workers))
    assert cluster.tape.count("increase") == 2
    workers[0].kill()
    cluster.run(lambda: "decrease" in cluster.tape)
    assert len(coordinator.workers) == 3


def test_collectors_that_the_config_names_do_not_widen_the_task_space(tmp_path):
    cluster = LocalCluster(tmp_path, collector=NAMED)
    cluster.start()
    for uid in ("c0", "c1", "c2"):
        cluster.collector(uid)
    cluster.run(lambda: len(cluster.coordinator.workers) == 3)
    assert cluster.tape.count("increase") == 1


def test_a_task_goes_to_the_worker_with_enough_resources(tmp_path):
    cluster = LocalCluster(tmp_path, main={"resource": {"gpu": 1}})
    cluster.start()
    cluster.learner(n_learn=1000)
    small = cluster.collector("c0")
    big = cluster.collector("c1", resource={"gpu": 1, "cpu": 1})
    cluster.run(lambda: big.taken)
    assert small.taken == []


def test_the_worker_that_is_idle_for_longest_gets_the_task(tmp_path):
    cluster = LocalCluster(tmp_path, collector=NAMED)
    cluster.start()
    first = cluster.collector("c1")
    cluster.run(lambda: cluster.coordinator.workers.get("c1") == "idle")
    second = cluster.collector("c0")
    cluster.run(lambda: cluster.coordinator.workers.get("c0") == "idle")
    cluster.learner(n_learn=1000)
    cluster.run(lambda: first.taken or second.taken)
    assert (bool(first.taken), bool(second.taken)) == (True, False)


def test_a_worker_that_cannot_be_reached_is_given_up_and_may_come_back(cluster):
    coordinator = cluster.start()
    send, failed = cluster.link.send, []

    def fail(peer, message):
        failed.append(peer)
        raise TimeoutError("its queue is full")

    cluster.link.send = fail
    learner = cluster.learner(n_learn=1000)
    cluster.run(lambda: failed)
    assert coordinator.workers == {}
    cluster.run_for(20)
    assert len(failed) > 5
    assert learner.asked == []
    cluster.link.send = send
    cluster.run(lambda: learner.taken)


# The states of the coordinator.


def test_a_coordinator_starts_once(cluster):
    coordinator = cluster.start()
    with pytest.raises(CoordinatorError, match="running"):
        coordinator.start()
    coordinator.close()
    coordinator.close()
    with pytest.raises(CoordinatorError, match="closed"):
        coordinator.start()


def test_a_coordinator_can_be_closed_without_a_start(tmp_path):
    coordinator = LocalCluster(tmp_path).coordinator
    assert coordinator.state == "new"
    coordinator.close()
    assert coordinator.state == "closed"


def test_a_thread_does_the_work(tmp_path):
    cluster = LocalCluster(tmp_path, threaded=True)
    cluster.add("l0", LEARNER, n_learn=1000)
    cluster.collector(result={"converged": True})
    with cluster.coordinator as coordinator:
        assert coordinator.state == "running"
        while not coordinator.wait(0.01):
            cluster.others_work(0.0)
    assert coordinator.state == "closed"
    assert cluster.files() == []


def test_start_and_close_wait_for_nobody_without_tasks(cluster):
    began = cluster.clock.now()
    cluster.start()
    cluster.coordinator.close()
    assert cluster.clock.now() == began


def test_start_opens_the_link_that_the_config_names(tmp_path):
    link = MemoryNetwork().connect("coordinator", "coordinator")
    opened = []
    COORDINATOR_LINK_REGISTRY.register("opened_for_a_test")(
        lambda cfg: opened.append(cfg) or (link, FileStore(tmp_path, tmp_path, "run"))
    )
    coordinator = Coordinator(config(type="opened_for_a_test"))
    with pytest.raises(CoordinatorError, match="call start"):
        coordinator.run_once()
    assert repr(coordinator) == "Coordinator('exp', new)"
    with coordinator:
        assert opened[0]["system"]["coordinator"]["port"] == 7235
    with pytest.raises(RegistryError, match="coordinator link"):
        Coordinator(config(type="carrier_pigeon")).start()


def test_a_damaged_state_is_an_error_and_keeps_the_data(tmp_path):
    path = tmp_path / "state.safetensors"
    path.write_bytes(b"damaged")
    cluster = LocalCluster(tmp_path, state_path=str(path))
    cluster.store.put("kept", {"obs": 1})
    with pytest.raises(CheckpointDamaged):
        cluster.start()
    assert cluster.coordinator.state == "closed"
    assert len(cluster.files()) == 1


def test_an_error_of_the_commander_ends_the_run_with_that_error(tmp_path):
    cluster = LocalCluster(tmp_path, threaded=True)

    def broken():
        raise ZeroDivisionError("the commander has a bug")

    cluster.commander.get_learner_task = broken
    cluster.coordinator.start()
    with pytest.raises(CoordinatorError, match="the commander has a bug"):
        cluster.coordinator.wait(30)
    with pytest.raises(CoordinatorError, match="the commander has a bug"):
        cluster.coordinator.close()


# The callbacks without a link.


def _restored(cluster, tmp_path) -> Coordinator:
    cluster.start()
    learner = cluster.learner(n_learn=1000, batch_size=100)
    collector = cluster.collector(n_data=1000)
    cluster.run(lambda: learner.task and collector.seq > 3)
    coordinator = Coordinator(config())
    coordinator.load_state_dict(cluster.coordinator.state_dict())
    return coordinator


def test_the_callbacks_work_without_a_link(cluster, tmp_path):
    coordinator = _restored(cluster, tmp_path)
    coordinator.deal_with_collector_send_data("collector_task_0", "buffer_naive", "new", {})
    coordinator.deal_with_collector_send_data("collector_task_0", "buffer_naive", "new", {})
    assert coordinator.counters["duplicates"] == 1
    batch = coordinator.deal_with_learner_get_data("learner_task_0", "buffer_naive", 3, 0)
    assert len(batch) == 3
    assert coordinator.deal_with_learner_get_data("learner_task_0", "buffer_naive", 99, 0) is None
    info = {"learner_step": 1, "priority_info": {}}
    coordinator.deal_with_learner_send_info("learner_task_0", "buffer_naive", info)
    assert not coordinator.deal_with_learner_judge_finish("learner_task_0", {})
    assert coordinator.deal_with_collector_judge_finish(
        "collector_task_0", {"collector_done": True}
    )
    assert coordinator.tasks["collector_task_0"] == "finishing"
    coordinator.deal_with_collector_finish_task("collector_task_0", {"converged": True})
    assert coordinator.system_shutdown_flag
    coordinator.deal_with_learner_finish_task("learner_task_0", {})
    assert coordinator.tasks == {}


def test_callbacks_about_unknown_tasks_are_ignored_but_a_demand_is_an_error(tmp_path):
    coordinator = Coordinator(config())
    coordinator.deal_with_collector_send_data("t", "b", "d", {})
    coordinator.deal_with_collector_finish_task("t", {})
    coordinator.deal_with_learner_finish_task("t", {})
    coordinator.deal_with_learner_send_info("t", "b", {})
    assert not coordinator.deal_with_collector_judge_finish("t", {"collector_done": True})
    assert not coordinator.deal_with_learner_judge_finish("t", {"learner_done": True})
    with pytest.raises(CoordinatorError, match="no learner task 't'; it has: none"):
        coordinator.deal_with_learner_get_data("t", "b", 1, 0)
    coordinator.close()


# The state.


def test_a_restarted_coordinator_adopts_what_workers_still_run(tmp_path):
    cluster = LocalCluster(
        tmp_path, state_path=str(tmp_path / "state.safetensors"), state_every_s=1
    )
    cluster.start()
    learner = cluster.learner(n_learn=1000)
    collector = cluster.collector(n_data=1000)
    cluster.run(lambda: learner.n_learned > 2 and collector.seq > 10)
    cluster.crash()
    cluster.others_work(1.0)
    coordinator = cluster.start()
    learned = learner.n_learned
    cluster.run(lambda: learner.n_learned > learned + 5)
    cluster.run_for(60)
    assert coordinator.counters["adopted"] == 2
    assert (len(learner.taken), len(collector.taken)) == (1, 1)
    assert not any(one.name == "collector_close_task" for one in collector.asked)


def test_a_task_that_nobody_runs_after_a_restart_is_started_again(tmp_path):
    cluster = LocalCluster(
        tmp_path, state_path=str(tmp_path / "state.safetensors"), state_every_s=1
    )
    cluster.start()
    cluster.learner(n_learn=1000)
    worker = cluster.collector(n_data=1000)
    cluster.run(lambda: worker.seq > 5)
    cluster.crash()
    worker.kill()
    coordinator = cluster.start()
    other = cluster.collector("c1")
    cluster.run(lambda: other.taken, most_s=40)
    assert other.taken == ["collector_task_0-2"]
    assert coordinator.counters["lost"] == 1


def test_an_attempt_is_saved_before_it_is_offered(tmp_path):
    path = tmp_path / "state.safetensors"
    cluster = LocalCluster(tmp_path, state_path=str(path), state_every_s=1000)
    cluster.start()
    first = cluster.learner(n_learn=1000)
    cluster.collector(n_data=1000)
    cluster.run(lambda: first.n_learned > 2)
    first.kill()
    second = cluster.learner("l1", n_learn=1000)
    cluster.run(lambda: second.taken)
    cluster.crash()
    coordinator = cluster.start()
    learned = second.n_learned
    cluster.run(lambda: second.n_learned > learned + 5)
    cluster.run_for(60)
    assert second.taken == ["learner_task_0-2"]
    assert coordinator.counters["adopted"] == 2


def test_references_whose_data_is_gone_are_removed_after_a_restart(tmp_path):
    cluster = LocalCluster(
        tmp_path, state_path=str(tmp_path / "state.safetensors"), state_every_s=1
    )
    cluster.start()
    cluster.learner(n_learn=1000, batch_size=1000)
    collector = cluster.collector(n_data=1000)
    cluster.run(lambda: collector.seq > 10)
    collector.kill()
    cluster.run_for(2)
    cluster.crash()
    gone = sorted((tmp_path / "data").rglob("*.safetensors"))[:3]
    for path in gone:
        path.unlink()
    coordinator = cluster.start()
    assert coordinator.counters["lost_data"] == 3
    buffer = coordinator.state_dict()["buffers"]["buffer_naive"]
    assert set(buffer["refs"].values()) == {f"run/{name}" for name in cluster.files()}


def test_a_closed_run_that_is_not_over_continues_in_another_process(tmp_path):
    path = tmp_path / "state.safetensors"
    cluster = LocalCluster(tmp_path, state_path=str(path))
    coordinator = cluster.start()
    cluster.learner(n_learn=1000, batch_size=1000)
    collector = cluster.collector(n_data=1000)
    cluster.run(lambda: collector.seq > 10)
    coordinator.close()
    kept = cluster.files()
    assert path.exists()
    assert kept
    cluster.coordinator = cluster.new_coordinator(cluster.cfg)
    again = cluster.start()
    assert len(again.state_dict()["buffers"]["buffer_naive"]["refs"]) >= 10


def test_the_state_file_is_removed_when_the_training_is_over(tmp_path):
    path = tmp_path / "state.safetensors"
    cluster = LocalCluster(tmp_path, state_path=str(path), state_every_s=1)
    coordinator = cluster.start()
    cluster.learner(n_learn=1000)
    cluster.collector(result={"converged": True})
    cluster.run(path.exists)
    cluster.run(lambda: coordinator.system_shutdown_flag)
    coordinator.close()
    assert not path.exists()


def test_a_state_is_loaded_before_start_only(cluster):
    coordinator = cluster.start()
    with pytest.raises(CoordinatorError, match="before start"):
        coordinator.load_state_dict(state_dict=coordinator.state_dict())
    with pytest.raises(CoordinatorError, match="version"):
        Coordinator(config()).load_state_dict({"version": 99})


# The config.


@pytest.mark.parametrize(
    ("policy", "word"),
    [
        ({"learn": {"learner": {"train_iteration": 3}}}, "train_iterations"),
        ({"learn": {"learner": {"type": "bass"}}}, "base"),
        ({"collect": {"collector": {"type": "zergling", "print_frequency": 3}}}, "print_freq"),
        ({"type": "dqn", "learn": {"batchsize": 3}}, "learn.batch_size"),
        ({"type": "dqm"}, "dqn"),
    ],
)
def test_a_config_with_which_each_task_would_fail_is_refused_at_once(policy, word):
    cfg = config()
    cfg["main"]["policy"] = {**cfg["main"]["policy"], **policy}
    with pytest.raises((ConfigError, RegistryError), match=word):
        Coordinator(cfg)


def test_an_unusable_config_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="system is missing"):
        Coordinator({"main": {}})
    with pytest.raises(ConfigError, match="platform k8s"):
        Coordinator(config(operator_server={"system_addr": "x"}))
    with pytest.raises(ConfigError, match="replay_buffer_size"):
        Coordinator(config(buffer={"replay_buffer_size": -1}))
    with pytest.raises(ConfigError, match="link and store"):
        Coordinator(config(), store=object())
    with pytest.raises(ConfigError, match="clock"):
        Coordinator(config(), clock=3)
    with pytest.raises(ConfigError, match="plain values"):
        Coordinator(config(main={"env": {"fn": print}}, state_path="x"))
    with pytest.raises(ConfigError, match="state_path"):
        Coordinator(config()).save_state()


def test_the_defaults_are_the_classic_ones():
    default = Coordinator.default_config()
    assert (default.type, default.collector_task_timeout) == ("router", 30)
    assert (default.learner_task_timeout, default.operator_server) == (600, {})
    assert (default.task_silence_s, default.max_attempts) == (30, 3)
    assert default.cfg_type == "CoordinatorDict"


def test_offers_carry_the_id_of_the_attempt(cluster):
    cluster.start()
    worker = cluster.learner(n_learn=1000)
    cluster.run(lambda: worker.task)
    offer = next(one for one in worker.asked if one.name == f"{LEARNER}_start_task")
    assert offer.request["task_info"]["task_id"] == "learner_task_0"
    assert offer.request["attempt"] == 1
