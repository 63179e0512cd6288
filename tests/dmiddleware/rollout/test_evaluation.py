from __future__ import annotations

import numpy as np
import pytest

from dmiddleware.errors import ConfigError
from dmiddleware.worker.evaluator import VectorEvalMonitor


def test_shares_are_even_and_the_remainder_goes_to_the_first_envs():
    monitor = VectorEvalMonitor(3, 8)
    counts = [0, 0, 0]
    while not monitor.is_finished():
        for env in monitor.unfinished:
            monitor.update_reward(env, env)
            counts[env] += 1
    assert counts == [3, 3, 2]
    assert monitor.get_episode_return() == [0, 0, 0, 1, 1, 1, 2, 2]


def test_episodes_beyond_an_envs_share_do_not_count():
    monitor = VectorEvalMonitor(2, 2)
    for episode in range(5):
        monitor.update_info(0, {"lives": episode})
        monitor.update_reward(0, 10 + episode)
    assert not monitor.is_finished()
    assert monitor.get_current_episode() == 1
    assert monitor.get_latest_reward(0) == 10
    monitor.update_info(1, {"lives": 4, "won": True, "name": "text"})
    monitor.update_reward(1, 20)
    assert monitor.is_finished()
    assert monitor.get_episode_return() == [10, 20]
    assert monitor.mean_info() == {"lives": 2.0, "won": 1.0}
    assert monitor.get_episode_info() == {
        "lives": [0.0, 4.0],
        "won": [1.0],
        "name": ["text"],
        "lives_mean": 2.0,
        "won_mean": 1.0,
    }


def test_numbers_of_all_kinds_are_averaged():
    monitor = VectorEvalMonitor(1, 1)
    monitor.update_info(
        0,
        {
            "a": np.float32(2),
            "b": np.array(3),
            "c": np.array([1, 2]),
            "d": None,
            "e": np.True_,
            "f": np.array([[4.0]]),
        },
    )
    assert monitor.mean_info() == {"a": 2.0, "b": 3.0, "e": 1.0, "f": 4.0}


def test_infos_that_are_not_numbers_are_kept_as_they_were():
    filled_again = {"grid": np.array([1, 2]), "nested": {"path": [np.array([3])], "n": 1}}
    monitor = VectorEvalMonitor(2, 2)
    monitor.update_info(0, {**filled_again, "name": "a", "score": 2, "nothing": None})
    filled_again["grid"][:] = 0
    filled_again["nested"]["path"][0][:] = 0
    monitor.update_info(1, {"name": "b", "score": "a text now"})
    info = monitor.get_episode_info()
    assert info.keys() == {"grid", "nested", "name", "score", "nothing"}
    assert info["grid"][0].tolist() == [1, 2]
    assert info["nested"][0]["path"][0].tolist() == [3]
    assert (info["name"], info["score"]) == (["a", "b"], [2.0, "a text now"])


def test_without_infos_there_is_no_info():
    assert VectorEvalMonitor(1, 1).get_episode_info() is None
    assert VectorEvalMonitor(1, 1).mean_info() == {}


def test_an_env_without_an_episode_has_no_latest_return():
    with pytest.raises(ValueError, match="env 0 has not finished"):
        VectorEvalMonitor(1, 1).get_latest_reward(0)


def test_fewer_episodes_than_envs_are_rejected():
    with pytest.raises(ConfigError, match=r"3 episode\(s\) cannot be spread over 4 envs"):
        VectorEvalMonitor(4, 3)


def frame(value):
    return np.full((4, 6, 3), value, np.uint8)


def film(returns):
    """A monitor of one episode per env; env i's film shows 10 i + t."""
    monitor = VectorEvalMonitor(len(returns), len(returns))
    for t in range(max(len(returns), 1) + 1):
        monitor.update_video({env: frame(10 * env + t) for env in monitor.unfinished if t <= env})
    for env, value in enumerate(returns):
        monitor.update_reward(env, value)
    monitor.update_video({0: frame(255)})  # a second episode is not filmed
    return monitor


@pytest.mark.parametrize(
    ("returns", "chosen"),
    [
        ([5], [0]),
        ([5, 3], [1, 0]),
        ([5, 3, 9], [1, 0, 2]),
        ([5, 3, 9, 1], [3, 1, 0, 2]),
        ([5, 3, 9, 1, 7], [3, 0, 2]),
    ],
)
def test_films_show_the_worst_median_and_best_episode(returns, chosen):
    video = film(returns).get_video()
    length = max(chosen) + 1
    assert video.shape == (len(chosen), length, 3, 4, 6)
    assert video.dtype == np.uint8
    for row, env in zip(video, chosen, strict=True):
        # Film of env i has i + 1 pictures; then it stands still.
        expected = [10 * env + min(t, env) for t in range(length)]
        assert row[:, 0, 0, 0].tolist() == expected
        assert (row == row[:, :1, :1, :1]).all()


def test_without_a_film_there_is_no_video():
    monitor = VectorEvalMonitor(1, 1)
    monitor.update_video({0: frame(1)})
    with pytest.raises(ValueError, match="recorded to its end"):
        monitor.get_video()
