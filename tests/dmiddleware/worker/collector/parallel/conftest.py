"""A parallel collector's surroundings in memory: what a communicating collector sets."""

import threading

import gymnasium as gym
import pytest
import torch
from torch import nn

from dmiddleware.classic import Policy
from dmiddleware.policy import POLICY_REGISTRY
from dmiddleware.worker import create_parallel_collector
from tests.dmiddleware.counting_env import CountingEnv

__all__ = ["run", "surrounded"]

if "CountingEnv-v0" not in gym.registry:
    gym.register("CountingEnv-v0", CountingEnv)


@POLICY_REGISTRY.register("recording")
class RecordingPolicy(Policy):
    """Its one weight is the action; it records which weight acted at every step."""

    def default_model(self):
        raise AssertionError("a model is given")

    def _create_model(self, cfg, model=None):
        made = nn.Linear(1, 1, bias=False)
        nn.init.zeros_(made.weight)
        return made

    def _init_common(self):
        self.acted = []
        self.settings = []
        self.resets = []

    def _forward_collect(self, data, **kwargs):
        self.settings.append(kwargs)
        self.acted.append(float(self._model.weight.detach()))
        return {env_id: {"action": torch.tensor(0)} for env_id in data}

    _forward_eval = _forward_collect

    def _reset_collect(self, data_id=None):
        self.resets.append(data_id)

    def _get_n_sample(self):
        return self._cfg.model.get("n_sample")

    def _get_n_episode(self):
        return self._cfg.model.get("n_episode")

    def check_spaces(self, observation_space, action_space):
        pass


class Surroundings:
    """Records what a collector hands over, in order."""

    def __init__(self):
        self.tape = []
        self.data = {}
        self.n_fetches = 0
        self.fetched = threading.Event()

    def send_stepdata(self, path, stepdata):
        self.data[path] = stepdata
        self.tape.append(("data", path))
        return f"ref/{path}"

    def send_metadata(self, metadata):
        self.tape.append(("info" if "collector_done" in metadata else "metadata", metadata))

    def get_policy_update_info(self, path):
        self.n_fetches += 1
        self.fetched.set()
        weight = torch.tensor([[float(self.n_fetches)]])
        return {"model": {"weight": weight}, "iter": self.n_fetches}

    @property
    def metadata(self):
        return [one for kind, one in self.tape if kind == "metadata"]

    @property
    def infos(self):
        return [one for kind, one in self.tape if kind == "info"]

    def surround(self, collector):
        for name in ("send_stepdata", "send_metadata", "get_policy_update_info"):
            setattr(collector, name, getattr(self, name))
        return collector


def config(**changes):
    env = {
        "id": "CountingEnv-v0",
        "kwargs": {"lengths": (5,)},
        "env_num": 2,
        "manager": {"episode_num": 2},
    }
    base = {
        "type": "zergling",
        "env": {**env, **changes.pop("env", {})},
        "policy": {"type": "recording", "model": {"n_episode": 1}},
        "policy_update_path": "policy_of_the_test",
    }
    return {**base, **changes}


@pytest.fixture
def surrounded():
    """Make a collector and its surroundings from changes of the config."""
    made = []

    def make(clock=None, **changes):
        cfg = config(**changes)
        if clock is None:
            collector = create_parallel_collector(cfg)
        else:
            from dmiddleware.worker import get_parallel_collector_cls

            collector = get_parallel_collector_cls(cfg)(cfg, clock=clock)
        made.append(collector)
        surroundings = Surroundings()
        return surroundings.surround(collector), surroundings

    yield make
    for collector in made:
        collector.close()


@pytest.fixture
def run(surrounded):
    """Run a collector to its end; return it and its surroundings."""

    def run(**changes):
        collector, surroundings = surrounded(**changes)
        collector.start()
        return collector, surroundings

    return run
