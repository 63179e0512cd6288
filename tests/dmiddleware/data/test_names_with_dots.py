"""Parts of observations whose names have dots, as LeRobot names them, in all that keeps rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces

from dmiddleware import Task
from dmiddleware.data import (
    OfflineDataset,
    PrioritySampler,
    TensorBuffer,
    UniformSampler,
    as_tree,
    load_checkpoint,
    pack_checkpoint,
    save_checkpoint,
    save_dataset,
    to_dict,
    unpack_checkpoint,
)
from dmiddleware.env import make_env_manager
from dmiddleware.errors import SpaceError
from dmiddleware.policy import DQNPolicy, PPOPolicy, SACPolicy
from middleware import (
    OffPolicyLearner,
    OnlineRLContext,
    StepCollector,
    data_pusher,
    eps_greedy_handler,
)

STATE = {
    "observation.state": spaces.Box(-1.0, 1.0, (3,)),
    "observation": spaces.Dict({"state": spaces.Box(-1.0, 1.0, (2,))}),
    "100%.a%2E": spaces.Box(-1.0, 1.0, (1,)),
}


class Dotted(gym.Env[Any, Any]):
    """Counts to ten, and shows random parts with odd names."""

    observation_space = spaces.Dict(STATE)

    def __init__(self, action_space: gym.Space[Any] | None = None) -> None:
        self.action_space = action_space or spaces.Discrete(2)
        self._t = 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self._t = 0
        return self._obs(), {}

    def step(self, action: Any) -> Any:
        self._t += 1
        return self._obs(), 1.0, self._t >= 10, False, {}

    def _obs(self) -> Any:
        draw = lambda n: self.np_random.uniform(-1, 1, n).astype(np.float32)  # noqa: E731
        return {
            "observation.state": draw(3),
            "observation": {"state": draw(2)},
            "100%.a%2E": draw(1),
        }


def some_rows(n: int = 6) -> dict[str, Any]:
    def obs(plus: float) -> dict[str, Any]:
        at = torch.arange(n, dtype=torch.float32)[:, None] + plus
        return {
            "observation.state": at.repeat(1, 3),
            "observation": {"state": -at.repeat(1, 2)},
            "100%.a%2E": 10 * at,
        }

    done = torch.zeros(n, dtype=torch.bool)
    return {"obs": obs(0), "next_obs": obs(1), "own.column": torch.arange(n), "done": done}


def same(a: Any, b: Any) -> bool:
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    return torch.equal(torch.as_tensor(a), torch.as_tensor(b))


@pytest.mark.parametrize("sampler", [UniformSampler, PrioritySampler])
def test_a_buffer_gives_back_what_was_pushed(sampler: Any) -> None:
    rows = some_rows()
    buffer = TensorBuffer(10, seed=0, sampler=sampler())
    buffer.push(rows)
    assert same(to_dict(buffer.get([0, 1, 2, 3, 4, 5])), rows)
    again = TensorBuffer(10, seed=0, sampler=sampler())
    again.load_state_dict(unpack_checkpoint(pack_checkpoint(buffer.state_dict())))
    for batch in (buffer.sample(4), *buffer.sample_ahead(4, at_most=2), again.sample(4)):
        expected = to_dict(buffer.get(batch["index"]))
        assert same({name: to_dict(batch)[name] for name in expected}, expected)


def test_a_dataset_gives_back_what_was_saved(tmp_path: Path) -> None:
    save_dataset(tmp_path / "a.safetensors", as_tree(some_rows()))
    with OfflineDataset(tmp_path / "a.safetensors") as dataset:
        assert same(to_dict(dataset.rows(slice(None))), some_rows())
        dataset.verify()


@pytest.mark.parametrize(
    ("policy_cls", "space", "options"),
    [
        (DQNPolicy, spaces.Discrete(2), {}),
        (DQNPolicy, spaces.Discrete(2), {"n_step": 3, "obs_norm": True}),
        (SACPolicy, spaces.Box(-1.0, 1.0, (2,)), {}),
    ],
)
def test_policies_learn_from_them(
    policy_cls: Any, space: gym.Space[Any], options: dict[str, Any], tmp_path: Path
) -> None:
    envs = make_env_manager(lambda: Dotted(space), env_num=2, seed=0)
    policy = policy_cls.for_env(envs, seed=0, batch_size=8, **options)
    buffer = TensorBuffer(200, seed=0, n_step=getattr(policy, "n_step", 1))
    with Task(OnlineRLContext(), seed=0) as task:
        if policy_cls is DQNPolicy:
            task.use(eps_greedy_handler(policy))
        task.use(StepCollector(policy, envs, n_sample=16)).use(data_pusher(buffer))
        task.use(OffPolicyLearner(policy, buffer)).run(max_step=4)
        assert task.ctx.train_iter > 0
    save_checkpoint(tmp_path / "p.safetensors", policy.eval_mode.state_dict())
    policy.eval_mode.load_state_dict(load_checkpoint(tmp_path / "p.safetensors"))


@pytest.mark.parametrize("name", ["a.b", "."])
def test_an_action_with_such_a_name_is_refused_when_the_policy_is_built(name: str) -> None:

    with pytest.raises(SpaceError, match="texts without dots"):
        PPOPolicy.for_env(Dotted(spaces.Dict({name: spaces.Discrete(2)})), seed=0)
