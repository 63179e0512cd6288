"""Soft actor-critic for discrete actions."""

from __future__ import annotations

import math
from typing import Any

import gymnasium as gym
import pytest
import torch

from dmiddleware.errors import ConfigError, SpaceError
from dmiddleware.policy import DiscreteSACPolicy
from dmiddleware.tree import as_tree
from tests.dmiddleware.policy.discrete_rows import discrete_rows

SMALL = {
    "obs_shape": 3,
    "action_shape": 4,
    "actor_hidden_sizes": [16],
    "critic_hidden_sizes": [16],
}


def made(seed: int = 0, **learn: Any) -> DiscreteSACPolicy:
    return DiscreteSACPolicy({"model": SMALL, "seed": seed, **learn})


def batch(n: int = 8, seed: int = 0, **columns: Any) -> Any:
    return discrete_rows(n, 3, 4, seed=seed, **columns)


def some_masks(n: int = 8) -> tuple[torch.Tensor, torch.Tensor]:
    masks = torch.rand(2, n, 4, generator=torch.Generator().manual_seed(7)) < 0.5
    masks[..., 0] = True
    return masks[0], masks[1]


def probabilities(actor: Any, obs: torch.Tensor, allowed: torch.Tensor) -> dict[int, torch.Tensor]:
    """Return the probabilities of the allowed actions of one row."""
    chosen = allowed.nonzero().flatten().tolist()
    prob = actor(obs)["logit"][chosen].softmax(-1)
    return dict(zip(chosen, prob, strict=True))


@pytest.mark.parametrize("is_masked", [False, True])
def test_the_losses_are_those_of_the_paper_over_the_allowed_actions(is_masked: bool) -> None:
    policy = made(alpha=0.5, target_entropy_ratio=0.9)
    mask, next_mask = some_masks() if is_masked else torch.ones(2, 8, 4, dtype=torch.bool)
    columns = {"action_mask": mask, "next_action_mask": next_mask} if is_masked else {}
    data = batch(**columns)
    parts = policy.components
    actor, critic = parts["actor"].module, parts["critic"]
    critic_loss = entropy = gap = 0.0
    before = []
    with torch.no_grad():
        for row in range(8):
            next_obs, obs = data["next_obs"][row], data["obs"][row]
            q = critic.target(next_obs).amin(0)
            # Equation 10.
            value = sum(
                p * (q[a] - 0.5 * p.log())
                for a, p in probabilities(actor, next_obs, next_mask[row]).items()
            )
            target = data["reward"][row] + 0.99 * value * ~data["terminated"][row]
            errors = critic.module(obs)[:, data["action"][row]] - target
            critic_loss += 0.5 * errors.square().sum().item() / 8
            prob = probabilities(actor, obs, mask[row])
            own = sum(float(-p * p.log()) for p in prob.values())
            entropy += own / 8
            gap += (own - 0.9 * math.log(len(prob))) / 8
            before.append(prob)
    output = policy.learn_mode.forward(data)
    assert output["critic_loss"] == pytest.approx(critic_loss, rel=1e-4)
    assert output["entropy"] == pytest.approx(entropy, rel=1e-4)
    # Equation 12; the actor follows the critics after their step.
    with torch.no_grad():
        wanted = 0.0
        for row, prob in enumerate(before):
            q = critic.module(data["obs"][row]).amin(0)
            wanted += sum(float(p * (0.5 * p.log() - q[a])) for a, p in prob.items()) / 8
    assert output["policy_loss"] == pytest.approx(wanted, rel=1e-4)
    # Equation 11: above its target, the entropy counts less; Adam's first step is its rate.
    assert gap > 0
    log_alpha = parts["temperature"].module.log_alpha.item()
    assert log_alpha == pytest.approx(math.log(0.5) - 3e-4, rel=1e-5)


def test_a_row_with_one_allowed_action_has_no_entropy_and_leaves_the_temperature() -> None:
    policy = made(alpha=0.5)
    mask = torch.zeros(8, 4, dtype=torch.bool)
    mask[:, 2] = True
    data = batch(action_mask=mask, next_action_mask=mask)
    with torch.no_grad():
        q = policy.components["critic"].target(data["next_obs"]).amin(0)[:, 2]
    target = data["reward"] + 0.99 * q * ~data["terminated"]
    output = policy.learn_mode.forward(data)
    assert output["entropy"] == 0.0
    assert output["target_q_value"] == pytest.approx(target.mean().item(), rel=1e-4)
    assert policy.learn_mode.forward(data)["alpha"] == pytest.approx(0.5)


def test_a_mask_that_allows_nothing_counts_as_one_that_allows_everything() -> None:
    nothing = torch.zeros(8, 4, dtype=torch.bool)
    masked = batch(action_mask=nothing, next_action_mask=nothing)
    outputs = [made().learn_mode.forward(data) for data in (masked, batch())]
    assert outputs[0] == pytest.approx(outputs[1])


def test_the_temperature_rises_where_the_entropy_is_too_small() -> None:
    policy = made(learning_rate_q=0.03, learning_rate_policy=0.03, learning_rate_alpha=0.01)
    data = batch(64)
    data["reward"][:] = 20.0 * (data["action"] == 0)
    data["terminated"][:] = True
    alphas = [policy.learn_mode.forward(data)["alpha"] for _ in range(100)]
    assert alphas[-1] > alphas[0]


def test_a_fixed_temperature_stays() -> None:
    policy = made(auto_alpha=False, alpha=0.2)
    outputs = [policy.learn_mode.forward(batch())["alpha"] for _ in range(3)]
    assert outputs == pytest.approx([0.2] * 3)


def test_evaluating_takes_the_most_likely_action_or_draws_one() -> None:
    policy, obs = made(), torch.randn(1, 3).expand(4000, 3)
    with torch.no_grad():
        prob = policy.components["actor"].module(obs[:1])["logit"].softmax(-1)[0]
    assert (policy.eval_mode.forward(obs)["action"] == prob.argmax()).all()
    for drawn in (
        policy.collect_mode.forward(obs)["action"],
        policy.eval_mode.forward(obs, deterministic=False)["action"],
    ):
        shares = torch.bincount(drawn, minlength=4) / 4000
        torch.testing.assert_close(shares, prob, rtol=0, atol=0.04)


def test_collectors_receive_the_actor_alone() -> None:
    names = made().collect_mode.state_dict()["model"]
    assert names
    assert all(name.startswith("actor.") for name in names)


def test_an_interrupted_run_continues_bit_for_bit() -> None:
    whole, first, second = made(), made(), made(seed=1)
    outputs = [whole.learn_mode.forward(batch(seed=seed)) for seed in range(6)]
    for seed in range(3):
        first.learn_mode.forward(batch(seed=seed))
    second.learn_mode.load_state_dict(first.learn_mode.state_dict())
    assert [second.learn_mode.forward(batch(seed=seed)) for seed in range(3, 6)] == outputs[3:]
    obs = torch.randn(50, 3)
    actions = [policy.collect_mode.forward(obs)["action"] for policy in (whole, second)]
    assert torch.equal(*actions)


def test_weights_enter_the_loss_and_priorities_come_back() -> None:
    policy = made()
    output = policy.learn_mode.forward(batch(weight=torch.zeros(8)))
    assert output["critic_loss"] == 0.0
    assert output["priority"].shape == (8,)


def test_a_column_discount_must_be_made_of_the_policys_own_discount() -> None:
    policy = made()
    policy.learn_mode.forward(batch(discount=torch.full((8,), 0.99)))
    with pytest.raises(ConfigError, match=r"discount 0\.99 up to n_step=1"):
        made().learn_mode.forward(batch(discount=torch.full((8,), 0.9)))


def test_continuous_actions_are_refused() -> None:
    with pytest.raises(SpaceError, match=r"supports discrete actions.*Box.*use PPO"):
        DiscreteSACPolicy.for_env(gym.make("Pendulum-v1"))


def test_images_are_learned_from() -> None:
    model = {**SMALL, "obs_shape": (1, 36, 36), "n_critics": 3}
    policy = DiscreteSACPolicy({"model": model, "seed": 0})
    image = torch.zeros(2, 1, 36, 36, dtype=torch.uint8)
    critic = policy.components["critic"]
    assert critic.module(image).shape == (3, 2, 4)
    data = batch(2)
    data["obs"] = data["next_obs"] = image
    assert math.isfinite(policy.learn_mode.forward(data)["total_loss"])


@pytest.mark.learning
def test_it_learns_which_action_is_best_where() -> None:
    """One step: the reward is the entry of obs that the action names; action 3 gives nothing."""
    rates = {f"learning_rate_{part}": 3e-3 for part in ("q", "policy", "alpha")}
    policy = made(**rates, target_entropy_ratio=0.2)
    generator = torch.Generator().manual_seed(0)
    for _ in range(300):
        obs = torch.rand(128, 3, generator=generator) * 2
        action = torch.randint(4, (128,), generator=generator)
        reward = torch.cat([obs, torch.zeros(128, 1)], -1).gather(-1, action[:, None])[:, 0]
        columns = {"obs": obs, "next_obs": obs, "action": action, "reward": 5 * reward}
        done = torch.ones(128, dtype=torch.bool)
        policy.learn_mode.forward(as_tree({**columns, "terminated": done}))
    obs = torch.rand(500, 3, generator=generator) * 2
    best = policy.eval_mode.forward(obs)["action"] == obs.argmax(-1)
    assert best.float().mean().item() > 0.85
