"""A coordinator over HTTP with naive workers, and an own slave, as a DI-engine user has them."""

import pytest
from easydict import EasyDict

from dmiddleware.worker import Coordinator, Master, NaiveCollector, NaiveLearner, Slave
from dmiddleware.worker.errors import TaskFail
from tests.waiting import wait_until

DEADLINE_S = 60.0


def test_a_coordinator_is_tried_with_workers_that_make_everything_up(tmp_path):
    path_data = str(tmp_path / "data")
    collectors = [NaiveCollector("127.0.0.1", 0, prefix=path_data) for _ in range(2)]
    learner = NaiveLearner("127.0.0.1", 0, prefix=path_data)
    for worker in (*collectors, learner):
        worker.start()
    cfg = EasyDict(
        main=dict(
            exp_name=str(tmp_path / "exp"),
            env=dict(id="CartPole-v1"),
            policy=dict(
                type="dqn",
                other=dict(
                    commander=dict(type="naive", collector_task_space=2),
                    replay_buffer=dict(type="naive", replay_buffer_size=100),
                ),
            ),
        ),
        system=dict(
            path_data=path_data,
            path_policy=str(tmp_path / "policy"),
            coordinator=dict(
                type="flask_fs",
                host="127.0.0.1",
                port=0,
                collector={
                    f"collector{i}": [f"collector{i}", "127.0.0.1", worker.port]
                    for i, worker in enumerate(collectors)
                },
                learner=dict(learner0=["learner0", "127.0.0.1", learner.port]),
            ),
        ),
    )
    coordinator = Coordinator(cfg)
    coordinator.start()
    wait_until(lambda: coordinator.counters.get("finished", 0) >= 4, "four finished tasks")
    counters = coordinator.counters
    coordinator.close()
    assert counters.get("failed", 0) == counters.get("lost", 0) == 0
    assert not list((tmp_path / "data").rglob("*.safetensors*"))
    for worker in (*collectors, learner):
        worker.close()


class Calculator(Slave):
    def _process_task(self, task):
        if "divisor" in task and not task["divisor"]:
            raise TaskFail(result={"message": "division by zero"}, message="cannot divide")
        return {"sum": task["a"] + task["b"]}


@pytest.mark.parametrize("channel", [0, 233])
def test_a_master_gives_tasks_to_an_own_slave(channel):
    results = []
    with Calculator("127.0.0.1", 0, channel=channel) as slave:
        assert slave.ping()
        with Master("127.0.0.1", 0, channel=channel) as master:
            with master.new_connection("calculator", "127.0.0.1", slave.port) as connection:
                assert connection.is_connected
                task = connection.new_task({"a": 2, "b": 3})
                task.on_complete(lambda result: results.append(result["sum"]))
                task.start().join(DEADLINE_S)
                assert task.result == {"sum": 5}
                failed = connection.new_task({"divisor": 0}).start().join(DEADLINE_S)
                assert failed.status == "failed"
                assert failed.result == {"message": "division by zero"}
            assert not connection.is_connected
    assert results == [5]
