import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dmiddleware.classic.collate import (
    collate,
    is_per_env,
    join_outputs,
    split_outputs,
    split_trajectories,
    to_rows,
)
from dmiddleware.errors import StructureError
from dmiddleware.tree import as_tree, leaves


def test_samples_of_every_kind_of_value_are_stacked():
    sample = {
        "obs": {"a": np.zeros(3, np.float32), "b": (torch.ones(2), np.uint8(4))},
        "action": 1,
        "reward": 0.5,
        "done": True,
        "scalar": np.float64(2.0),
    }
    batch = collate([sample, sample, sample])
    got = {path: (tuple(leaf.shape), leaf.dtype) for path, leaf in leaves(batch)}
    assert got == {
        "obs.a": ((3, 3), torch.float32),
        "obs.b.0": ((3, 2), torch.float32),
        "obs.b.1": ((3,), torch.int64),
        "action": ((3,), torch.int64),
        "reward": ((3,), torch.float32),
        "done": ((3,), torch.bool),
        "scalar": ((3,), torch.float32),
    }


def test_an_empty_list_of_samples_is_rejected():
    with pytest.raises(StructureError, match="at least one sample"):
        collate([])


def test_samples_that_differ_in_keys_are_rejected():
    with pytest.raises(StructureError, match=r"item 1 differs .* extra"):
        collate([{"a": 1}, {"a": 1, "extra": 2}])


@pytest.mark.parametrize("values", [[torch.zeros(2), torch.zeros(3)], [None, None], ["x", "y"]])
def test_values_that_cannot_be_stacked_are_named(values):
    with pytest.raises(StructureError, match=r"'inner\.it' cannot be stacked"):
        collate([{"inner": {"it": value}} for value in values])


@settings(deadline=None)
@given(st.lists(st.integers(0, 1000), min_size=1, max_size=6, unique=True), st.integers(1, 3))
def test_splitting_and_joining_are_inverse(env_ids, width):
    n = len(env_ids)
    outputs = {
        "action": torch.arange(n),
        "logit": torch.randn(n, width),
        "state": as_tree({"h": torch.randn(n, 2)}),
    }
    joined = join_outputs(split_outputs(outputs, env_ids), env_ids)
    assert torch.equal(joined["action"], outputs["action"])
    assert torch.equal(joined["logit"], outputs["logit"])
    assert torch.equal(joined["state"]["h"], outputs["state"]["h"])


def test_rows_are_views():
    batch = as_tree({"obs": {"a": torch.zeros(2, 3)}, "reward": torch.zeros(2)})
    rows = to_rows(batch)
    rows[1]["reward"].add_(1)
    rows[0]["obs"]["a"].add_(2)
    assert batch["reward"].tolist() == [0, 1]
    assert batch["obs"]["a"].tolist() == [[2, 2, 2], [0, 0, 0]]


@settings(deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.integers(0, 1)), max_size=12), st.booleans())
def test_trajectories_add_up_to_the_whole_and_end_where_episodes_end(steps, with_id):
    rows, episode = [], 0
    for number, (done, change) in enumerate(steps):
        episode += change
        row = {"number": number, "done": done}
        rows.append({**row, "episode_id": episode} if with_id else row)
    pieces = split_trajectories(rows)
    assert [row for piece in pieces for row in piece] == rows
    assert all(pieces)
    for piece in pieces:
        assert not any(row["done"] for row in piece[:-1])
        assert len({row.get("episode_id") for row in piece}) == 1
    for before, after in itertools.pairwise(pieces):
        other = with_id and before[-1]["episode_id"] != after[0]["episode_id"]
        assert before[-1]["done"] or other


@pytest.mark.parametrize(
    ("data", "answer"),
    [
        ({0: 1, 5: 2}, True),
        ({np.int64(3): 1}, True),
        ({}, True),
        ({"obs": 1}, False),
        ({True: 1}, False),
        (torch.zeros(2), False),
    ],
)
def test_a_dictionary_of_env_ids_is_distinguished_from_a_nested_observation(data, answer):
    assert is_per_env(data) is answer
