"""Synthetic experience: batches as collectors push them, and a literal model of the buffer."""

from __future__ import annotations

import numpy as np
import torch

from dmiddleware.data import as_tree, index_rows


class Collector:
    """Steps synthetic environments whose episodes end at random.

    ``obs`` is (episode, step), so all observations differ. With ``odd_next_obs``, some ``next_obs``
    differ from the next row's ``obs``. ``episode_id`` counts from ``first_id``, or from
    ``first_episode``.
    """

    def __init__(self, env_num, seed, first_episode=0, odd_next_obs=False, first_id=None):
        self.generator = np.random.default_rng(seed)
        self.env_num = env_num
        self.first_episode = first_episode
        self.id_offset = 0 if first_id is None else first_id - first_episode
        self.n_episodes = 0
        self.odd_next_obs = odd_next_obs
        self.state = [self._new_episode() for _ in range(env_num)]

    def _new_episode(self):
        self.n_episodes += 1
        return (self.first_episode + self.n_episodes, 0)

    def step(self):
        """Return one row of each env."""
        return [self._step(env) for env in range(self.env_num)]

    def _step(self, env):
        episode, step = self.state[env]
        fate = self.generator.random()
        if fate < 0.05:  # the env crashed: the row is lost, and the episode never ends
            episode, step = self._new_episode()
        terminated, truncated = 0.1 < fate < 0.2, 0.2 < fate < 0.3
        odd = self.odd_next_obs and self.generator.random() < 0.3
        row = {
            "obs": (episode, step),
            "reward": float(self.generator.normal()),
            "next_obs": (episode, step + 1 + 1000 * odd),
            "done": terminated or truncated,
            "terminated": terminated,
            "truncated": truncated,
            "episode_id": episode + self.id_offset,
        }
        self.state[env] = self._new_episode() if row["done"] else (episode, step + 1)
        return row

    def rows(self, n_steps):
        """Return ``[T][E]`` rows."""
        return [self.step() for _ in range(n_steps)]


DTYPES = {
    "obs": torch.float32,
    "next_obs": torch.float32,
    "reward": torch.float32,
    "episode_id": torch.int64,
}


def as_batch(rows, lead):
    """Stack rows into a batch with these leading dimensions; obs become nested."""
    columns = {
        name: torch.tensor([row[name] for row in rows], dtype=DTYPES.get(name, torch.bool))
        for name in rows[0]
    }
    columns = {name: c.reshape(*lead, *c.shape[1:]) for name, c in columns.items()}
    for name in ("obs", "next_obs"):
        pair = columns[name]
        columns[name] = {"episode": pair[..., 0], "both": pair}
    return as_tree(columns)


def every_row(buffer):
    """Sample every row of a buffer that draws without replacement, oldest first."""
    batch = buffer.sample(len(buffer))
    order = batch["index"].argsort()
    if "mask" not in batch:
        return index_rows(batch, order)
    return as_tree({k: v[order] if v.dim() == 1 else v[:, order] for k, v in batch.items()})


class NaiveBuffer:
    """A model of TensorBuffer that handles rows one by one."""

    def __init__(self, size, n_step, discount, unroll_len):
        self.size, self.n_step, self.discount, self.unroll_len = size, n_step, discount, unroll_len
        self.rows = {}
        self.place = {}
        self.total = 0
        self.n_pushes = 0

    def push(self, rows, width=1):
        """Append rows, of a push of ``width`` envs."""
        self.n_pushes += 1
        for number, row in enumerate(rows):
            self.rows[self.total] = row
            self.place[self.total] = (self.n_pushes, number // width, number % width)
            self.rows.pop(self.total - self.size, None)
            self.total += 1

    def successor(self, i):
        episode, step = self.rows[i]["obs"]
        if self.rows[i]["done"]:
            return None
        for j in range(i + 1, self.total):
            if j in self.rows and self.rows[j]["obs"] == (episode, step + 1):
                return j if self.are_linked(i, j) else None
        return None

    def are_linked(self, i, j):
        """Rows that are not neighbors in one push are linked only if their observations match."""
        push, t, e = self.place[i]
        return self.place[j] == (push, t + 1, e) or self.rows[i]["next_obs"] == self.rows[j]["obs"]

    def walk(self, i, length):
        rows = [i]
        while len(rows) < length and (following := self.successor(rows[-1])) is not None:
            rows.append(following)
        return rows

    def window(self, i):
        """Return the n-step sample of row ``i``."""
        rows = self.walk(i, self.n_step)
        last = self.rows[rows[-1]]
        return {
            **self.rows[i],
            "reward": sum(self.discount**k * self.rows[j]["reward"] for k, j in enumerate(rows)),
            "discount": self.discount ** len(rows),
            **{name: last[name] for name in ("next_obs", "done", "terminated", "truncated")},
        }

    def sequence(self, i):
        return self.walk(i, self.unroll_len)
