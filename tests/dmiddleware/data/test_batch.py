import numpy as np
import pytest
import torch
import treetensor.torch as ttorch
from hypothesis import given
from hypothesis import strategies as st

from dmiddleware.data import (
    as_tree,
    cat,
    flatten_lead,
    from_numpy,
    index_rows,
    lead_shape,
    leaves,
    map_leaves,
    map_nested,
    nest,
    stack,
    to_device,
    to_dict,
    to_numpy,
)
from dmiddleware.errors import StructureError


def batch(n=6):
    return as_tree({"obs": {"a": torch.arange(n), "b": torch.ones(n, 2)}, "done": torch.zeros(n)})


NAMES = st.text("abc", min_size=1, max_size=2)
TREES = st.dictionaries(
    NAMES,
    st.recursive(
        st.integers(0, 99),
        lambda t: st.dictionaries(NAMES, t, min_size=1, max_size=3),
        max_leaves=6,
    ),
    min_size=1,
    max_size=4,
)


def as_tensors(tree):
    return map_nested(lambda number: torch.tensor([number]), tree)


@given(TREES)
def test_a_tree_has_the_leaves_it_was_built_from(tree):
    built = as_tree(as_tensors(tree))
    assert isinstance(built, ttorch.Tensor)
    assert map_nested(lambda leaf: leaf.item(), to_dict(built)) == tree
    paths = [path for path, _ in leaves(built)]
    assert paths == sorted(paths, key=lambda path: path.split("."))
    assert map_nested(lambda leaf: leaf.item(), nest(dict(leaves(built)))) == tree


@given(TREES)
def test_a_tree_equals_one_that_treetensor_builds(tree):
    slow = ttorch.tensor(map_nested(lambda number: [number], tree))
    assert (as_tree(as_tensors(tree)) == slow).all()


def test_leaves_are_not_copied():
    tensor, array = torch.zeros(2), np.zeros(2)
    built = as_tree({"t": tensor, "a": array, "sub": {"t": tensor}, "pair": (tensor, array)})
    tensor.add_(1)
    array += 2
    assert built.t.tolist() == built.sub.t.tolist() == built.pair["0"].tolist() == [1, 1]
    assert built.a.tolist() == built.pair["1"].tolist() == [2, 2]
    assert to_dict(built)["t"] is tensor
    assert as_tree({"whole": built}).whole.t is tensor


def test_arrays_of_any_nesting_become_tensors_and_back():
    nested = {"a": np.arange(3), "b": (np.ones(3, np.float32), {"c": np.zeros(3, np.uint8)})}
    tree = from_numpy(nested)
    assert tree.b["1"].c.dtype == torch.uint8
    back = to_numpy(tree)
    assert back["b"]["0"].dtype == np.float32
    assert np.array_equal(back["a"], nested["a"])
    assert torch.equal(from_numpy(np.arange(3)), torch.arange(3))
    assert from_numpy(np.float32(2.5)).shape == ()
    assert np.array_equal(to_numpy(torch.ones(2, requires_grad=True)), np.ones(2))
    assert isinstance(from_numpy((np.ones(1),)), ttorch.Tensor)


def test_a_bare_leaf_is_a_tree_with_one_leaf():
    assert list(leaves(torch.tensor(3))) == [("", torch.tensor(3))]
    assert to_dict(5) == 5


def test_leaves_are_mapped_together_with_those_at_the_same_path():
    a, b = batch(), batch()
    added = map_leaves(torch.add, a, b)
    assert added.obs.a.tolist() == [0, 2, 4, 6, 8, 10]
    assert map_nested(lambda leaf: leaf.ndim, ({"x": torch.zeros(1)}, torch.zeros(1, 1))) == (
        {"x": 1},
        2,
    )


def test_leading_dimensions_are_checked_merged_and_indexed():
    tree = as_tree({"x": torch.arange(6).reshape(2, 3), "y": torch.zeros(2, 3, 4)})
    assert lead_shape(tree) == (2,)
    assert lead_shape(tree, 2) == (2, 3)
    flat = flatten_lead(tree)
    assert flat.x.tolist() == [0, 1, 2, 3, 4, 5]
    assert flat.y.shape == (6, 4)
    assert index_rows(flat, torch.tensor([5, 0])).x.tolist() == [5, 0]
    assert index_rows(flat, slice(2)).x.tolist() == [0, 1]
    with pytest.raises(StructureError, match=r"'y' has shape \[3\] and 'x' starts with \[2\]"):
        lead_shape(as_tree({"x": torch.zeros(2), "y": torch.zeros(3)}))
    with pytest.raises(StructureError, match=r"'x' has shape \[2\]"):
        lead_shape(as_tree({"x": torch.zeros(2)}), 2)
    with pytest.raises(StructureError, match="this tree is empty"):
        lead_shape(as_tree({}))


def test_batches_are_joined_along_old_and_new_dimensions():
    joined = cat([batch(2), batch(3)])
    assert joined.obs.a.tolist() == [0, 1, 0, 1, 2]
    assert cat([batch(2), batch(2)], dim=-1).obs.b.shape == (2, 4)
    assert stack([batch(2), batch(2)]).obs.b.shape == (2, 2, 2)
    assert stack([batch(2), batch(2)], dim=1).obs.a.tolist() == [[0, 0], [1, 1]]
    with pytest.raises(StructureError, match="empty list"):
        cat([])
    with pytest.raises(StructureError, match="differ in the keys done, odd"):
        stack([batch(), as_tree({"obs": batch().obs, "odd": torch.zeros(6)})])


def test_tensors_already_on_the_device_are_not_copied():
    tree = batch()
    moved = to_device(tree, "cpu")
    assert moved.obs.a.data_ptr() == tree.obs.a.data_ptr()
    tensor = torch.zeros(2)
    assert to_device(tensor, torch.device("cpu")) is tensor


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_batches_move_to_the_gpu_and_into_buffers_from_there():
    from dmiddleware.data import TensorBuffer

    tree = to_device(batch(), "cuda")
    assert tree.obs.a.is_cuda
    assert np.array_equal(to_numpy(tree)["obs"]["a"], np.arange(6))
    buffer = TensorBuffer(6)
    buffer.push(tree)
    assert buffer.get(range(6)).obs.a.tolist() == [0, 1, 2, 3, 4, 5]
