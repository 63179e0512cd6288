"""Conservative Q-learning."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from dmiddleware.policy import CQLPolicy, SACPolicy
from dmiddleware.tree import Batch, index_rows

from .mixed_data import Follow, bc_regret, mixed_rows, regret, train

SMALL = {"actor_hidden_sizes": [16], "critic_hidden_sizes": [16]}


def made(**options: Any) -> CQLPolicy:
    return CQLPolicy.for_env(Follow(), seed=0, model=SMALL, **options)


def some_rows() -> Batch:
    return index_rows(mixed_rows(), slice(0, 64))


def test_the_gap_is_that_of_equation_4() -> None:
    """The estimate of the integral over all actions agrees with a sum over a fine grid."""
    policy, rows = made(n_actions=3000), some_rows()
    critic = policy.components["critic"].module
    grid = torch.linspace(-1, 1, 401)
    with torch.no_grad():
        q = torch.stack([critic(rows["obs"], at.expand(64, 1)) for at in grid], -1)
        integral = (q + math.log(2 / 401)).logsumexp(-1)
        wanted = (integral - critic(rows["obs"], rows["action"] / 2)).mean()
    assert policy.learn_mode.forward(rows)["cql_gap"] == pytest.approx(wanted.item(), abs=0.01)


def test_without_the_penalty_it_is_sac() -> None:
    rows = some_rows()
    shared = {"learning_rate_policy": 1e-4, "alpha": 1e-6}
    plain = SACPolicy.for_env(Follow(), seed=0, model=SMALL, **shared)
    wanted = plain.learn_mode.forward(rows)
    found = made(cql_alpha=1e-9, **shared).learn_mode.forward(rows)
    # The gradient of the critics is the same, and so is what follows from their step.
    for name in ("critic_loss", "q_value", "policy_loss", "entropy"):
        assert found[name] == pytest.approx(wanted[name], rel=1e-3), name


@pytest.mark.parametrize("min_q_weight", [1.0, 5.0, 10.0])
def test_half_of_the_weight_of_the_authors_code_gives_the_same_loss(min_q_weight: float) -> None:
    policy, rows = made(cql_alpha=min_q_weight / 2, n_actions=4), some_rows()
    rows["terminated"][:] = True  # the target is the reward
    critic = policy.components["critic"].module
    with torch.no_grad():
        q = critic(rows["obs"], rows["action"] / 2)
    squares = (q - rows["reward"]).square().mean(-1).sum()
    found = policy.learn_mode.forward(rows)
    theirs = squares.item() + min_q_weight * len(q) * found["cql_gap"]
    assert 2.0 * found["critic_loss"] == pytest.approx(theirs, rel=1e-4)


def test_targets_do_not_contain_the_entropy() -> None:
    losses = [
        made(cql_alpha=1e-9, alpha=alpha).learn_mode.forward(some_rows())["critic_loss"]
        for alpha in (1e-6, 10.0)
    ]
    assert losses[0] == losses[1]


def test_the_penalty_lowers_the_values_of_unknown_actions() -> None:
    gaps = []
    for alpha in (1e-9, 10.0):
        policy = made(cql_alpha=alpha, n_actions=4, learning_rate_q=3e-3)
        rows = some_rows()
        rows["action"] = torch.full_like(rows["action"], 1.0)
        outputs = [policy.learn_mode.forward(rows) for _ in range(60)]
        gaps.append(outputs[-1]["cql_gap"])
    assert gaps[1] < gaps[0] - 0.2


@pytest.mark.parametrize(("aim", "rises"), [(-100.0, True), (100.0, False)])
def test_the_weight_is_tuned_towards_a_gap(aim: float, rises: bool) -> None:
    policy = made(lagrange_gap=aim, cql_alpha=2.0, n_actions=2)
    weights = [policy.learn_mode.forward(some_rows())["cql_alpha"] for _ in range(3)]
    assert (weights[-1] > 2.0) is rises
    assert policy.learn_mode.state_dict()["optimizer"].keys() >= {"penalty_weight"}


def test_a_fixed_weight_stays() -> None:
    policy = made(cql_alpha=2.0, n_actions=2)
    weights = [policy.learn_mode.forward(some_rows())["cql_alpha"] for _ in range(3)]
    assert weights == pytest.approx([2.0] * 3)


def test_an_interrupted_run_continues_bit_for_bit() -> None:
    whole, first, second = made(lagrange_gap=1.0), made(lagrange_gap=1.0), made(lagrange_gap=1.0)
    outputs = [whole.learn_mode.forward(some_rows()) for _ in range(4)]
    for _ in range(2):
        first.learn_mode.forward(some_rows())
    second.learn_mode.load_state_dict(first.learn_mode.state_dict())
    assert [second.learn_mode.forward(some_rows()) for _ in range(2)] == outputs[2:]


@pytest.mark.slow
@pytest.mark.learning
def test_it_beats_cloning_on_mixed_data() -> None:
    rates = {f"learning_rate_{part}": 3e-3 for part in ("q", "policy", "alpha")}
    policy = made(**rates, cql_alpha=0.1, n_actions=4, alpha=0.05, auto_alpha=False)
    assert bc_regret() > 0.8
    assert regret(train(policy, 600)) < bc_regret() / 3
