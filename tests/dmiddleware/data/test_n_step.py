import logging

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dmiddleware.data import TensorBuffer, UniformSampler, to_dict
from dmiddleware.errors import ConfigError, NotEnoughData, StructureError

from .collecting import Collector, NaiveBuffer, as_batch, every_row


@st.composite
def histories(draw):
    """Actions on a buffer: pushes of several collectors in several layouts, and clearing."""
    return [
        (
            draw(st.sampled_from(["push"] * 6 + ["flat", "episode", "clear"])),
            draw(st.integers(0, 1)),
            draw(st.integers(1, 6)),
        )
        for _ in range(draw(st.integers(1, 12)))
    ]


def run(history, size, seed, *, odd_next_obs=False, **options):
    """Apply the same actions to a buffer and to its model."""
    buffer = TensorBuffer(size, seed=seed, **options)
    naive = NaiveBuffer(
        size, options.get("n_step", 1), options.get("discount", 0.99), options.get("unroll_len")
    )
    collectors = [
        Collector(3, seed, 0, odd_next_obs),
        Collector(1 + seed % 4, seed + 1, 10_000, odd_next_obs),
        Collector(1, seed + 2, 20_000, odd_next_obs),
    ]
    for name, which, n_steps in history:
        if name == "push":
            rows = collectors[which].rows(n_steps)
            flat = [row for step in rows for row in step]
            buffer.push(as_batch(flat, (n_steps, len(rows[0]))))
            naive.push(flat, width=len(rows[0]))
        elif name == "flat":  # [N, …], the rows of all envs of one step after the other
            flat = [row for step in collectors[which].rows(n_steps) for row in step]
            buffer.push(as_batch(flat, (len(flat),)))
            naive.push(flat)
        elif name == "episode":  # [T, …], consecutive rows of one env
            flat = [step[0] for step in collectors[2].rows(n_steps)]
            buffer.push(as_batch(flat, (n_steps,)))
            naive.push(flat)
        elif name == "clear":
            buffer.clear()
            naive.rows.clear()
        assert len(buffer) == len(naive.rows)
    return buffer, naive


def check(value, expected):
    assert torch.allclose(value.double(), torch.tensor(expected).double(), atol=1e-5)


CASES = {"history": histories(), "size": st.integers(1, 40), "seed": st.integers(0, 10_000)}


@settings(max_examples=150, deadline=None)
@given(**CASES, n_step=st.integers(2, 5), once=st.booleans(), odd=st.booleans())
def test_n_step_samples_equal_those_of_a_naive_model(history, size, seed, n_step, once, odd):
    buffer, naive = run(
        history,
        size,
        seed,
        n_step=n_step,
        discount=0.9,
        store_next_obs=not once,
        odd_next_obs=odd,
    )
    if not naive.rows:
        return
    batch = buffer.sample(len(naive.rows))
    expected = [naive.window(i) for i in batch["index"].tolist()]
    for name in ("reward", "discount", "done", "terminated", "truncated", "episode_id"):
        check(batch[name], [row[name] for row in expected])
    check(batch.obs.both, [row["obs"] for row in expected])
    check(batch.next_obs.both, [row["next_obs"] for row in expected])
    check(batch.next_obs.episode, [row["next_obs"][0] for row in expected])


@settings(max_examples=100, deadline=None)
@given(**CASES, odd=st.booleans())
def test_next_obs_read_from_obs_is_the_next_obs_that_was_pushed(history, size, seed, odd):
    buffer, naive = run(history, size, seed, store_next_obs=False, odd_next_obs=odd)
    index = np.array(list(naive.rows), np.int64)
    if len(index):
        check(buffer.get(index).next_obs.both, [row["next_obs"] for row in naive.rows.values()])


@settings(max_examples=100, deadline=None)
@given(**CASES, unroll_len=st.integers(1, 6))
def test_sequences_follow_one_episode_and_are_masked_beyond_it(history, size, seed, unroll_len):
    buffer, naive = run(history, size, seed, unroll_len=unroll_len)
    if not naive.rows:
        return
    batch = buffer.sample(len(naive.rows))
    assert batch.obs.both.shape == (unroll_len, len(naive.rows), 2)
    for n, start in enumerate(batch["index"].tolist()):
        rows = naive.sequence(start)
        assert batch.mask[:, n].tolist() == [i < len(rows) for i in range(unroll_len)]
        rows += [rows[-1]] * (unroll_len - len(rows))
        check(batch.obs.both[:, n], [naive.rows[i]["obs"] for i in rows])
        check(batch.reward[:, n], [naive.rows[i]["reward"] for i in rows])


@settings(max_examples=100, deadline=None)
@given(**CASES, unroll_len=st.integers(2, 4))
def test_without_padding_only_complete_sequences_are_drawn(history, size, seed, unroll_len):
    buffer, naive = run(history, size, seed, unroll_len=unroll_len, unroll_pad=False)
    whole = {i for i in naive.rows if len(naive.sequence(i)) == unroll_len}
    if not naive.rows:
        return
    if not whole:
        with pytest.raises(NotEnoughData, match="complete sequence"):
            buffer.sample(1)
        return
    batch = buffer.sample(len(naive.rows))
    assert batch.mask.all()
    assert set(batch["index"].tolist()) <= whole


@settings(max_examples=100, deadline=None)
@given(
    pushes=st.lists(st.tuples(st.integers(0, 2), st.integers(1, 4)), min_size=2, max_size=20),
    seed=st.integers(0, 1000),
    once=st.booleans(),
)
def test_episodes_of_collectors_that_use_the_same_ids_are_never_joined(pushes, seed, once):
    buffer = TensorBuffer(40, unroll_len=4, store_next_obs=not once, seed=seed)
    collectors = [Collector(2, seed + n, first_episode=1000 * n, first_id=0) for n in range(3)]
    for which, n_steps in pushes:
        flat = [row for step in collectors[which].rows(n_steps) for row in step]
        buffer.push(as_batch(flat, (n_steps, 2)))
    batch = buffer.sample(len(buffer))
    mask = batch["mask"][1:]
    assert torch.equal(batch["obs"]["both"][1:][mask], batch["next_obs"]["both"][:-1][mask])


def test_a_new_run_on_a_restored_buffer_does_not_continue_its_episodes(caplog):
    caplog.set_level(logging.INFO)

    def make():
        return TensorBuffer(100, n_step=3, discount=1.0, sampler=UniformSampler(replace=False))

    old, buffer = make(), make()
    old.push(as_batch([step[0] for step in Collector(1, seed=3).rows(3)], (3,)))
    buffer.load_state_dict(old.state_dict())
    again = Collector(1, seed=5, first_episode=500, first_id=0)
    buffer.push(as_batch([step[0] for step in again.rows(3)], (3,)))
    for i, row in enumerate(every_row(buffer)["next_obs"]["episode"].tolist()):
        assert (row > 500) == (i >= 3)
    assert "episode_id 1" in caplog.text


@pytest.mark.parametrize("once", [False, True])
def test_steps_that_a_restart_has_lost_are_not_blamed_on_the_collectors(once, caplog):
    caplog.set_level(logging.INFO)

    def make():
        return TensorBuffer(200, n_step=3, discount=1.0, store_next_obs=not once)

    collector = Collector(3, seed=3)
    saved = make()
    for _ in range(4):
        saved.push(as_batch(collector.step(), (1, 3)))
    state = saved.state_dict()
    for _ in range(2):  # learned, and lost with the learner that was killed
        collector.step()
    buffer = make()
    buffer.load_state_dict(state)
    for _ in range(20):
        buffer.push(as_batch(collector.step(), (1, 3)))
    assert [record.levelname for record in caplog.records] == ["INFO"]
    assert "restored" in caplog.text
    # The ids that two sources share since then are still warned about.
    other = Collector(3, seed=4, first_episode=900, first_id=collector.n_episodes - 3)
    for _ in range(4):
        buffer.push(as_batch(other.step(), (1, 3)))
        buffer.push(as_batch(collector.step(), (1, 3)))
    assert "same ids" in caplog.text


def test_two_collectors_in_turns_are_warned_about_once(caplog):
    buffer = TensorBuffer(100, n_step=2, discount=1.0)
    collectors = [Collector(2, n, first_episode=1000 * n, first_id=0) for n in range(2)]
    for _ in range(5):
        for collector in collectors:
            buffer.push(as_batch(collector.step(), (1, 2)))
    assert caplog.text.count("same ids") == 1


def test_complete_sequences_are_drawn_equally_often():
    buffer, naive = run([("push", 0, 30)], 200, 4, unroll_len=3, unroll_pad=False)
    whole = [i for i in naive.rows if len(naive.sequence(i)) == 3]
    index = torch.cat([buffer.sample(40)["index"] for _ in range(300)])
    counts = np.bincount(index, minlength=naive.total)[whole]
    expected = len(index) / len(whole)
    assert ((counts - expected) ** 2 / expected).sum() / (len(whole) - 1) < 1.6


def test_sequences_and_n_step_returns_can_be_combined():
    buffer, naive = run([("push", 0, 20)], 200, 1, unroll_len=3, n_step=2, discount=0.5)
    batch = buffer.sample(20)
    assert batch.reward.shape == batch.discount.shape == batch.mask.shape == (3, 20)
    for n, start in enumerate(batch["index"].tolist()):
        expected = [naive.window(i) for i in naive.sequence(start)]
        k = len(expected)
        check(batch.reward[:k, n], [row["reward"] for row in expected])
        check(batch.next_obs.both[:k, n], [row["next_obs"] for row in expected])


def test_next_obs_takes_memory_only_where_it_differs_from_obs():
    rows = [
        {
            "obs": (1, step),
            "reward": 0.0,
            "next_obs": (1, step + 1),
            "done": step == 99,
            "terminated": step == 99,
            "truncated": False,
            "episode_id": 1,
        }
        for step in range(100)
    ]
    once, twice = (
        TensorBuffer(1000, store_next_obs=False),
        TensorBuffer(1000, n_step=2),
    )
    used = []
    for start in range(0, 100, 10):
        for buffer in (once, twice):
            buffer.push(as_batch(rows[start : start + 10], (10,)))
        used.append(once.nbytes)
    assert len(set(used)) == 1  # only the last row needs its next_obs, whatever was pushed before
    assert once.nbytes < twice.nbytes
    assert torch.equal(
        once.get(range(100)).next_obs.both, once.get(range(100)).obs.both + torch.tensor([0, 1])
    )


def test_columns_that_the_options_need_are_checked_at_the_first_push():
    batch = as_batch([step[0] for step in Collector(1, 0).rows(4)], (4,))
    without = {key: leaf for key, leaf in to_dict(batch).items() if key != "episode_id"}
    buffer = TensorBuffer(10, n_step=3)
    with pytest.raises(StructureError, match="but the batch has no episode_id"):
        buffer.push(without)
    buffer.push(batch)  # the refused batch did not fix the structure
    wrong = {**to_dict(batch), "next_obs": batch.obs.both}
    with pytest.raises(StructureError, match="same leaves"):
        TensorBuffer(10, store_next_obs=False).push(wrong)
    vector = {**to_dict(batch), "episode_id": batch.obs.both.long()}
    with pytest.raises(StructureError, match="episode_id must be one number"):
        TensorBuffer(10, n_step=2).push(vector)
    no_reward = {key: leaf for key, leaf in to_dict(batch).items() if key != "reward"}
    with pytest.raises(StructureError, match="has no reward"):
        TensorBuffer(10, n_step=2).push(no_reward)


def test_integer_rewards_are_summed_as_floats():
    batch = as_batch([step[0] for step in Collector(1, 3).rows(6)], (6,))
    batch.reward = torch.ones(6, dtype=torch.int64)
    buffer = TensorBuffer(10, n_step=2, discount=0.5)
    buffer.push(batch)
    sample = buffer.sample(6)
    assert sample.reward.dtype == torch.float32
    assert set(sample.reward.tolist()) <= {1.0, 1.5}
    assert 1.5 in sample.reward


def test_rewards_of_several_parts_are_summed_part_by_part():
    batch = as_batch([step[0] for step in Collector(1, 3).rows(6)], (6,))
    single = TensorBuffer(10, n_step=3, discount=0.9, seed=0)
    single.push(batch)
    batch.reward = torch.stack([batch.reward, 2 * batch.reward], dim=1)
    double = TensorBuffer(10, n_step=3, discount=0.9, seed=0)
    double.push(batch)
    a, b = single.sample(6).reward, double.sample(6).reward
    assert torch.allclose(torch.stack([a, 2 * a], dim=1), b)


def test_a_buffer_without_a_discount_takes_it_from_the_policy():
    buffer = TensorBuffer(10, n_step=2, seed=0)
    assert (buffer.n_step, buffer.discount) == (2, None)
    buffer.push(as_batch(Collector(1, seed=0).step(), (1,)))
    with pytest.raises(ConfigError, match="bind"):
        buffer.sample(1)
    buffer.bind(n_step=2, discount=0.5)
    buffer.bind(n_step=2, discount=0.5)
    assert buffer.discount == 0.5
    assert buffer.sample(1)["discount"].item() == 0.5


def test_a_buffer_takes_its_n_step_from_the_policy_until_the_first_push():
    buffer, twin = TensorBuffer(10, seed=0), TensorBuffer(10, n_step=2, discount=0.5, seed=0)
    buffer.bind(n_step=2, discount=0.5)
    assert buffer.settings["n_step"] == buffer.n_step == 2
    batch = as_batch([step[0] for step in Collector(1, 3).rows(6)], (6,))
    assert buffer.push(batch) == twin.push(batch)
    assert torch.equal(buffer.sample(6).reward, twin.sample(6).reward)
    with pytest.raises(ConfigError, match="n_step=2, but the policy has n_step=3"):
        buffer.bind(n_step=3, discount=0.5)
    twin.load_state_dict(buffer.state_dict())


def test_a_buffer_with_rows_keeps_its_n_step():
    buffer = TensorBuffer(10, seed=0)
    buffer.push(as_batch(Collector(1, seed=0).step(), (1,)))
    buffer.bind(n_step=2, discount=0.5)
    assert buffer.n_step == 1


@pytest.mark.parametrize("restored", [False, True])
def test_rows_with_returns_are_sampled_as_they_are(restored: bool):
    def bound() -> TensorBuffer:
        buffer = TensorBuffer(10, seed=0)
        buffer.bind(n_step=2, discount=0.5)
        return buffer

    buffer = bound()
    batch = as_batch(Collector(1, seed=0).step(), (1,))
    batch["discount"] = torch.tensor([0.25])
    buffer.push(batch)
    if restored:
        state, buffer = buffer.state_dict(), bound()
        buffer.load_state_dict(state)
    assert (buffer.n_step, buffer.discount) == (1, 0.5)
    assert torch.equal(buffer.sample(1).reward, batch.reward)
    with pytest.raises(StructureError, match="discount"):
        TensorBuffer(10, n_step=2).push(batch)


@pytest.mark.parametrize(
    ("options", "name"),
    [({"n_step": 3}, "n_step=1"), ({"n_step": 1, "discount": 0.9}, "discount=0.99")],
)
def test_a_buffer_and_a_policy_with_different_n_step_returns_are_rejected(options, name):
    buffer = TensorBuffer(10, **options)
    with pytest.raises(ConfigError, match=name):
        buffer.bind(n_step=1, discount=0.99)
    assert buffer.discount == options.get("discount")  # unchanged
