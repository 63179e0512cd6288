"""Parallel collectors for games of two players."""

import json
import sys
from pathlib import Path

import pytest
import torch

from dmiddleware.errors import ConfigError, RegistryError
from dmiddleware.worker import MarineParallelCollector, get_parallel_collector_cls
from tests.dmiddleware.battle_envs import InTurns, Together

POLICY = {"type": "recording", "model": {"n_episode": 1}}


@pytest.fixture
def played(run):
    """Run marine in two games of the given kind; changes are those of the config."""

    def played(game=Together, env=None, **changes):
        own = {"id": game, "kwargs": {"lengths": (3,)}, **(env or {})}
        return run(
            **{
                "type": "marine",
                "policy": [POLICY, POLICY],
                "policy_update_path": ["left", "right"],
                "policy_update_flag": [True, True],
                "env": own,
                **changes,
            }
        )

    return played


def players(around):
    return [int(sample["obs"][1]) for sample in around.data.values()]


def test_both_players_samples_are_handed_over_with_a_policy_that_plays_episodes(played):
    _, around = played()
    # Two games, two episodes each, three steps.
    assert sorted(players(around)) == [0] * 12 + [1] * 12
    assert [one["cur_sample"] for one in around.metadata] == list(range(1, 25))


def test_each_step_is_counted_once(played):
    collector, around = played()
    info = collector.get_finish_info()
    assert info["step_count"] == 2 * 2 * 3
    assert info["sample_count"] == 24
    assert around.infos[-1]["cur_step"] == 12
    assert around.infos[-1]["collector_done"] is True


def test_what_is_left_at_an_episodes_end_is_handed_over(played):
    policy = {"type": "recording", "model": {"n_sample": 2}}
    _, around = played(policy=[policy, policy])
    assert len(around.data) == 24
    places = {tuple(sample["obs"].tolist()) for sample in around.data.values()}
    assert {(0, 0, episode, 2) for episode in (0, 1)} <= places


def test_only_the_transitions_of_active_players_are_stored(played):
    for flags, wanted in (([True, False], {0}), ([False, True], {1}), ([False, False], set())):
        _, around = played(policy_update_flag=flags)
        assert set(players(around)) == wanted


def test_inactive_policies_are_loaded_once_and_active_ones_again(surrounded):
    collector, _ = surrounded(
        type="marine",
        policy=[POLICY, POLICY],
        policy_update_path=["left", "right"],
        policy_update_flag=[True, False],
        update_policy_second=1e-9,
        env={"id": Together, "kwargs": {}},
    )
    asked = []

    def fetch(path):
        asked.append(path)
        return {"model": {"weight": torch.ones(1, 1)}, "iter": len(asked)}

    collector.get_policy_update_info = fetch
    collector.start()
    assert asked[:3] == ["left", "right", "left"]
    assert asked.count("right") == 1
    assert asked.count("left") > 2
    assert collector.get_finish_info()["train_iter"] == [len(asked), 2]


def test_in_self_play_both_policies_get_weights_that_are_sent_once(surrounded):
    collector, _ = surrounded(
        type="marine",
        policy=[POLICY, POLICY],
        policy_update_path=["same", "same"],
        env={"id": Together, "kwargs": {}},
    )
    sent = iter([{"model": {"weight": torch.full((1, 1), 3.0)}, "iter": 7}])
    collector.get_policy_update_info = lambda path: next(sent, None)
    collector.start()
    for mode in collector.policy:
        assert set(mode.forward.__self__.acted) == {3.0}
    assert collector.get_finish_info()["train_iter"] == [7, 7]


def test_a_players_transition_runs_to_its_own_next_turn(played):
    _, around = played(InTurns, env={"kwargs": {"lengths": (5,)}, "env_num": 1})
    left = [sample for sample in around.data.values() if int(sample["obs"][1]) == 0]
    right = [sample for sample in around.data.values() if int(sample["obs"][1]) == 1]
    # The left player moves at the steps 0, 2 and 4, the right one at 1 and 3.
    assert [int(one["obs"][3]) for one in left] == [0, 2, 4] * 2
    assert [int(one["obs"][3]) for one in right] == [1, 3] * 2
    assert [int(one["next_obs"][3]) for one in left] == [2, 4, 5] * 2
    assert [int(one["next_obs"][3]) for one in right] == [3, 5] * 2
    assert [float(one["reward"]) for one in left] == [2.0, 2.0, 1.0] * 2
    assert [bool(one["done"]) for one in right] == [False, True] * 2


def test_the_game_result_is_that_of_the_left_player_in_each_env(played):
    for rewards, word in (((1.0, -1.0), "wins"), ((0.0, 0.0), "draws"), ((-1.0, 1.0), "losses")):
        collector, _ = played(env={"kwargs": {"lengths": (3,), "rewards": rewards}})
        info = collector.get_finish_info()
        assert info["game_result"] == [[word] * 2] * 2
        assert info["reward_mean"] == 3 * rewards[0]
        assert json.loads(json.dumps(info)) == info


def test_a_game_that_fails_loses_the_trajectories_of_both_players(played):
    collector, around = played(env={"kwargs": {"crashes": [(1, 2)]}, "env_num": 1})
    info = collector.get_finish_info()
    assert info["real_episode_count"] == 2
    assert info["step_count"] == 3 + 2 + 3
    assert len(around.data) == 2 * (3 + 3)


def test_when_evaluating_one_policy_plays_against_the_envs_own_opponent(run):
    collector, around = run(
        type="marine",
        eval_flag=True,
        policy=[{"type": "recording", "model": {}}],
        policy_update_path=["left"],
        policy_update_flag=[True],
    )
    info = collector.get_finish_info()
    assert around.data == {}
    assert len(collector.policy) == 1
    assert info["game_result"] == [["wins", "wins"], ["wins", "wins"]]
    assert info["reward_raw"] == [15.0] * 4
    assert info["train_iter"] == [1]


def test_each_policy_has_its_own_setting_or_both_have_one(played):
    collector, _ = played(collect_setting=[{"eps": 0.1}, {"eps": 0.2}])
    settings = [mode.forward.__self__.settings for mode in collector.policy]
    assert [one[0] for one in settings] == [{"eps": 0.1}, {"eps": 0.2}]
    collector, _ = played(collect_setting={"eps": 0.3})
    settings = [mode.forward.__self__.settings for mode in collector.policy]
    assert [one[0] for one in settings] == [{"eps": 0.3}, {"eps": 0.3}]


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"policy": [POLICY]}, "2 policies"),
        ({"policy": POLICY}, "2 policies"),
        ({"policy": [POLICY, POLICY], "eval_flag": True, "env": {}}, "1 policy"),
        ({"policy_update_path": ["left"]}, "policy_update_path"),
        ({"policy_update_flag": [True]}, "policy_update_flag"),
        ({"env": {"id": Together, "mode": "async"}}, "sync"),
        ({"policy": [POLICY, {"type": "recording", "model": {}}]}, "n_sample"),
    ],
)
def test_an_unusable_config_is_refused(surrounded, changes, word):
    cfg = {
        "type": "marine",
        "policy": [POLICY, POLICY],
        "policy_update_path": ["left", "right"],
        "env": {"id": Together, "kwargs": {}},
    }
    with pytest.raises(ConfigError, match=word):
        surrounded(**{**cfg, **changes})


def test_a_game_may_be_named_and_wrapped(played, tmp_path, monkeypatch):
    Path(tmp_path / "named_game.py").write_text(
        "from tests.dmiddleware.battle_envs import Together\n"
        "def make(**kwargs):\n    return Together(**kwargs)\n"
        "def double(game):\n    game.rewards = tuple(2 * one for one in game.rewards)\n"
        "    return game\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    try:
        collector, _ = played("named_game:make", env={"wrappers": ["named_game:double"]})
    finally:
        sys.modules.pop("named_game", None)
    assert collector.get_finish_info()["reward_mean"] == 6.0


def test_the_registry_knows_marine():
    assert get_parallel_collector_cls({"type": "marine"}) is MarineParallelCollector
    with pytest.raises(RegistryError, match="marine"):
        get_parallel_collector_cls({"type": "marin"})
    assert MarineParallelCollector.default_config().cfg_type == "MarineParallelCollectorDict"
