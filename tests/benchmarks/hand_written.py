"""Hand-written DQN, optimized for speed: no framework, preallocated arrays, fused Adam."""

from __future__ import annotations

import copy
import itertools
from typing import Self

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from tests.benchmarks import setting as S


class Replay:
    """A ring of rows in preallocated arrays."""

    def __init__(self, size: int, rng: np.random.Generator) -> None:
        self.obs = np.zeros((size, S.OBS_SIZE), np.float32)
        self.next_obs = np.zeros((size, S.OBS_SIZE), np.float32)
        self.action = np.zeros(size, np.int64)
        self.reward = np.zeros(size, np.float32)
        self.terminated = np.zeros(size, bool)
        self.size, self.count, self.at, self.rng = size, 0, 0, rng

    def push(self, obs, action, reward, next_obs, terminated) -> None:
        end = self.at + len(action)
        rows = slice(self.at, end) if end <= self.size else np.arange(self.at, end) % self.size
        self.obs[rows] = obs
        self.action[rows] = action
        self.reward[rows] = reward
        self.next_obs[rows] = next_obs
        self.terminated[rows] = terminated
        self.at = end % self.size
        self.count = min(self.count + len(action), self.size)

    def sample(self, n: int) -> tuple[torch.Tensor, ...]:
        rows = self.rng.integers(self.count, size=n)
        columns = (self.obs, self.action, self.reward, self.next_obs, self.terminated)
        return tuple(torch.from_numpy(column[rows]) for column in columns)


class HandWrittenDQN:
    """The whole training loop; each ``run`` continues where the last one ended."""

    def __init__(self, seed: int = 0) -> None:
        torch.manual_seed(seed)
        self.rng = np.random.default_rng(seed)
        self.envs = [S.make_env() for _ in range(S.ENV_NUM)]
        self.obs = np.stack([env.reset(seed=seed + i)[0] for i, env in enumerate(self.envs)])
        sizes = (S.OBS_SIZE, *S.HIDDEN_SIZES)
        layers = [
            layer for a, b in itertools.pairwise(sizes) for layer in (nn.Linear(a, b), nn.ReLU())
        ]
        self.model = nn.Sequential(*layers, nn.Linear(sizes[-1], S.ACTION_NUM))
        self.target = copy.deepcopy(self.model).requires_grad_(False)
        self.optimizer = torch.optim.Adam(self.model.parameters(), S.LEARNING_RATE, fused=True)
        self.replay = Replay(S.BUFFER_SIZE, self.rng)
        self.updates = 0
        self.episode_return = np.zeros(S.ENV_NUM)
        self.returns: list[float] = []
        for _ in range(S.FILL_STEPS):
            self.collect()

    def run(self, steps: int) -> None:
        """Step all environments ``steps`` times, with the updates after each."""
        for _ in range(steps):
            self.collect()
            for _ in range(S.UPDATES_PER_STEP):
                self.update()

    def collect(self) -> None:
        """Step each environment once and store the rows."""
        obs = self.obs
        with torch.no_grad():
            action = self.model(torch.from_numpy(obs)).argmax(dim=1).numpy()
        explore = self.rng.random(S.ENV_NUM) < S.EPSILON
        action = np.where(explore, self.rng.integers(S.ACTION_NUM, size=S.ENV_NUM), action)
        next_obs = np.empty_like(obs)
        reward = np.empty(S.ENV_NUM, np.float32)
        terminated = np.empty(S.ENV_NUM, bool)
        following = next_obs
        for i, env in enumerate(self.envs):
            next_obs[i], reward[i], terminated[i], truncated, _ = env.step(action[i])
            if terminated[i] or truncated:
                if following is next_obs:
                    following = next_obs.copy()
                following[i], _ = env.reset()
                self.returns.append(self.episode_return[i] + reward[i])
                self.episode_return[i] = -reward[i]
            elif following is not next_obs:
                following[i] = next_obs[i]
        self.episode_return += reward
        self.replay.push(obs, action, reward, next_obs, terminated)
        self.obs = following

    def update(self) -> float:
        """Make one update from one sampled batch."""
        obs, action, reward, next_obs, terminated = self.replay.sample(S.BATCH_SIZE)
        with torch.no_grad():
            bootstrap = self.target(next_obs).max(dim=1).values
            wanted = reward + S.DISCOUNT * bootstrap * ~terminated
        q = self.model(obs).gather(1, action.unsqueeze(1)).squeeze(1)
        loss = F.smooth_l1_loss(q, wanted)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.updates += 1
        if self.updates % S.TARGET_UPDATE == 0:
            self.target.load_state_dict(self.model.state_dict())
        return loss.item()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        for env in self.envs:
            env.close()
