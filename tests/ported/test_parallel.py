"""An own parallel collector and its registered relatives, as programs for DI-engine have them."""

import threading

from easydict import EasyDict

from dmiddleware.worker import (
    LearnerAggregator,
    ZerglingParallelCollector,
    create_parallel_collector,
    get_parallel_collector_cls,
)
from dmiddleware.worker.collector.parallel import PARALLEL_COLLECTOR_REGISTRY

CONFIG = EasyDict(
    type="counting_zergling",
    print_freq=2,
    compressor="none",
    update_policy_second=3,
    env=dict(
        id="CartPole-v1",
        env_num=2,
        manager=dict(episode_num=2),
        seed=0,
    ),
    policy=dict(
        type="dqn",
        model=dict(obs_shape=4, action_shape=2),
        collect=dict(n_episode=1),
    ),
    collect_setting=dict(eps=0.9),
    eval_flag=False,
    policy_update_path="policy_one",
)


@PARALLEL_COLLECTOR_REGISTRY.register("counting_zergling")
class CountingCollector(ZerglingParallelCollector):
    def _start_thread(self):
        self.n_steps = 0

    def _process_timestep(self, timestep):
        for env_id, t in timestep.items():
            assert t.env_id == env_id
            self.n_steps += 1
        super()._process_timestep(timestep)

    def _finish_task(self):
        self.info(f"finished after {self.n_steps} steps")

    def __repr__(self):
        return "CountingCollector"


class Comm:
    """What a communicating collector does, in this process."""

    def __init__(self, cfg):
        self.collector = create_parallel_collector(cfg)
        for item in ("send_metadata", "send_stepdata", "get_policy_update_info"):
            setattr(self.collector, item, getattr(self, item))
        self.data = {}
        self.metadata = []
        self.done = threading.Event()

    def get_policy_update_info(self, path):
        assert path == "policy_one"
        state = self.collector.policy.state_dict()
        return {"model": state["model"], "iter": 12}

    def send_stepdata(self, path, stepdata):
        self.data[path] = stepdata

    def send_metadata(self, metadata):
        if "data_id" in metadata:
            assert metadata["data_id"] in self.data
            self.metadata.append(metadata)
        elif metadata["collector_done"]:
            self.done.set()

    def run(self):
        thread = threading.Thread(target=self.collector.start)
        thread.start()
        assert self.done.wait(60)
        self.collector.close()
        thread.join()
        return self.collector.get_finish_info()


def test_a_ported_parallel_collector_collects(tmp_path):
    assert get_parallel_collector_cls(CONFIG) is CountingCollector
    comm = Comm(EasyDict(CONFIG, exp_name=str(tmp_path / "exp")))
    info = comm.run()
    assert info["real_episode_count"] == info["predefined_episode_count"] == 4
    assert info["step_count"] == comm.collector.n_steps == len(comm.data)
    assert info["train_iter"] == 12
    assert {meta["policy_iter"] for meta in comm.metadata} == {12}
    assert {meta["compressor"] for meta in comm.metadata} == {"none"}


def test_a_ported_aggregator_merges_what_learners_report():
    infos = [
        {"learner_step": 5, "learner_done": False, "priority_info": {"priority": [0.5]}, "lr": 0.1},
        {"learner_step": 5, "learner_done": False, "priority_info": {"priority": [0.7]}, "lr": 0.1},
    ]
    assert LearnerAggregator.merge_info(infos) == {
        "learner_step": 5,
        "learner_done": False,
        "priority_info": {"priority": [0.5, 0.7]},
        "lr": [0.1, 0.1],
    }
