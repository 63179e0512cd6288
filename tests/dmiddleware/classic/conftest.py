"""Policies in both styles, and the batches of the tests of policies."""

import pytest
import torch

from dmiddleware.classic import Policy
from tests.dmiddleware.policy.conftest import (  # noqa: F401
    ACTIONS,
    batched,
    cartpole_spaces,
    linear,
    ppo_batch,
    small,
    transitions,
)


class PerEnv(Policy):
    """A policy as the classic interface has it: one env at a time."""

    config = {"n_step": 2}

    def _forward_learn(self, batch):
        return {"total_loss": 0.0}

    def _forward_collect(self, data, *, shift=0):
        answer = {}
        for env_id, obs in data.items():
            logit = self._model(obs.unsqueeze(0))["logit"][0]
            action = (logit.argmax() + shift + env_id) % ACTIONS
            answer[env_id] = {"action": action, "logit": logit}
        return answer

    def _forward_eval(self, data):
        return {
            env_id: {"action": self._model(obs.unsqueeze(0))["logit"][0].argmax()}
            for env_id, obs in data.items()
        }

    def _get_train_sample(self, rows):
        rewards = [float(one["reward"]) for one in rows]
        n_step = self._cfg.n_step
        return [
            {**one, "reward": torch.tensor(sum(rewards[t : t + n_step]))}
            for t, one in enumerate(rows)
        ]


@pytest.fixture
def per_env(linear):  # noqa: F811
    return PerEnv({}, model=linear())
