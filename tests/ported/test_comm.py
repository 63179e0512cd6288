"""A transport of one's own between a collector and a learner, as a DI-engine user has it."""

import queue
from functools import partial

from easydict import EasyDict

from dmiddleware.worker import BaseCommCollector, BaseCommLearner, load_data_fn

POLICY = EasyDict(
    type="dqn",
    model=dict(obs_shape=4, action_shape=2),
    learn=dict(batch_size=16),
    collect=dict(n_sample=16),
)
COLLECTOR_TASK = EasyDict(
    task_id="collector_task",
    buffer_id="buffer",
    collector_cfg=dict(
        type="zergling",
        exp_name="exp",
        env=dict(id="CartPole-v1", env_num=2, manager=dict(episode_num=10), seed=0),
        policy=POLICY,
        policy_update_path="policy",
        collect_setting=dict(eps=0.5),
        eval_flag=False,
    ),
)
LEARNER_TASK = EasyDict(
    task_id="learner_task",
    policy_id="policy",
    buffer_id="buffer",
    learner_cfg=dict(
        type="base", exp_name="exp", train_iterations=5, hook=dict(save_ckpt_after_run=False)
    ),
    policy=POLICY,
)


class Wire:
    """What travels between the two."""

    def __init__(self):
        self.stepdata, self.metadata = {}, queue.Queue()
        self.policies, self.learn_infos, self.collector_infos = [], queue.Queue(), queue.Queue()


class MyCollector(BaseCommCollector):
    def __init__(self, cfg, wire):
        super().__init__(cfg)
        self.wire = wire

    def get_policy_update_info(self, path):
        return self.wire.policies[-1] if self.wire.policies else None

    def send_stepdata(self, path, stepdata):
        self.wire.stepdata[path] = stepdata

    def send_metadata(self, metadata):
        is_data = "data_id" in metadata
        (self.wire.metadata if is_data else self.wire.collector_infos).put(metadata)


class MyLearner(BaseCommLearner):
    def __init__(self, cfg, wire):
        super().__init__(cfg)
        self.wire = wire

    def send_policy(self, state_dict):
        self.wire.policies.append(state_dict)

    def send_learn_info(self, learn_info):
        self.wire.learn_infos.put(learn_info)

    def get_data(self, batch_size):
        metadata = [self.wire.metadata.get(timeout=60) for _ in range(batch_size)]
        read = self.wire.stepdata.__getitem__
        return [partial(load_data_fn, meta["data_id"], meta, read) for meta in metadata]


def train(wire):
    collector, learner = MyCollector({}, wire), MyLearner({"send_policy_freq": 2}, wire)
    collector.start()
    learner.start()
    learner.deal_with_learner_start(LEARNER_TASK)
    collector.deal_with_collector_start(COLLECTOR_TASK)
    while not (info := wire.learn_infos.get(timeout=60))["learner_done"]:
        pass
    while not wire.collector_infos.get(timeout=60)["collector_done"]:
        pass
    ends = collector.deal_with_collector_close(), learner.deal_with_learner_close()
    collector.close()
    learner.close()
    return info, *ends


def test_a_program_with_a_transport_of_its_own_trains(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    wire = Wire()
    info, collected, learned = train(wire)
    assert info["learner_step"] == 5
    assert [state["iter"] for state in wire.policies] == [0, 2, 4]
    assert collected["task_id"] == "collector_task" and collected["real_episode_count"] == 20
    assert learned == {"task_id": "learner_task", "buffer_id": "buffer"}
