from __future__ import annotations

import numpy as np
import pytest

from dmiddleware.classic import BattleEnvManager, game_result
from dmiddleware.env import BattleEnv
from dmiddleware.errors import (
    CheckpointMismatch,
    ConfigError,
    EnvCallError,
    EnvCrashed,
    EnvProtocolError,
    EnvStateError,
    StructureError,
)
from tests.dmiddleware.battle_envs import InTurns, Together, battle_envs


def place(obs):
    return tuple(int(value) for value in obs)


def test_ready_obs_has_one_observation_per_player():
    with battle_envs() as games:
        assert [place(obs) for obs in games.ready_obs[1]] == [(1, 0, 0, 0), (1, 1, 0, 0)]
        assert games.to_move == {0: (0, 1), 1: (0, 1)}
        games.step({1: [0, 2]})
        assert [place(obs) for obs in games.ready_obs[1]] == [(1, 0, 0, 1), (1, 1, 0, 1)]
        assert [place(obs) for obs in games.ready_obs[0]] == [(0, 0, 0, 0), (0, 1, 0, 0)]


def test_an_ended_episode_has_final_observations_and_returns_for_each_player():
    with battle_envs(lengths=(2, 1)) as games:
        first = games.step({0: [0, 0]})[0]
        last = games.step({0: [0, 0]})[0]
        cut = games.step({0: [0, 0]})[0]
        ready = games.ready_obs[0]
    assert (first.done, last.done, cut.done) == (False, True, True)
    assert (last.terminated, last.truncated) == (True, False)
    assert (cut.terminated, cut.truncated) == (False, True)
    assert [place(obs) for obs in last.obs] == [(0, 0, 0, 2), (0, 1, 0, 2)]
    assert [place(obs) for obs in ready] == [(0, 0, 2, 0), (0, 1, 2, 0)]
    assert last.to_move == ()
    assert "eval_episode_return" not in first.info[0]
    assert [info["eval_episode_return"] for info in last.info] == [2.0, -2.0]
    assert [info["eval_episode_length"] for info in last.info] == [2, 2]
    assert [info["player"] for info in last.info] == [0, 1]
    assert [info["eval_episode_return"] for info in cut.info] == [1.0, -1.0]


def test_only_players_to_move_act():
    with battle_envs(InTurns, n_player=3, n_game=1, lengths=(4,)) as games:
        assert games.step({0: [1, None, None]})[0].to_move == (1,)
        with pytest.raises(StructureError, match=r"players \(0,\).*players \(1,\) are to move"):
            games.step({0: [1, None, None]})
        with pytest.raises(StructureError, match="one per player"):
            games.step({0: [None, 1]})
        with pytest.raises(StructureError, match="unknown game 3"):
            games.step({3: [None, 1, None]})
        assert games.step({0: [None, 1, None]})[0].to_move == (2,)


def test_a_game_that_raises_is_restarted():
    with battle_envs(crashes=[(0, 2)], lengths=(5,)) as games:
        for _ in range(2):
            games.step({0: [0, 0], 1: [0, 0]})
        steps = games.step({0: [0, 0], 1: [0, 0]})
        assert steps[0].abnormal
        assert not steps[0].done
        assert [info["abnormal"] for info in steps[0].info] == [True, True]
        assert not steps[1].abnormal
        assert games.dropped_steps == 2
        assert games.restarts == 1
        assert [place(obs)[2:] for obs in games.ready_obs[0]] == [(100, 0), (100, 0)]


def test_a_game_that_keeps_failing_closes_the_manager():
    games = battle_envs(crashes=[(0, 0)], keeps_crashing=True, max_retry=2)
    games.launch()
    for _ in range(2):
        assert games.step({0: [0, 0]})[0].abnormal
    with pytest.raises(EnvCrashed, match="game 0 failed 3 time"):
        games.step({0: [0, 0]})
    assert games.closed


def test_a_game_that_fails_from_the_start_is_not_retried():
    class Broken(Together):
        def reset(self, seed=None):
            raise OSError("no board")

    with pytest.raises(EnvCrashed, match="OSError: no board"):
        battle_envs(Broken).launch()


def test_a_game_may_fail_in_a_later_reset():
    class Fragile(Together):
        made = 0

        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            Fragile.made += 1
            self.number = Fragile.made

        def reset(self, seed=None):
            if self.number == 1 and self.episode == 0:
                raise OSError("no board")
            return super().reset(seed)

    with battle_envs(Fragile, n_game=1, lengths=(1,)) as games:
        assert games.step({0: [0, 0]})[0].done
        assert games.restarts == 1
        games.reset()
        assert [place(obs) for obs in games.ready_obs[0]] == [(0, 0, 101, 0), (0, 1, 101, 0)]


def test_masks_of_a_game_appear_in_its_observations():
    class Masked(Together):
        def action_mask(self, player):
            return np.array([1, player, 0])

    with battle_envs(Masked) as games:
        obs = games.ready_obs[0][1]
        assert place(obs["observation"]) == (0, 1, 0, 0)
        assert obs["action_mask"].tolist() == [1, 1, 0]
        final = games.step({0: [0, 0]})[0].obs[0]
        assert final["action_mask"].tolist() == [1, 0, 0]
        assert games.observation_space.contains(obs)
    assert battle_envs(Masked).observation_space["action_mask"].n == 3
    assert battle_envs().observation_space == Together.observation_space
    assert battle_envs().action_space.n == 3


def test_games_are_seeded_once_or_at_each_reset():
    def seeds(**options):
        made = []

        def make():
            made.append(Together(lengths=(1,)))
            return made[-1]

        with BattleEnvManager([make, make]) as games:
            games.seed(5, **options)
            games.reset()
            first = [env.seed for env in made]
            games.step({0: [0, 0], 1: [0, 0]})
            return first, [env.seed for env in made]

    first, later = seeds()
    assert None not in first
    assert first[0] != first[1]
    assert later == [None, None]
    fixed, again = seeds(dynamic_seed=False)
    assert fixed == again == first
    with pytest.raises(ConfigError, match="3 seeds were given for 2"):
        battle_envs().seed([1, 2, 3])


def test_a_saved_state_continues_the_episodes():
    with battle_envs(InTurns, lengths=(5,)) as games, battle_envs(InTurns, lengths=(5,)) as other:
        games.step({0: [0, None]})
        games.step({0: [None, 1]})
        state = games.state_dict()
        assert other.load_state_dict(state)
        assert other.to_move == games.to_move
        for _ in range(3):
            player = games.to_move[0][0]
            actions = {0: [0 if one == player else None for one in range(2)]}
            mine, theirs = games.step(actions)[0], other.step(actions)[0]
            assert [place(o) for o in mine.obs] == [place(o) for o in theirs.obs]
        assert mine.done
        assert mine.info[1] == theirs.info[1]
        assert mine.info[1]["eval_episode_return"] == 50.0


def test_games_that_cannot_be_saved_start_over():
    class WithFile(Together):
        def reset(self, seed=None):
            self.handle = object.__new__(type("Opaque", (), {"__slots__": ("x",)}))
            return super().reset(seed)

    with battle_envs(WithFile) as games, battle_envs(WithFile) as other:
        other.seed(1)
        games.step({0: [0, 0]})
        assert not other.load_state_dict(games.state_dict())
        assert place(other.ready_obs[0][0]) == (0, 0, 1, 0)


def test_a_state_of_another_number_of_games_is_refused():
    with battle_envs() as games:
        state = games.state_dict()
    with battle_envs(n_game=3) as other, pytest.raises(CheckpointMismatch, match="2 games"):
        other.load_state_dict(state)


@pytest.mark.parametrize(
    ("result", "word"),
    [
        (3, "must return"),
        (([0], [0.0, 0.0], False, False, [{}, {}]), "observations"),
        (([0, 0], 1.0, False, False, [{}, {}]), "rewards"),
        (([0, 0], [0.0, 0.0], "no", False, [{}, {}]), "terminated"),
        (([0, 0], [0.0, 0.0], False, False, [{}]), "infos"),
    ],
)
def test_a_step_that_is_not_one_is_refused(result, word):
    class Odd(Together):
        def step(self, actions):
            return result

    games = battle_envs(Odd)
    games.launch()
    with pytest.raises(EnvProtocolError, match=word):
        games.step({0: [0, 0]})
    assert games.closed


def test_what_is_not_a_game_is_refused():
    with pytest.raises(EnvProtocolError, match="without a method to_move"):
        BattleEnvManager([lambda: type("Old", (), {"reset": print, "step": print})()]).launch()
    with pytest.raises(EnvProtocolError, match="its 3 players"):
        BattleEnvManager([Together], n_player=3).launch()

    class Idle(Together):
        def to_move(self):
            return ()

    with pytest.raises(EnvProtocolError, match="at least one player moves"):
        battle_envs(Idle).launch()
    with pytest.raises(ConfigError, match="n_player"):
        BattleEnvManager([Together], n_player=1)
    with pytest.raises(ConfigError, match="list of functions"):
        BattleEnvManager(Together)


def test_a_closed_manager_says_so():
    games = battle_envs()
    for use in (lambda: games.ready_obs, lambda: games.step({}), games.reset, games.state_dict):
        with pytest.raises(EnvStateError, match="launch"):
            use()
    games.close()
    with games, pytest.raises(EnvStateError, match="already"):
        games.launch()
    assert games.closed


def test_without_own_rules_all_players_move_and_all_actions_are_allowed():
    class Plain(BattleEnv):
        n_player = 4

    game = Plain()
    assert game.to_move() == (0, 1, 2, 3)
    assert game.action_mask(2) is None
    assert game.observation_space is None
    game.close()


@pytest.mark.parametrize(
    ("info", "result"),
    [
        ({"eval_episode_return": 0.5}, "wins"),
        ({"eval_episode_return": 0}, "draws"),
        ({"eval_episode_return": -3}, "losses"),
        ({"eval_episode_return": -3, "result": "wins"}, "wins"),
        ({"eval_episode_return": 1, "result": "loss"}, "losses"),
        ({"eval_episode_return": 1, "result": "draw"}, "draws"),
    ],
)
def test_a_game_is_won_by_its_result_or_the_sign_of_the_return(info, result):
    assert game_result(info) == result


def test_an_unknown_result_is_refused():
    with pytest.raises(EnvProtocolError, match="victory"):
        game_result({"result": "victory", "eval_episode_return": 1.0})


def test_the_episodes_of_each_game_are_counted():
    with battle_envs(lengths=(2,)) as games:
        for _ in range(4):
            games.step({0: [0, 0]})
        assert games.episode_counts == [2, 0]
        games.close()
        games.launch()
        assert games.episode_counts == [0, 0]


class Remembering(Together):
    """Records its seeds; the first ``fails`` games that are made cannot be reset a second time."""

    made: list[Remembering] = []
    fails = 0

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.seeds = []
        type(self).made.append(self)

    def reset(self, seed=None):
        if self.seeds and type(self).made.index(self) < type(self).fails:
            raise OSError("no board")
        self.seeds.append(seed)
        return super().reset(seed)


@pytest.fixture
def remembering():
    return type("Fresh", (Remembering,), {"made": [], "fails": 0})


def test_a_restarted_game_gets_another_seed(remembering):
    with BattleEnvManager([lambda: remembering(crashes=[(0, 1)])], seed=[7]) as games:
        games.step({0: [0, 0]})
        assert games.step({0: [0, 0]})[0].abnormal
    first, second = remembering.made
    assert first.seeds == [7]
    assert second.seeds[0] not in (None, 7)


def test_resetting_games_that_cannot_be_reset_closes_the_manager(remembering):
    remembering.fails = 1
    games = BattleEnvManager([remembering], max_retry=0)
    games.launch()
    with pytest.raises(EnvCrashed, match="no board"):
        games.reset([0])
    assert games.closed


def test_a_restart_may_need_several_attempts():
    class Flaky(Together):
        made = 0

        def __init__(self):
            super().__init__(crashes=[(0, 0)])
            Flaky.made += 1
            if Flaky.made == 2:
                raise OSError("no board")
            if Flaky.made > 2:
                self.crashes = set()

    with BattleEnvManager([Flaky]) as games:
        assert games.step({0: [0, 0]})[0].abnormal
        assert games.restarts == 2
        assert not games.step({0: [0, 0]})[0].abnormal


@pytest.mark.parametrize("moment", ["made", "reset"])
def test_a_restarted_game_of_another_kind_is_refused(moment):
    class Changing(Together):
        made = 0

        def __new__(cls):
            cls.made += 1
            is_other = cls.made == 2 and moment == "made"
            return object() if is_other else super().__new__(cls)

        def __init__(self):
            super().__init__(lengths=(1,), crashes=[(0, 0)] if moment == "made" else ())

        def to_move(self):
            return () if moment == "reset" and self.episode == 1 else (0, 1)

    games = BattleEnvManager([Changing])
    games.launch()
    with pytest.raises(EnvProtocolError):
        games.step({0: [0, 0]})
    assert games.closed


def test_seeded_games_that_start_over_get_other_seeds_each_time():
    class Growing(Together):
        """Has more objects after a step, which another game cannot restore."""

        def reset(self, seed=None):
            self.pieces = []
            return super().reset(seed)

        def step(self, actions):
            self.pieces.append(type("Piece", (), {})())
            return super().step(actions)

    made = []

    def make():
        made.append(Growing())
        return made[-1]

    seeds, state = [], None
    for _ in range(3):
        with BattleEnvManager([make], seed=3) as games:
            if state is not None:
                assert not games.load_state_dict(state)
            seeds.append(made[-1].seed)
            games.step({0: [0, 0]})
            state = games.state_dict()
    assert None not in seeds
    assert len(set(seeds)) == 3


def test_a_game_restarted_after_a_resume_gets_its_own_seed(remembering):
    def make():
        return remembering(lengths=(5,), crashes=[(0, 1)])

    seeds, state = [], None
    for _ in range(2):
        with BattleEnvManager([make], seed=3) as games:
            if state is not None:
                games.load_state_dict(state)
            while not games.step({0: [0, 0]})[0].abnormal:
                pass
            seeds.append(remembering.made[-1].seeds[-1])
            state = games.state_dict()
    assert games.restarts == 2
    assert len(set(seeds)) == 2


class Optional(Together):
    """A game that notes its options."""

    def reset(self, seed=None, options=None):
        self.options = options
        return super().reset(seed)


def test_games_are_called_and_changed_and_keep_it_after_a_crash_and_a_resume():
    def make():
        return Optional(lengths=(2,), crashes={(1, 1)})

    with BattleEnvManager([make, make]) as games:
        games.set_attr("rewards", [(5.0, -5.0), (1.0, -1.0)])
        games.set_reset_options({"board": 9})
        assert games.get_attr("options") == [None, None]
        for _ in range(2):
            games.step({0: [0, 0]})
        assert games.get_attr("options") == [{"board": 9}, None]
        assert len(games.call("_obs")[0]) == 2
        with pytest.raises(EnvCallError, match=r"'reward'.*rewards"):
            games.set_attr("reward", 1)
        with pytest.raises(ConfigError, match="own reset"):
            games.call("reset")
        for _ in range(2):
            last = games.step({0: [0, 0]})[0]
        assert last.abnormal
        assert games.get_attr("rewards") == [(5.0, -5.0), (1.0, -1.0)]
        assert games.get_attr("options") == [{"board": 9}, None]
        state = games.state_dict()
    with BattleEnvManager([make, make]) as games:
        games.load_state_dict(state)
        assert games.get_attr("rewards")[0] == (5.0, -5.0)
        assert games.reset_options == [{"board": 9}, {"board": 9}]
        games.reset()
        assert games.get_attr("options") == [{"board": 9}, {"board": 9}]
