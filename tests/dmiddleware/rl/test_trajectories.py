"""Rows with returns to go, against a literal loop."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dmiddleware.data import as_tree
from dmiddleware.errors import StructureError
from dmiddleware.rl import with_returns_to_go


def rows_of(done, reward, **columns):
    terminated = done.clone()
    return as_tree({"reward": reward, "done": done, "terminated": terminated, **columns})


def literal(done, reward):
    """Return the returns to go and the places of one lane."""
    returns, places = [], []
    for t in range(len(reward)):
        end = next((k for k in range(t, len(reward)) if done[k]), len(reward) - 1)
        start = max((k + 1 for k in range(t) if done[k]), default=0)
        returns.append(sum(reward[t : end + 1]))
        places.append(t - start)
    return returns, places


@settings(deadline=None, max_examples=40)
@given(n_steps=st.integers(1, 30), n_envs=st.sampled_from([None, 1, 3]), seed=st.integers(0, 999))
def test_returns_to_go_are_the_sums_to_the_end_of_the_episode(n_steps, n_envs, seed):
    shape = (n_steps,) if n_envs is None else (n_steps, n_envs)
    generator = torch.Generator().manual_seed(seed)
    reward = torch.randn(shape, generator=generator)
    done = torch.rand(shape, generator=generator) < 0.2
    rows = with_returns_to_go(rows_of(done, reward))
    assert rows["return_to_go"].dtype is torch.float32
    lanes = zip(*(column.reshape(n_steps, -1).T for column in (done, reward)), strict=True)
    expected = [literal(one.tolist(), two.tolist()) for one, two in lanes]
    returns, places = (torch.tensor(part).T.reshape(shape) for part in zip(*expected, strict=True))
    torch.testing.assert_close(rows["return_to_go"], returns.float(), rtol=1e-4, atol=1e-5)
    assert torch.equal(rows["timestep"], places)


def test_an_episode_without_its_last_row_ends_with_its_rows():
    rows = rows_of(torch.zeros(4, dtype=torch.bool), torch.ones(4))
    rows["episode_id"] = torch.tensor([7, 7, 8, 8])
    found = with_returns_to_go(rows)
    assert found["return_to_go"].tolist() == [2.0, 1.0, 2.0, 1.0]
    assert found["timestep"].tolist() == [0, 1, 0, 1]


def test_long_episodes_lose_no_digits():
    rows = rows_of(torch.zeros(100_000, dtype=torch.bool), torch.full((100_000,), 0.1))
    found = with_returns_to_go(rows)["return_to_go"]
    assert found[0].item() == pytest.approx(10_000, rel=1e-6)


def test_columns_of_another_shape_are_rejected():
    rows = rows_of(torch.zeros(4, dtype=torch.bool), torch.ones(4, 1))
    with pytest.raises(StructureError, match="must be"):
        with_returns_to_go(rows)
