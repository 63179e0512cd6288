import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dmiddleware.data import as_tree, cat, minibatches, n_minibatches, select_columns
from dmiddleware.errors import StructureError


def grid(n_steps, n_envs):
    number = torch.arange(n_steps * n_envs).reshape(n_steps, n_envs)
    image = number[..., None, None].expand(n_steps, n_envs, 2, 3).to(torch.uint8)
    return as_tree({"number": number, "obs": {"image": image, "speed": number.double()}})


@given(n_rows=st.integers(1, 40), size=st.integers(1, 50), seed=st.integers(0, 99))
def test_minibatches_of_rows_are_a_partition_into_nearly_equal_parts(n_rows, size, seed):
    batch = as_tree({"number": torch.arange(n_rows)})
    n = n_minibatches(batch, size)
    parts = list(minibatches(batch, n, generator=torch.Generator().manual_seed(seed)))
    sizes = [len(part["number"]) for part in parts]
    assert len(sizes) == n
    assert max(sizes) - min(sizes) <= 1
    assert min(sizes) >= min(size, n_rows)
    assert sorted(cat(parts)["number"].tolist()) == list(range(n_rows))


@given(
    n_steps=st.integers(1, 6),
    n_envs=st.integers(1, 9),
    size=st.integers(1, 40),
    seed=st.integers(0, 99),
)
def test_minibatches_of_lanes_are_whole_lanes(n_steps, n_envs, size, seed):
    batch = grid(n_steps, n_envs)
    n = n_minibatches(batch, size, unit="lanes")
    generator = torch.Generator().manual_seed(seed)
    parts = list(minibatches(batch, n, unit="lanes", generator=generator))
    assert len(parts) == n
    assert all(part["number"].numel() >= min(size, n_steps * n_envs) for part in parts)
    joined = cat(parts, dim=1)
    order = joined["number"][0].argsort()
    assert torch.equal(joined["number"][:, order], batch["number"])
    for name in ("image", "speed"):
        assert torch.equal(joined["obs"][name][:, order], batch["obs"][name])
        assert joined["obs"][name].dtype == batch["obs"][name].dtype


def test_the_order_follows_the_generator():
    batch = as_tree({"number": torch.arange(100)})

    def order(seed):
        generator = torch.Generator().manual_seed(seed)
        return cat(list(minibatches(batch, 3, generator=generator)))["number"].tolist()

    assert order(1) == order(1) != order(2)


def test_columns_of_text_are_divided_with_their_rows():
    batch = as_tree({"number": torch.arange(5)}, lists={"name": list("abcde"), "odd": [None] * 5})
    chosen = select_columns(batch, ("number", "name", "missing"))
    assert set(chosen.keys()) == {"number", "name"}
    for part in minibatches(chosen, n_minibatches(chosen, 2)):
        assert part["name"] == ["abcde"[number] for number in part["number"].tolist()]


def test_lanes_need_a_grid_of_tensors():
    rows = as_tree({"number": torch.arange(5)})
    with pytest.raises(StructureError, match=r"need batches \[T, E, …\].*n_sample a multiple"):
        n_minibatches(rows, 2, unit="lanes")
    text = as_tree({"number": torch.zeros(2, 2)}, lists={"name": ["a", "b"]})
    with pytest.raises(StructureError, match="columns of text have no lanes"):
        next(minibatches(text, 1, unit="lanes"))
    uneven = as_tree({"number": torch.arange(5), "other": torch.arange(4)})
    with pytest.raises(StructureError, match="share their first"):
        n_minibatches(uneven, 2)
