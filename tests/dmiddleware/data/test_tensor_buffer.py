import numpy as np
import pytest
import torch

from dmiddleware.data import TensorBuffer, as_tree
from dmiddleware.errors import NotEnoughData, StructureError


def rows(first, n, lead=None):
    lead = (n,) if lead is None else lead
    number = torch.arange(first, first + n).reshape(lead)
    return as_tree(
        {
            "obs": {"image": number[..., None].to(torch.uint8), "speed": number.float()},
            "done": torch.zeros(lead, dtype=torch.bool),
            "number": number,
        }
    )


def test_sampled_rows_are_rows_that_were_pushed():
    buffer = TensorBuffer(10, seed=0)
    buffer.push(rows(0, 6))
    assert buffer.push(rows(6, 8, lead=(2, 4))) == range(6, 14)
    assert len(buffer) == buffer.count() == 10
    batch = buffer.sample(10)
    assert set(batch.number.tolist()) <= set(range(4, 14))
    assert torch.equal(batch.number, batch["index"])
    assert torch.equal(batch.obs.speed, batch.number.float())
    assert batch.obs.image.dtype == torch.uint8


def test_a_batch_of_another_structure_is_refused_by_the_name_of_its_leaf():
    buffer = TensorBuffer(10)
    buffer.push(rows(0, 6))
    batch = rows(6, 2)
    batch.obs.speed = torch.zeros(2, 3)
    with pytest.raises(StructureError, match=r"obs\.speed.*float32\[2, 3\].*float32\[2\]"):
        buffer.push(batch)


def test_sampling_more_than_is_held_says_how_many_are_missing():
    buffer = TensorBuffer(10)
    buffer.push(rows(0, 6))
    with pytest.raises(NotEnoughData, match="asked for 8 rows, but the buffer holds 6; push 2"):
        buffer.sample(8)


def test_a_loaded_buffer_draws_as_the_original_does():
    buffer, other = TensorBuffer(10, seed=0), TensorBuffer(10, seed=1)
    buffer.push(rows(0, 16))
    buffer.sample(4)
    other.load_state_dict(buffer.state_dict())
    for _ in range(3):
        buffer.push(rows(16, 3)), other.push(rows(16, 3))
        assert np.array_equal(buffer.sample(8).number, other.sample(8).number)
