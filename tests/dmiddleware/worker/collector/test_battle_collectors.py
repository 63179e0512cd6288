from __future__ import annotations

import dataclasses
import re
from collections import namedtuple

import numpy as np
import pytest
import torch
from torch import nn

from dmiddleware.classic import as_collect_mode
from dmiddleware.classic.policy_config import ClassicSettings
from dmiddleware.data import load_checkpoint, save_checkpoint
from dmiddleware.env import make_env_manager
from dmiddleware.errors import ConfigError, PolicyOutputError
from dmiddleware.worker import (
    BattleEpisodeSerialCollector,
    BattleSampleSerialCollector,
    create_serial_collector,
    get_serial_collector_cls,
)
from tests.dmiddleware.battle_envs import InTurns, Together, battle_envs
from tests.dmiddleware.counting_fixtures import CountingPolicy


def policies(n=2, cfg=None):
    return [CountingPolicy(cfg or {}, nn.Linear(4, 2)) for _ in range(n)]


@pytest.fixture
def collector(tmp_path):
    """Make a collector: ``collector(kind, envs, policies, cfg)``."""
    made = []

    def make(kind, envs=None, players=None, cfg=None, **kwargs):
        envs = battle_envs() if envs is None else envs
        players = policies(envs.n_player) if players is None else players
        made.append(kind(cfg or {}, envs, players, exp_name=str(tmp_path), **kwargs))
        return made[-1]

    yield make
    for one in made:
        one.close()


def place(obs):
    return tuple(int(value) for value in obs)


def shape(transition):
    """Return (step acted in, step seen next, reward, done)."""
    return (
        place(transition["obs"])[3],
        place(transition["next_obs"])[3],
        float(transition["reward"]),
        bool(transition["done"]),
    )


def test_episodes_of_both_players_are_returned_with_their_last_infos(collector):
    worker = collector(BattleEpisodeSerialCollector, battle_envs(lengths=(2, 3)))
    data, infos = worker.collect(3, train_iter=7)
    assert [len(own) for own in data] == [len(own) for own in infos] == [3, 3]
    for player in range(2):
        for episode, info in zip(data[player], infos[player], strict=True):
            assert {place(row["obs"])[1] for row in episode} == {player}
            assert info["eval_episode_return"] == (1.0, -1.0)[player] * len(episode)
            assert [bool(row["done"]) for row in episode][-1]
            assert {int(row["collect_iter"]) for row in episode} == {7}
            assert len({int(row["episode_id"]) for row in episode}) == 1
    games = [place(episode[0]["obs"])[::2] for episode in data[0]]
    assert games == [(0, 0), (1, 0), (0, 1)]  # game, episode
    assert worker.envstep == 2 + 2 + 3


def test_games_get_equal_shares_and_the_extra_episodes_in_turn(collector):
    worker = collector(BattleEpisodeSerialCollector, battle_envs(n_game=3, lengths=(1, 4)))
    counts = []
    for _ in range(3):
        data, _ = worker.collect(4)
        games = [place(episode[0]["obs"])[0] for episode in data[0]]
        counts.append([games.count(game) for game in range(3)])
    assert counts == [[2, 1, 1], [1, 2, 1], [1, 1, 2]]


def test_episodes_are_turned_into_samples_on_request(collector):
    worker = collector(BattleEpisodeSerialCollector, cfg={"get_train_sample": True})
    seen = []
    worker.reset_policy(
        [
            mode._replace(get_train_sample=lambda rows, p=p: seen.append((p, len(rows))) or rows)
            for p, mode in enumerate(worker.policy)
        ]
    )
    data, _ = worker.collect(2)
    assert [len(own) for own in data] == [6, 6]
    assert seen == [(0, 3), (0, 3), (1, 3), (1, 3)]


def test_a_turn_lasts_until_the_players_own_next_turn(collector):
    worker = collector(BattleEpisodeSerialCollector, battle_envs(InTurns, 1, lengths=(5, 2)))
    data, infos = worker.collect(2)
    assert [shape(row) for row in data[0][0]] == [
        (0, 2, 2.0, False), (2, 4, 2.0, False), (4, 5, 1.0, True),
    ]  # fmt: skip
    assert [shape(row) for row in data[1][0]] == [(1, 3, 20.0, False), (3, 5, 20.0, True)]
    assert [shape(row) for row in data[0][1]] == [(0, 2, 2.0, True)]
    assert [bool(row["truncated"]) for row in data[1][1]] == [True]
    assert [info["eval_episode_return"] for info in infos[1]] == [50.0, 20.0]


def test_a_game_may_end_before_a_player_has_moved(collector):
    envs = battle_envs(InTurns, 1, lengths=(1,))
    data, infos = collector(BattleEpisodeSerialCollector, envs).collect(2)
    assert [len(episode) for episode in data[1]] == [0, 0]
    assert len(infos[1]) == 2
    worker = collector(BattleEpisodeSerialCollector, envs, cfg={"get_train_sample": True})
    data, _ = worker.collect(2)
    assert [len(own) for own in data] == [2, 0]


def test_every_player_of_a_sample_collector_gets_n_samples(collector):
    worker = collector(
        BattleSampleSerialCollector, battle_envs(InTurns, 2, n_player=3, lengths=(7, 4))
    )
    seen = [[], [], []]
    for _ in range(6):
        data, _ = worker.collect(5)
        assert [len(own) for own in data] == [5, 5, 5]
        for player, own in enumerate(data):
            seen[player] += [place(row["obs"]) for row in own]
    for player, places in enumerate(seen):
        assert len(set(places)) == len(places)
        assert {one[1] for one in places} == {player}
        for game in range(2):
            mine = [one[2:] for one in places if one[0] == game]
            assert mine == sorted(mine)
            steps = [(e, t) for e in range(99) for t in range(player, (7, 4)[e % 2], 3)]
            assert mine == steps[: len(mine)]


def test_extra_samples_of_each_player_are_kept(collector):
    worker = collector(BattleSampleSerialCollector, battle_envs(n_game=3, lengths=(4,)))
    data, _ = worker.collect(4)
    assert [len(own) for own in data] == [4, 4]
    assert worker.n_extra == [2, 2]
    more, _ = worker.collect(2)
    assert worker.n_extra == [0, 0]
    for player in range(2):
        places = [place(row["obs"])[::3] for row in data[player] + more[player]]
        assert sorted(places) == [(game, t) for game in range(3) for t in range(2)]
    data, _ = worker.collect(4, drop_extra=False)
    assert [len(own) for own in data] == [6, 6]


def test_trajectories_end_with_the_game_or_at_the_trajectory_length(collector):
    worker = collector(BattleSampleSerialCollector, battle_envs(n_game=1, lengths=(5,)))
    lengths = [[], []]
    worker.reset_policy(
        [
            mode._replace(get_train_sample=lambda rows, p=p: lengths[p].append(len(rows)) or rows)
            for p, mode in enumerate(worker.policy)
        ]
    )
    worker.collect(3)
    worker.collect(3)
    assert lengths == [[3, 2, 3], [3, 2, 3]]


def test_a_player_that_does_not_collect_acts_and_is_not_stored(collector):
    players = policies(3)
    worker = collector(
        BattleSampleSerialCollector, battle_envs(n_player=3, rewards=(1.0, 0.0, -1.0)), players
    )
    worker.policy[1].set_attribute("collect_data", False)
    data, infos = worker.collect(4)
    assert [len(own) for own in data] == [4, 0, 4]
    assert [len(own) for own in infos] == [0, 0, 0]
    assert players[1].steps != {}
    for mode in worker.policy:
        mode.set_attribute("collect_data", False)
    with pytest.raises(ConfigError, match="no player"):
        worker.collect(4)


@pytest.mark.parametrize("kind", [BattleEpisodeSerialCollector, BattleSampleSerialCollector])
def test_keywords_go_to_all_policies_or_to_each_its_own(collector, kind):
    worker = collector(kind, battle_envs(lengths=(2,)))
    for kwargs, actions in [(None, [0, 0]), ({"shift": 1}, [1, 1]), ([{"shift": 1}, {}], [1, 0])]:
        worker.reset_env(battle_envs(lengths=(2,)))
        data, _ = worker.collect(2, policy_kwargs=kwargs)
        rows = [own[0] if isinstance(own[0], dict) else own[0][0] for own in data]
        assert [int(row["action"]) for row in rows] == actions
    with pytest.raises(ConfigError, match="list of 2 dictionaries"):
        worker.collect(2, policy_kwargs=[{}])


@pytest.mark.parametrize("n_player", [2, 3])
def test_all_players_policies_are_reset_when_a_game_ends(collector, n_player):
    players = policies(n_player)
    envs = battle_envs(n_player=n_player, rewards=(1.0,) * n_player, lengths=(3,))
    worker = collector(BattleSampleSerialCollector, envs, players)
    for player, own in enumerate(worker.collect(9)[0]):
        for row in own:
            assert int(row["memory"]) == place(row["obs"])[3] + 1
        assert players[player].resets[0] is None
        assert [0] in players[player].resets[1:]


@pytest.mark.parametrize("n_player", [2, 3])
def test_an_abnormal_step_drops_the_unfinished_trajectories_of_all_players(collector, n_player):
    envs = battle_envs(n_player=n_player, rewards=(1.0,) * n_player, lengths=(4,), crashes=[(0, 2)])
    worker = collector(BattleSampleSerialCollector, envs)
    data, _ = worker.collect(8)
    for own in data:
        ids = {}
        for row in own:
            ids.setdefault(int(row["episode_id"]), []).append(place(row["obs"]))
        assert all(places[0][3] == 0 for places in ids.values())
        assert all(bool(row["reward"] == 1.0) for row in own)
    # Two steps of the game that failed were made, and none of them is in the data.
    assert worker.dropped_steps == 2 * n_player
    assert {place(row["obs"])[2] for row in data[0] if place(row["obs"])[0] == 0} == {100}


def test_a_game_that_fails_plays_another_episode_in_place_of_the_lost_one(collector):
    envs = battle_envs(n_game=1, lengths=(3,), crashes=[(0, 2)])
    worker = collector(BattleEpisodeSerialCollector, envs)
    data, infos = worker.collect(1)
    assert [place(row["obs"])[2:] for row in data[1][0]] == [(100, 0), (100, 1), (100, 2)]
    assert len(infos[0]) == 1
    assert worker.dropped_steps == 4


@pytest.mark.parametrize("kind", [BattleEpisodeSerialCollector, BattleSampleSerialCollector])
def test_a_collector_continues_from_a_checkpoint_exactly(collector, kind, tmp_path):
    def make():
        return collector(kind, battle_envs(InTurns, 3, lengths=(5, 3)))

    worker, other = make(), make()
    worker.collect(4)
    save_checkpoint(tmp_path / "state.safetensors", worker.state_dict())
    other.load_state_dict(load_checkpoint(tmp_path / "state.safetensors"))
    assert other.envstep == worker.envstep
    for _ in range(3):
        mine, theirs = worker.collect(4, train_iter=3), other.collect(4, train_iter=3)
        assert repr(drop_ids(mine)) == repr(drop_ids(theirs))
    assert other.envstep == worker.envstep
    assert other.dropped_steps == 0


def drop_ids(found):
    """Return what was collected without episode ids and the policies' own counts."""
    data, infos = found

    def plain(rows):
        if isinstance(rows, list):
            return [plain(one) for one in rows]
        return {k: v for k, v in rows.items() if k not in ("episode_id", "memory")}

    return plain(data), infos


class WithHandle(Together):
    """Cannot be saved; the second game is longer than the first."""

    def reset(self, seed=None):
        self.handle = iter(())
        self.lengths = (3 + 2 * self.index,)
        return super().reset(seed)


def whole_episodes(player):
    """Return a collect mode that asks for whole episodes."""
    mode = as_collect_mode(player, user="test")
    settings = ClassicSettings({"traj_len_inf": True})
    return mode._replace(spec=dataclasses.replace(mode.spec, settings=settings))


def test_what_cannot_be_continued_is_dropped_and_counted(collector):
    def make():
        players = [whole_episodes(player) for player in policies()]
        return collector(BattleSampleSerialCollector, battle_envs(WithHandle), players)

    worker, other = make(), make()
    worker.collect(2)
    other.load_state_dict(worker.state_dict())
    assert worker.dropped_steps == 0
    assert other.dropped_steps == 3 * 2  # those of the longer game
    assert other.n_extra == [1, 1]
    data, _ = other.collect(5)
    assert [place(row["obs"])[3] for row in data[0]] == [2, 0, 1, 2, 0]


def test_episodes_that_a_failed_call_has_finished_are_returned_later(collector):
    envs = battle_envs(n_game=2, lengths=(1, 3))
    worker = collector(BattleEpisodeSerialCollector, envs)
    mode = worker.policy[1]

    def fail(obs, **kwargs):
        if any(place(one)[2:] == (1, 1) for one in obs.values()):
            raise ArithmeticError("a failure for the test")
        return mode.forward(obs, **kwargs)

    worker.reset_policy([worker.policy[0], mode._replace(forward=fail)])
    with pytest.raises(ArithmeticError):
        worker.collect(4)
    state = worker.state_dict()
    assert len(state["ended"]) == 2
    other = collector(BattleEpisodeSerialCollector, battle_envs(n_game=2, lengths=(1, 3)))
    other.load_state_dict(state)
    worker.reset_policy(policies())
    assert len(worker.state_dict()["ended"]) == 2
    worker.collect(1)  # takes one of them, and keeps the other
    assert len(worker.state_dict()["ended"]) == 1
    before = worker.dropped_steps
    worker.reset()
    assert worker.dropped_steps == before + 2
    data, _ = other.collect(2)
    assert [place(episode[0]["obs"])[2] for episode in data[0]] == [0, 0]


def test_games_that_something_else_has_stepped_start_over(collector):
    worker = collector(BattleSampleSerialCollector, battle_envs(n_game=1, lengths=(9,)))
    worker.collect(1)
    worker.collect(1)
    gathered = worker.state_dict()["gathered"]
    assert gathered == {"0": [[], []]}
    worker.env.step({0: [0, 0]})
    data, _ = worker.collect(1)
    assert place(data[0][0]["obs"]) == (0, 0, 1, 0)


def test_totals_survive_a_reset_and_unfinished_data_does_not(collector):
    worker = collector(BattleEpisodeSerialCollector, battle_envs(n_game=1, lengths=(2,)))
    worker.collect(2)
    assert worker.envstep == 4
    fresh = battle_envs(n_game=1, lengths=(3,))
    worker.reset_env(fresh)
    data, _ = worker.collect(1)
    assert len(data[0][0]) == 3
    assert worker.envstep == 7
    worker.envstep = 100
    worker.reset_policy()
    worker.reset(policies(), battle_envs(n_game=1, lengths=(4,)))
    worker.collect(1)
    assert worker.envstep == 104
    unused = collector(BattleEpisodeSerialCollector)
    unused.reset_env(battle_envs())
    assert not unused.env.closed
    unused.reset_policy(policies())


def test_resetting_drops_what_was_kept(collector):
    worker = collector(BattleSampleSerialCollector, battle_envs(n_game=3))
    worker.collect(1)
    assert worker.n_extra == [2, 2]
    worker.reset()
    assert worker.n_extra == [0, 0]


def test_observations_are_converted_and_copied_as_configured(collector):
    class Bytes(Together):
        def _obs(self):
            return [obs.astype(np.uint8) for obs in super()._obs()]

    seen = []
    players = policies()

    def watch(mode):
        def forward(data, **kwargs):
            seen.extend(obs.dtype for obs in data.values())
            return mode.forward(data, **kwargs)

        return mode._replace(forward=forward)

    modes = [watch(as_collect_mode(player, user="test")) for player in players]
    for cfg, dtype in (({}, torch.uint8), ({"transform_obs": True}, torch.float32)):
        seen.clear()
        worker = collector(BattleEpisodeSerialCollector, battle_envs(Bytes), modes, cfg)
        data, _ = worker.collect(2)
        assert {row[key].dtype for row in data[0][0] for key in ("obs", "next_obs")} == {dtype}
        assert set(seen) == {dtype}
    first, second, *_ = data[0][0]
    assert first["next_obs"].data_ptr() == second["obs"].data_ptr()
    worker = collector(BattleEpisodeSerialCollector, cfg={"deepcopy_obs": True})
    first, second, *_ = worker.collect(2)[0][0][0]
    assert torch.equal(first["next_obs"], second["obs"])
    assert first["next_obs"].data_ptr() != second["obs"].data_ptr()


def test_the_log_has_returns_of_each_player_and_the_results(collector, tmp_path):
    worker = collector(
        BattleEpisodeSerialCollector,
        battle_envs(InTurns, 2, lengths=(3,)),
        cfg={"collect_print_freq": 10},
        instance_name="games",
    )
    worker.collect(4, train_iter=9)
    log = tmp_path / "log" / "games" / "games_logger.txt"
    assert not log.exists()
    worker.collect(4, train_iter=10)
    words = log.read_text().split()
    for player in range(2):
        for kind in ("mean", "std", "max", "min"):
            assert f"reward{player}_{kind}" in words
    for name in ("win_count", "draw_count", "loss_count", "avg_envstep_per_sec"):
        assert name in words
    lines = log.read_text().splitlines()
    values = {}
    for names, row in zip(lines[1::2], lines[2::2], strict=True):
        values |= dict(zip(names.split(), row.split(), strict=True))
    assert values["episode_count"] == "8"
    assert values["win_count"] == "8"
    assert values["loss_count"] == "0"
    assert values["reward1_mean"] == "30"


Foreign = namedtuple(
    "Foreign", ["forward", "process_transition", "get_train_sample", "reset", "get_attribute"]
)


def test_foreign_named_tuples_play_too(collector):
    def forward(data, **kwargs):
        return {env_id: {"action": torch.tensor(1)} for env_id in data}

    def process(obs, output, timestep):
        return {"obs": obs, "next_obs": timestep.obs, "reward": timestep.reward,
                "done": timestep.done}  # fmt: skip

    def attribute(name):
        if name == "n_sample":
            return 4
        raise KeyError(name)

    mode = Foreign(forward, process, list, lambda data_id=None: None, attribute)
    worker = collector(BattleSampleSerialCollector, players=[mode, mode])
    data, _ = worker.collect()
    assert [len(own) for own in data] == [4, 4]


def test_the_number_to_collect_comes_from_the_policy_or_is_asked_for(collector):
    worker = collector(BattleSampleSerialCollector)
    with pytest.raises(ConfigError, match=r"collect\(n_sample="):
        worker.collect()
    with pytest.raises(ConfigError, match="positive"):
        worker.collect(0)
    with pytest.raises(ConfigError, match=r"collect\(n_episode="):
        collector(BattleEpisodeSerialCollector).collect()


def test_a_player_that_never_has_samples_is_reported(collector, monkeypatch):
    monkeypatch.setattr("dmiddleware.worker.collector.transitions._MOST_FRUITLESS", 50)
    players = policies()
    worker = collector(BattleSampleSerialCollector, battle_envs(n_game=1, lengths=(1,)), players)
    worker.reset_policy(
        [worker.policy[0], worker.policy[1]._replace(get_train_sample=lambda rows: [])]
    )
    with pytest.raises(PolicyOutputError, match="50 trajectories in a row"):
        worker.collect(2)


def test_an_action_for_every_game_is_required(collector):
    worker = collector(BattleEpisodeSerialCollector)
    worker.reset_policy(
        [worker.policy[0]._replace(forward=lambda data, **kwargs: {}), worker.policy[1]]
    )
    with pytest.raises(PolicyOutputError, match="returned no output for 0"):
        worker.collect(2)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("episode_1v1", BattleEpisodeSerialCollector),
        ("battle_episode", BattleEpisodeSerialCollector),
        ("sample_1v1", BattleSampleSerialCollector),
        ("battle_sample", BattleSampleSerialCollector),
    ],
)
def test_battle_collectors_are_created_by_name(name, kind, tmp_path):
    assert get_serial_collector_cls({"type": name}) is kind
    worker = create_serial_collector(
        {"type": name}, env=battle_envs(), policy=policies(), exp_name=str(tmp_path)
    )
    assert type(worker) is kind
    worker.close()


def test_the_defaults_are_the_classic_ones():
    common = {
        "deepcopy_obs": False,
        "transform_obs": False,
        "collect_print_freq": 100,
        "log_to_file": True,
    }
    assert dict(BattleSampleSerialCollector.default_config()) == {
        **common,
        "cfg_type": "BattleSampleSerialCollectorDict",
    }
    assert dict(BattleEpisodeSerialCollector.default_config()) == {
        **common,
        "get_train_sample": False,
        "cfg_type": "BattleEpisodeSerialCollectorDict",
    }


def test_what_does_not_fit_is_refused(collector):
    with pytest.raises(ConfigError, match="exactly 2 policies"):
        collector(BattleEpisodeSerialCollector, players=policies(3))
    with pytest.raises(ConfigError, match="two or more"):
        collector(BattleSampleSerialCollector, players=policies(1))
    with pytest.raises(ConfigError, match="list of"):
        collector(BattleSampleSerialCollector, players=policies(1)[0].collect_mode)
    with pytest.raises(ConfigError, match="takes a BattleEnvManager"):
        BattleSampleSerialCollector({}, make_env_manager("CartPole-v1", env_num=1), policies())
    worker = collector(BattleSampleSerialCollector, battle_envs(), policies(3))
    with pytest.raises(ConfigError, match="3 policies for games of 2 players"):
        worker.collect(2)


def test_a_policy_that_does_not_fit_the_games_is_refused_and_the_games_are_closed(collector):
    from dmiddleware.errors import SpaceError
    from dmiddleware.policy import DQNPolicy

    policy = DQNPolicy({"model": {"obs_shape": 5, "action_shape": 3}})
    worker = collector(BattleEpisodeSerialCollector, players=[policy, policy])
    with pytest.raises(SpaceError, match=re.escape("(5,)")):
        worker.collect(2)
    assert worker.env.closed
