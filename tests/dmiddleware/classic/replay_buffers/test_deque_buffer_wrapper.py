"""The buffer of DI-engine's newer configs."""

import numpy as np
import pytest
import torch

from dmiddleware.classic import DequeBufferWrapper, create_buffer
from dmiddleware.errors import ConfigError


@pytest.fixture
def make(tmp_path):
    made = []

    def build(**cfg):
        cfg = {"type": "deque", "replay_buffer_size": 8, "seed": 0, "log_to_file": False, **cfg}
        made.append(create_buffer(cfg, exp_name=str(tmp_path)))
        return made[-1]

    yield build
    for buffer in made:
        buffer.close()


def items(n, **more):
    return [{"obs": torch.tensor(float(k)), **more} for k in range(n)]


def test_it_draws_what_was_pushed_and_drops_the_oldest(make):
    buffer = make()
    assert isinstance(buffer, DequeBufferWrapper)
    assert buffer.sample(4) is None
    buffer.push(items(12), cur_collector_envstep=12)
    assert (buffer.count(), buffer.buffer.count(), buffer.replay_buffer_size) == (8, 8, 8)
    drawn = buffer.sample(8, 3)
    assert sorted(float(one["obs"]) for one in drawn) == [4, 5, 6, 7, 8, 9, 10, 11]
    assert all(set(one) == {"obs"} for one in drawn)
    buffer.update({"priority": [1.0] * 8})  # without priorities it does nothing
    assert buffer.sample(2, train_iter=4) and buffer.sample(2, cur_learner_iter=5)


def test_items_go_after_so_many_uses(make):
    buffer = make(max_use=2)
    buffer.push(items(4), 4)
    assert [buffer.sample(4) is None for _ in range(3)] == [False, False, True]


@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize("by_position", [True, False])
def test_priorities_decide_what_is_drawn(weighted, by_position, make):
    buffer = make(priority=True, priority_IS_weight=weighted, priority_power_factor=1.0)
    buffer.push(items(4, priority=1e-6), 4)
    buffer.push(items(1), 5)
    drawn = buffer.sample(64)
    assert all(("IS" in one) == weighted and "priority" not in one for one in drawn)
    info = {"priority": [1e-6 if one["replay_buffer_idx"] != 2 else 5.0 for one in drawn]}
    if not by_position:
        info["replay_buffer_idx"] = [one["replay_buffer_idx"] for one in drawn]
    if not any(one["replay_buffer_idx"] == 2 for one in drawn):
        info = {"priority": torch.tensor([5.0]), "replay_buffer_idx": np.array([2])}
    buffer.update(info)
    counts = [one["replay_buffer_idx"] for one in buffer.sample(64)]
    assert counts.count(2) > 48


def test_priorities_have_a_limit(make):
    buffer = make(priority=True, priority_max_limit=10)
    buffer.push(items(2, priority=1e9), 2)
    assert {item.meta["priority"] for item in buffer.buffer} == {10.0}


def test_states_and_files_are_whole(make, tmp_path):
    first, second = (make(priority=True) for _ in range(2))
    first.push(items(5), 5)
    first.sample(3)
    second.load_state_dict(first.state_dict())
    mine, theirs = ([one["replay_buffer_idx"] for one in b.sample(5)] for b in (first, second))
    assert mine == theirs
    first.save_data(tmp_path / "items")
    second.load_data(file_name=str(tmp_path / "items"))
    assert second.count() == 5


def test_misspelled_options_are_refused(make):
    with pytest.raises(ConfigError, match="priority_IS_weight"):
        make(priority_IS_wieght=True)
    with pytest.raises(ConfigError, match="max_use"):
        make(max_use=0)
