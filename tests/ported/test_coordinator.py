"""A program that runs a coordinator and its workers, as programs for DI-engine have it."""

import threading

from easydict import EasyDict

from dmiddleware.worker import Coordinator
from dmiddleware.worker.comm import BaseCommCollector, BaseCommLearner, LinkServer
from dmiddleware.worker.comm.file_store import FileStore
from dmiddleware.worker.comm.memory_link import MemoryNetwork

CONFIG = EasyDict(
    main=dict(
        exp_name="cartpole",
        env=dict(id="CartPole-v1", env_num=2, manager=dict(episode_num=2), seed=0),
        policy=dict(
            type="dqn",
            model=dict(obs_shape=4, action_shape=2),
            learn=dict(
                batch_size=8,
                learner=dict(
                    type="base", train_iterations=20, hook=dict(save_ckpt_after_run=False)
                ),
            ),
            collect=dict(n_sample=8, collector=dict(type="zergling", compressor="none")),
            other=dict(
                replay_buffer=dict(type="advanced", replay_buffer_size=200),
                commander=dict(type="naive"),
            ),
        ),
    ),
    system=dict(coordinator=dict(collector_task_timeout=30, learner_task_timeout=600)),
)


class InThisProcess:
    """Gives a worker the run's store."""

    run_store = None

    def _open_store(self):
        return self.run_store


class Collector(InThisProcess, BaseCommCollector):
    pass


class Learner(InThisProcess, BaseCommLearner):
    pass


def test_a_coordinator_trains_a_policy_with_its_workers(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    network = MemoryNetwork()
    store = InThisProcess.run_store = FileStore("data", "policy", "run", compressor="none")
    link = network.connect("coordinator", "coordinator")
    learned = threading.Event()
    coordinator = Coordinator(CONFIG, link=link, store=store)
    finish = coordinator.deal_with_learner_send_info

    def send_info(task_id, buffer_id, info):
        finish(task_id, buffer_id, info)
        if info["learner_step"] >= 20:
            learned.set()

    coordinator.deal_with_learner_send_info = send_info
    workers = []
    with coordinator:
        for worker in (Learner(), Collector()):
            worker.start()
            server = LinkServer(worker, network.connect(worker.kind, worker.kind))
            server.start()
            workers.append((worker, server))
        try:
            assert learned.wait(60)
        finally:
            coordinator.close(deadline_s=30)
            for worker, server in workers:
                worker.close()
                server.close()
    assert coordinator.state == "closed"
    assert coordinator.counters["finished"] >= 2
    assert coordinator.counters.get("bad_messages", 0) == 0
    assert coordinator.counters.get("lost", 0) == 0
    assert not [path for path in (tmp_path / "data").rglob("*") if path.is_file()]
