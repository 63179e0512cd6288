"""The replay buffer on a device, beside sums and frequencies that are computed here."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from dmiddleware.data import (
    HindsightReplay,
    PrioritySampler,
    PrioritySamplerSettings,
    ReplayBuffer,
    TensorBuffer,
    UniformSampler,
)
from dmiddleware.errors import CheckpointMismatch, ConfigError, NotEnoughData, StructureError
from dmiddleware.rl import Schedule
from dmiddleware.tree import Batch, as_tree, leaves

LANES = 3
GAMMA = 0.9


def steps(n: int, *, first: int = 0, seed: int = 0) -> Batch:
    """Make steps of lanes whose episodes end at random, with rows that name themselves."""
    random = torch.Generator().manual_seed(seed + first)
    number = torch.arange(first, first + n).unsqueeze(1).expand(n, LANES)
    name = number * LANES + torch.arange(LANES)
    done = torch.rand((n, LANES), generator=random) < 0.2
    return as_tree(
        {
            "obs": as_tree({"name": name.float(), "picture": name.to(torch.uint8)}),
            "next_obs": as_tree(
                {"name": name.float() + LANES, "picture": (name + LANES).to(torch.uint8)}
            ),
            "action": name % 2,
            "state": torch.stack([name, -name], dim=-1).float(),
            "reward": torch.rand((n, LANES), generator=random),
            "done": done,
            "terminated": done & (name % 2 == 0),
            "truncated": done & (name % 2 == 1),
            "episode_id": torch.zeros((n, LANES), dtype=torch.int64),
        }
    )


def with_ids(batches: list[Batch]) -> list[Batch]:
    """Give the rows of each episode an id of its own, over all batches."""
    current = torch.arange(LANES)
    following = LANES
    for batch in batches:
        for step in range(len(batch["done"])):
            batch["episode_id"][step] = current
            for lane in batch["done"][step].nonzero()[:, 0].tolist():
                current[lane] = following
                following += 1
    return batches


def on_device(
    size: int, *, priority: PrioritySamplerSettings | None = None, **options: Any
) -> TensorBuffer:
    sampler = None if priority is None else PrioritySampler.of(priority)
    return TensorBuffer(size, sampler=sampler, device="cpu", **options)


def filled(size: int, *, n_step: int = 1, **options: Any) -> tuple[TensorBuffer, Batch]:
    batches = with_ids([steps(5), steps(7, first=5), steps(8, first=12)])
    buffer = on_device(size, n_step=n_step, discount=GAMMA, seed=1, **options)
    for batch in batches:
        buffer.push(batch)
    rows = {
        path: torch.cat([dict(leaves(batch))[path] for batch in batches])
        for path, _ in leaves(batches[0])
    }
    return buffer, rows


@pytest.mark.parametrize("n_step", [1, 2, 4])
@pytest.mark.parametrize("size", [300, 30])
def test_samples_are_the_rows_that_were_pushed_with_their_returns(size, n_step):
    buffer, rows = filled(size, n_step=n_step)
    assert isinstance(buffer, ReplayBuffer)
    assert len(buffer) == min(size, 60)
    seen = set()
    for _ in range(60):
        batch = dict(leaves(buffer.sample(20)))
        for at, index in enumerate(batch["index"].tolist()):
            step, lane = divmod(index, LANES)
            seen.add(index)
            assert batch["obs.name"][at] == index
            total, discount, last = 0.0, 1.0, step
            for later in range(step, min(step + n_step, 20)):
                total += discount * rows["reward"][later, lane].item()
                discount, last = discount * GAMMA, later
                if rows["done"][later, lane]:
                    break
            assert batch["reward"][at].item() == pytest.approx(total)
            assert batch["next_obs.name"][at] == rows["next_obs.name"][last, lane]
            assert batch["terminated"][at] == rows["terminated"][last, lane]
            assert batch["action"][at] == rows["action"][step, lane]
            if n_step > 1:
                assert batch["discount"][at].item() == pytest.approx(discount)
    assert seen == set(range(60 - len(buffer), 60))


def test_the_returns_are_those_of_the_buffer_of_the_host():
    buffer, _ = filled(30, n_step=3)
    host = TensorBuffer(30, n_step=3, discount=GAMMA, seed=0)
    for batch in with_ids([steps(5), steps(7, first=5), steps(8, first=12)]):
        host.push(batch)
    batch = host.sample(30)
    theirs = {row: at for at, row in enumerate(batch["index"].tolist())}
    ours = buffer.sample(30)
    for name in ("reward", "discount", "terminated", "done"):
        for at, row in enumerate(ours["index"].tolist()):
            if row in theirs:
                torch.testing.assert_close(ours[name][at], batch[name][theirs[row]])


def test_all_rows_are_drawn_alike():
    buffer, _ = filled(300)
    counts = np.bincount(buffer.sample(60)["index"], minlength=60).astype(float)
    for _ in range(999):
        counts += np.bincount(buffer.sample(60)["index"], minlength=60)
    assert np.abs(counts - 1000).max() < 5 * 1000**0.5


@pytest.mark.parametrize("size", [300, 30])
def test_rows_are_drawn_in_proportion_to_their_priorities(size):
    settings = PrioritySamplerSettings(alpha=0.5, beta=1.0, eps=1e-6)
    buffer, _ = filled(size, priority=settings)
    assert buffer.lacks_priorities
    held = torch.arange(60 - len(buffer), 60)
    priority = 1.0 + held.float() % 7
    assert buffer.update_priority(held, priority) == len(held)
    assert not buffer.lacks_priorities
    shares = priority.double().sqrt() / priority.double().sqrt().sum()
    counts = torch.zeros(60)
    for _ in range(500):
        batch = buffer.sample(20)
        counts += torch.bincount(batch["index"], minlength=60)
        drawn = shares[batch["index"] - held[0]]
        torch.testing.assert_close(batch["weight"], (drawn.min() / drawn).float())
    expected = shares * 10_000
    assert ((counts[held] - expected).abs() < 5 * expected.sqrt()).all()


def test_new_rows_have_the_highest_priority_and_old_ones_are_not_touched():
    buffer, _ = filled(30, priority=PrioritySamplerSettings(alpha=1.0, beta=0.0))
    buffer.update_priority(torch.arange(30, 60), torch.full((30,), 0.001))
    buffer.update_priority(torch.tensor([0, 40]), torch.tensor([1e6, 50.0]))  # 0 is gone
    assert (buffer.sample(20)["index"] == 40).float().mean() > 0.9
    buffer.push(with_ids([steps(1, first=20)])[0])
    counts = torch.bincount(torch.cat([buffer.sample(20)["index"] for _ in range(100)]))
    assert counts[60:].min() > 300
    assert counts[40] > 300  # now they are four of the same priority


def test_rows_are_held_in_a_batch_that_is_larger_than_the_buffer():
    buffer = on_device(4 * LANES, seed=0)
    assert buffer.push(steps(9)) == range(5 * LANES, 9 * LANES)
    assert set(buffer.sample(12)["index"].tolist()) <= set(range(15, 27))
    for _ in range(30):
        batch = buffer.sample(12)
        assert torch.equal(batch["obs"]["name"].long(), batch["index"])


@pytest.mark.parametrize("priority", [None, PrioritySamplerSettings()])
def test_a_restored_buffer_draws_the_same(priority):
    buffer, _ = filled(30, n_step=2, priority=priority)
    if priority is not None:
        buffer.update_priority(torch.arange(40, 50), torch.arange(10.0))
    other = on_device(30, n_step=2, discount=GAMMA, priority=priority, seed=77)
    other.load_state_dict(buffer.state_dict())
    for _ in range(3):
        ours, theirs = (dict(leaves(held.sample(8))) for held in (buffer, other))
        assert all(torch.equal(ours[path], theirs[path]) for path in ours)
        more = with_ids([steps(2, first=20)])[0]
        buffer.push(more)
        other.push(more)


def test_a_state_of_another_buffer_is_refused():
    state = filled(30)[0].state_dict()
    with pytest.raises(CheckpointMismatch, match="size=60"):
        on_device(60).load_state_dict(state)
    with pytest.raises(CheckpointMismatch, match="PrioritySampler"):
        on_device(30, priority=PrioritySamplerSettings()).load_state_dict(state)
    with pytest.raises(CheckpointMismatch, match="no leaves"):
        on_device(30).load_state_dict({})


def test_rows_of_other_lanes_or_structure_are_refused_and_nothing_changes():
    buffer, _ = filled(30)
    wrong = steps(2)
    flat = as_tree({name: column.flatten() for name, column in leaves(wrong)})
    for batch, message in (
        (flat, r"\[T, 3, …\]"),
        (as_tree({**dict(wrong.items()), "more": wrong["reward"]}), "more"),
        (as_tree({**dict(wrong.items()), "reward": wrong["reward"].double()}), "float64"),
        (as_tree({**dict(wrong.items()), "reward": wrong["obs"]["name"][..., None]}), "shape"),
    ):
        with pytest.raises(StructureError, match=message):
            buffer.push(batch)
    assert len(buffer) == 30


def test_too_few_rows_and_small_sizes_are_refused():
    with pytest.raises(NotEnoughData, match="has 30"):
        filled(30)[0].sample(31)
    with pytest.raises(ConfigError, match="at least 15"):
        on_device(10, n_step=4, discount=GAMMA).push(steps(2))


def test_it_takes_what_the_policy_knows_and_compares_it_later():
    buffer = on_device(30)
    buffer.bind(n_step=3, discount=0.5)
    assert (buffer.n_step, buffer.discount) == (3, 0.5)
    with pytest.raises(ConfigError, match=r"discount=0\.5"):
        buffer.bind(n_step=3, discount=0.6)
    with pytest.raises(ConfigError, match="burn_in=4"):
        buffer.bind(n_step=1, discount=0.5, burn_in=4)
    with pytest.raises(ConfigError, match="has no discount"):
        buffer = on_device(30, n_step=2)
        buffer.push(steps(5))
        buffer.sample(2)


def test_beta_follows_its_schedule():
    beta = Schedule.linear(0.0, 1.0, decay=10, by="update")
    buffer, _ = filled(30, priority=PrioritySamplerSettings(alpha=1.0, beta=beta))
    buffer.update_priority(torch.arange(30, 60), 1.0 + torch.arange(30.0))
    assert (buffer.sample(30)["weight"] == 1).all()
    for _ in range(9):
        buffer.sample(30)
    batch = buffer.sample(30)
    assert float(batch["weight"].min()) < 0.2
    assert buffer.schedules == {"beta": beta}


@pytest.mark.parametrize("bad", [-0.5, float("nan"), float("inf")])
@pytest.mark.parametrize("alpha", [0.0, 0.6, 2.0])
def test_a_priority_that_is_not_valid_makes_all_weights_nan(bad, alpha):
    buffer, _ = filled(300, priority=PrioritySamplerSettings(alpha=alpha))
    buffer.update_priority(torch.tensor([3, 4]), torch.tensor([1.0, bad]))
    assert buffer.sample(8)["weight"].isnan().all()


def test_no_priorities_change_nothing():
    buffer, _ = filled(300, priority=PrioritySamplerSettings())
    state = buffer.state_dict()
    assert buffer.update_priority(torch.arange(0), torch.zeros(0)) == 0
    assert torch.equal(buffer.state_dict()["tree"]["nodes"], state["tree"]["nodes"])


@pytest.mark.parametrize("priority", [None, PrioritySamplerSettings()])
def test_the_state_of_an_empty_buffer_empties_one(priority):
    empty = on_device(300, priority=priority, seed=1, discount=GAMMA)
    buffer, _ = filled(300, priority=priority)
    buffer.load_state_dict(empty.state_dict())
    assert len(buffer) == 0
    for target in (buffer, empty):
        target.push(steps(5))
    assert torch.equal(buffer.sample(8)["index"], empty.sample(8)["index"])


def test_a_state_of_a_device_that_is_not_here_is_refused():
    buffer, _ = filled(300)
    state = {**buffer.state_dict(), "device": "cuda:99"}
    with pytest.raises(CheckpointMismatch, match="cuda:99"):
        TensorBuffer(300).load_state_dict(state)


def test_rows_without_done_are_refused():
    with pytest.raises(StructureError, match="done"):
        on_device(300).push(as_tree({"obs": torch.zeros(2, LANES)}))


SEQUENCES: dict[str, dict[str, Any]] = {
    "padded": {"unroll_len": 3},
    "complete": {"unroll_len": 3, "unroll_pad": False},
    "with burn-in": {"unroll_len": 2, "burn_in": 2, "stride": 2},
    "complete with burn-in": {"unroll_len": 3, "burn_in": 1, "stride": 3, "unroll_pad": False},
    "n-step": {"unroll_len": 4, "stride": 2, "n_step": 2},
    "stored state": {"unroll_len": 3, "stride": 3, "burn_in": 1, "start_columns": ("state",)},
}


def pushed(buffer: TensorBuffer) -> TensorBuffer:
    for batch in with_ids([steps(5), steps(7, first=5), steps(8, first=12), steps(1, first=20)]):
        buffer.push(batch)
    return buffer


def drawn_from(buffer: TensorBuffer) -> dict[int, dict[str, torch.Tensor]]:
    """Return what samples have, by the index of the first row."""
    drawn: dict[int, dict[str, torch.Tensor]] = {}
    for _ in range(100):
        batch = dict(leaves(buffer.sample(4)))
        is_per_sequence = {path: path in ("index", "weight") for path in batch}
        is_per_sequence["state"] = batch["state"].dim() == 2
        for at, index in enumerate(batch["index"].tolist()):
            drawn[index] = {
                path: column[at] if is_per_sequence[path] else column[:, at]
                for path, column in batch.items()
            }
    return drawn


@pytest.mark.parametrize("size", [300, 30])
@pytest.mark.parametrize("name", SEQUENCES)
def test_sequences_are_those_of_the_buffer_of_the_host(name, size):
    options = {"discount": GAMMA, "seed": 3, **SEQUENCES[name]}
    ours = drawn_from(pushed(on_device(size, **options)))
    theirs = drawn_from(pushed(TensorBuffer(size, **options)))
    assert ours.keys() == theirs.keys()
    for index, columns in theirs.items():
        assert columns.keys() == ours[index].keys()
        for path, column in columns.items():
            torch.testing.assert_close(ours[index][path], column)


@pytest.mark.parametrize("name", SEQUENCES)
def test_sequences_are_drawn_in_proportion_to_their_priorities(name):
    priority = PrioritySamplerSettings(alpha=1.0, beta=1.0, eps=1e-6)
    options = {"discount": GAMMA, **SEQUENCES[name]}
    buffer = pushed(on_device(30, priority=priority, seed=0, **options))
    starts = torch.tensor(sorted(drawn_from(buffer)))
    rows = torch.arange(63)  # those at which no sequence can be drawn have no priority
    buffer.update_priority(rows, 1.0 + rows.float() % 5)
    shares = (1.0 + starts.float() % 5) / (1.0 + starts.float() % 5).sum()
    counts = torch.zeros(63)
    for _ in range(500):
        batch = buffer.sample(4)
        counts += torch.bincount(batch["index"], minlength=63)
        drawn = shares[torch.searchsorted(starts, batch["index"])]
        torch.testing.assert_close(batch["weight"], drawn.min() / drawn, rtol=1e-4, atol=0.0)
    expected = shares * 2000
    assert counts.sum() == counts[starts].sum()
    assert ((counts[starts] - expected).abs() < 5 * expected.sqrt()).all()


@pytest.mark.parametrize("priority", [None, PrioritySamplerSettings()])
@pytest.mark.parametrize("with_device", [True, False])
def test_a_restored_buffer_draws_the_same_sequences(priority, with_device):
    options: dict[str, Any] = {"unroll_len": 3, "stride": 2, "burn_in": 1}
    buffer = pushed(on_device(30, priority=priority, **options))
    if with_device:
        other = on_device(30, priority=priority, **options)
    else:  # it becomes one of the device of the state
        sampler = None if priority is None else PrioritySampler.of(priority)
        other = TensorBuffer(30, sampler=sampler, **options)
    other.load_state_dict(buffer.state_dict())
    for number in range(3):
        ours, theirs = (dict(leaves(held.sample(8))) for held in (buffer, other))
        assert all(torch.equal(ours[path], theirs[path]) for path in ours)
        for held in (buffer, other):
            held.push(with_ids([steps(2, first=21 + 2 * number)])[0])
            held.update_priority(ours["index"], ours["index"].float()) if priority else None


def test_a_state_of_other_sequences_is_refused():
    state = pushed(on_device(30, unroll_len=3)).state_dict()
    with pytest.raises(CheckpointMismatch, match="unroll_len"):
        on_device(30, unroll_len=4).load_state_dict(state)


def test_sequences_that_are_not_there_yet_are_not_drawn():
    buffer = on_device(300, unroll_len=2, burn_in=3, seed=0)
    batch = steps(4)
    batch["done"][:] = False
    buffer.push(as_tree({name: column[:3] for name, column in leaves(batch)}))
    with pytest.raises(NotEnoughData, match="has 0 of them in 9 rows"):
        buffer.sample(1)
    buffer.push(as_tree({name: column[3:] for name, column in leaves(batch)}))
    assert sorted(set(buffer.sample(LANES)["index"].tolist())) == [0, 1, 2]


def test_a_cleared_buffer_draws_only_what_comes_after():
    for options in ({}, {"unroll_len": 2}, {"priority": PrioritySamplerSettings()}):
        buffer = pushed(on_device(60, **options))
        buffer.clear()
        assert len(buffer) == 0
        with pytest.raises(NotEnoughData):
            buffer.sample(1)
        assert buffer.push(steps(3, first=21)) == range(63, 72)
        assert {index for _ in range(20) for index in buffer.sample(3)["index"].tolist()} <= set(
            range(63, 72)
        )


def test_rows_are_read_by_their_index():
    buffer = pushed(on_device(30))
    assert buffer.index.tolist() == list(range(33, 63))
    assert buffer.get([40, 33], ["obs.name"])["obs"]["name"].tolist() == [40.0, 33.0]
    with pytest.raises(IndexError, match="row 32"):
        buffer.get([32])
    with pytest.raises(KeyError, match="colors"):
        buffer.get([40], ["colors"])


@pytest.mark.parametrize(
    "options",
    [
        {"follow_episodes": True},
        {"store_next_obs": False},
        {"frame_stacks": ("obs",), "store_next_obs": False},
        {"sampler": UniformSampler(replace=False)},
        {"transform": HindsightReplay(lambda *goals: goals[0]), "follow_episodes": True},
    ],
)
def test_options_that_a_device_does_not_have_are_refused(options):
    with pytest.raises(ConfigError, match=r"device='cpu' has no .*device=None"):
        TensorBuffer(30, device="cpu", **options)


def test_a_device_that_is_not_here_is_refused():
    with pytest.raises(ConfigError, match="cuda:99"):
        TensorBuffer(30, device="cuda:99")


def test_priorities_of_a_buffer_without_them_are_refused():
    with pytest.raises(TypeError, match="PrioritySampler"):
        pushed(on_device(30)).update_priority([40], [1.0])
    with pytest.raises(ValueError, match="2 indices"):
        pushed(on_device(30, priority=PrioritySamplerSettings())).update_priority([40, 41], [1.0])


@pytest.mark.parametrize(
    ("options", "column"),
    [({"n_step": 2}, "discount"), ({"unroll_len": 2}, "mask"), ({}, "index")],
)
def test_columns_that_samples_add_are_refused(options, column):
    batch = steps(4)
    with pytest.raises(StructureError, match=column):
        on_device(60, discount=GAMMA, **options).push(
            as_tree({**dict(batch.items()), column: batch["reward"]})
        )
