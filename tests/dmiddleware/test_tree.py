import numpy as np
import pytest
import torch
import treetensor.torch as ttorch
from hypothesis import given, settings
from hypothesis import strategies as st

from dmiddleware.errors import StructureError
from dmiddleware.tree import (
    Batch,
    as_tree,
    assign_rows,
    cat,
    clone,
    flatten_lead,
    from_numpy,
    index_rows,
    items_of,
    lead_shape,
    leaves,
    map_leaves,
    nest,
    stack,
    to_array,
    to_device,
    to_dict,
    to_numpy,
    with_columns,
)


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
    return map_leaves(lambda number: torch.tensor([number]), tree)


@given(TREES)
def test_a_tree_has_the_leaves_it_was_built_from(tree):
    built = as_tree(as_tensors(tree))
    assert isinstance(built, ttorch.Tensor)
    assert map_leaves(lambda leaf: leaf.item(), to_dict(built)) == tree
    paths = [path for path, _ in leaves(built)]
    assert paths == sorted(paths, key=lambda path: path.split("."))
    assert map_leaves(lambda leaf: leaf.item(), to_dict(nest(dict(leaves(built))))) == tree


ODD_NAMES = st.text("a.%2E5", min_size=1, max_size=5)


@given(
    st.dictionaries(
        ODD_NAMES,
        st.integers(0, 9) | st.dictionaries(ODD_NAMES, st.integers(0, 9), min_size=1, max_size=3),
        min_size=1,
        max_size=4,
    )
)
def test_names_with_dots_have_paths_of_their_own(tree):
    built = as_tree(as_tensors(tree))
    flat = dict(leaves(built))
    n_leaves = sum(len(value) if isinstance(value, dict) else 1 for value in tree.values())
    assert len(flat) == n_leaves
    assert map_leaves(lambda leaf: leaf.item(), to_dict(nest(flat))) == tree


@settings(deadline=None)
@given(TREES)
def test_a_tree_equals_one_that_treetensor_builds(tree):
    slow = ttorch.tensor(map_leaves(lambda number: [number], tree))
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
    nested = {"b": (1, {"c": 2}), "a": 3}
    assert list(leaves(nested, "x")) == [("x.a", 3), ("x.b.0", 1), ("x.b.1.c", 2)]
    assert to_dict(5) == 5


def test_leaves_are_mapped_together_with_those_at_the_same_path():
    a, b = batch(), batch()
    added = map_leaves(torch.add, a, b)
    assert added.obs.a.tolist() == [0, 2, 4, 6, 8, 10]
    assert map_leaves(lambda leaf: leaf.ndim, ({"x": torch.zeros(1)}, torch.zeros(1, 1))) == (
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
    with pytest.raises(StructureError, match=r"item 1 differs .* in the keys done, odd"):
        stack([batch(), as_tree({"obs": batch().obs, "odd": torch.zeros(6)})])


def test_tensors_already_on_the_device_are_not_copied():
    tree = batch()
    moved = to_device(tree, "cpu")
    assert moved.obs.a.data_ptr() == tree.obs.a.data_ptr()
    tensor = torch.zeros(2)
    assert to_device(tensor, torch.device("cpu")) is tensor


def test_the_tensors_of_the_host_go_to_a_gpu_in_one_transfer(monkeypatch):
    sizes = []

    def page_locked(n_bytes):
        sizes.append(n_bytes)
        return torch.empty(n_bytes, dtype=torch.uint8)

    monkeypatch.setattr("dmiddleware.tree._is_gpu", lambda device: True)
    monkeypatch.setattr("dmiddleware.tree._page_locked", page_locked)
    wide = torch.rand(4, 3, dtype=torch.float64)
    tree = as_tree(
        {
            "flag": torch.tensor([True, False, True]),
            "obs": {"frame": torch.arange(7, dtype=torch.uint8), "part": wide.t()[1:]},
            "empty": torch.zeros(0, 3),
            "scalar": torch.tensor(2.5, requires_grad=True),
            "state": torch.zeros(2, 1, dtype=torch.int64).expand(2, 5),
        },
        lists={"text": ["a", "b", "c"]},
    )
    moved = to_device(tree, "cpu")
    assert sizes == [16 + 16 + 64 + 16 + 80]
    assert len({leaf.untyped_storage().data_ptr() for leaf in columns_of(moved)}) == 1
    for before, after in zip(columns_of(tree), columns_of(moved), strict=True):
        assert after.dtype == before.dtype
        assert torch.equal(after, before)
        assert not after.requires_grad
    assert to_dict(moved)["text"] == ["a", "b", "c"]
    assert torch.equal(to_device((wide, 1 * wide), "cpu")[1], wide)


def columns_of(tree):
    return [leaf for _, leaf in leaves(tree) if isinstance(leaf, torch.Tensor)]


METHODS = ("keys", "items", "get", "values", "shape", "detach", "numpy")


def like_methods():
    return {name: torch.full((2,), float(i)) for i, name in enumerate(METHODS)}


def test_keys_named_like_methods_are_keys():
    tree = as_tree({"obs": like_methods(), "items": torch.arange(2)})
    assert [path for path, _ in leaves(tree)] == [
        "items",
        *(f"obs.{name}" for name in sorted(METHODS)),
    ]
    assert dict(items_of(tree)).keys() == {"obs", "items"}
    assert set(to_dict(tree)["obs"]) == set(to_numpy(tree)["obs"]) == set(METHODS)
    for same in (
        map_leaves(torch.clone, tree),
        clone(tree),
        to_device(tree, "cpu"),
        index_rows(tree, slice(None)),
        nest(dict(leaves(tree))),
        cat([tree]),
        index_rows(stack([tree, tree]), 1),
        from_numpy(to_numpy(tree)),
    ):
        assert {path: leaf.tolist() for path, leaf in leaves(same)} == {
            path: leaf.tolist() for path, leaf in leaves(tree)
        }
    assert lead_shape(tree) == (2,)
    assign_rows(tree, 0, as_tree({"obs": {name: 9.0 for name in METHODS}, "items": 9}))
    assert {leaf.tolist()[0] for _, leaf in leaves(tree)} == {9}


def test_dictionaries_and_tuples_keep_their_kind_when_they_are_mapped_and_indexed():
    nested = {"a": np.arange(3), "b": (torch.arange(3), as_tree({"c": torch.arange(3)}))}
    for rows in (index_rows(nested, slice(1, None)), map_leaves(lambda leaf: leaf[1:], nested)):
        assert rows["a"].tolist() == [1, 2]
        assert type(rows["a"]) is np.ndarray
        first, second = rows["b"]
        assert first.tolist() == second["c"].tolist() == [1, 2]
        assert isinstance(second, Batch)
    assert index_rows(np.arange(3), 1) == 1
    assert index_rows(torch.arange(3), torch.tensor([True, False, True])).tolist() == [0, 2]
    assert map_leaves(len, [1, 2, 3]) == 3


def test_lists_of_text_follow_their_rows():
    tree = as_tree({"x": torch.arange(3)}, lists={"name": ["a", "b", "c"]})

    def texts(tree):
        return dict(items_of(tree))["name"]

    assert texts(index_rows(tree, torch.tensor([2, 0]))) == ["c", "a"]
    assert texts(index_rows(tree, slice(1, None))) == ["b", "c"]
    assert texts(index_rows(tree, torch.tensor([False, True, False]))) == ["b"]
    assert texts(index_rows(tree, 1)) == "b"
    assert texts(map_leaves(torch.neg, tree)) == texts(clone(tree)) == ["a", "b", "c"]
    assert texts(to_device(tree, "cpu")) == to_dict(tree)["name"] == ["a", "b", "c"]
    assert texts(cat([tree, index_rows(tree, slice(1))])) == ["a", "b", "c", "a"]
    assert texts(stack([tree, tree])) == [["a", "b", "c"]] * 2
    assert [path for path, _ in leaves(tree)] == ["name", "x"]


def test_an_empty_tree_stays_empty():
    for empty in (
        as_tree({}),
        nest({}),
        index_rows(as_tree({}), 0),
        cat([as_tree({})]),
        stack([{}]),
    ):
        assert isinstance(empty, Batch)
        assert list(leaves(empty)) == []
    assert to_dict(as_tree({})) == to_numpy(as_tree({})) == {}
    assert map_leaves(len, ()) == ()
    assert list(leaves({})) == []


def test_copies_share_no_memory_and_have_no_gradient():
    tree = as_tree({"x": torch.ones(2, requires_grad=True), "y": {"z": torch.ones(2)}})
    copied = clone(tree)
    tree.y.z.zero_()
    assert copied.y.z.tolist() == [1, 1]
    assert not copied.x.requires_grad
    column = torch.zeros(2)
    assert clone(column) is not column
    assert clone({"a": column})["a"].data_ptr() != column.data_ptr()


def test_assigned_rows_take_the_dtype_of_the_tree():
    tree = as_tree({"h": torch.zeros(3, 2), "inner": {"n": torch.zeros(3, dtype=torch.int64)}})
    rows = as_tree({"h": torch.ones(2, 2, dtype=torch.float64), "inner": {"n": torch.ones(2)}})
    assign_rows(tree, torch.tensor([2, 0]), rows)
    assert tree.h.dtype == torch.float32
    assert tree.h[:, 0].tolist() == [1, 0, 1]
    assert tree.inner.n.tolist() == [1, 0, 1]
    column = torch.zeros(3)
    assign_rows(column, slice(1, None), torch.ones(2, requires_grad=True))
    assert column.tolist() == [0, 1, 1]


def test_tensors_become_arrays_that_share_memory_where_they_can():
    tensor = torch.zeros(2)
    to_array(tensor)[0] = 1
    assert tensor.tolist() == [1, 0]
    array = np.zeros(2)
    assert to_array(array) is array
    assert to_array([1, 2]).tolist() == [1, 2]
    assert to_array(torch.ones(2, requires_grad=True)).tolist() == [1, 1]
    with pytest.raises(StructureError, match="bfloat16"):
        to_array(torch.zeros(2, dtype=torch.bfloat16))


def test_values_of_every_kind_are_stacked():
    values = {
        "array": np.zeros(3, np.uint8),
        "tensor": torch.zeros(2, dtype=torch.float64),
        "pair": (np.float64(1), True),
        "number": 0.5,
        "batch": as_tree({"x": torch.zeros(1)}),
    }
    stacked = {path: (list(leaf.shape), leaf.dtype) for path, leaf in leaves(stack([values] * 2))}
    assert stacked == {
        "array": ([2, 3], torch.uint8),
        "tensor": ([2, 2], torch.float64),
        "pair.0": ([2], torch.float32),
        "pair.1": ([2], torch.bool),
        "number": ([2], torch.float32),
        "batch.x": ([2, 1], torch.float32),
    }
    assert stack([np.zeros(2, np.float32), torch.ones(2)]).tolist() == [[0, 0], [1, 1]]
    assert stack([torch.ones(2), np.zeros(2, np.float32)]).tolist() == [[1, 1], [0, 0]]
    assert cat([np.zeros(1), torch.ones(2)]).tolist() == [0, 1, 1]
    assert cat([np.zeros(1, np.int16), np.ones(2, np.int16)]).dtype == torch.int16


def test_joined_arrays_are_copies():
    array = np.zeros(2)
    joined, stacked = cat([array]), stack([array])
    array += 1
    assert joined.tolist() == stacked[0].tolist() == [0, 0]


@pytest.mark.parametrize(
    ("join", "path"),
    [
        (cat, "obs"),
        (stack, "obs"),
        (lambda trees: stack(trees, path="ctx.rows"), r"ctx\.rows\.obs"),
        (lambda trees: map_leaves(torch.add, *trees), "obs"),
        (lambda trees: assign_rows(*map(as_tree, trees[:1]), slice(None), trees[1]), "obs"),
    ],
)
@pytest.mark.parametrize(
    ("other", "what"),
    [
        ({"b": torch.zeros(2)}, "differs from the first one in the keys a, b"),
        (torch.zeros(2), "but the first one is nested"),
    ],
)
def test_a_tree_of_another_structure_is_rejected_with_its_path(join, path, other, what):
    trees = [{"obs": {"a": torch.zeros(2)}, "x": torch.zeros(2)}]
    trees.append({"obs": other, "x": torch.zeros(2)})
    with pytest.raises(StructureError, match=rf"^{path} 1 .*{what}"):
        join(trees)


def test_a_nested_value_does_not_fit_a_leaf_nor_a_dictionary_a_tuple():
    leaf, nested = {"x": torch.zeros(2)}, {"x": {"y": torch.zeros(2)}}
    with pytest.raises(StructureError, match=r"^x 1 is nested, but the first one is not"):
        map_leaves(torch.add, leaf, nested)
    with pytest.raises(StructureError, match=r"^item 1 is a dict, but the first one is a tuple"):
        map_leaves(torch.add, (torch.zeros(2),), {"0": torch.zeros(2)})
    with pytest.raises(StructureError, match=r"^item 1 differs .* in the keys 1;"):
        map_leaves(torch.add, (torch.zeros(2),), (torch.zeros(2), torch.zeros(2)))


@pytest.mark.parametrize(
    "values", [[torch.zeros(2), torch.zeros(3)], [np.zeros(2), np.zeros(3)], [None] * 2, ["x", "y"]]
)
def test_values_that_cannot_be_joined_are_named(values):
    with pytest.raises(StructureError, match=r"^the values cannot be stacked"):
        stack(values)
    if values[0] is not None and not isinstance(values[0], str):
        values = [value[None] for value in values]
    with pytest.raises(StructureError, match=r"'obs\.it' cannot be concatenated"):
        cat([{"obs": {"it": value}} for value in values])
    with pytest.raises(StructureError, match=r"'obs\.it' cannot be stacked"):
        stack([{"obs": {"it": value}} for value in values])


def test_a_value_that_is_not_a_column_is_named():
    with pytest.raises(StructureError, match=r"the column 'obs\.name' is 'text'"):
        as_tree({"obs": {"name": "text", "x": torch.zeros(1)}})
    with pytest.raises(StructureError, match="the column '0' is None"):
        from_numpy((None, np.zeros(1)))


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


def test_columns_are_added_to_a_batch_or_replaced():
    batch = as_tree({"items": torch.ones(2), "obs": {"a": torch.zeros(2)}}, lists={"text": [1, 2]})
    changed = with_columns(batch, reward=np.zeros(2), obs=torch.ones(2))
    assert set(changed) == {"items", "obs", "reward", "text"}
    assert changed["obs"].tolist() == [1, 1]
    assert changed["text"] == [1, 2]
    assert "reward" not in batch
    assert with_columns(batch, text=torch.ones(2))["text"].tolist() == [1, 1]
