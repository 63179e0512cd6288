import pickle

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from dmiddleware.env.manager import EpisodeTotals

STEPS = st.lists(
    st.tuples(
        st.none() | st.lists(st.integers(0, 2), unique=True, min_size=1),
        st.lists(st.floats(-10, 10), min_size=3, max_size=3),
        st.sets(st.integers(0, 2)),
        st.booleans(),
    ),
    max_size=12,
)


@given(STEPS)
@settings(max_examples=40, deadline=None)
def test_totals_are_those_of_literal_counting(steps):
    totals = EpisodeTotals(3)
    rewards = [[], [], []]
    n_ended = [0, 0, 0]
    for ids, values, over, is_end in steps:
        rows = range(3) if ids is None else ids
        totals.add(ids, np.array(values[: len(rows)]))
        for env, value in zip(rows, values, strict=False):
            rewards[env].append(value)
        again = EpisodeTotals(3)
        again.load_state_dict(totals.state_dict())
        totals = again
        for env in range(3):
            assert totals.length_of(env) == len(rewards[env])
        for env in over:
            if is_end:
                assert totals.end(env) == {
                    "eval_episode_return": np.float32(np.cumsum([0.0, *rewards[env]])[-1]),
                    "eval_episode_length": len(rewards[env]),
                }
                n_ended[env] += 1
            else:
                totals.clear([env])
            rewards[env] = []
            assert totals.length_of(env) == 0
        assert totals.n_ended == n_ended


def test_ends_of_several_episodes_are_counted_however_many_there_are():
    totals = EpisodeTotals(4)
    expected = np.zeros(4, np.int64)
    for step in range(1000):
        ended = np.flatnonzero([step % 2 == 0, step % 3 == 0, False, step > 500])
        totals.add(None, np.ones(4))
        totals.end_some(ended)
        expected[ended] += 1
    assert totals.n_ended == expected.tolist()
    assert totals.state_dict()["n_ended"] == expected.tolist()
    totals.end_some(np.array([2]))
    totals.load_state_dict({**totals.state_dict(), "n_ended": [7, 7, 7, 7]})
    assert totals.n_ended == [7, 7, 7, 7]


def test_totals_of_several_episodes_can_be_read_after_later_steps():
    totals = EpisodeTotals(3)
    for _ in range(4):
        totals.add(None, np.array([0.5, 1.0, 2.0], np.float32))
    ended = pickle.loads(pickle.dumps(totals.end_some(np.array([0, 2]), pause=1)))
    for _ in range(3):
        totals.add(None, np.ones(3, np.float32))
    returns, lengths = ended["eval_episode_return"](), ended["eval_episode_length"]()
    assert returns.dtype == np.float32 and returns.tolist() == [2.0, 8.0]
    assert lengths.dtype == np.int64 and lengths.tolist() == [4, 4]
    assert [totals.length_of(env_id) for env_id in range(3)] == [2, 7, 2]
