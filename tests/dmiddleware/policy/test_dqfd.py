"""Deep Q-learning from demonstrations."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import pytest
import torch

from dmiddleware.data import MixedReplay, TensorBuffer
from dmiddleware.env import make_env_manager
from dmiddleware.errors import ConfigError, StructureError
from dmiddleware.policy import DQfDPolicy
from dmiddleware.rollout import RolloutCollector
from dmiddleware.tree import as_tree
from tests.dmiddleware.policy.discrete_rows import discrete_rows

MODEL = {"obs_shape": 4, "action_shape": 3, "encoder_hidden_sizes": [16]}
GAMMA, N_ROWS = 0.9, 8


def made(**cfg: Any) -> DQfDPolicy:
    return DQfDPolicy({"model": MODEL, "seed": 0, "discount": GAMMA, **cfg})


def nstep_rows(n_step: int = 3, **columns: Any) -> Any:
    """Return rows as a buffer with n-step returns gives them."""
    single, summed = discrete_rows(N_ROWS, 4, 3), discrete_rows(N_ROWS, 4, 3, seed=1, ends_every=3)
    return as_tree(
        {
            **{name: single[name] for name in ("obs", "action")},
            **{f"step_{name}": single[name] for name in ("reward", "next_obs", "terminated")},
            **{name: summed[name] for name in ("reward", "next_obs", "terminated")},
            "discount": torch.full((N_ROWS,), GAMMA**n_step),
            **columns,
        }
    )


def target(policy: DQfDPolicy, reward: Any, next_obs: Any, terminated: Any, discount: float) -> Any:
    """Return a double target of one row: the network chooses, the target network values."""
    if bool(terminated):
        return float(reward)
    with torch.no_grad():
        best = int(policy.model(next_obs[None])["logit"][0].argmax())
        value = policy.q.target(next_obs[None])["logit"][0, best]
    return float(reward + discount * value)


@pytest.mark.parametrize("weighted", [False, True])
def test_the_loss_is_that_of_the_paper(weighted: bool) -> None:
    options = {"n_step_weight": 0.7, "margin_weight": 2.0, "l2_weight": 0.01, "margin": 0.5}
    policy = made(n_step=3, loss="mse", **options)
    with torch.no_grad():  # so that the target network has weights of its own
        for parameter in policy.q.target.parameters():
            parameter.add_(0.05)
    is_expert = torch.arange(N_ROWS) % 2 == 0
    weight = torch.linspace(0.2, 1.0, N_ROWS) if weighted else torch.ones(N_ROWS)
    data = nstep_rows(is_expert=is_expert, **({"weight": weight} if weighted else {}))
    with torch.no_grad():
        q = policy.model(data["obs"])["logit"]
    sums, errors = dict.fromkeys(("single", "n", "margin"), 0.0), []
    for row in range(N_ROWS):
        action, share = int(data["action"][row]), float(weight[row]) / N_ROWS
        columns = ("reward", "next_obs", "terminated")
        single = target(policy, *(data[f"step_{name}"][row] for name in columns), GAMMA)
        summed = target(policy, *(data[name][row] for name in columns), GAMMA**3)
        errors.append(abs(single - float(q[row, action])))
        sums["single"] += share * errors[-1] ** 2
        sums["n"] += share * (summed - float(q[row, action])) ** 2
        if is_expert[row]:
            raised = [float(q[row, a]) + (0.0 if a == action else 0.5) for a in range(3)]
            sums["margin"] += share * (max(raised) - float(q[row, action]))
    squares = sum(float(p.detach().square().sum()) for p in policy.model.parameters())
    output = policy.learn_mode.forward(data)
    assert output["n_step_loss"] == pytest.approx(sums["n"], rel=1e-4)
    assert output["margin_loss"] == pytest.approx(sums["margin"], rel=1e-4)
    whole = sums["single"] + 0.7 * sums["n"] + 2.0 * sums["margin"] + 0.01 * squares / 2
    assert output["total_loss"] == pytest.approx(whole, rel=1e-4)
    if weighted:
        torch.testing.assert_close(output["priority"], torch.tensor(errors), rtol=0, atol=1e-4)


def test_without_demonstrations_there_is_no_margin() -> None:
    assert made(n_step=3).learn_mode.forward(nstep_rows())["margin_loss"] == 0.0


def test_the_margin_is_to_allowed_actions_only() -> None:
    data = nstep_rows(is_expert=torch.ones(N_ROWS, dtype=torch.bool))
    mask = torch.zeros(N_ROWS, 3, dtype=torch.bool).scatter_(1, data["action"][:, None], True)
    output = made(n_step=3).learn_mode.forward(as_tree({**data, "action_mask": mask}))
    assert output["margin_loss"] == 0.0  # the demonstrated action is the only one


def test_the_margin_makes_demonstrated_actions_the_best() -> None:
    policy = made(n_step=1, learning_rate=0.01, margin=0.5, l2_weight=0.0)
    data = discrete_rows(N_ROWS, 4, 3, is_expert=torch.ones(N_ROWS, dtype=torch.bool))
    for _ in range(300):
        policy.learn_mode.forward(data)
    chosen = policy.eval_mode.forward(data["obs"])["action"]
    assert torch.equal(chosen, data["action"])


def test_rows_without_their_single_steps_are_refused() -> None:
    data = nstep_rows()
    rows = as_tree({name: data[name] for name in data if not name.startswith("step_")})
    with pytest.raises(StructureError, match=r"policy\.train_batch"):
        made(n_step=3).learn_mode.forward(rows)
    with pytest.raises(ConfigError, match="margin"):
        made(margin=-1.0)


def test_it_learns_from_collected_rows_and_demonstrations_of_several_steps() -> None:
    with make_env_manager(lambda: gym.make("CartPole-v1"), env_num=2, seed=0) as envs:
        policy = DQfDPolicy.for_env(envs, seed=0, n_step=3, obs_norm=True)
        rows = policy.train_batch(RolloutCollector(policy, envs).collect(64))
    buffer = MixedReplay(TensorBuffer(64, seed=0), rows, share=0.25)
    buffer.bind(n_step=policy.n_step, discount=policy.discount, burn_in=None, start_columns=())
    buffer.push(rows)
    (sample,) = buffer.sample_ahead(48, at_most=1)
    assert int(sample["is_expert"].sum()) == 12
    assert set(sample["step_reward"].tolist()) == {1.0}
    assert set(sample["reward"].tolist()) > {1.0}
    output = policy.learn_mode.forward(sample)
    assert output["margin_loss"] > 0 and output["n_step_loss"] > 0


def test_single_steps_are_normalized_as_the_others_are() -> None:
    policy, twin = made(n_step=3, obs_norm=True), made(n_step=3)
    data = nstep_rows()
    policy.observe(3 + 2 * data["obs"])
    seen = {name: policy.obs_norm(data[name]) for name in ("obs", "next_obs", "step_next_obs")}
    output = policy.learn_mode.forward(data)
    assert output["total_loss"] == twin.learn_mode.forward(as_tree({**data, **seen}))["total_loss"]
