import functools

import numpy as np
import pytest
from gymnasium.vector import SyncVectorEnv
from strange_envs import Walk

from dmiddleware.env import BatchedTimestep, EnvTimestep, StepInfo

ROWS = [
    {"a": 1, "b": 0.5, "deep": {"x": np.arange(2), "y": True}},
    {},
    {"a": 3, "name": "z", "deep": {"x": np.arange(2) + 5}},
]


def test_columns_are_gymnasiums_vector_info():
    class Informed(Walk):
        def __init__(self, info):
            super().__init__()
            self.info = info

        def reset(self, **kwargs):
            return super().reset(**kwargs)[0], self.info

    vector = SyncVectorEnv([functools.partial(Informed, row) for row in ROWS])
    _, expected = vector.reset()
    vector.close()
    info = StepInfo(ROWS)

    def same(ours, theirs):
        assert set(ours) == set(theirs)
        for key, value in theirs.items():
            if isinstance(value, dict):
                same(ours[key], value)
            else:
                np.testing.assert_array_equal(ours[key], value)
                assert ours[key].dtype == value.dtype, key

    same(info, expected)


def test_columns_give_the_rows_back():
    again = StepInfo.from_columns(dict(StepInfo(ROWS)), 3)
    for index, row in enumerate(ROWS):
        np.testing.assert_equal(again.row(index), row)


def test_a_value_without_a_mask_belongs_to_every_row():
    info = StepInfo.from_columns({"score": np.array([1, 2]), "level": 7}, 2)
    assert info.rows() == [{"score": 1, "level": 7}, {"score": 2, "level": 7}]


@pytest.mark.parametrize("is_read_first", [False, True])
def test_columns_of_some_rows_are_like_the_others(is_read_first):
    partial = np.array([0, 2]), {"b": lambda: np.array([5, 6]), "a": lambda: np.array([7, 8])}
    a, _a = np.array([1, 2, 0]), np.array([True, True, False])
    info = StepInfo.from_columns({"a": a, "_a": _a}, 3, partial=partial)
    if is_read_first:
        assert set(info) == {"a", "_a", "b", "_b"}
    assert info.values_at("b", [0, 2]) == [5, 6]
    assert info.values_at("b", [2]) == [6]
    assert info.values_at("a", [0]) == [1]
    assert info.values_of(("b", "c"), 0) == {"b": 5}
    assert info.values_of(("b", "c"), 1) == {}
    assert StepInfo([{"a": 1}, {}]).values_of(("a",), 0) == {"a": 1}
    assert info.rows() == [{"a": 1, "b": 5}, {"a": 2}, {"b": 6}]
    for key, values, mask in (("a", [1, 2, 0], _a), ("b", [5, 0, 6], [True, False, True])):
        column, given = info.column(key)
        np.testing.assert_array_equal(column, values)
        np.testing.assert_array_equal(given, mask)
    assert "b" in info
    assert "_b" in info
    assert "c" not in info


def test_membership_is_known_without_reading_the_values():
    class Unread(dict):
        def __getitem__(self, key):
            raise AssertionError(f"{key} was read")

        items = values = __getitem__

    info = StepInfo([Unread(row) for row in ROWS])
    assert "a" in info
    assert "_a" in info
    assert "c" not in info
    assert "_c" not in info
    assert 5 not in info


def test_numbers_of_different_types_share_a_column_that_holds_both():
    info = StepInfo([{"a": 1}, {"a": 0.5}])
    assert info["a"].tolist() == [1.0, 0.5]


def test_arrays_of_different_shapes_become_objects():
    info = StepInfo([{"a": np.zeros(2)}, {"a": np.zeros(3)}])
    assert info["a"].dtype == object
    assert [len(one) for one in info["a"]] == [2, 3]


def test_a_row_is_a_fresh_dictionary():
    info = StepInfo(ROWS)
    info.row(0)["a"] = 99
    assert ROWS[0]["a"] == 1


def test_an_info_without_keys_is_empty():
    info = StepInfo([{}, {}])
    assert len(info) == 0
    assert info.n_rows == 2
    assert repr(info) == "StepInfo({})"
    with pytest.raises(KeyError):
        info["a"]


def test_a_batch_is_iterated_env_by_env():
    obs = {"x": np.array([[1.0], [9.0]]), "pair": (np.array([5, 9]),)}
    batch = BatchedTimestep(
        env_id=np.array([0, 3]),
        ready_obs=obs,
        next_obs={"x": np.array([[1.0], [2.0]]), "pair": (np.array([5, 6]),)},
        reward=np.array([0.5, 1.5], np.float32),
        done=np.array([False, True]),
        terminated=np.array([False, False]),
        truncated=np.array([False, True]),
        abnormal=np.array([False, False]),
        valid=np.array([True, True]),
        infos=[{}, {"eval_episode_return": 3.0}],
        is_full=False,
    )
    first, second = batch
    assert len(batch) == 2
    assert (first.env_id, second.env_id) == (0, 3)
    assert (first.reward, first.done, second.done, second.truncated) == (0.5, False, True, True)
    assert second.info == {"eval_episode_return": 3.0}
    assert second.obs["x"].tolist() == [2.0]
    assert second.next_obs["pair"][0] == 6
    assert type(first.reward) is float
    assert type(first.done) is bool


def test_a_timestep_has_the_true_successor_under_both_names():
    step = EnvTimestep(0, np.ones(2), 1.0, True, True, False, {})
    assert step.next_obs is step.obs
    changed = step._replace(reward=2.0)
    assert (changed.reward, changed.done, step.reward) == (2.0, True, 1.0)
    assert step._replace(obs=3).next_obs == step._replace(next_obs=3).obs == 3
