"""Conservative Q-learning for discrete actions."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from dmiddleware.policy import DiscreteCQLPolicy, QRDQNPolicy
from dmiddleware.tree import as_tree
from tests.dmiddleware.policy.discrete_rows import discrete_rows

MODEL = {"obs_shape": 4, "action_shape": 3, "encoder_hidden_sizes": [16], "n_quantiles": 5}


def made(**cfg: Any) -> DiscreteCQLPolicy:
    return DiscreteCQLPolicy({"model": MODEL, "seed": 0, **cfg})


@pytest.mark.parametrize("is_masked", [False, True])
def test_the_loss_is_that_of_qr_dqn_and_the_gap_of_the_paper(is_masked: bool) -> None:
    data, allowed = discrete_rows(8, 4, 3), torch.ones(8, 3, dtype=torch.bool)
    if is_masked:
        allowed.scatter_(1, (data["action"].unsqueeze(-1) + 1) % 3, False)
        data["action_mask"] = allowed
    plain = QRDQNPolicy({"model": MODEL, "seed": 0}).learn_mode.forward(data)
    policy, gap = made(cql_alpha=2.5), 0.0
    with torch.no_grad():
        q = policy.model(data["obs"])["quantiles"].mean(-1)
    for row in range(8):
        # Equation 4, with a sum over the allowed actions.
        powers = [math.exp(float(q[row, a])) for a in range(3) if allowed[row, a]]
        gap += (math.log(sum(powers)) - float(q[row, data["action"][row]])) / 8
    output = policy.learn_mode.forward(data)
    assert output["cql_gap"] == pytest.approx(gap, rel=1e-4)
    assert output["total_loss"] == pytest.approx(plain["total_loss"] + 2.5 * gap, rel=1e-4)


def test_actions_that_the_data_never_takes_get_low_values() -> None:
    """QR-DQN overestimates an action that bootstraps from itself, and is never corrected."""
    values = {}
    for cls in (QRDQNPolicy, DiscreteCQLPolicy):
        policy = cls({"model": MODEL, "seed": 0, "learning_rate": 1e-2, "target_update_freq": 10})
        for seed in range(150):
            rows = discrete_rows(32, 4, 2, seed=seed)  # never the third action
            policy.learn_mode.forward(as_tree({**rows, "reward": rows["reward"].abs()}))
        with torch.no_grad():
            logit = policy.model(discrete_rows(64, 4, 2, seed=999)["obs"])["logit"]
        values[cls] = float((logit[:, 2] - logit[:, :2].mean(-1)).mean())
    assert values[DiscreteCQLPolicy] < values[QRDQNPolicy] - 0.5
    assert values[DiscreteCQLPolicy] < -0.5
