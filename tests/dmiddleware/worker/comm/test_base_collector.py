"""Communicating collectors, driven through their callbacks."""

from __future__ import annotations

import threading

import pytest

from dmiddleware.errors import ConfigError, RegistryError
from dmiddleware.worker.comm.base_collector import create_comm_collector
from dmiddleware.worker.errors import TaskFail
from tests.dmiddleware.worker.comm.comm_workers import (
    DEADLINE_S,
    Collector,
    collector_task,
    info,
    metadata,
)


def wait(collector):
    assert collector.end.wait(DEADLINE_S)


def play(collector):
    collector.send_stepdata("env_0_a", {"x": 1})
    collector.send_metadata(metadata())
    collector.send_metadata(info(collector_done=True))


def test_a_task_reports_data_and_progress_in_order_and_ends_with_its_finish_info():
    worker = Collector(play)
    assert "c" in worker.deal_with_collector_start(collector_task())["message"]
    first, second = worker.deal_with_collector_data(), worker.deal_with_collector_data()
    assert first["data_id"] == first["object_ref"] == "env_0_a"
    assert (first["task_id"], first["buffer_id"], first["priority"]) == ("c", "b", 1.0)
    assert second["collector_done"] and second["task_id"] == "c"
    assert worker.memory.get(first["object_ref"]) == {"x": 1}
    assert worker.deal_with_collector_close() == {
        "collector_done": True, "step_count": 9, "task_id": "c",
    }  # fmt: skip
    assert worker.job is None


def test_without_a_report_in_time_the_data_is_pending():
    worker = Collector(wait)
    worker.deal_with_collector_start(collector_task())
    assert worker.deal_with_collector_data(0.01) == {
        "pending": True, "task_id": "c", "buffer_id": "b",
    }  # fmt: skip
    worker.deal_with_collector_close()


def test_a_full_queue_makes_the_collector_wait_until_the_close():
    reached = threading.Event()

    def flood(collector):
        for index in range(3):
            if index == 2:
                reached.set()
            collector.send_stepdata(f"d{index}", index)
            collector.send_metadata(metadata(f"d{index}"))
        assert collector.send_stepdata("late", 0) is None

    worker = Collector(flood, {"queue_size": 2})
    worker.deal_with_collector_start(collector_task())
    assert reached.wait(DEADLINE_S)
    worker.deal_with_collector_close()
    assert worker.memory.values == {}, "what was not reported is deleted"


def test_data_that_is_announced_after_the_close_is_deleted():
    closing = threading.Event()

    def late(collector):
        collector.send_stepdata("early", 1)
        closing.set()
        assert collector.end.wait(DEADLINE_S)
        assert collector.send_stepdata("late", 1) is None
        collector.send_metadata(metadata("early"))
        collector.send_metadata(metadata("late"))

    worker = Collector(late)
    deleted = []
    worker.memory.delete = deleted.extend
    worker.deal_with_collector_start(collector_task())
    assert closing.wait(DEADLINE_S)
    worker.deal_with_collector_close()
    assert deleted == ["early"]


def test_a_coordinator_that_takes_nothing_fails_the_task_in_the_end():
    def flood(collector):
        for _ in range(3):
            collector.send_metadata(info())

    worker = Collector(flood, {"queue_size": 2, "timeout_s": 0.05})
    worker.deal_with_collector_start(collector_task())
    worker.job.thread.join(DEADLINE_S)
    worker.deal_with_collector_data()
    worker.deal_with_collector_data()
    with pytest.raises(TaskFail, match="took none"):
        worker.deal_with_collector_data()


@pytest.mark.parametrize("callback", ["deal_with_collector_data", "deal_with_collector_close"])
def test_an_error_in_the_task_is_reported_once_with_its_traceback(callback):
    def crash(collector):
        collector.send_stepdata("d", 1)
        raise ValueError("the env broke")

    worker = Collector(crash)
    worker.deal_with_collector_start(collector_task())
    worker.job.thread.join(DEADLINE_S)
    with pytest.raises(TaskFail, match="the env broke") as failure:
        getattr(worker, callback)()
    assert "Traceback" in failure.value.message and failure.value.result["task_id"] == "c"
    assert worker.memory.values == {}
    with pytest.raises(TaskFail, match="runs no task"):
        getattr(worker, callback)()
    worker.work = wait
    worker.deal_with_collector_start(collector_task("next"))
    worker.close()


def test_a_busy_worker_takes_no_other_task():
    worker = Collector(wait)
    worker.deal_with_collector_start(collector_task())
    with pytest.raises(TaskFail, match="already runs the task c"):
        worker.deal_with_collector_start(collector_task("other"))
    worker.close()
    worker.close()
    assert worker.job is None


def test_a_task_that_does_not_end_keeps_the_worker_busy_until_it_does():
    release = threading.Event()

    def stuck(collector):
        assert release.wait(DEADLINE_S)

    worker = Collector(stuck, {"timeout_s": 0.05})
    worker.deal_with_collector_start(collector_task())
    thread = worker.job.thread
    with pytest.raises(TaskFail, match="did not end"):
        worker.deal_with_collector_close()
    with pytest.raises(TaskFail, match="already runs"):
        worker.deal_with_collector_start(collector_task("other"))
    release.set()
    thread.join(DEADLINE_S)
    worker.work = wait
    worker.deal_with_collector_start(collector_task("other"))
    worker.close()


def test_a_task_that_is_closed_while_it_is_created_does_not_start():
    creating, created = threading.Event(), threading.Event()
    started = []

    class Slow(Collector):
        def _create_collector(self, task_info):
            creating.set()
            assert created.wait(DEADLINE_S)
            return super()._create_collector(task_info)

        def _stop_work(self, job):
            super()._stop_work(job)
            created.set()

    worker = Slow(started.append)
    worker.deal_with_collector_start(collector_task())
    assert creating.wait(DEADLINE_S)
    worker.deal_with_collector_close()
    assert started == []


@pytest.mark.parametrize(
    ("report", "missing"),
    [
        ({"data_id": "d"}, "policy_iter"),
        ({"cur_step": 1}, "collector_done"),
        ({}, "it has nothing"),
    ],
)
def test_what_is_neither_metadata_nor_info_is_refused_with_the_missing_keys(report, missing):
    worker = Collector(wait)
    worker.deal_with_collector_start(collector_task())
    with pytest.raises(ConfigError, match=missing):
        worker.send_metadata(report)
    worker.close()


def test_a_task_gets_each_version_of_a_policy_once():
    worker = Collector(wait)
    worker.deal_with_collector_start(collector_task())
    assert worker.get_policy_update_info("p") is None
    worker.memory.publish("p", 0, {"model": {}, "iter": 0})
    assert worker.get_policy_update_info("p") == {"model": {}, "iter": 0}
    assert worker.get_policy_update_info("p") is None
    worker.memory.publish("p", 5, {"model": {}, "iter": 5})
    assert worker.get_policy_update_info("p")["iter"] == 5
    worker.deal_with_collector_close()
    worker.deal_with_collector_start(collector_task("next"))
    assert worker.get_policy_update_info("p")["iter"] == 5, "the next task has no weights yet"
    worker.close()


@pytest.mark.parametrize("key", ["task_id", "buffer_id", "collector_cfg"])
def test_an_incomplete_task_is_refused(key):
    task = collector_task()
    del task[key]
    with pytest.raises(ConfigError, match=key):
        Collector(wait).deal_with_collector_start(task)


def test_the_resources_come_from_the_config():
    assert Collector(wait).deal_with_resource() == {"gpu": 1, "cpu": 20}
    assert Collector(wait, {"resource": {"gpu": 0, "tpu": 2}}).deal_with_resource() == {
        "gpu": 0, "cpu": 20, "tpu": 2,
    }  # fmt: skip


@pytest.mark.parametrize(
    "cfg", [{"port": -1}, {"port": [1, "2"]}, {"host": 5}, {"queue_size": 0}, {"timeout_s": 0}]
)
def test_an_impossible_config_is_refused(cfg):
    with pytest.raises(ConfigError, match=next(iter(cfg))):
        Collector(wait, cfg)


def test_an_unknown_type_is_refused_by_name():
    with pytest.raises(RegistryError, match="comm collector"):
        create_comm_collector({"type": "no_such"})
    with pytest.raises(ConfigError, match="type"):
        create_comm_collector({})
