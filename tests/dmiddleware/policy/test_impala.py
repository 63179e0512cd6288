"""IMPALA."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dmiddleware.classic.monitored import monitored_of
from dmiddleware.data import as_tree, flatten_lead
from dmiddleware.errors import ConfigError, StructureError
from dmiddleware.policy import IMPALAPolicy

SMALL = {"obs_shape": 4, "action_shape": 2, "encoder_hidden_sizes": [16]}
T, B = 5, 3


def made(**cfg: Any) -> IMPALAPolicy:
    return IMPALAPolicy({"model": SMALL, "seed": 0, **cfg})


def lanes(policy: IMPALAPolicy, n_steps: int = T, n_lanes: int = B, seed: int = 0) -> Any:
    """Lanes of one policy: an episode is terminated, one truncated, and all are cut at the end."""
    generator = torch.Generator().manual_seed(seed)
    obs, next_obs = torch.randn(2, n_steps, n_lanes, 4, generator=generator)
    next_obs[:-1] = obs[1:]
    terminated, truncated = torch.zeros(2, n_steps, n_lanes, dtype=torch.bool)
    terminated[1, 0] = truncated[2, 1] = True
    next_obs[2, 1] = torch.randn(4, generator=generator)
    output = policy.collect_mode.forward(obs.flatten(0, 1))
    return as_tree(
        {
            "obs": obs,
            "next_obs": next_obs,
            "reward": torch.randn(n_steps, n_lanes, generator=generator),
            "terminated": terminated,
            "done": terminated | truncated,
            "action": output["action"].reshape(n_steps, n_lanes),
            "log_prob": output["log_prob"].reshape(n_steps, n_lanes),
        }
    )


def vtrace_by_hand(batch: Any, value: Any, next_value: Any, ratio: Any, clips: Any) -> Any:
    """Compute the targets as equation 1 writes them: a sum over all later steps."""
    discount, (rho_clip, c_clip) = 0.9, clips
    rho, c = ratio.clamp(max=rho_clip), ratio.clamp(max=c_clip)
    bootstrap = next_value * ~batch["terminated"]
    delta = rho * (batch["reward"] + discount * bootstrap - value)
    target, adv = torch.zeros(T, B), torch.zeros(T, B)
    for lane in range(B):
        for start in range(T):
            factor, target[start, lane] = 1.0, value[start, lane]
            for t in range(start, T):
                target[start, lane] += factor * delta[t, lane]
                factor *= discount * c[t, lane]
                if batch["done"][t, lane]:
                    break
        for t in range(T):
            is_cut = t == T - 1 or batch["done"][t, lane]
            following = bootstrap[t, lane] if is_cut else target[t + 1, lane]
            adv[t, lane] = rho[t, lane] * (
                batch["reward"][t, lane] + discount * following - value[t, lane]
            )
    return target, adv


def test_the_losses_are_those_of_the_paper() -> None:
    learn = {"rho_clip": 1.1, "c_clip": 0.9, "entropy_weight": 0.02, "learning_rate": 0.05}
    policy = made(discount=0.9, **learn)
    batch = lanes(policy)
    policy.learn_mode.forward(batch)  # so that ratios differ from 1
    model = policy.model
    with torch.no_grad():
        output, next_value = model(batch["obs"]), model(batch["next_obs"])["value"]
    distribution = torch.distributions.Categorical(logits=output["logit"])
    log_prob = distribution.log_prob(batch["action"])
    ratio = (log_prob - batch["log_prob"]).exp()
    assert ratio.min() < 0.9
    assert ratio.max() > 1.1
    value = output["value"]
    target, adv = vtrace_by_hand(batch, value, next_value, ratio, (1.1, 0.9))
    got = policy.learn_mode.forward(batch)
    wanted = -(log_prob * adv).mean().item()
    assert got["policy_loss"] == pytest.approx(wanted, rel=1e-4)
    wanted = 0.5 * (value - target).square().mean().item()
    assert got["value_loss"] == pytest.approx(wanted, rel=1e-4)
    assert got["entropy"] == pytest.approx(distribution.entropy().mean().item(), rel=1e-4)
    assert set(monitored_of(type(policy))) <= set(got)


def test_an_episode_that_a_failing_env_cut_short_is_not_continued() -> None:
    policies = [made(learning_rate=0.01) for _ in range(2)]
    whole, cut = (lanes(policy) for policy in policies)
    whole["episode_id"] = torch.zeros(T, B, dtype=torch.int64)
    cut["episode_id"] = (torch.arange(T) > 2).long()[:, None].expand(T, B)
    cut["next_obs"][2] = whole["next_obs"][2]
    losses = [
        policy.learn_mode.forward(batch)["value_loss"]
        for policy, batch in zip(policies, (whole, cut), strict=True)
    ]
    assert losses[0] != losses[1]


def test_rows_that_are_not_lanes_are_refused() -> None:
    policy = made()
    with pytest.raises(StructureError, match=r"lanes \[T, B, …\].*\(15,\)"):
        policy.learn_mode.forward(flatten_lead(lanes(policy)))


def test_a_bound_of_the_traces_above_that_of_the_errors_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"c_clip must be at most rho_clip"):
        made(c_clip=2.0)


def test_an_interrupted_run_continues_bit_for_bit() -> None:
    whole, first, second = made(), made(), made(seed=1)
    batches = [lanes(made(), seed=seed) for seed in range(4)]
    outputs = [whole.learn_mode.forward(batch) for batch in batches]
    for batch in batches[:2]:
        first.learn_mode.forward(batch)
    second.learn_mode.load_state_dict(first.learn_mode.state_dict())
    assert [second.learn_mode.forward(batch) for batch in batches[2:]] == outputs[2:]


@pytest.mark.learning
def test_it_learns_from_data_of_much_older_weights() -> None:
    """Action 1 pays where the first entry of obs is positive, and costs elsewhere.

    The weights that act are up to 20 updates old.
    """
    policy, acting = (made(learning_rate=5e-3) for _ in range(2))
    generator = torch.Generator().manual_seed(0)
    for update in range(200):
        if update % 20 == 0:
            acting.collect_mode.load_state_dict(policy.collect_mode.state_dict())
        obs = torch.randn(8, 16, 4, generator=generator)
        output = acting.collect_mode.forward(obs.flatten(0, 1))
        action = output["action"].reshape(8, 16)
        done = torch.zeros(8, 16, dtype=torch.bool)
        policy.learn_mode.forward(
            as_tree(
                {
                    "obs": obs,
                    "next_obs": torch.cat([obs[1:], obs[:1]]),
                    "action": action,
                    "log_prob": output["log_prob"].reshape(8, 16),
                    "reward": (action * obs[..., 0].sign()).float(),
                    "terminated": done,
                    "done": done,
                }
            )
        )
    obs = torch.randn(500, 4, generator=generator)
    action = policy.eval_mode.forward(obs)["action"]
    assert (action == (obs[:, 0] > 0)).float().mean().item() > 0.9
