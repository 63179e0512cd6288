"""Weighted QMIX."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dmiddleware.errors import ConfigError, PolicyError
from dmiddleware.model import QMIXNetwork
from dmiddleware.policy import QMIXPolicy, WQMIXPolicy
from dmiddleware.tree import as_tree
from tests.dmiddleware.policy.test_qmix import MODEL, batch

BOTH = pytest.mark.parametrize("weighting", ["optimistic", "central"])


def made(**cfg: Any) -> Any:
    return WQMIXPolicy({"model": MODEL, "seed": 0, **cfg})


def value_of(network: Any, obs: Any, action: torch.Tensor) -> torch.Tensor:
    """Return a network's value of one joint action ``[2]``."""
    logit = network(obs)["logit"]
    chosen = torch.stack([logit[agent, action[agent]] for agent in range(2)])
    value: torch.Tensor = network.mix(chosen, obs)
    return value


@BOTH
@pytest.mark.parametrize("masked", [True, False])
def test_the_losses_are_those_of_the_paper(weighting: str, masked: bool) -> None:
    policy, data = made(weighting=weighting, alpha=0.3), batch(n=64, masked=masked)
    for seed in range(1, 4):
        policy.learn_mode.forward(batch(seed=seed))  # so that the target network differs
    q, central = policy.q.module, policy.central
    losses, central_losses, weights = [], [], []
    with torch.no_grad():
        for row in range(64):
            action, obs, after = (
                data["action"][row],
                *(
                    {key: data[name][key][row] for key in data[name]}
                    for name in ("obs", "next_obs")
                ),
            )
            next_best = q(after)["logit"].argmax(-1)
            bootstrap = value_of(central.target, after, next_best)
            if data["terminated"][row]:
                bootstrap = torch.zeros(())
            y = data["reward"][row].mean() + 0.99 * bootstrap
            value = value_of(q, obs, action)
            best = q(obs)["logit"].argmax(-1)
            is_best = all(
                action[agent] == best[agent] or obs["agent_mask"][agent] == 0 for agent in range(2)
            )
            if weighting == "optimistic":
                counts = bool(value < y)
            else:
                counts = is_best or bool(y > value_of(central.module, obs, best))
            weights.append(1.0 if counts else 0.3)
            losses.append(weights[-1] * (value - y) ** 2)
            central_losses.append((value_of(central.module, obs, action) - y) ** 2)
    assert set(weights) == {1.0, 0.3}
    output = policy.learn_mode.forward(data)
    assert output["total_loss"] == pytest.approx(torch.stack(losses).mean().item(), rel=1e-4)
    wanted = torch.stack(central_losses).mean().item()
    assert output["central_loss"] == pytest.approx(wanted, rel=1e-4)


PENALTIES = torch.tensor([[8.0, -12.0, -12.0], [-12.0, 0.0, 0.0], [-12.0, 0.0, 0.0]])
"""A game of one step, whose best joint action is next to the worst: Son et al., "QTRAN" (2019)."""


@pytest.mark.learning
def test_it_finds_the_joint_action_that_qmix_misses() -> None:
    action = torch.cartesian_prod(torch.arange(3), torch.arange(3))
    ones, mask = torch.ones(9, 2, 1), torch.ones(9, 2, dtype=torch.int8)
    obs = {"agents": ones, "agent_mask": mask, "state": ones[:, 0]}
    reward = PENALTIES[action[:, 0], action[:, 1]].unsqueeze(-1).expand(9, 2)
    ends = torch.ones(9, dtype=torch.bool)
    rows = {"obs": obs, "next_obs": obs, "action": action, "reward": reward, "terminated": ends}
    best = {}
    for name, cls, options in (
        ("qmix", QMIXPolicy, {}),
        ("optimistic", WQMIXPolicy, {"weighting": "optimistic", "alpha": 0.1}),
        ("central", WQMIXPolicy, {"weighting": "central", "alpha": 0.1}),
    ):
        shape = {"obs_shape": {"agents": 1, "state": 1}, "action_shape": 3, "n_agent": 2}
        model = {**shape, "encoder_hidden_sizes": [16]}
        policy: Any = cls({"seed": 0, "model": model, "learning_rate": 5e-3, **options})
        for _ in range(250):
            policy.learn_mode.forward(as_tree(rows))
        acted = policy.eval_mode.forward(as_tree(obs))["action"]
        best[name] = PENALTIES[tuple(acted[0])].item()
    assert best == {"qmix": 0.0, "optimistic": 8.0, "central": 8.0}


@BOTH
def test_an_interrupted_run_continues_bit_for_bit(weighting: str) -> None:
    whole, first, second = (made(weighting=weighting, seed=seed) for seed in (0, 0, 1))
    outputs = [whole.learn_mode.forward(batch(seed=seed)) for seed in range(4)]
    for seed in range(2):
        first.learn_mode.forward(batch(seed=seed))
    second.learn_mode.load_state_dict(first.learn_mode.state_dict())
    assert [second.learn_mode.forward(batch(seed=seed)) for seed in (2, 3)] == outputs[2:]


def test_collectors_get_the_agents_network_alone() -> None:
    learner, collector = made(), made(seed=1)
    learner.learn_mode.forward(batch())
    state = learner.collect_mode.state_dict()
    assert all(name.startswith("q.agent.") for name in state["model"])
    collector.collect_mode.load_state_dict(state)
    obs = batch(seed=9)["obs"]
    answers = [policy.collect_mode.forward(obs)["logit"] for policy in (learner, collector)]
    assert torch.equal(*answers)


def test_only_the_central_network_has_a_target() -> None:
    policy = made(target_update_freq=2)
    assert set(policy.learn_mode.state_dict()["target"]) == {"central"}


@pytest.mark.parametrize("option", [{"double": False}, {"alpha": 1.5}, {"weighting": "none"}])
def test_what_the_weighting_cannot_have_is_refused(option: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(option))):
        made(**option)


def test_the_network_of_qmix_is_refused() -> None:
    with pytest.raises(PolicyError, match="submodule q"):
        WQMIXPolicy({}, model=QMIXNetwork(**MODEL))
