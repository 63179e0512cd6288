"""Observations of integers: networks see them as they are, unless they are pixels."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.wrappers import FrameStackObservation

from dmiddleware.data import TensorBuffer, as_tree, flatten_lead, from_numpy, leaves
from dmiddleware.env import make_env_manager
from dmiddleware.errors import SpaceError
from dmiddleware.model import CentralizedActorCritic, QMIXNetwork
from dmiddleware.policy import BCPolicy, DQNPolicy, PPOPolicy, SACPolicy
from dmiddleware.reward import GAIL, RND
from dmiddleware.rollout import RolloutCollector, evaluate_episodes
from dmiddleware.tree import with_columns
from tests.dmiddleware.policy.every_policy import others_are_slow
from tests.dmiddleware.policy.one_round import (
    BOX,
    CONTINUOUS,
    STOCK,
    Drawn,
    action_space_of,
    learnable,
    one_round,
)

U8 = np.uint8
SMALL_CONVOLUTIONS = {"conv_layers": [(4, 3, 2)]}
NUMBERS: dict[str, gym.Space[Any]] = {
    "flags": spaces.Box(0, 1, (6,), U8),
    "counts": spaces.Box(0, np.array([3, 20, 255]), (3,), U8),
    "bytes": spaces.Box(0, 255, (6,), U8),
    "one number": spaces.Box(0, 9, (), U8),
    "a board": spaces.Box(0, 2, (8, 8), U8),
    "a large board": spaces.Box(0, 2, (30, 30), U8),
    "planes": spaces.Box(0, 1, (2, 8, 8), U8),
    "large planes": spaces.Box(0, 1, (2, 40, 40), U8),
    "stacked planes": spaces.Box(0, 1, (2, 2, 36, 36), U8),
    "the cells of a grid": spaces.Box(0, 255, (3, 7, 7), U8),
    "parts": spaces.Dict(
        {
            "flags": spaces.Box(0, 1, (6,), U8),
            "map": spaces.Box(0, 9, (1, 40, 40), U8),
            "nested": spaces.Tuple((spaces.Box(0, 30, (2, 2), U8), spaces.Discrete(3))),
        }
    ),
}
IMAGES: dict[str, gym.Space[Any]] = {
    "an image": spaces.Box(0, 255, (3, 36, 40), U8),
    "without channels": spaces.Box(0, 255, (28, 30), U8),
    "a stack": spaces.Box(0, 255, (4, 3, 36, 36), U8),
    "a stack of one channel": spaces.Box(0, 255, (4, 1, 36, 36), U8),
    "parts": spaces.Dict({"camera": spaces.Box(0, 255, (2, 3, 36, 36), U8), "arm": BOX}),
}


def with_floats(space: gym.Space[Any]) -> gym.Space[Any]:
    """Return a space of the same numbers as float32."""
    if isinstance(space, spaces.Dict):
        return spaces.Dict({name: with_floats(one) for name, one in space.spaces.items()})
    if isinstance(space, spaces.Tuple):
        return spaces.Tuple([with_floats(one) for one in space.spaces])
    if isinstance(space, spaces.Box):
        return spaces.Box(space.low, space.high, space.shape, np.float32)
    return space


def as_floats(tree: Any, *, scale: float = 1.0) -> Any:
    """Return a tree with its bytes as float32."""
    if isinstance(tree, torch.Tensor):
        return tree.float() * scale if tree.dtype is torch.uint8 else tree
    return as_tree({name: as_floats(tree[name], scale=scale) for name in tree})


def conv_layers_for(space: gym.Space[Any]) -> dict[str, Any]:
    is_small_image = len(space.shape or ()) == 3 and min(space.shape[-2:]) < 36
    return SMALL_CONVOLUTIONS if is_small_image else {}


def drawn(space: gym.Space[Any], n: int = 5) -> Any:
    batch = gym.vector.utils.batch_space(space, n)
    batch.seed(0)
    return as_tree({"obs": from_numpy(batch.sample())})["obs"]


def check_same(cls: Any, one: Any, other: Any, obs: Any, seen: Any) -> None:
    """Require that a policy sees observations as another one sees others."""
    answers = [p.collect_mode.forward(o) for p, o in ((one, obs), (other, seen))]
    for name in answers[0]:
        for (path, a), (_, b) in zip(
            leaves(answers[0][name]), leaves(answers[1][name]), strict=True
        ):
            torch.testing.assert_close(a, b, msg=f"{cls.__name__}: {name} {path}")


@pytest.mark.parametrize("space", NUMBERS.values(), ids=NUMBERS)
@pytest.mark.parametrize("cls", [DQNPolicy, PPOPolicy, SACPolicy, BCPolicy])
def test_a_policy_sees_integers_as_it_sees_the_same_floats(cls: Any, space: Any) -> None:
    options = {"seed": 0, "model": conv_layers_for(space)}
    action = action_space_of(cls)
    one, other = (cls.for_env(Drawn(s, action), **options) for s in (space, with_floats(space)))
    obs = drawn(space)
    check_same(cls, one, other, obs, as_floats(obs))


@pytest.mark.parametrize("cls", others_are_slow(STOCK))
def test_every_policy_learns_from_integers_what_it_learns_from_floats(cls: Any) -> None:
    space, losses = NUMBERS["parts"], []
    rows: Any = None
    for own in (space, with_floats(space)):
        options = {"burn_in": 2} if hasattr(cls.settings_class(), "burn_in") else {}
        with make_env_manager(
            lambda own=own: Drawn(own, action_space_of(cls)), env_num=1, seed=0
        ) as envs:
            policy = cls.for_env(envs, seed=0, **options)
            if rows is None:
                rows = policy.train_batch(RolloutCollector(policy, envs).collect(40))
            else:
                rows = as_tree({name: as_floats(rows[name]) for name in rows})
        if getattr(policy.cfg, "obs_norm", False):
            policy.observe(rows["obs"])
        output = policy.learn_mode.forward(learnable(policy, rows))
        losses.append((output[-1] if isinstance(output, list) else output)["total_loss"])
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)


@pytest.mark.parametrize("space", IMAGES.values(), ids=IMAGES)
@pytest.mark.parametrize("cls", [DQNPolicy, PPOPolicy, SACPolicy])
def test_pixels_are_scaled_to_the_unit_interval(cls: Any, space: Any) -> None:
    action = action_space_of(cls)
    one, other = (cls.for_env(Drawn(s, action), seed=0) for s in (space, with_floats(space)))
    obs = drawn(space)
    check_same(cls, one, other, obs, as_floats(obs, scale=1 / 255))


@pytest.mark.parametrize("shape", [6, (8, 8), ("unscaled", 30, 30)], ids=str)
def test_a_policy_that_knows_no_env_does_the_same(shape: Any) -> None:
    policy = DQNPolicy({"model": {"obs_shape": shape, "action_shape": 3}, "seed": 0})
    sizes = tuple(size for size in np.atleast_1d(np.array(shape, object)) if size != "unscaled")
    obs = torch.randint(20, (4, *map(int, sizes)), dtype=torch.uint8)
    check_same(DQNPolicy, policy, policy, obs, obs.float())


def test_a_model_may_say_that_numbers_are_no_pixels() -> None:
    space = spaces.Box(0, 255, (1, 40, 40), U8)
    unscaled = ("unscaled", 1, 40, 40)
    policy = DQNPolicy.for_env(Drawn(space, spaces.Discrete(3)), model={"obs_shape": unscaled})
    obs = drawn(space)
    check_same(DQNPolicy, policy, policy, obs, obs.float())
    planes = Drawn(spaces.Box(0, 1, (1, 40, 40), U8), spaces.Discrete(3))
    wrong = DQNPolicy({"model": {"obs_shape": [1, 40, 40], "action_shape": 3}})
    with pytest.raises(SpaceError, match=r"obs_shape to \('unscaled', 1, 40, 40\)"):
        wrong.check_spaces(planes.observation_space, planes.action_space)


@pytest.mark.parametrize("name", ["large planes", "a stack"])
def test_a_saved_policy_sees_what_it_saw(name: str, tmp_path: Path) -> None:
    one_round(PPOPolicy, {**NUMBERS, **IMAGES}[name], folder=tmp_path)
    one_round(DQNPolicy, {**NUMBERS, **IMAGES}[name], folder=tmp_path)


@pytest.mark.parametrize("name", ["flags", "parts"])
def test_learned_rewards_see_integers_as_floats(name: str) -> None:
    rewards = []
    space = NUMBERS[name]
    rows: Any = None
    for own in (space, with_floats(space)):
        env = Drawn(own, spaces.Discrete(3))
        policy = PPOPolicy.for_env(env, seed=0)
        if rows is None:
            with make_env_manager(lambda env=env: env, env_num=1, seed=0) as envs:
                rows = RolloutCollector(policy, envs).collect(20)
        else:
            rows = as_tree({name: as_floats(rows[name]) for name in rows})
        for model in (RND.for_env(env, policy), GAIL.for_env(env, rows)):
            model.update(rows)
            rewards.append(model.reward(rows))
    torch.testing.assert_close(rewards[0], rewards[2], rtol=1e-3, atol=1e-5)
    torch.testing.assert_close(rewards[1], rewards[3], rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("network", [CentralizedActorCritic, QMIXNetwork])
@pytest.mark.parametrize("size", [9, (30, 30)], ids=str)
def test_teams_see_flags_as_floats_and_pixels_scaled(network: Any, size: Any) -> None:
    torch.manual_seed(0)
    shape = size if isinstance(size, tuple) else (size,)
    model = network({"agents": size, "state": size}, 3, n_agent=2)
    obs = {
        "agents": torch.randint(2, (4, 2, *shape), dtype=torch.uint8),
        "state": torch.randint(2, (4, *shape), dtype=torch.uint8),
        "agent_mask": torch.ones(4, 2, dtype=torch.int8),
    }
    scale = 1 / 255 if shape == (30, 30) else 1.0
    floats = {name: one if name == "agent_mask" else one * scale for name, one in obs.items()}
    for name, column in model(obs).items():
        torch.testing.assert_close(column, model(floats)[name])
    if network is QMIXNetwork:
        q = torch.randn(4, 2)
        torch.testing.assert_close(model.mix(q, obs), model.mix(q, floats))


class Flags(gym.Env[Any, Any]):
    """The reward is 1 for the action whose flag is set."""

    observation_space = spaces.Box(0, 1, (8,), U8)
    action_space = spaces.Discrete(8)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.n_steps = 0
        return self.draw(), {}

    def draw(self) -> Any:
        self.flag = int(self.np_random.integers(8))
        return np.eye(8, dtype=U8)[self.flag]

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.n_steps += 1
        reward = float(action == self.flag)
        return self.draw(), reward, False, self.n_steps == 10, {}


def test_ppo_learns_from_flags() -> None:
    with make_env_manager(Flags, env_num=8, seed=0) as envs:
        policy = PPOPolicy.for_env(envs, seed=0, learning_rate=1e-2, discount=0.5)
        collector = RolloutCollector(policy, envs)
        for _ in range(12):
            rows = collector.collect(512)
            adv = rows["reward"] - rows["value"]
            batch = flatten_lead(with_columns(rows, adv=adv, ret=rows["reward"]))
            for _ in range(8):
                policy.learn_mode.forward(batch)
        mean = np.mean(evaluate_episodes(policy, envs, 16).get_episode_return()) / 10
    assert mean > 0.9  # 0.125 by chance


class Camera(gym.Env[Any, Any]):
    """Frames of random pixels."""

    def __init__(self, shape: tuple[int, ...], dtype: Any = U8) -> None:
        high = 255 if dtype is U8 else 1.0
        self.observation_space = spaces.Box(0, high, shape, dtype)
        self.action_space: gym.Space[Any] = spaces.Discrete(3)
        self.n_steps = 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.n_steps = 0
        return self.observation_space.sample(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.n_steps += 1
        return self.observation_space.sample(), 1.0, False, self.n_steps == 5, {}


@pytest.mark.parametrize("dtype", [U8, np.float32])
@pytest.mark.parametrize("channels", [1, 3, 4])
@pytest.mark.parametrize("cls", [DQNPolicy, PPOPolicy, SACPolicy])
def test_the_frames_of_a_stack_are_channels_of_one_image(
    cls: Any, channels: int, dtype: Any
) -> None:
    env: Any = Camera((channels, 40, 40), dtype)
    env.action_space = action_space_of(cls)
    stacked = FrameStackObservation(env, 2)
    with make_env_manager(lambda: stacked, env_num=1, seed=0) as envs:
        policy = cls.for_env(envs, seed=0)
        rows = RolloutCollector(policy, envs).collect(12)
    convolutions = [one for one in policy.model.modules() if isinstance(one, torch.nn.Conv2d)]
    assert convolutions[0].in_channels == 2 * channels
    assert rows["obs"].shape[2:] == (2, channels, 40, 40)
    flat = rows["obs"].flatten(2, 3)
    merged = Drawn(spaces.Box(0, 255, flat.shape[2:], U8), env.action_space)
    fresh, twin = cls.for_env(stacked, seed=0), cls.for_env(merged, seed=0)
    check_same(cls, fresh, twin, rows["obs"][:, 0], flat[:, 0])


def test_a_buffer_keeps_each_frame_of_a_stack_once() -> None:
    stacked = FrameStackObservation(Camera((3, 40, 40)), 4)
    with make_env_manager(lambda: stacked, env_num=1, seed=0) as envs:
        policy = DQNPolicy.for_env(envs, seed=0)
        rows = RolloutCollector(policy, envs).collect(20)
    plain = TensorBuffer(40, seed=0)
    thrifty = TensorBuffer(40, seed=0, store_next_obs=False, frame_stacks=["obs"])
    for buffer in (plain, thrifty):
        buffer.push(rows)
    one, other = plain.sample(8), thrifty.sample(8)
    assert torch.equal(one["obs"], other["obs"])
    assert torch.equal(one["next_obs"], other["next_obs"])
    loss = policy.learn_mode.forward(other)["total_loss"]
    assert np.isfinite(loss)


@pytest.mark.parametrize(
    "shape",
    [
        (64, 64, 9),
        (7, 7, 3),
        (8, 8, 111),
        (6, 7, 2),
        (210, 160, 3),
        (40, 40, 36),
        (120, 160, 12),
        (4, 64, 64, 1),
        (4, 64, 64, 3),
        (4, 64, 64, 4),
        (4, 7, 7, 3),
    ],
    ids=str,
)
@pytest.mark.parametrize("dtype", [U8, np.float32])
@pytest.mark.parametrize("cls", [DQNPolicy, PPOPolicy, *CONTINUOUS[:1]])
def test_channels_that_are_last_are_refused_with_the_remedy(
    cls: Any, shape: tuple[int, ...], dtype: Any
) -> None:
    space = spaces.Box(0, 255, shape, dtype)
    for whole in (space, spaces.Dict({"camera": space, "arm": BOX})):
        with pytest.raises(SpaceError, match=r"channels last;.*TransformObservation"):
            cls.for_env(Drawn(whole, action_space_of(cls)))


def test_the_remedy_keeps_the_bounds_and_leads_to_a_policy() -> None:
    env = Camera((40, 48, 3), np.float32)
    with pytest.raises(SpaceError) as caught:
        DQNPolicy.for_env(FrameStackObservation(env, 2))
    remedy = str(caught.value).partition("are stacked, in ")[2]
    first = eval(remedy, {"gymnasium": gym, "env": env})
    assert first.observation_space == spaces.Box(0, 1, (3, 40, 48), np.float32)
    DQNPolicy.for_env(FrameStackObservation(first, 2))


@pytest.mark.parametrize(
    "shape", [(111, 8, 8), (17, 19, 19), (16, 36, 64), (3, 210, 160), (12, 36, 480)], ids=str
)
def test_many_channels_may_be_first(shape: tuple[int, ...]) -> None:
    space = spaces.Box(0, 1, shape, np.float32)
    DQNPolicy.for_env(Drawn(space, spaces.Discrete(2)), model={"conv_layers": [(4, 3, 2)]})
