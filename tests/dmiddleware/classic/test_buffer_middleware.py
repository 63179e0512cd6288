from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dmiddleware.classic import BufferedData, DequeBuffer
from dmiddleware.classic.buffer_middleware import (
    PriorityExperienceReplay,
    clone_object,
    group_sample,
    padding,
    sample_range_view,
    staleness_check,
    use_time_check,
)
from dmiddleware.data import TensorBuffer, as_tree
from dmiddleware.errors import CheckpointMismatch, NotEnoughData


def rows(first, n):
    return as_tree({"x": torch.arange(first, first + n)})


def deque(n=6, size=10, **meta):
    buffer = DequeBuffer(size, seed=0)
    for i in range(n):
        buffer.push(i, {key: value(i) for key, value in meta.items()})
    return buffer


def test_buffer_middleware_wraps_actions_from_the_outside_in():
    tape = []

    def recorder(name):
        def middleware(action, chain, *args, **kwargs):
            tape.append(f"{name} before {action}")
            result = chain(*args, **kwargs)
            tape.append(f"{name} after {action}")
            return result

        return middleware

    buffer = DequeBuffer(4)
    assert buffer.use(recorder("a")).use(recorder("b")) is buffer
    buffer.push("x")
    assert tape == ["a before push", "b before push", "b after push", "a after push"]
    buffer.sample(1)
    buffer.update(0, "y")
    buffer.delete([0])
    buffer.clear()
    assert [line[9:] for line in tape if line.startswith("a before")] == [
        "push",
        "sample",
        "update",
        "delete",
        "clear",
    ]


def test_buffer_middleware_may_change_arguments_and_results():
    def doubling(action, chain, *args, **kwargs):
        if action == "push":
            return chain(args[0] * 2, **kwargs)
        result = chain(*args, **kwargs)
        return [item.data for item in result] if action == "sample" else result

    buffer = DequeBuffer(4).use(doubling)
    buffer.push(21)
    assert buffer.sample(1) == [42]


def test_an_object_that_cannot_be_called_is_not_accepted():
    with pytest.raises(TypeError, match="must be callable"):
        DequeBuffer(4).use("clone")


def test_a_buffer_of_another_kind_is_not_accepted():
    with pytest.raises(TypeError, match="use_time_check needs a DequeBuffer"):
        use_time_check(TensorBuffer(4))


def test_a_middleware_works_only_on_the_buffer_it_was_made_for():
    with pytest.raises(ValueError, match="made for another buffer"):
        DequeBuffer(4).use(use_time_check(DequeBuffer(4)))


class TestClone:
    def test_changes_outside_do_not_reach_the_buffer(self):
        buffer = DequeBuffer(4).use(clone_object())
        data = {"x": torch.ones(2), "list": [np.zeros(1)], "batch": rows(0, 2)}
        meta = {"notes": [1]}
        buffer.push(data, meta)
        (
            data["x"].zero_(),
            data["list"][0].fill(9),
            data["batch"].x.fill_(9),
            meta["notes"].append(2),
        )
        item = buffer.sample(1)[0]
        assert item.data["x"].sum() == 2
        assert item.data["list"][0] == 0
        assert item.data["batch"].x.tolist() == [0, 1]
        assert item.meta == {"notes": [1]}
        item.data["x"].zero_(), item.meta["notes"].append(3)
        again = buffer.sample(1)[0]
        assert again.data["x"].sum() == 2
        assert again.meta == {"notes": [1]}
        new = torch.ones(1)
        buffer.update(0, data=new)
        new.zero_()
        assert buffer.sample(1)[0].data == 1

    def test_without_it_the_pushed_object_is_returned(self):
        buffer, data = DequeBuffer(4), [1]
        buffer.push(data)
        assert buffer.sample(1)[0].data is data

    def test_groups_are_copied_too(self):
        buffer = deque(3, g=lambda i: 0).use(clone_object())
        assert [item.data for item in buffer.sample(1, groupby="g")[0]] == [0, 1, 2]


class TestPriority:
    def test_items_are_drawn_in_proportion(self):
        buffer = DequeBuffer(8, seed=0)
        buffer.use(
            PriorityExperienceReplay(
                buffer, priority_power_factor=1.0, IS_weight_anneal_train_iter=None
            )
        )
        for i in range(10):
            buffer.push(i, {"priority": i + 1.0})
        buffer.update(3, meta={"priority": 10.0})
        counts = Counter(item.data for _ in range(500) for item in buffer.sample(8))
        priority = np.array([3, 10, 5, 6, 7, 8, 9, 10.0])
        expected = 4000 * priority / priority.sum()
        seen = np.array([counts[i] for i in range(2, 10)])
        assert ((seen - expected) ** 2 / expected).sum() / 7 < 1.7

    def test_samples_have_priority_and_weight(self):
        buffer = DequeBuffer(8, seed=0)
        replay = PriorityExperienceReplay(
            buffer, priority_power_factor=0.5, IS_weight_power_factor=0.4,
            IS_weight_anneal_train_iter=2,
        )  # fmt: skip
        buffer.use(replay)
        buffer.push("a", {"priority": 4.0})
        buffer.push("b")  # the highest so far
        buffer.push("c", {"priority": 1.0})
        assert buffer.get(1).meta["priority"] == 4.0
        weights = {item.data: item.meta["priority_IS"] for item in buffer.sample(3)}
        low = min(1.0 if "c" in weights else 4.0, 4.0)
        for data, weight in weights.items():
            priority = 1.0 if data == "c" else 4.0
            assert weight == pytest.approx((low / priority) ** (0.5 * 0.4), rel=1e-4)
        assert replay.beta == pytest.approx(0.7)
        assert "priority_IS" not in buffer.get(0).meta

    def test_weights_can_be_left_out(self):
        buffer = DequeBuffer(8, seed=0)
        buffer.use(PriorityExperienceReplay(buffer, IS_weight=False))
        buffer.push("a")
        assert "priority_IS" not in buffer.sample(1)[0].meta

    def test_items_can_be_fetched_by_index_but_not_in_groups(self):
        buffer = DequeBuffer(8, seed=0)
        buffer.use(PriorityExperienceReplay(buffer))
        with pytest.raises(NotEnoughData):
            buffer.sample(1)
        buffer.push("a", {"g": 1})
        assert buffer.sample(indices=[0])[0].data == "a"
        with pytest.raises(ValueError, match="draws items, not groups"):
            buffer.sample(1, groupby="g")

    def test_nothing_is_drawn_from_a_range_without_items(self):
        buffer = DequeBuffer(8, seed=0)
        buffer.use(PriorityExperienceReplay(buffer))
        for i in range(5):
            buffer.push(i)
        with pytest.raises(NotEnoughData, match="asked for 2 items, but only 0"):
            buffer.sample(2, sample_range=slice(5, None))
        assert buffer.sample(2, sample_range=slice(-8, -5), ignore_insufficient=True) == []
        assert buffer.sample(0) == []
        with pytest.raises(ValueError, match="size must be at least 0"):
            buffer.sample(-1)

    @pytest.mark.parametrize("odd", [-1.0, float("nan"), float("inf")])
    def test_invalid_priorities_are_rejected_and_change_nothing(self, odd):
        buffer = DequeBuffer(8, seed=0)
        buffer.use(PriorityExperienceReplay(buffer))
        buffer.push("a")
        with pytest.raises(ValueError, match="priority must be"):
            buffer.push("b", {"priority": odd})
        with pytest.raises(ValueError, match="priority must be"):
            buffer.update(0, meta={"priority": odd})
        assert len(buffer) == 1
        assert buffer.get(0).meta["priority"] == 1.0

    @settings(max_examples=60, deadline=None)
    @given(
        st.integers(1, 6),
        st.lists(
            st.tuples(
                st.sampled_from(["push", "push", "update", "delete", "clear", "reload"]),
                st.integers(0, 12),
                st.floats(0, 9),
            ),
            max_size=20,
        ),
    )
    def test_draws_agree_with_a_naive_model(self, size, actions):
        def build():
            buffer = DequeBuffer(size, seed=0)
            replay = PriorityExperienceReplay(buffer, priority_power_factor=1.0)
            return buffer.use(replay), replay

        buffer, replay = build()
        model, total = {}, 0
        for name, number, priority in actions:
            if name == "push":
                buffer.push(number, {"priority": priority})
                model = {i: p for i, p in model.items() if i > total - size} | {total: priority}
                total += 1
            elif name == "update":
                buffer.update(number, meta={"priority": priority})
                model |= {number: priority} if number in model else {}
            elif name == "delete":
                buffer.delete([number, number])
                model.pop(number, None)
            elif name == "clear":
                buffer.clear()
                model.clear()
            else:
                state = buffer.state_dict()
                buffer, replay = build()
                buffer.load_state_dict(state)
            mass = replay.state_dict()["mass"]
            assert np.allclose(mass, np.array(list(model.values())) + 1e-6, rtol=1e-12)
            if model:
                drawn = buffer.sample(2)
                assert {item.index for item in drawn} <= set(model)
                assert all(item.meta["priority"] == model[item.index] for item in drawn)


class TestPrioritiesBetweenDraws:
    """Without a draw or a state in between, which would give them to the sampler."""

    @staticmethod
    def buffer(*priorities):
        buffer = DequeBuffer(4, seed=0)
        buffer.use(PriorityExperienceReplay(buffer))
        for n, priority in enumerate(priorities):
            buffer.push(n, {"priority": priority})
        return buffer

    def test_deleted_items_are_not_drawn(self):
        buffer = self.buffer(1.0, 9.0, 2.0)
        buffer.delete(1)
        assert {item.data for item in buffer.sample(40)} == {0, 2}

    def test_cleared_items_are_not_drawn(self):
        buffer = self.buffer(1.0, 9.0, 2.0)
        buffer.clear()
        buffer.push("new")
        assert {item.data for item in buffer.sample(40)} == {"new"}

    def test_overwritten_items_count_for_the_highest_priority(self):
        buffer, restored = self.buffer(9.0, 1.0, 1.0, 1.0, 1.0, 1.0), self.buffer(3.0)
        restored.load_state_dict(buffer.state_dict())
        for one in (buffer, restored):
            one.push("new")
        assert buffer.get(6).meta == restored.get(6).meta == {"priority": 9.0}

    def test_loading_a_state_forgets_them(self):
        buffer, restored = self.buffer(1.0, 2.0), self.buffer(50.0, 60.0)
        restored.load_state_dict(buffer.state_dict())
        assert [i.index for i in buffer.sample(40)] == [i.index for i in restored.sample(40)]


class TestStaleness:
    def test_old_items_of_a_deque_are_deleted_before_a_sample(self):
        buffer = deque(6, train_iter_data_collected=lambda i: i)
        buffer.use(staleness_check(buffer, max_staleness=3))
        items = buffer.sample(4, train_iter_sample_data=5)
        assert {item.data for item in items} == {2, 3, 4, 5}
        assert all(item.meta["staleness"] == 5 - item.data for item in items)
        with pytest.raises(NotEnoughData):
            buffer.sample(4, train_iter_sample_data=6)
        with pytest.raises(ValueError, match="needs items pushed with meta"):
            buffer.push("x")
        with pytest.raises(ValueError, match="needs the learner's iteration"):
            buffer.sample(1)
        buffer.push("x", {"train_iter_data_collected": 9})
        assert buffer.sample(1, train_iter_sample_data=12)[0].data == "x"

    def test_iterations_may_change_and_are_restored_with_the_items(self):
        buffer = deque(6, train_iter_data_collected=lambda i: i)
        buffer.use(staleness_check(buffer, max_staleness=3))
        buffer.sample(1, train_iter_sample_data=3)
        buffer.update(1, meta={"train_iter_data_collected": 9})
        restored = deque(6, train_iter_data_collected=lambda i: 20)
        restored.use(staleness_check(restored, max_staleness=3))
        restored.sample(1, train_iter_sample_data=20)
        restored.load_state_dict(buffer.state_dict())
        for one in (buffer, restored):
            assert {item.data for item in one.sample(3, train_iter_sample_data=7)} == {1, 4, 5}

    @given(st.integers(0, 2**32), st.sampled_from([10, 40]))
    @settings(max_examples=40, deadline=None)
    def test_exactly_the_old_items_are_deleted_in_any_order_of_iterations(  # noqa: C901
        self, seed, size
    ):
        rng = np.random.default_rng(seed)
        buffer, collected, total = DequeBuffer(size, seed=0), {}, 0

        def meta(iteration):
            return {"train_iter_data_collected": int(iteration)}

        if rng.random() < 0.5:  # items from before the check
            collected, total = {buffer.push("x", meta(3)): 3 for _ in range(5)}, 5
        check = staleness_check(buffer, max_staleness=20)
        buffer.use(check)
        for now in range(0, 200, 4):
            for iteration in now - rng.integers(0, 15, int(rng.integers(1, size // 2))):
                collected[buffer.push("x", meta(iteration))] = iteration
                total += 1
            action = rng.random()
            if action < 0.2:
                for item in list(buffer):
                    if rng.random() < 0.1:
                        collected[item.index] = now - rng.integers(0, 30)
                        buffer.update(item.index, meta=meta(collected[item.index]))
            elif action < 0.4:
                gone = rng.integers(max(0, total - size), total, 7).tolist()
                buffer.delete(gone)
                collected = {item: at for item, at in collected.items() if item not in gone}
            elif action < 0.5:
                restored = DequeBuffer(size, seed=0)
                check = staleness_check(restored, max_staleness=20)
                restored.use(check).push("x", meta(now))
                assert check.delete_stale(now) == 0
                restored.load_state_dict(buffer.state_dict())
                buffer = restored
            elif action < 0.55:
                buffer.clear()
                collected = {}
            collected = {item: at for item, at in collected.items() if item >= total - size}
            fresh = {item: at for item, at in collected.items() if at >= now - 20}
            assert check.delete_stale(now) == len(collected) - len(fresh)
            assert [item.index for item in buffer] == list(fresh)
            collected = fresh


class TestUse:
    def test_items_of_a_deque_are_deleted_after_their_last_use(self):
        buffer = deque(4)
        buffer.use(use_time_check(buffer, max_use=2))
        assert {item.meta["use_count"] for item in buffer.sample(4)} == {1}
        buffer.sample(indices=[0, 1])
        assert sorted(item.index for item in buffer) == [2, 3]
        buffer.push("new")
        assert buffer.sample(indices=[4])[0].meta["use_count"] == 1

    def test_counts_are_part_of_the_state(self):
        buffer, other = deque(2), DequeBuffer(10)
        buffer.use(use_time_check(buffer, max_use=2))
        buffer.sample(2)
        with pytest.raises(CheckpointMismatch, match="this one has 0"):
            other.load_state_dict(buffer.state_dict())
        other.use(use_time_check(other, max_use=2))
        other.load_state_dict(buffer.state_dict())
        other.sample(2)
        assert len(other) == 0

    def test_an_invalid_limit_is_rejected(self):
        with pytest.raises(ValueError, match="at least 1"):
            use_time_check(DequeBuffer(1), max_use=0)


class TestGroups:
    def groups(self, *middleware):
        buffer = deque(9, g=lambda i: 0 if i < 5 else 1 if i < 8 else 2)
        for one in middleware:
            buffer.use(one)
        return buffer

    def starts(self, buffer):
        seen = set()
        for _ in range(100):
            for group in buffer.sample(3, groupby="g"):
                seen.add(tuple(item.data for item in group))
        return seen

    def test_consecutive_items_are_kept(self):
        assert self.starts(self.groups(group_sample(3))) == {
            (0, 1, 2), (1, 2, 3), (2, 3, 4), (5, 6, 7), (8,)
        }  # fmt: skip

    def test_with_any_start_the_last_items_are_as_likely_as_others(self):
        assert self.starts(self.groups(group_sample(3, max_use_in_group=False))) == {
            (0, 1, 2), (1, 2, 3), (2, 3, 4), (3, 4), (4,), (5, 6, 7), (6, 7), (7,), (8,)
        }  # fmt: skip

    def test_items_in_any_order_are_kept(self):
        seen = self.starts(self.groups(group_sample(2, ordered_in_group=False)))
        assert {tuple(sorted(pair)) for pair in seen if max(pair) < 5} == {
            (a, b) for a in range(5) for b in range(a + 1, 5)
        }
        assert (1, 0) in seen

    def test_groups_are_padded_to_the_longest(self):
        buffer = self.groups(padding())
        for group in buffer.sample(3, groupby="g"):
            assert len(group) == 5
            assert len({item.meta["g"] for item in group}) == 1
        buffer = self.groups(padding("none"))
        groups = buffer.sample(3, groupby="g")
        assert sorted(group.count(BufferedData(None, None)) for group in groups) == [0, 2, 4]
        assert isinstance(buffer.sample(2)[0], BufferedData)
        assert self.groups(padding()).sample(0, groupby="g") == []

    def test_they_work_together(self):
        buffer = self.groups(padding(), group_sample(3))
        assert {len(group) for group in buffer.sample(3, groupby="g")} == {3}

    def test_mistakes_are_rejected(self):
        with pytest.raises(ValueError, match="group_sample works on groups"):
            self.groups(group_sample(3)).sample(2)
        with pytest.raises(ValueError, match="size_in_group must be at least 1"):
            group_sample(0)
        with pytest.raises(ValueError, match="policy must be 'random' or 'none'"):
            padding("zeros")
        with pytest.raises(ValueError, match="no buffer yet"):
            group_sample(1)("sample", lambda **kwargs: [["x"]], groupby="g")


class TestView:
    def test_only_a_range_by_age_is_drawn(self):
        buffer = deque(8)
        buffer.use(sample_range_view(buffer, -4, -1))
        assert {item.data for item in buffer.sample(100, replace=True)} == {4, 5, 6}
        part = buffer.sample(100, replace=True, sample_range=slice(-2, None))
        assert {item.data for item in part} == {5, 6}
