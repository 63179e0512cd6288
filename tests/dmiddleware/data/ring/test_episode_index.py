import numpy as np

from dmiddleware.data.ring.episode_index import EpisodeLinks


def push(links, first, ids, done=None, *, oldest=0):
    ids = np.array(ids)
    done = np.zeros(ids.shape, bool) if done is None else np.array(done)
    return links.push(first, ids, done, oldest=oldest)


def test_rows_of_one_env_follow_one_another_within_and_across_pushes():
    links = EpisodeLinks(20)
    push(links, 0, [[1, 2], [1, 2]])
    entered = push(links, 4, [[1, 2]])
    assert links.of(np.arange(6)).tolist() == [2, 3, 4, 5, -1, -1]
    assert (entered.tail.tolist(), entered.head.tolist()) == ([2, 3], [4, 5])


def test_nothing_follows_the_end_of_an_episode_even_if_its_id_comes_again():
    links = EpisodeLinks(20)
    push(links, 0, [[7], [7], [7]], [[False], [True], [False]])
    assert links.of(np.arange(3)).tolist() == [1, -1, -1]
    push(links, 3, [[7]], [[True]])
    push(links, 4, [[7]])
    assert links.of(np.arange(5)).tolist() == [1, -1, 3, -1, -1]


def test_an_episode_may_move_to_another_column():
    links = EpisodeLinks(20)
    push(links, 0, [[1, 2]])
    push(links, 2, [[2, 1]])
    assert links.of(np.arange(4)).tolist() == [3, 2, -1, -1]
    # The row of episode 3 moves from one column to the other inside of a push.
    push(links, 4, [[3, 1], [2, 3]])
    assert links.of(np.arange(2, 8)).tolist() == [6, 5, 7, -1, -1, -1]


def test_a_tail_waits_while_others_push():
    links = EpisodeLinks(20)
    push(links, 0, [[1]])
    push(links, 1, [[8, 9]])
    entered = push(links, 3, [[1]])
    assert (entered.tail.tolist(), entered.head.tolist()) == ([0], [3])


def test_cleared_and_overwritten_tails_wait_no_more():
    links = EpisodeLinks(4)
    push(links, 0, [[1, 2]])
    links.clear()
    assert len(push(links, 2, [[1, 2]]).tail) == 0
    push(links, 4, [[8, 9]], oldest=2)
    push(links, 6, [[8, 9]], oldest=4)
    assert len(push(links, 8, [[1, 2]], oldest=6).tail) == 0


def test_of_a_push_larger_than_the_ring_only_the_rows_that_stay_are_linked():
    links = EpisodeLinks(3)
    push(links, 0, [[1], [1]])
    entered = push(links, 2, [[1], [1], [1], [1], [1]], oldest=4)
    assert len(entered.tail) == 0
    assert links.of(np.arange(4, 7)).tolist() == [5, 6, -1]
