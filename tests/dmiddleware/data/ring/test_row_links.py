import tracemalloc

import pytest
import torch

from dmiddleware.data import TensorBuffer, UniformSampler, as_tree

from ..collecting import every_row


def make(size=20):
    return TensorBuffer(size, unroll_len=2, sampler=UniformSampler(replace=False))


def push(buffer, ids, done=None):
    ids = torch.tensor(ids)
    first = buffer.index[-1] + 1 if len(buffer) else 0
    buffer.push(
        as_tree(
            {
                "episode_id": ids,
                "done": torch.tensor(done) if done else torch.zeros(ids.shape, dtype=torch.bool),
                "number": torch.arange(first, first + ids.numel()).reshape(ids.shape),
            }
        )
    )


def successors(buffer):
    """Return the number of the row that follows each row, -1 where there is none."""
    rows = every_row(buffer)
    return torch.where(rows["mask"][1], rows["number"][1], -1).tolist()


def test_rows_of_one_env_follow_one_another_within_and_across_pushes():
    buffer = make()
    push(buffer, [[1, 2], [1, 2]])
    push(buffer, [[1, 2]])
    assert successors(buffer) == [2, 3, 4, 5, -1, -1]


def test_nothing_follows_the_end_of_an_episode_even_if_its_id_appears_again():
    buffer = make()
    push(buffer, [[7], [7], [7]], [[False], [True], [False]])
    assert successors(buffer) == [1, -1, -1]
    push(buffer, [[7]], [[True]])
    push(buffer, [[7]])
    assert successors(buffer) == [1, -1, 3, -1, -1]


def test_an_episode_may_move_to_another_column():
    buffer = make()
    push(buffer, [[1, 2]])
    push(buffer, [[2, 1]])
    assert successors(buffer) == [3, 2, -1, -1]
    # Episode 3 moves from one column to the other within a push.
    push(buffer, [[3, 1], [2, 3]])
    assert successors(buffer) == [3, 2, 6, 5, 7, -1, -1, -1]


def test_an_open_episode_continues_after_others_have_pushed():
    buffer = make()
    push(buffer, [[1]])
    push(buffer, [[8, 9]])
    push(buffer, [[1]])
    assert successors(buffer) == [3, -1, -1, -1]


def test_episodes_whose_rows_were_cleared_are_not_continued():
    buffer = make()
    push(buffer, [[1, 2]])
    buffer.clear()
    push(buffer, [[1, 2]])
    assert successors(buffer) == [-1, -1]


def test_episodes_whose_rows_were_overwritten_are_not_continued():
    buffer = make(size=4)
    push(buffer, [[1, 2]])
    push(buffer, [[8, 9]])
    push(buffer, [[8, 9]])
    push(buffer, [[1, 2]])
    assert successors(buffer) == [-1, -1, -1, -1]


def test_of_a_push_larger_than_the_buffer_only_the_rows_that_stay_are_linked():
    buffer = make(size=3)
    push(buffer, [[1], [1]])
    push(buffer, [[1], [1], [1], [1], [1]])
    assert successors(buffer) == [5, 6, -1]


@pytest.mark.parametrize("options", [{"unroll_len": 2}, {"store_next_obs": False}])
def test_a_push_takes_no_memory_for_each_episode_that_came_before(options):
    size, n = 20_000, 100

    def rows(first, ids, done):
        obs = torch.arange(first, first + n).float()
        done = torch.tensor(done).expand(n).clone()
        return {"obs": obs, "next_obs": obs + 1, "episode_id": ids, "done": done}

    with TensorBuffer(size, **options) as buffer:
        for first in range(0, 3 * size, n):  # each row is an episode
            buffer.push(rows(first, torch.arange(first, first + n), done=True))
        for first in range(3 * size, 4 * size, n):  # few episodes in their place
            buffer.push(rows(first, torch.full((n,), first), done=False))
        tracemalloc.start()
        for first in range(4 * size, 4 * size + 2 * n, n):
            buffer.push(rows(first, torch.arange(first, first + n), done=True))
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert peak < 8 * size / 2
