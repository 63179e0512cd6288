from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dmiddleware.classic import AdvancedReplayBuffer, NaiveReplayBuffer, SequenceReplayBuffer


def item(n):
    return {"data_id": f"d{n}", "unroll_len": 1}


def naive(size=3, **cfg):
    cfg = {"replay_buffer_size": size, "enable_track_used_data": True, "log_to_file": False} | cfg
    return NaiveReplayBuffer(cfg)


def ids(samples):
    return [sample["data_id"] for sample in samples]


def test_items_that_were_pushed_out_are_deleted_once():
    buffer = naive()
    buffer.push([item(n) for n in range(5)], 0)
    assert buffer.take_deleted() == ["d0", "d1"]
    assert buffer.take_deleted() == []


def test_leased_items_are_deleted_only_when_their_lease_ends():
    buffer = naive()
    buffer.push([item(n) for n in range(3)], 0)
    batch = ids(buffer.sample(3, 0))
    buffer.push([item(n) for n in range(3, 6)], 0)
    assert buffer.take_deleted() == []
    buffer.release(["d1"])
    assert buffer.take_deleted() == ["d1"]
    buffer.release(batch)
    assert buffer.take_deleted() == ["d0", "d2"]


def test_an_item_drawn_twice_has_two_leases():
    buffer = naive(size=1)
    buffer.push(item(0), 0)
    assert ids(buffer.sample(2, 0, replace=True)) == ["d0", "d0"]
    buffer.push(item(1), 0)
    buffer.release(["d0"])
    assert buffer.take_deleted() == []
    buffer.release(["d0"])
    assert buffer.take_deleted() == ["d0"]


def test_releasing_what_is_not_leased_changes_nothing():
    buffer = naive()
    buffer.push(item(0), 0)
    buffer.release(["d0", "unknown"])
    buffer.sample(1, 0)
    buffer.clear()
    assert buffer.take_deleted() == []
    buffer.release(["d0"])
    assert buffer.take_deleted() == ["d0"]


def test_an_id_that_is_pushed_again_is_not_deleted():
    buffer = naive()
    buffer.push([item(0), item(0)], 0)
    buffer.push([item(1), item(2)], 0)
    assert buffer.take_deleted() == []
    buffer.push(item(3), 0)
    buffer.push(item(0), 0)
    assert buffer.take_deleted() == ["d1"]


def test_used_up_items_wait_for_the_learner():
    cfg = {"enable_track_used_data": True, "max_use": 1, "log_to_file": False}
    buffer = AdvancedReplayBuffer(cfg)
    buffer.push([item(0), item(1)], 0)
    batch = ids(buffer.sample(2, 0))
    assert buffer.count() < 2
    assert not set(batch) & set(buffer.take_deleted())
    buffer.release(batch)
    assert set(buffer.take_deleted()) == set(batch)


def test_every_step_of_a_drawn_sequence_is_leased():
    cfg = {"replay_buffer_size": 3, "enable_track_used_data": True, "log_to_file": False}
    buffer = SequenceReplayBuffer(cfg)
    buffer.push([item(n) for n in range(3)], 0)
    (run,) = buffer.sample(1, 3, 0)
    buffer.clear()
    assert buffer.take_deleted() == []
    buffer.release(ids(run))
    assert buffer.take_deleted() == ["d0", "d1", "d2"]


def test_closing_gives_up_everything_that_is_left():
    buffer = naive()
    buffer.push([item(n) for n in range(5)], 0)
    buffer.sample(2, 0)
    buffer.close()
    buffer.close()
    assert sorted(buffer.take_deleted()) == [f"d{n}" for n in range(5)]


def test_items_whose_data_is_lost_are_removed():
    buffer = naive()
    buffer.push([item(n) for n in range(3)], 0)
    assert buffer.remove(["d1", "unknown"]) == 1
    assert buffer.count() == 2
    assert buffer.take_deleted() == ["d1"]


def test_items_must_have_an_id():
    buffer = naive()
    with pytest.raises(TypeError, match="data_id"):
        buffer.push([item(0), {"obs": 1}], 0)
    assert buffer.count() == 0


def test_leases_are_part_of_the_state():
    buffer = naive()
    buffer.push([item(n) for n in range(3)], 0)
    batch = ids(buffer.sample(2, 0))
    buffer.push([item(n) for n in range(3, 7)], 0)
    restored = naive()
    restored.load_state_dict(buffer.state_dict())
    assert restored.take_deleted() == buffer.take_deleted() != []
    restored.release(batch)
    assert set(restored.take_deleted()) == set(batch)
    assert restored.remove(["d5"]) == 1
    assert restored.take_deleted() == ["d5"]


def test_without_tracking_there_is_nothing_to_delete():
    buffer = NaiveReplayBuffer({"replay_buffer_size": 1, "log_to_file": False})
    buffer.push([item(0), item(1)], 0)
    buffer.release(["d0"])
    assert buffer.take_deleted() == []
    assert buffer.remove(["d1"]) == 0


ACTIONS = st.one_of(
    st.tuples(st.just("push"), st.integers(0, 9)),
    st.tuples(st.just("sample"), st.integers(1, 3)),
    st.tuples(st.just("release"), st.integers(0, 9)),
    st.tuples(st.just("remove"), st.integers(0, 9)),
    st.tuples(st.just("take"), st.just(0)),
)


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 4), st.lists(ACTIONS, max_size=40))
def test_what_is_deleted_is_neither_held_nor_leased_and_nothing_is_forgotten(size, actions):
    buffer = naive(size=size)
    # The slots of the ring, by their number since the start; what is pending may be deleted.
    held, leases, pending, n_pushed = {}, Counter(), set(), 0
    for action, n in actions:
        if action == "push":
            buffer.push(item(n), 0)
            pending |= {held.pop(n_pushed - size, None)} - {None}
            held[n_pushed], n_pushed = f"d{n}", n_pushed + 1
        elif action == "sample":
            leases.update(ids(buffer.sample(n, 0, replace=True) or []))
        elif action == "release":
            buffer.release([f"d{n}"])
            leases -= Counter([f"d{n}"])
        elif action == "remove":
            assert buffer.remove([f"d{n}"]) == list(held.values()).count(f"d{n}")
            pending |= {f"d{n}"} & set(held.values())
            held = {number: one for number, one in held.items() if one != f"d{n}"}
        else:
            expected = {one for one in pending if not leases[one]}
            assert sorted(buffer.take_deleted()) == sorted(expected)
            pending -= expected
        pending -= set(held.values())
        assert buffer.count() == len(held)
    buffer.close()
    assert set(buffer.take_deleted()) == pending | set(held.values())
