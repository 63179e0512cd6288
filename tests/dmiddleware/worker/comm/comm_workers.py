"""A store in memory, and workers that tests drive through their callbacks."""

from __future__ import annotations

import threading
import time

import numpy as np

from dmiddleware.worker.comm.base_collector import BaseCommCollector
from dmiddleware.worker.comm.base_learner import BaseCommLearner
from dmiddleware.worker.errors import StepDataLost

DEADLINE_S = 30.0


class DictStore:
    """A store of one process."""

    def __init__(self):
        self.values, self.policies = {}, {}

    def put(self, name, value):
        self.values[name] = value
        return name

    def get(self, ref):
        if ref not in self.values:
            raise StepDataLost(f"{ref} is gone", data_id=ref)
        return self.values[ref]

    def delete(self, refs):
        for ref in refs:
            self.values.pop(ref, None)

    def missing(self, refs):
        return set(refs) - set(self.values)

    def clear(self):
        self.values.clear()

    def publish(self, name, version, state):
        self.policies[name] = version, state

    def newest(self, name, have):
        found = self.policies.get(name)
        return found if found is not None and found[0] > have else None


def metadata(data_id="env_0_a", **extra):
    return {
        "data_id": data_id, "env_id": 0, "policy_iter": 3, "unroll_len": 1, "compressor": "none",
        "get_data_time": time.time(), "eval_flag": False, "cur_episode": 0, "cur_sample": 1,
        "cur_step": 1, **extra,
    }  # fmt: skip


def info(**extra):
    return {
        "collector_done": False, "cur_episode": 1, "cur_sample": 1, "cur_step": 9,
        "eval_flag": False, "get_info_time": time.time(), **extra,
    }  # fmt: skip


class ScriptedCollector:
    """A parallel collector whose work is a function of it."""

    def __init__(self, work):
        self.work = work
        self.end = threading.Event()

    def start(self):
        self.work(self)

    def close(self):
        self.end.set()

    def get_finish_info(self):
        return {"collector_done": True, "step_count": 9}


class Collector(BaseCommCollector):
    """A communicating collector without a transport, whose tasks run ``work``."""

    def __init__(self, work, cfg=None):
        super().__init__(cfg)
        self.work = work
        self.memory = DictStore()

    def _open_store(self):
        return self.memory

    def _create_collector(self, task_info):
        collector = ScriptedCollector(self.work)
        for name in ("send_metadata", "send_stepdata", "get_policy_update_info"):
            setattr(collector, name, getattr(self, name))
        return collector


class Learner(BaseCommLearner):
    """A communicating learner without a transport."""

    def __init__(self, cfg=None):
        super().__init__(cfg)
        self.memory = DictStore()

    def _open_store(self):
        return self.memory


def collector_task(task_id="c", **extra):
    return {"task_id": task_id, "buffer_id": "b", "collector_cfg": {}, **extra}


def learner_task(task_id="l", train_iterations=3, batch_size=4, **extra):
    return {
        "task_id": task_id,
        "policy_id": "p",
        "buffer_id": "b",
        "learner_cfg": {
            "type": "base",
            "exp_name": "exp",
            "train_iterations": train_iterations,
            "hook": {"save_ckpt_after_run": False},
            **extra,
        },
        "policy": {
            "type": "dqn",
            "model": {"obs_shape": 4, "action_shape": 2, "encoder_hidden_sizes": [8]},
            "learn": {"batch_size": batch_size},
        },
    }


def sample(index=0):
    rng = np.random.default_rng(index)
    return {
        "obs": rng.normal(size=4).astype(np.float32),
        "next_obs": rng.normal(size=4).astype(np.float32),
        "action": index % 2,
        "reward": 1.0,
        "done": False,
        "terminated": False,
        "truncated": False,
        "collect_iter": 0,
    }


def put_samples(store, n):
    """Store samples, and return the metadata of each."""
    return [
        metadata(name, object_ref=store.put(name, sample(index)), replay_unique_id=name)
        for index, name in enumerate(f"d{number}" for number in range(n))
    ]
