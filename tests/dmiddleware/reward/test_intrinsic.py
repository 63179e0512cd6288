"""Rewards for new observations: random network distillation and the intrinsic curiosity module."""

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces

from dmiddleware.data import as_tree, from_numpy
from dmiddleware.errors import CheckpointMismatch, ConfigError, NonFiniteLoss, SpaceError
from dmiddleware.model import obs_shape_of
from dmiddleware.policy import BCPolicy, PPOPolicy
from dmiddleware.reward import ICM, RND

OBS = spaces.Box(-1.0, 1.0, (3,), np.float32)
CHOICES = spaces.Discrete(4, start=2)
FORCES = spaces.Box(-2.0, 2.0, (2, 1), np.float32)


def drawn(space, shape, seed):
    for size in reversed(shape):
        space = gym.vector.utils.batch_space(space, size)
    space.seed(seed)
    return from_numpy(space.sample())


def rows(obs_space=OBS, action_space=CHOICES, *, seed=0, shape=(6, 3)):
    """Rows [T, E, …] of random observations; each env is in an episode of its own."""
    return as_tree(
        {
            "obs": drawn(obs_space, shape, 3 * seed),
            "next_obs": drawn(obs_space, shape, 3 * seed + 1),
            "action": drawn(action_space, shape, 3 * seed + 2),
            "done": torch.zeros(shape, dtype=torch.bool),
            "episode_id": torch.arange(shape[-1]).expand(shape).contiguous(),
            "reward": torch.zeros(shape),
        }
    )


def rnd(obs_space=OBS, **options):
    return RND(obs_shape_of(obs_space), **{"hidden_sizes": (16,), "embedding_size": 8, **options})


def icm(obs_space=OBS, action_space=CHOICES, **options):
    shape = obs_shape_of(obs_space)
    return ICM(shape, action_space, **{"hidden_sizes": (16,), "model_size": 16, **options})


BOTH = pytest.mark.parametrize("make", [rnd, icm], ids=["RND", "ICM"])


@BOTH
def test_rewards_of_seen_rows_fall_below_those_of_new_ones(make):
    model = make(learning_rate=1e-2, discount=0.0)
    seen, new = rows(shape=(4, 2)), rows(seed=7, shape=(4, 2))
    model.reward(as_tree({key: torch.cat([seen[key], new[key]]) for key in seen}))
    first = model.reward(seen).mean()
    for _ in range(60):
        losses = model.update(seen)
    assert all(np.isfinite(value) for value in losses.values())
    seen_reward, new_reward = model.reward(seen).mean(), model.reward(new).mean()
    assert seen_reward < 0.2 * first
    assert seen_reward < 0.2 * new_reward


@BOTH
def test_the_discounted_sums_of_rewards_have_a_deviation_of_1(make):
    reward = make(discount=0.9).reward(rows(shape=(40, 5)))
    total, totals = torch.zeros(5), []
    for row in reward:
        total = 0.9 * total + row
        totals.append(total)
    assert torch.stack(totals).std(correction=0).item() == pytest.approx(1.0, rel=1e-4)


@BOTH
def test_rewards_have_the_shape_of_the_rows(make):
    assert make().reward(rows(shape=(5, 2))).shape == (5, 2)
    reward = make().reward(rows(shape=(5,)))
    assert reward.shape == (5,)
    assert reward.dtype == torch.float32
    assert (reward >= 0).all()


@BOTH
def test_the_scale_of_observations_does_not_matter(make):
    far = spaces.Box(5e3, 7e3, (3,), np.float32)
    near = rows()
    batch = as_tree({**dict(near.items())})
    for name in ("obs", "next_obs"):
        batch[name] = near[name] * 1000 + 6000
    one, other = make(), make(far)
    torch.testing.assert_close(one.reward(near), other.reward(batch), rtol=1e-2, atol=1e-3)


@BOTH
def test_the_brightness_of_images_does_not_matter(make):
    dark = spaces.Box(0, 60, (3, 36, 36), np.uint8)
    batch = rows(dark, shape=(4, 2))
    bright = as_tree({**dict(batch.items())})
    for name in ("obs", "next_obs"):
        bright[name] = 2 * batch[name] + 100
    reward, same = make(dark).reward(batch), make(dark).reward(bright)
    torch.testing.assert_close(reward, same, rtol=1e-3, atol=1e-4)


@BOTH
@pytest.mark.parametrize(
    "obs_space",
    [
        spaces.Box(0, 255, (3, 36, 36), np.uint8),
        spaces.Discrete(5),
        spaces.Dict({"at": OBS, "room": spaces.Discrete(5)}),
    ],
    ids=["image", "integer", "dict"],
)
def test_observations_of_all_kinds_are_rewarded(make, obs_space):
    model, batch = make(obs_space), rows(obs_space)
    assert model.reward(batch).isfinite().all()
    model.update(batch)


@BOTH
def test_small_images_need_small_convolutions(make):
    grid = spaces.Box(0, 255, (3, 7, 7), np.uint8)
    with pytest.raises(SpaceError, match="at least 36 by 36, got 7 by 7"):
        make(grid)
    layers = ((4, 3, 2), (8, 3, 1))
    model, batch = make(grid, conv_layers=layers), rows(grid)
    assert model.settings["conv_layers"] == layers
    assert model.reward(batch).isfinite().all()
    model.update(batch)


@BOTH
def test_the_state_restores_every_later_reward(make):
    model, other = make(seed=0, batch_size=8), make(seed=1, batch_size=8)
    model.reward(rows())
    model.update(rows())
    other.load_state_dict(model.state_dict())
    for seed in range(2):
        assert torch.equal(model.reward(rows(seed=seed)), other.reward(rows(seed=seed)))
        assert model.update(rows(seed=seed)) == other.update(rows(seed=seed))


def test_the_state_of_another_reward_is_refused():
    with pytest.raises(CheckpointMismatch, match="components"):
        rnd().load_state_dict(icm().state_dict())
    with pytest.raises(CheckpointMismatch):
        rnd().load_state_dict(rnd(embedding_size=4).state_dict())


@BOTH
def test_the_same_seed_makes_the_same_reward(make):
    before = torch.get_rng_state()
    one, same, other = make(seed=3), make(seed=3), make(seed=4)
    assert torch.equal(torch.get_rng_state(), before)
    batch = rows()
    first = one.reward(batch)
    assert torch.equal(first, same.reward(batch))
    assert not torch.equal(first, other.reward(batch))


def test_the_target_of_rnd_never_changes():
    model = rnd(learning_rate=1e-2)
    before = {
        name: value.clone() for name, value in model.state_dict()["components"]["target"].items()
    }
    model.reward(rows())
    model.update(rows())
    after = model.state_dict()["components"]["target"]
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)


@pytest.mark.parametrize("action_space", [CHOICES, FORCES], ids=["discrete", "box"])
def test_icm_learns_to_tell_actions_that_change_the_observation(action_space):
    model = icm(action_space=action_space, learning_rate=1e-2, hidden_sizes=(32,))
    batch = rows(action_space=action_space, shape=(32, 2))
    effect = batch["action"].float().reshape(32, 2, -1)[..., :1]
    batch["next_obs"] = batch["obs"] + effect * torch.tensor([1.0, 0.0, 0.0])
    model.reward(batch)
    first = model.update(batch)
    for _ in range(40):
        last = model.update(batch)
    assert last["inverse_loss"] < (0.2 if action_space is CHOICES else 0.6) * first["inverse_loss"]


def test_icm_refuses_actions_that_it_cannot_predict():
    with pytest.raises(SpaceError, match="MultiBinary"):
        icm(action_space=spaces.MultiBinary(3))


@pytest.mark.parametrize(
    ("make", "options"),
    [
        (rnd, {"obs_clip": 0.0}),
        (rnd, {"batch_size": 0}),
        (icm, {"beta": 0.0}),
        (icm, {"beta": 1.0}),
    ],
    ids=["clip", "batch", "beta 0", "beta 1"],
)
def test_invalid_option_is_refused(make, options):
    with pytest.raises(ConfigError, match=next(iter(options))):
        make(**options)


@BOTH
def test_observations_that_are_not_finite_are_reported(make):
    model, batch = make(), rows()
    model.reward(batch)
    batch["next_obs"][0, 0] = torch.nan
    with pytest.raises(NonFiniteLoss, match=type(model).__name__):
        model.update(batch)


def spaces_of_env(obs_space, action_space):
    env = gym.Env()
    env.observation_space, env.action_space = obs_space, action_space
    return env


@pytest.mark.parametrize("kind", [RND, ICM])
def test_discount_and_seed_are_the_policys(kind):
    env = spaces_of_env(OBS, CHOICES)
    policy = PPOPolicy.for_env(env, seed=3, discount=0.5)
    model = kind.for_env(env, policy)
    shape = (obs_shape_of(OBS),) if kind is RND else (obs_shape_of(OBS), CHOICES)
    same = kind(*shape, discount=0.5, seed=3)
    other = kind(*shape, discount=0.9, seed=3)
    batch = rows()
    assert torch.equal(model.reward(batch), same.reward(batch))
    assert not torch.equal(model.reward(batch), other.reward(batch))


def test_policy_without_a_discount_is_refused():
    env = spaces_of_env(OBS, CHOICES)
    with pytest.raises(ConfigError, match="discount"):
        RND.for_env(env, BCPolicy.for_env(env))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("kind", [RND, ICM])
def test_a_gpu_gives_the_same_rewards(kind):
    env, rewards = spaces_of_env(OBS, CHOICES), []
    for cuda in (False, True):
        model = kind.for_env(env, PPOPolicy.for_env(env, seed=0, cuda=cuda))
        model.reward(rows())
        model.update(rows())
        rewards.append(model.reward(rows(seed=1)))
    torch.testing.assert_close(*rewards, rtol=1e-3, atol=1e-4)
