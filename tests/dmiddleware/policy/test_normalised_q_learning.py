"""Q-learning from observations that running statistics normalise."""

from typing import Any

import gymnasium as gym
import pytest
import torch

from dmiddleware.data import Batch, as_tree
from dmiddleware.data.batch import leaves
from dmiddleware.errors import ConfigError
from dmiddleware.policy import (
    C51Policy,
    DQNPolicy,
    IQNPolicy,
    QMIXPolicy,
    QRDQNPolicy,
    R2D2Policy,
    RainbowPolicy,
    VDNPolicy,
)
from tests.dmiddleware.policy import test_qmix, test_r2d2

PLAIN = [DQNPolicy, C51Policy, QRDQNPolicy, IQNPolicy, RainbowPolicy]
TEAMS = [VDNPolicy, QMIXPolicy]


def pair(cls: Any, **options: Any) -> tuple[Any, Any]:
    """Return a policy that normalises, and one of the same weights that does not."""
    if cls in TEAMS:
        return test_qmix.made(cls, obs_norm=True, **options), test_qmix.made(cls, **options)
    env = gym.make("CartPole-v1")
    return cls.for_env(env, seed=0, obs_norm=True, **options), cls.for_env(env, seed=0, **options)


def rows(cls: Any, seed: int = 0) -> Batch:
    if cls in TEAMS:
        return test_qmix.batch(seed=seed)
    generator = torch.Generator().manual_seed(seed)
    return as_tree(
        {
            "obs": 5 + 3 * torch.randn(16, 4, generator=generator),
            "next_obs": 5 + 3 * torch.randn(16, 4, generator=generator),
            "action": torch.randint(2, (16,), generator=generator),
            "reward": torch.randn(16, generator=generator),
            "terminated": torch.arange(16) % 4 == 0,
        }
    )


def normalised(policy: Any, batch: Batch) -> Batch:
    see = policy.get_attribute("obs_normaliser")
    return as_tree({**dict(batch.items()), **{k: see(batch[k]) for k in ("obs", "next_obs")}})


def first_inputs(sequences: Batch) -> dict[str, torch.Tensor]:
    """Return what a recurrent policy takes beside the first observations of sequences."""
    names = ("is_first", "prev_action", "prev_reward")
    return {**{name: sequences[name][0] for name in names}, "state": sequences["state"]}


@pytest.mark.parametrize("cls", [*PLAIN, *TEAMS])
def test_acting_and_learning_see_normalised_observations(cls: Any) -> None:
    policy, twin = pair(cls)
    for seed in range(3):
        obs = rows(cls, seed)["obs"]
        output = policy.collect_mode.forward(obs)
        wanted = twin.collect_mode.forward(policy.get_attribute("obs_normaliser")(obs))
        assert torch.equal(output["logit"], wanted["logit"])
    batch = rows(cls, 3)
    batch["discount"] = torch.full_like(batch["terminated"], 0.99, dtype=torch.float32)
    for _ in range(2):
        loss = policy.learn_mode.forward(batch)["total_loss"]
        assert loss == twin.learn_mode.forward(normalised(policy, batch))["total_loss"]
    obs = rows(cls, 4)["obs"]
    seen = policy.get_attribute("obs_normaliser")(obs)
    output, wanted = policy.eval_mode.forward(obs), twin.eval_mode.forward(seen)
    assert torch.equal(output["action"], wanted["action"])
    unlike = [twin.collect_mode.forward(one)["logit"] for one in (obs, seen)]
    assert not torch.allclose(*unlike)


def test_sequences_are_normalised() -> None:
    policy, batch = test_r2d2.sampled(obs_norm=True)
    twin, _ = test_r2d2.sampled()
    assert policy.get_attribute("obs_normaliser").has_seen_all
    loss = policy.learn_mode.forward(batch)["total_loss"]
    assert loss == twin.learn_mode.forward(normalised(policy, batch))["total_loss"]
    obs, inputs = batch["obs"][0], first_inputs(batch)
    output = policy.eval_mode.forward(obs, **inputs)
    wanted = twin.eval_mode.forward(policy.get_attribute("obs_normaliser")(obs), **inputs)
    assert torch.equal(output["state"], wanted["state"])


@pytest.mark.parametrize("cls", [DQNPolicy, R2D2Policy])
def test_only_collecting_changes_the_statistics(cls: Any) -> None:
    if cls is R2D2Policy:
        policy, batch = test_r2d2.sampled(obs_norm=True)
        obs, inputs = batch["obs"][0], first_inputs(batch)
    else:
        (policy, _), batch = pair(cls), rows(cls)
        obs, inputs = batch["obs"], {}
        policy.collect_mode.forward(obs)

    def statistics() -> list[torch.Tensor]:
        state = policy.collect_mode.state_dict()["acting_parts"]["obs_normaliser"]
        return [torch.as_tensor(leaf) for _, leaf in leaves(as_tree(state["running"]))]

    before = statistics()
    policy.eval_mode.forward(obs, **inputs)
    policy.learn_mode.forward(batch)
    assert all(map(torch.equal, before, statistics()))
    policy.collect_mode.forward(obs, **inputs)
    assert not all(map(torch.equal, before, statistics()))


def test_the_statistics_are_part_of_a_checkpoint_and_of_what_collectors_receive() -> None:
    (policy, _), (other, _) = pair(DQNPolicy), pair(DQNPolicy)
    for seed in range(2):
        policy.collect_mode.forward(rows(DQNPolicy, seed)["obs"])
    obs = rows(DQNPolicy, 5)["obs"]
    for mode in ("learn_mode", "collect_mode"):
        getattr(other, mode).load_state_dict(getattr(policy, mode).state_dict())
        actions = [one.eval_mode.forward(obs)["action"] for one in (policy, other)]
        assert torch.equal(*actions)
        seen = [one.get_attribute("obs_normaliser")(obs) for one in (policy, other)]
        assert torch.equal(*seen)
        (other, _) = pair(DQNPolicy)


def test_several_ranks_are_refused() -> None:
    with pytest.raises(ConfigError, match="multi_gpu must be False with obs_norm"):
        DQNPolicy.for_env(gym.make("CartPole-v1"), obs_norm=True, multi_gpu=True)
