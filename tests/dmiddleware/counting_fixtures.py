"""Fixtures of managers of counting envs, and policies that act in them."""

from __future__ import annotations

import contextlib
import functools
import math

import gymnasium as gym
import pytest
import torch
from torch import nn

from dmiddleware import classic
from dmiddleware.env import SyncEnvManager, VectorEnvManager
from dmiddleware.policy import DQNPolicy, Policy
from tests.dmiddleware.counting_env import CountingEnv


class PerEnvPolicy(classic.Policy):
    """Written per env: acts by the parity of the step, and makes its own transitions."""

    def _forward_learn(self, batch, **kwargs):
        return {}

    def _forward_collect(self, data, **kwargs):
        return {
            env_id: {"action": torch.tensor(int(obs[2]) % 2), "value": obs.sum()}
            for env_id, obs in data.items()
        }

    def _forward_eval(self, data, **kwargs):
        return self._forward_collect(data)

    def _process_transition(self, obs, policy_output, timestep):
        return {
            "obs": obs,
            "next_obs": torch.as_tensor(timestep.next_obs),
            "action": policy_output["action"],
            "reward": timestep.reward,
            "done": timestep.done,
            "half_reward": timestep.reward / 2,
        }

    def check_spaces(self, observation_space, action_space):
        pass


class CountingPolicy(Policy):
    """Written batched: the same actions, and a count of steps per env that reset clears."""

    def setup(self):
        self.steps = {}
        self.resets = []

    def learn(self, batch):
        return {}

    def act_collect(self, obs, env_id, *, shift=0, fail_at=None, **kwargs):
        if fail_at is not None and (obs[:, 2] == fail_at).any():
            raise ArithmeticError("a failure for the test")
        for one in env_id.tolist():
            self.steps[one] = self.steps.get(one, 0) + 1
        memory = torch.tensor([self.steps[one] for one in env_id.tolist()])
        action = (obs[:, 2].long() + shift) % 2
        return {"action": action, "memory": memory}

    def act_eval(self, obs, env_id, **kwargs):
        return {"action": obs[:, 2].long() % 2}

    def reset(self, env_ids=None):
        self.resets.append(None if env_ids is None else list(env_ids))
        for one in list(self.steps) if env_ids is None else env_ids:
            self.steps.pop(one, None)

    def check_spaces(self, observation_space, action_space):
        pass


@pytest.fixture
def counting_envs():
    """Make a manager: ``counting_envs([lengths of env 0, …], crashes={env: …})``."""
    made = []

    def make(lengths, crashes=None, resumable=True, first_index=0, **kwargs):
        crashes = {i: set(places) for i, places in (crashes or {}).items()}

        def factory(index):
            own = crashes.get(index, set())

            def build():
                env = CountingEnv(first_index + index, lengths[index], own)
                # A restarted env counts from 100, to distinguish its episodes from earlier ones.
                env.episode = 99 if index in built else -1
                built.add(index)
                if not resumable:
                    env.simulator = iter(())  # something whose state cannot be saved
                env.crashes = own if env.episode < 0 else set()
                return env

            return build

        built = set()
        manager = SyncEnvManager([factory(i) for i in range(len(lengths))], **kwargs)
        made.append(manager)
        return manager

    yield make
    for manager in made:
        manager.close()


@pytest.fixture
def lockstep_envs():
    """Make a vector env of CountingEnvs: ``lockstep_envs([lengths of env 0, …], mode)``.

    With ``fails_every``, it raises after this many steps, each time that it is made.
    """
    with contextlib.ExitStack() as stack:

        def make(lengths, mode="NextStep", fails_every=math.inf):
            class Vector(gym.vector.SyncVectorEnv):
                n_steps = 0

                def step(self, actions):
                    self.n_steps += 1
                    if self.n_steps > fails_every:
                        raise RuntimeError("a failure for the test")
                    return super().step(actions)

            def make_vector():
                return Vector(
                    [functools.partial(CountingEnv, *one) for one in enumerate(lengths)],
                    autoreset_mode=gym.vector.AutoresetMode(mode),
                )

            return stack.enter_context(VectorEnvManager(make_vector, len(lengths)))

        yield make


@pytest.fixture
def batched_policy():
    return CountingPolicy({}, nn.Linear(3, 2))


@pytest.fixture
def per_env_policy():
    return PerEnvPolicy({}, nn.Linear(3, 2))


@pytest.fixture
def dqn_policy():
    torch.manual_seed(0)
    model = {"obs_shape": 4, "action_shape": 2, "encoder_hidden_sizes": [8, 8]}
    return DQNPolicy({"model": model, "seed": 0})
