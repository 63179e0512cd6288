"""Fully parameterized quantile functions."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from dmiddleware.policy import FQFPolicy
from tests.dmiddleware.policy.discrete_rows import discrete_rows

N = 4
MODEL = {"obs_shape": 4, "action_shape": 3, "encoder_hidden_sizes": [16], "n_quantiles": N}


def made(**cfg: Any) -> FQFPolicy:
    return FQFPolicy({"model": MODEL, "seed": 0, **cfg})


@pytest.mark.parametrize("double", [True, False])
def test_the_quantile_loss_is_that_of_the_paper(double: bool) -> None:
    policy, data = made(double=double), discrete_rows(6, 4, 3, ends_every=3)
    with torch.no_grad():
        own = policy.model(data["obs"])
        following = policy.q.target(data["next_obs"], fractions=own["fractions"])
        judge = policy.model(data["next_obs"]) if double else following
    wanted, value = 0.0, 0.0
    for row in range(6):
        action, best = int(data["action"][row]), int(judge["logit"][row].argmax())
        for i in range(N):
            z = own["quantiles"][row, action, i]
            value += float((own["fractions"][row, i + 1] - own["fractions"][row, i]) * z) / 6
            for j in range(N):
                follows = 0.0 if data["terminated"][row] else following["quantiles"][row, best, j]
                error = float(data["reward"][row] + 0.99 * follows - z)
                huber = 0.5 * error**2 if abs(error) <= 1 else abs(error) - 0.5
                wanted += abs(float(own["tau"][row, i]) - (error < 0)) * huber / N / 6
    output = policy.learn_mode.forward(data)
    assert output["total_loss"] == pytest.approx(wanted, rel=1e-4)
    assert output["q_value"] == pytest.approx(value, rel=1e-4)


class Square(nn.Module):
    """A network whose return at the fraction τ is τ², for every action."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))
        self.proposal = nn.Linear(4, N)

    def forward(self, obs: Any, fractions: Any = None, with_edges: bool = False) -> Any:
        if fractions is None:
            fractions = F.pad(self.proposal(obs).softmax(-1).cumsum(-1), (1, 0))
        edges = fractions.detach()
        tau = (edges[..., 1:] + edges[..., :-1]) / 2
        returns = (self.scale * tau.square()).unsqueeze(-2).expand(*tau.shape[:-1], 3, N)
        logit = (returns * edges.diff().unsqueeze(-2)).sum(-1)
        inner = edges[..., 1:-1].square().unsqueeze(-2).expand(*tau.shape[:-1], 3, N - 1)
        return {
            "logit": logit, "quantiles": returns, "tau": tau, "fractions": fractions,
            "edges": inner,
        }  # fmt: skip


def distance_of(fractions: torch.Tensor) -> torch.Tensor:
    """Return the Wasserstein distance of τ² from its steps at the middles of the intervals.

    Below the middle m of an interval it is the integral of m² - τ², and above of τ² - m².
    """
    start, end = fractions[:-1], fractions[1:]
    middle = (start + end) / 2
    cubes = start.pow(3) + end.pow(3) - 2 * middle.pow(3)
    return (cubes / 3 + middle.square() * (2 * middle - start - end)).sum()


def test_fractions_descend_the_wasserstein_distance() -> None:
    policy, data = FQFPolicy({"seed": 0}, model=Square()), discrete_rows(5, 4, 3)
    layer = copy.deepcopy(policy.proposal.module).double()
    policy.learn_mode.forward(data)
    bias, moved = policy.proposal.module.bias, torch.zeros(N, dtype=torch.float64)
    for unit in range(N):
        sides = []
        for step in (1e-3, -1e-3):
            shift = step * torch.eye(N, dtype=torch.float64)[unit]
            widths = (layer(data["obs"].double()) + shift).softmax(-1).detach()
            fractions = F.pad(widths.cumsum(-1), (1, 0))
            sides.append(torch.stack([distance_of(row) for row in fractions]).mean())
        moved[unit] = (sides[0] - sides[1]) / 2e-3
    torch.testing.assert_close(bias.grad.double(), moved, rtol=1e-4, atol=1e-6)


def test_the_quantiles_do_not_move_the_proposal_nor_the_proposal_the_encoder() -> None:
    policy, data = made(learning_rate_fraction=1e-3), discrete_rows(6, 4, 3)
    frozen = made(learning_rate_fraction=1e-30)
    before = copy.deepcopy(policy.model.state_dict())
    for one in (policy, frozen):
        one.learn_mode.forward(data)
    states = (one.model.state_dict() for one in (policy, frozen))
    for (name, value), still in zip(next(states).items(), next(states).values(), strict=True):
        is_proposal = name.startswith("proposal.")
        assert torch.equal(value, still) is not is_proposal
        assert torch.allclose(before[name], still, rtol=0, atol=1e-20) is is_proposal


def test_an_entropy_keeps_the_widths_from_collapsing() -> None:
    entropies = []
    for weight in (0.0, 10.0):
        policy = made(learning_rate_fraction=1e-2, learning_rate=1e-9, entropy_weight=weight)
        for seed in range(60):
            output = policy.learn_mode.forward(discrete_rows(16, 4, 3, seed=seed))
        entropies.append(float(output["fraction_entropy"]))
    assert entropies[0] < 1.36
    assert entropies[1] > 1.38  # of at most log(4)


def test_it_learns_a_distribution_and_not_only_its_mean() -> None:
    """One state: the return is 0 or 1 with the same probability."""
    policy = made(learning_rate=0.01, learning_rate_fraction=1e-4)
    data = discrete_rows(64, 4, 3, reward=(torch.arange(64) % 2).float())
    data["obs"][:] = 0.0
    data["terminated"][:] = True
    for _ in range(300):
        policy.learn_mode.forward(data)
    with torch.no_grad():
        quantiles = policy.model(torch.zeros(1, 4))["quantiles"][0]
    assert quantiles[:, 0].max() < 0.3
    assert quantiles[:, -1].min() > 0.7
