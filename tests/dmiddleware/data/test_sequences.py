import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dmiddleware.data import (
    PrioritySampler,
    TensorBuffer,
    UniformSampler,
    as_tree,
    load_checkpoint,
    save_checkpoint,
)
from dmiddleware.errors import CheckpointMismatch, ConfigError, NotEnoughData, StructureError

from .collecting import Collector, NaiveBuffer, as_batch


def with_state(batch):
    """Add a column like a recurrent state, which tells the row's episode and step."""
    state = {"h": batch["obs"]["both"] * 10, "c": batch["obs"]["episode"].double()}
    return as_tree({**dict(batch.items()), "state": state})


def push(buffer, naive, collector, n_steps, *, flat=False):
    rows = [row for step in collector.rows(n_steps) for row in step]
    width = 1 if flat else collector.env_num
    lead = (len(rows),) if flat else (n_steps, width)
    buffer.push(with_state(as_batch(rows, lead)))
    first = naive.total
    naive.push(rows, width=width)
    before = {naive.successor(i): i for i in naive.rows}
    for i in range(max(first, naive.total - naive.size), naive.total):
        naive.steps[i] = naive.steps[before[i]] + 1 if i in before else 0


def fill(pushes, size, seed, **options):
    """Push rows of two collectors, and the same to a model."""
    buffer = TensorBuffer(size, seed=seed, start_columns=("state",), **options)
    naive = NaiveBuffer(size, 1, 1.0, options["burn_in"] + options["unroll_len"])
    naive.steps = {}
    collectors = [Collector(3, seed), Collector(2, seed + 1, first_episode=1000)]
    for which, n_steps, flat in pushes:
        push(buffer, naive, collectors[which], n_steps, flat=flat)
    return buffer, naive


PUSH_SHAPES = st.integers(0, 1), st.integers(1, 8), st.booleans()
PUSHES = st.lists(st.tuples(*PUSH_SHAPES), min_size=1, max_size=12)


@settings(max_examples=120, deadline=None)
@given(
    pushes=PUSHES,
    size=st.integers(1, 60),
    seed=st.integers(0, 10_000),
    burn_in=st.integers(0, 2),
    unroll_len=st.integers(1, 5),
    stride=st.integers(1, 5),
    pad=st.booleans(),
    prioritized=st.booleans(),
)
def test_sequences_start_every_stride_rows_and_have_the_state_stored_there(
    pushes, size, seed, burn_in, unroll_len, stride, pad, prioritized
):
    stride = min(stride, unroll_len)
    options = {"burn_in": burn_in, "unroll_len": unroll_len, "stride": stride, "unroll_pad": pad}
    sampler = PrioritySampler() if prioritized else UniformSampler()
    buffer, naive = fill(pushes, size, seed, sampler=sampler, **options)
    length = burn_in + unroll_len
    shortest = burn_in + 1 if pad else length
    starts = {i for i in naive.rows if naive.steps[i] % stride == 0}
    whole = {i for i in starts if len(naive.sequence(i)) >= shortest}
    if not whole:
        with pytest.raises(NotEnoughData):
            buffer.sample(1)
        return
    batch = buffer.sample(len(starts))
    assert set(batch["index"].tolist()) <= whole
    assert batch.obs.both.shape == (length, len(starts), 2)
    for n, start in enumerate(batch["index"].tolist()):
        rows = naive.sequence(start)
        assert batch.mask[:, n].tolist() == [i < len(rows) for i in range(length)]
        rows += [rows[-1]] * (length - len(rows))
        assert batch.obs.both[:, n].tolist() == [list(naive.rows[i]["obs"]) for i in rows]
        assert batch.state.h[n].tolist() == [10 * x for x in naive.rows[start]["obs"]]
        assert batch.state.c[n] == naive.rows[start]["obs"][0]


@settings(max_examples=80, deadline=None)
@given(
    pushes=PUSHES,
    size=st.integers(1, 60),
    seed=st.integers(0, 10_000),
)
def test_rows_ahead_are_later_rows_of_the_same_episode(pushes, size, seed):
    buffer, naive = fill(pushes, size, seed, unroll_len=100, burn_in=0)
    index = buffer.index
    rest = [naive.sequence(i) for i in index.tolist()]
    left = buffer.steps_left(index)
    assert left.tolist() == [len(rows) - 1 for rows in rest]
    assert buffer.ahead(index, left).tolist() == [rows[-1] for rows in rest]
    assert buffer.ahead(index, 0).tolist() == index.tolist()
    for _ in range(3):
        for row, rows in zip(buffer.sample_future(index).tolist(), rest, strict=True):
            assert row in rows


@settings(max_examples=80, deadline=None)
@given(
    pushes=st.lists(
        st.tuples(st.sampled_from(["push"] * 5 + ["restart"]), *PUSH_SHAPES),
        min_size=1,
        max_size=15,
    ),
    size=st.integers(1, 80),
    seed=st.integers(0, 10_000),
    same_ids=st.booleans(),
    sampler=st.sampled_from([UniformSampler, PrioritySampler]),
    n_step=st.integers(1, 3),
)
def test_no_sequence_and_no_n_step_window_joins_rows_of_different_episodes(
    pushes, size, seed, same_ids, sampler, n_step
):
    def make_buffer():
        options = {"unroll_len": 3, "burn_in": 1, "stride": 2, "n_step": n_step, "discount": 1.0}
        return TensorBuffer(size, sampler=sampler(), seed=seed, **options)

    def make_collectors(run):
        firsts = [1000 * (2 * run + number) for number in (0, 1)]
        first_id = 0 if same_ids else None
        return [
            Collector(width, seed + first, first, first_id=first_id)
            for width, first in zip((3, 2), firsts, strict=True)
        ]

    buffer, run, collectors = make_buffer(), 0, make_collectors(0)
    for action, which, n_steps, is_flat in pushes:
        if action == "restart":  # another process continues with the saved buffer
            state, buffer = buffer.state_dict(), make_buffer()
            buffer.load_state_dict(state)
            run += 1
            collectors = make_collectors(run)
        # In the column reward is the number of the episode, so that sums tell what they sum.
        rows = [row for step in collectors[which].rows(n_steps) for row in step]
        rows = [{**row, "reward": float(row["obs"][0])} for row in rows]
        lead = (len(rows),) if is_flat else (n_steps, collectors[which].env_num)
        buffer.push(as_batch(rows, lead))
        try:
            batch = buffer.sample(3)
        except NotEnoughData:
            continue
        mask, (episode, step) = batch.mask, batch.obs.both.unbind(-1)
        assert (episode == episode[0]).all()
        assert (step[1:] == step[:-1] + 1)[mask[1:]].all()
        assert (batch.next_obs.episode == episode).all()
        n_summed = batch.next_obs.both[..., 1] - step
        assert ((n_summed >= 1) & (n_summed <= n_step)).all()
        assert (batch.reward == n_summed * episode).all()


def test_every_later_row_is_drawn_equally_often():
    buffer = TensorBuffer(100, follow_episodes=True, seed=0)
    rows = [{**row, "done": False} for row in episode_of(20)]
    buffer.push(as_batch(rows, (20,)))
    drawn = np.bincount(buffer.sample_future(np.full(15_000, 5)), minlength=20)
    assert not drawn[:5].any()
    assert ((drawn[5:] - 1000) ** 2 / 1000).sum() / 14 < 1.8


def test_goals_reached_later_replace_those_of_sampled_rows():
    buffer = TensorBuffer(100, follow_episodes=True, seed=0)
    buffer.push(as_batch(episode_of(30), (30,)))
    batch = buffer.sample(20)
    goal = buffer.get(buffer.sample_future(batch["index"]), ["next_obs.both"]).next_obs.both
    assert (goal[:, 0] == batch.obs.episode).all()
    assert (goal[:, 1] > batch.obs.both[:, 1]).all()


def episode_of(n, first=0):
    return [
        {
            "obs": (7, step),
            "reward": 1.0,
            "next_obs": (7, step + 1),
            "done": False,
            "terminated": False,
            "truncated": False,
            "episode_id": 7,
        }
        for step in range(first, first + n)
    ]


def test_an_endless_episode_takes_no_more_memory_than_the_ring():
    buffer = TensorBuffer(50, unroll_len=4, stride=3, seed=0)
    used = []
    for first in range(0, 2000, 5):
        buffer.push(as_batch(episode_of(5, first), (5,)))
        used.append(buffer.nbytes)
    assert used[-1] == used[30]
    restored = TensorBuffer(50, unroll_len=4, stride=3, seed=0)
    restored.load_state_dict(buffer.state_dict())
    assert restored.nbytes <= buffer.nbytes
    assert buffer.steps_left([1950]).item() == 49
    batch = buffer.sample(10)
    assert (batch["index"] % 3 == 0).all()
    assert torch.equal(
        batch.obs.both[1:, :, 1][batch.mask[1:]] - 1, batch.obs.both[:-1, :, 1][batch.mask[1:]]
    )


def test_short_episodes_take_no_more_memory_over_time():
    buffer, collector, used = TensorBuffer(50, unroll_len=4), Collector(5, seed=0), []
    for _ in range(400):
        buffer.push(as_batch(collector.step(), (1, 5)))
        used.append(buffer.nbytes)
    assert used[-1] <= used[100]


@pytest.mark.parametrize("sampler", [UniformSampler, PrioritySampler])
def test_a_restored_buffer_draws_the_same_sequences_and_later_rows(sampler, tmp_path):
    options = {"unroll_len": 4, "burn_in": 1, "stride": 2, "start_columns": ("state",)}

    def make(seed):
        return TensorBuffer(60, sampler=sampler(), seed=seed, **options)

    buffer, other = make(0), make(1)
    collector = Collector(3, seed=4)
    for _ in range(15):
        flat = [row for step in collector.rows(2) for row in step]
        buffer.push(with_state(as_batch(flat, (2, 3))))
    if sampler is PrioritySampler:
        index = buffer.sample(8)["index"]
        buffer.update_priority(index, torch.rand(8) * 5)
    save_checkpoint(tmp_path / "buffer.ckpt", buffer.state_dict())
    other.load_state_dict(load_checkpoint(tmp_path / "buffer.ckpt"))
    for _ in range(12):
        batch = with_state(as_batch([row for step in collector.rows(2) for row in step], (2, 3)))
        assert buffer.push(batch) == other.push(batch)
        ours, theirs = buffer.sample(6), other.sample(6)
        for name in ("index", "mask", "reward"):
            assert torch.equal(ours[name], theirs[name])
        assert torch.equal(ours.state.h, theirs.state.h)
        assert torch.equal(ours.obs.both, theirs.obs.both)
        assert torch.equal(buffer.sample_future(buffer.index), other.sample_future(other.index))
    rows, loaded = (
        [block["links"] for block in one.state_dict()["rows"]["blocks"]] for one in (buffer, other)
    )
    for name in ("successor", "step"):
        for block, same in zip(rows, loaded, strict=True):
            assert np.array_equal(block[name], same[name])
    with pytest.raises(CheckpointMismatch, match="stride=2"):
        TensorBuffer(60, sampler=sampler(), **{**options, "stride": 1}).load_state_dict(
            buffer.state_dict()
        )


def test_a_start_column_takes_memory_only_where_sequences_start():
    def used(stride):
        buffer = TensorBuffer(1000, unroll_len=10, stride=stride, start_columns=("state",))
        batch = as_batch(episode_of(1000), (1000,))
        batch["state"] = torch.zeros(1000, 256)
        buffer.push(batch)
        return buffer.nbytes

    assert used(10) < used(1) - 0.8 * 1000 * 256 * 4
    buffer = TensorBuffer(50, unroll_len=10, stride=5, start_columns=("state",))
    for first in range(0, 1000, 10):
        buffer.push(with_state(as_batch(episode_of(10, first), (10,))))
    assert buffer.sample(5).state.h.shape == (5, 2)
    with pytest.raises(KeyError, match="unknown leaf 'state'"):
        buffer.get([990], ["state"])
    with pytest.raises(StructureError, match="no state"):
        TensorBuffer(50, unroll_len=2, start_columns=("state",)).push(as_batch(episode_of(4), (4,)))


def test_a_buffer_of_sequences_takes_burn_in_and_start_columns_from_the_policy():
    buffer = TensorBuffer(10, unroll_len=4)
    buffer.bind(n_step=1, discount=0.9, burn_in=2, start_columns=("state",))
    options = buffer.settings
    assert (buffer.burn_in, options["burn_in"], options["start_columns"]) == (2, 2, ["state"])
    with pytest.raises(ConfigError, match="burn_in=0, but the policy has burn_in=2"):
        TensorBuffer(10).bind(n_step=1, burn_in=2)


def test_a_policy_for_sequences_refuses_a_buffer_of_single_rows():
    with pytest.raises(ConfigError, match=r"learns from sequences.*unroll_len"):
        TensorBuffer(10).bind(n_step=1, discount=0.9, burn_in=0)


def test_priorities_of_rows_where_no_sequence_starts_are_ignored():
    buffer = TensorBuffer(40, sampler=PrioritySampler(), unroll_len=4, stride=4, seed=0)
    buffer.push(as_batch(episode_of(40), (40,)))
    assert buffer.update_priority(np.arange(40), np.full(40, 3.0)) == 10
    index = torch.cat([buffer.sample(10)["index"] for _ in range(20)])
    assert set(index.tolist()) == set(range(0, 40, 4))
    buffer.update_priority([8], [1e6])
    assert (buffer.sample(10)["index"] == 8).sum() >= 9


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"burn_in": 2}, ValueError, "burn_in is an option of sequences"),
        ({"stride": 2}, ValueError, "stride is an option of sequences"),
        ({"start_columns": ("state",)}, ValueError, "start_columns is an option"),
        ({"unroll_len": 3, "stride": 4}, ValueError, "at most unroll_len=3"),
        ({"unroll_len": 3, "burn_in": -1}, ConfigError, "burn_in must be an integer ≥ 0"),
        ({"unroll_len": 3, "start_columns": "state"}, ConfigError, "several names"),
        ({"follow_episodes": 1}, ConfigError, "follow_episodes must be"),
    ],
)
def test_wrong_options_of_sequences_are_rejected(options, error, message):
    with pytest.raises(error, match=message):
        TensorBuffer(10, **options)


def test_a_buffer_that_does_not_follow_episodes_says_how_to():
    buffer = TensorBuffer(10)
    buffer.push(as_batch(episode_of(4), (4,)))
    with pytest.raises(TypeError, match="follow_episodes=True"):
        buffer.sample_future([0])
    follows = TensorBuffer(10, follow_episodes=True)
    follows.push(as_batch(episode_of(4), (4,)))
    with pytest.raises(IndexError, match="no row 2 steps after row 2"):
        follows.ahead([1, 2], 2)
    follows.push(as_batch(episode_of(10, 4), (10,)))
    with pytest.raises(IndexError, match="row 3 is no longer held"):
        follows.steps_left([5, 3])
