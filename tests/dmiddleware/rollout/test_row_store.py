from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dmiddleware.rollout.row_store import RowStore
from dmiddleware.tree import as_tree


class NaiveStore:
    """The same by lists of rows, one list per env."""

    def __init__(self, env_num):
        self.rows = [[] for _ in range(env_num)]
        self.clock = 0

    def add(self, rows):
        for env, row in rows:
            self.rows[env].append({**row, "made": self.clock})
            self.clock += 1

    def take_rectangle(self, n_steps):
        taken = [rows[:n_steps] for rows in self.rows]
        self.rows = [rows[n_steps:] for rows in self.rows]
        return [[lane[t]["serial"] for lane in taken] for t in range(n_steps)]

    def take_episodes(self, shares):
        found = []
        for env, rows in enumerate(self.rows):
            for _ in range(shares[env]):
                ends = [i for i, row in enumerate(rows) if row["done"]]
                if not ends:
                    break
                last = rows[ends[0]]
                episode = [row for row in rows if row["episode"] == last["episode"]]
                rows[:] = [row for row in rows if row["episode"] != last["episode"]]
                found.append((last["made"], [row["serial"] for row in episode]))
        return [serials for _, serials in sorted(found)]

    def drop(self, episodes):
        before = sum(map(len, self.rows))
        self.rows = [[r for r in rows if r["episode"] not in episodes] for rows in self.rows]
        return before - sum(map(len, self.rows))


ENV_NUM = 3

steps = st.lists(
    st.tuples(
        st.lists(st.integers(0, ENV_NUM - 1), unique=True),
        st.lists(st.booleans(), min_size=ENV_NUM, max_size=ENV_NUM),
    ),
    max_size=12,
)


def fill(store, naive, plan, serial=0):
    """Add the same rows to both; an env's episode id changes after each end."""
    current = [100 * env for env in range(ENV_NUM)]
    for envs, dones in plan:
        rows = []
        for env in envs:
            row = {"serial": serial, "done": dones[env], "episode": current[env]}
            rows.append((env, row))
            current[env] += dones[env]
            serial += 1
        naive.add(rows)
        piece = {
            "done": np.array([row["done"] for _, row in rows], bool),
            "episode_id": np.array([row["episode"] for _, row in rows], np.int64),
            "serial": torch.tensor([row["serial"] for _, row in rows], dtype=torch.int64),
            "obs": as_tree({"a": np.array([[row["serial"]] for _, row in rows], np.float32)})
            if rows
            else as_tree({"a": np.zeros((0, 1), np.float32)}),
        }
        if envs == list(range(ENV_NUM)):
            store.add(piece)
        else:
            store.add(piece, np.array(envs, np.int64))


@settings(max_examples=50, deadline=None)
@given(plan=steps, n_steps=st.integers(1, 4))
def test_rectangles_are_the_oldest_rows_of_every_env_and_the_rest_stays(plan, n_steps):
    store, naive = RowStore(ENV_NUM), NaiveStore(ENV_NUM)
    fill(store, naive, plan)
    assert store.counts.tolist() == [len(rows) for rows in naive.rows]
    while not len(store.lacking(n_steps)):
        batch = store.take_rectangle(n_steps)
        assert batch["serial"].tolist() == naive.take_rectangle(n_steps)
        assert torch.equal(batch["obs"]["a"][..., 0], batch["serial"].float())
        assert store.counts.tolist() == [len(rows) for rows in naive.rows]


@settings(max_examples=50, deadline=None)
@given(plan=steps, shares=st.lists(st.integers(0, 2), min_size=ENV_NUM, max_size=ENV_NUM))
def test_episodes_are_whole_and_in_the_order_in_which_they_ended(plan, shares):
    store, naive = RowStore(ENV_NUM), NaiveStore(ENV_NUM)
    fill(store, naive, plan)
    episodes = store.take_episodes(np.array(shares))
    assert [episode["serial"].tolist() for episode in episodes] == naive.take_episodes(shares)
    assert store.counts.tolist() == [len(rows) for rows in naive.rows]


@settings(max_examples=50, deadline=None)
@given(plan=steps, episodes=st.lists(st.sampled_from([0, 1, 100, 101, 200])))
def test_dropped_episodes_are_gone_and_counted(plan, episodes):
    store, naive = RowStore(ENV_NUM), NaiveStore(ENV_NUM)
    fill(store, naive, plan)
    assert store.drop(episodes) == naive.drop(episodes)
    assert store.counts.tolist() == [len(rows) for rows in naive.rows]


@settings(max_examples=50, deadline=None)
@given(plan=steps)
def test_a_restored_store_returns_the_same_rows(plan):
    store, naive = RowStore(ENV_NUM), NaiveStore(ENV_NUM)
    fill(store, naive, plan)
    other = RowStore(ENV_NUM)
    other.load_state_dict(store.state_dict())
    assert other.counts.tolist() == store.counts.tolist()
    if not len(store.lacking(1)):
        batch = other.take_rectangle(1)
        assert batch["serial"].tolist() == naive.take_rectangle(1)
        assert batch["obs"]["a"].shape == (1, ENV_NUM, 1)


def test_the_state_does_not_change_with_the_store():
    store = RowStore(1)
    rows = np.zeros(1, np.int64)
    store.add({"done": np.zeros(1, bool), "episode_id": rows})
    state = store.state_dict()
    rows += 7
    assert state["rows"]["episode_id"].tolist() == [0]


@pytest.mark.parametrize("n_steps", [1, 2])
def test_a_batch_of_regular_pieces_keeps_the_dtype_of_every_column(n_steps):
    store = RowStore(2)
    for _ in range(n_steps):
        store.add(
            {
                "done": np.zeros(2, bool),
                "episode_id": np.zeros(2, np.int64),
                "obs": np.zeros((2, 4, 4), np.uint8),
                "logit": torch.zeros(2, 3),
            }
        )
    batch = store.take_rectangle(n_steps)
    assert batch["obs"].dtype == torch.uint8
    assert batch["obs"].shape == (n_steps, 2, 4, 4)
    assert batch["logit"].dtype == torch.float32
    assert batch["done"].dtype == torch.bool
    assert len(store) == 0
