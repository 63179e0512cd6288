"""Games of teams: the rows of each team, and its opponents."""

from __future__ import annotations

import gymnasium as gym
import numpy as np
import pettingzoo
import pytest
import torch

from dmiddleware.env import GameEnv, make_env_manager
from dmiddleware.errors import (
    ConfigError,
    EnvProtocolError,
    EnvStateError,
    EnvTimeout,
    PolicyOutputError,
    SpaceError,
)
from dmiddleware.policy import (
    DQNPolicy,
    IMPALAPolicy,
    IPPOPolicy,
    MAPPOPolicy,
    PPOPolicy,
    QMIXPolicy,
    R2D2Policy,
    RecurrentIPPOPolicy,
    RecurrentMAPPOPolicy,
    RecurrentPPOPolicy,
    RecurrentQMIXPolicy,
    SACPolicy,
)
from dmiddleware.rollout import (
    ActingPolicy,
    Frozen,
    Game,
    OpponentPool,
    RolloutCollector,
    TeamRollout,
    against,
    evaluate_episodes,
    make_game,
)
from dmiddleware.tree import leaves
from tests.dmiddleware.env.test_parallel_env import Relay
from tests.dmiddleware.team_games import Auction, Duel, Exits, Solo, Telephone

TEAMS = {"red": "red_*", "blue": "blue_*"}
SMALL = {"encoder_hidden_sizes": [8]}


def make_duel(seed=0, env_num=2, **options):
    return make_game(Duel, teams=TEAMS, env_num=env_num, seed=seed, env_kwargs=options)


def make_tictactoe(seed=0, env_num=3):
    return make_game(
        lambda: pettingzoo.make("aec", "classic/tictactoe-v3"),
        teams={"x": "player_1", "o": "player_2"},
        flatten=True,
        env_num=env_num,
        seed=seed,
    )


def same(rows, others):
    names = [name for name, _ in leaves(rows)]
    assert names == [name for name, _ in leaves(others)]
    return all(
        torch.equal(column, other)
        for (name, column), (_, other) in zip(leaves(rows), leaves(others), strict=True)
        if name != "episode_id"
    )


def test_a_game_of_one_agent_is_collected_as_its_env_is():
    game = make_game(Solo, teams={"only": "it"}, env_num=3, seed=5)
    rollout = TeamRollout(game, {"only": PPOPolicy.for_env(game["only"], seed=1, model=SMALL)})
    envs = make_env_manager("CartPole-v1", env_num=3, seed=5)
    worker = RolloutCollector(PPOPolicy.for_env(envs, seed=1, model=SMALL), envs)
    with envs, game:
        for _ in range(3):
            rows = rollout.collect(100)["only"]
            assert same(rows, worker.collect(100))
            assert rollout.workers["only"].episode_returns == worker.episode_returns
            assert rollout.workers["only"].env_step == worker.env_step


@pytest.mark.parametrize(
    ("cls", "last"),
    [
        (MAPPOPolicy, "terminated"),
        (MAPPOPolicy, "truncated"),
        (RecurrentMAPPOPolicy, "terminated"),
        (RecurrentIPPOPolicy, "truncated"),
        (RecurrentQMIXPolicy, "terminated"),
    ],
)
def test_a_game_of_one_team_is_collected_as_its_parallel_env_is(cls, last):
    # Agents come and go in it.
    kwargs = {"masks": "infos", "ends": ("terminated", last)}
    game = make_game(Relay, teams={"only": "*"}, env_num=2, seed=5, env_kwargs=kwargs)
    rollout = TeamRollout(game, {"only": cls.for_env(game["only"], seed=1)})
    envs = make_env_manager(Relay, env_num=2, seed=5, env_kwargs=kwargs)
    worker = RolloutCollector(cls.for_env(envs, seed=1), envs)
    with envs, game:
        for _ in range(3):
            assert same(rollout.collect(10)["only"], worker.collect(10))
            assert rollout.workers["only"].episode_returns == worker.episode_returns


@pytest.mark.parametrize(
    ("red", "blue"), [(DQNPolicy, SACPolicy), (IPPOPolicy, PPOPolicy), (QMIXPolicy, SACPolicy)]
)
def test_teams_of_different_spaces_and_algorithms_act_in_lockstep(red, blue):
    game = make_duel()
    policies = {"red": red.for_env(game["red"], seed=0), "blue": blue.for_env(game["blue"], seed=0)}
    rollout = TeamRollout(game, policies)
    with game:
        rows = rollout.collect(6, train_iter={"blue": 7})
    n_red = (3, 2, 2) if red.several_agents else (3, 4)
    assert rows["red"]["action"].shape == n_red
    assert rows["blue"]["action"].shape == (3, 2, 2)
    assert rows["blue"]["reward"].tolist() == [[21.0, 21.0]] * 3
    assert rows["blue"]["collect_iter"].unique().tolist() == [7]
    assert rollout.workers["red"].env_step == rows["red"]["done"].numel()


def test_an_agent_that_leaves_ends_its_lane_and_has_no_rows_while_it_is_away():
    game = make_duel(leaves=2, env_num=1)
    rollout = TeamRollout(game, {"red": DQNPolicy.for_env(game["red"], seed=0), "blue": "random"})
    with game:
        rows = rollout.collect(14)["red"]  # two games of 5 + 2 rows
    assert rows["done"].shape == (14,)
    assert rows["terminated"].nonzero().flatten().tolist() == [4, 9, 11, 13]
    assert rows["reward"].tolist() == [1.0] * 10 + [11.0] * 4
    assert rollout.workers["red"].episode_returns == [22.0, 5.0, 22.0, 5.0]
    assert rollout.workers["red"].episode_lengths == [2, 5, 2, 5]
    # Each row is followed by the next one of its lane.
    goes_on = ~rows["done"][:-1]
    assert torch.equal(rows["next_obs"][:-1][goes_on], rows["obs"][1:][goes_on])


def test_rows_of_a_turn_based_game_have_the_action_that_was_taken_and_all_rewards():
    game = make_tictactoe()
    policies = {
        "x": PPOPolicy.for_env(game["x"], seed=0), "o": DQNPolicy.for_env(game["o"], seed=1)
    }  # fmt: skip
    rollout = TeamRollout(game, policies)
    returns = {"x": [], "o": []}
    with game:
        collected = []
        for _ in range(3):
            collected.append(rollout.collect(40, policy_kwargs={"o": {"eps": 0.5}}))
            for team, worker in rollout.workers.items():
                returns[team] += worker.episode_returns
    for team in ("x", "o"):
        rows = [batch[team] for batch in collected]
        earned = {}
        for batch in rows:
            assert batch["action_mask"].gather(-1, batch["action"].unsqueeze(-1)).all()
            for episode, reward in zip(
                batch["episode_id"].flatten().tolist(), batch["reward"].flatten().tolist(),
                strict=True,
            ):  # fmt: skip
                earned[episode] = earned.get(episode, 0.0) + reward
            # A cell that was chosen is the player's own on the next board.
            board = batch["next_obs"].reshape(-1, 9, 2)
            mine = board[torch.arange(len(board)), batch["action"].flatten()]
            assert (mine.sum(-1) == 1).all()
            before = batch["obs"].reshape(-1, 9, 2)
            assert (before[torch.arange(len(board)), batch["action"].flatten()] == 0).all()
            if batch["done"].dim() == 1:
                follows = batch["episode_id"][1:] == batch["episode_id"][:-1]
                assert torch.equal(batch["obs"][1:][follows], batch["next_obs"][:-1][follows])
        ends = sum(int(batch["done"].sum()) for batch in rows)
        assert ends == len(returns[team]) > 5
        assert sum(earned.values()) == sum(returns[team])
    assert sum(returns["x"]) == -sum(returns["o"])
    x = torch.cat([batch["x"]["log_prob"].flatten() for batch in collected])
    logit = torch.cat([batch["x"]["logit"].reshape(-1, 9) for batch in collected])
    mask = torch.cat([batch["x"]["action_mask"].reshape(-1, 9) for batch in collected])
    action = torch.cat([batch["x"]["action"].flatten() for batch in collected])
    allowed = logit.masked_fill(~mask, -torch.inf).log_softmax(-1)
    torch.testing.assert_close(x, allowed.gather(-1, action[:, None])[:, 0])


def test_a_policy_with_a_memory_takes_one_step_of_it_with_each_turn():
    game = make_game(Auction, teams={"a": "a", "rest": "[bc]"}, env_num=2, seed=0)
    policy = R2D2Policy.for_env(game["a"], seed=0)
    rollout = TeamRollout(game, {"a": policy, "rest": lambda obs, mask: 0})
    with game:
        rows = rollout.collect(8)["a"]
    # Two turns in each game: the first without a memory.
    state = torch.cat([leaf.flatten(1) for _, leaf in leaves(rows["state"])], dim=1)
    assert rows["done"].tolist() == [False, True] * 4
    assert (state[0::2] == 0).all() and (state[1::2] != 0).any(-1).all()
    inputs = {name: rows[name][0::2] for name in policy.act_inputs if name in rows}
    output = policy.collect_mode.forward(
        rows["obs"][0::2], env_id=np.arange(4), state=rows["state"][0::2], **inputs, eps=0.0
    )
    after = torch.cat([leaf.flatten(1) for _, leaf in leaves(output["state"])], dim=1)
    torch.testing.assert_close(after, state[1::2])
    assert rows["reward"].tolist() == [111.0, 101.0] * 4


def rows_of_lanes(policy, rows):
    """Return lanes run again from the state before their first row, as learning runs them."""
    with torch.no_grad():
        return policy.learning_output(dict(rows.items()))


@pytest.mark.parametrize("cls", [RecurrentPPOPolicy, RecurrentMAPPOPolicy])
def test_teams_with_memories_learn_from_lanes_although_agents_leave(cls):
    """One of two red agents leaves after the second of five steps, so its lanes are shorter."""
    game = make_duel(leaves=2)
    red = cls.for_env(game["red"], seed=0)
    rollout = TeamRollout(game, {"red": red, "blue": RecurrentPPOPolicy.for_env(game["blue"])})
    with game:
        for _ in range(3):
            rows = rollout.collect(12)
            lanes = rows["red"]
            assert lanes["done"].shape[1] == (2 if red.several_agents else 4)
            assert len(lanes["done"]) >= 12 // lanes["done"].shape[1]
            assert (lanes["state"][lanes["is_first"]] == 0).all()
            # The state of each row is the one after the row before, unless an episode starts.
            logit = rows_of_lanes(red, lanes)["logit"]
            torch.testing.assert_close(logit, lanes["logit"], rtol=1e-4, atol=1e-5)


def test_all_rows_that_fit_into_lanes_are_taken():
    """Blue has half as many agents, so red makes twice as many rows as were asked for."""
    game = make_duel()
    policies = {
        "red": RecurrentPPOPolicy.for_env(game["red"], seed=0),
        "blue": SACPolicy.for_env(game["blue"], seed=0),
    }
    rollout = TeamRollout(game, policies)
    with game:
        for _ in range(2):
            assert rollout.collect(12)["red"]["done"].shape == (6, 4)
            assert rollout.workers["red"].waiting_steps == 0


def test_the_lane_of_an_agent_that_never_acts_is_filled_with_rows_of_others():
    class Late(Duel):
        def reset(self, seed=None, options=None):
            obs, infos = super().reset(seed=seed)
            self.agents = ["red_0", "blue_0"]
            return {agent: obs[agent] for agent in self.agents}, infos

    game = make_game(Late, teams=TEAMS, env_num=1, seed=0)
    red = RecurrentPPOPolicy.for_env(game["red"], seed=0)
    rollout = TeamRollout(game, {"red": red, "blue": "random"})
    with game:
        for _ in range(3):
            rows = rollout.collect(24)["red"]
            assert rows["done"].shape == (12, 2)
            # No episode is in both lanes.
            first, second = (set(rows["episode_id"][:, lane].tolist()) for lane in range(2))
            assert not first & second
            logit = rows_of_lanes(red, rows)["logit"]
            torch.testing.assert_close(logit, rows["logit"], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("cls", [RecurrentPPOPolicy, IMPALAPolicy])
def test_lanes_of_agents_that_take_turns_are_filled(cls):
    game = make_tictactoe()
    x = cls.for_env(game["x"], seed=0)
    rollout = TeamRollout(game, {"x": x, "o": "random"})
    collected = []
    with game:
        for _ in range(4):
            collected.append(rollout.collect(30)["x"])
            assert collected[-1]["done"].shape == (len(collected[-1]["done"]), 3)
    ids = [rows["episode_id"] for rows in collected]
    for lane in range(3):
        columns = {
            name: torch.cat([rows[name][:, lane] for rows in collected])
            for name in ("episode_id", "done", "obs", "next_obs")
        }
        # Nothing is lost between rows, nor between calls.
        goes_on = ~columns["done"][:-1]
        assert torch.equal(columns["episode_id"][:-1][goes_on], columns["episode_id"][1:][goes_on])
        assert torch.equal(columns["next_obs"][:-1][goes_on], columns["obs"][1:][goes_on])
    worker = rollout.workers["x"]
    assert sum(map(torch.numel, ids)) + worker.waiting_steps == worker.env_step
    if cls is RecurrentPPOPolicy:
        for rows in collected:
            logit = rows_of_lanes(x, rows)["logit"]
            torch.testing.assert_close(logit, rows["logit"], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "opponent", ["policy", "random", "pool", "frozen", "memory", "pool with memories"]
)
def test_a_rollout_that_is_restored_goes_on_exactly(opponent):
    def build():
        game = make_tictactoe()
        has_memory = opponent in ("memory", "pool with memories")
        learner, player = (RecurrentPPOPolicy, R2D2Policy) if has_memory else (PPOPolicy, DQNPolicy)
        policy = learner.for_env(game["x"], seed=0, model=SMALL)
        other = player.for_env(game["o"], seed=1, model=SMALL)
        pool = OpponentPool(lambda: player.for_env(game["o"], seed=2, model=SMALL), size=2)
        for seed in (3, 4):
            pool.add(player.for_env(game["o"], seed=seed, model=SMALL))
        others = {"policy": other, "random": "random", "frozen": Frozen(other)}
        others |= {"memory": Frozen(other)}
        players = {"x": policy, "o": others.get(opponent, pool)}
        return game, players, TeamRollout(game, players), pool

    kwargs = {"policy_kwargs": {"o": {"eps": 0.3}}} if opponent == "policy" else {}
    game, players, rollout, pool = build()
    rollout.collect(20, **kwargs)
    state = rollout.state_dict(), pool.state_dict()
    learning = {team: players[team].learn_mode for team in rollout.modes}
    weights = {team: mode.state_dict() for team, mode in learning.items()}
    expected = [rollout.collect(20, **kwargs) for _ in range(2)]
    returns, ratings = rollout.workers["x"].episode_returns, pool.ratings
    game.close()
    game, players, rollout, pool = build()
    for team in rollout.modes:
        players[team].learn_mode.load_state_dict(weights[team])
    pool.load_state_dict(state[1])
    rollout.load_state_dict(state[0])
    again = [rollout.collect(20, **kwargs) for _ in range(2)]
    assert (rollout.workers["x"].episode_returns, pool.ratings) == (returns, ratings)
    game.close()
    for batch, other in zip(expected, again, strict=True):
        assert batch.keys() == other.keys()
        assert all(same(batch[team], other[team]) for team in batch)


def test_returns_and_results_have_what_was_earned_before_a_snapshot():
    def build():
        game = make_duel(env_num=1)
        red = DQNPolicy.for_env(game["red"], seed=0)
        return game, TeamRollout(game, {"red": red, "blue": "random"})

    game, rollout = build()
    rollout.collect(6)  # three of five steps
    state = rollout.state_dict()
    game.close()
    game, rollout = build()
    rollout.load_state_dict(state)
    with game:
        rollout.collect(4)
        assert game.results == {0: {"red": 30.0, "blue": 105.0}}
    assert rollout.workers["red"].episode_returns == [5.0, 55.0]


def test_functions_see_observations_and_masks_and_evaluators_play_against_them():
    seen = []

    def first_free(obs, mask):
        seen.append((obs.shape, mask.shape))
        return int(np.flatnonzero(mask)[0])

    game = make_tictactoe()
    policy = DQNPolicy.for_env(game["x"], seed=0)
    envs = against(game, "x", {"o": first_free})
    with envs:
        monitor = evaluate_episodes(policy, envs, 9)
        assert len(monitor.get_episode_return()) == 9
        assert set(monitor.get_episode_return()) <= {-1.0, 0.0, 1.0}
    assert set(seen) == {((18,), (9,))}


def test_teams_with_a_policy_for_several_agents_are_evaluated_jointly():
    game = make_duel()
    policy = MAPPOPolicy.for_env(game["red"], seed=0)
    with against(game, "red", {"blue": "random"}).joint as envs:
        assert evaluate_episodes(policy, envs, 4).get_episode_return() == [30.0] * 4


def test_a_collector_of_one_team_plays_against_a_policy_that_does_not_learn():
    game = make_duel()
    blue = PPOPolicy.for_env(game["blue"], seed=0)
    envs = against(game, "red", {"blue": Frozen(blue)})
    worker = RolloutCollector(DQNPolicy.for_env(game["red"], seed=0), envs)
    with envs:
        rows = worker.collect(12)
    assert rows["obs"].shape == (3, 4, 3)
    assert rows["done"].sum() == 0


def test_a_loaded_policy_plays_and_does_not_learn():
    rows = []
    for wrap in (Frozen, ActingPolicy):
        game = make_duel()
        red = wrap(DQNPolicy.for_env(game["red"], seed=0))
        blue = SACPolicy.for_env(game["blue"], seed=1)
        rollout = TeamRollout(game, {"red": red, "blue": blue})
        with game:
            rows.append(rollout.collect(12))
        assert rows[-1].keys() == {"blue"}
    assert same(rows[0]["blue"], rows[1]["blue"])


def test_games_are_counted_for_and_against_past_versions_and_hard_ones_are_drawn_more_often():
    game = make_tictactoe(env_num=8)
    policy = DQNPolicy.for_env(game["x"], seed=0, model=SMALL)
    pool = OpponentPool(
        lambda: DQNPolicy.for_env(game["o"], model=SMALL),
        size=2, prioritized=True, policy_kwargs={"eps": 1.0},
    )  # fmt: skip
    pool.add(policy)
    rollout = TeamRollout(game, {"x": policy, "o": pool})
    with game:
        rollout.collect(400, policy_kwargs={"x": {"eps": 1.0}})
    rate, elo = pool.ratings[0]
    # The player that moves first wins more often, at random 58% against 29%.
    assert rate > 0.5
    assert pool.elo > 1200 > elo
    assert pool.elo + elo == pytest.approx(2400)
    pool.add(policy)
    assert pool.ratings[1] == (0.5, pool.elo)
    for _ in range(20):
        pool.record(0, "wins")
        pool.record(1, "losses")
    rng = np.random.default_rng(0)
    assert [pool.draw(rng) for _ in range(40)].count(1) > 30


@pytest.mark.parametrize("cls", [MAPPOPolicy, RecurrentMAPPOPolicy])
def test_a_version_of_a_team_plays_as_the_frozen_policy_does(cls):
    """Its draws are certain, so that it acts as the greedy one."""
    played = []
    for wrap in (Frozen, OpponentPool):
        game = make_duel()
        red = cls.for_env(game["red"], seed=0)
        with torch.no_grad():
            for weight in red.model.parameters():
                if weight.shape[:1] == (4,):  # the logits of four actions
                    weight.mul_(1e6)
        player = Frozen(red)
        if wrap is OpponentPool:
            player = OpponentPool(lambda made=game: cls.for_env(made["red"], seed=1))
            player.add(red)
        blue = SACPolicy.for_env(game["blue"], seed=0)
        rollout = TeamRollout(game, {"red": player, "blue": blue})
        moves = []
        step = game.env_manager.step
        game.env_manager.step = lambda actions, step=step, moves=moves: (
            moves.append([part.tolist() for part in actions["red"]]) or step(actions)
        )
        with game:
            rollout.collect(24)
        played.append(moves)
    assert len(played[0]) == 12
    assert len({str(move) for move in played[0]}) > 1
    assert played[0] == played[1]


def test_what_does_not_fit_the_teams_is_an_error_before_the_first_step():
    game = make_duel()
    red = DQNPolicy.for_env(game["red"], seed=0)
    with pytest.raises(ConfigError, match="nobody acts for the team 'blue'"):
        TeamRollout(game, {"red": red})
    with pytest.raises(ConfigError, match=r"no team 'bleu'.*'blue'"):
        TeamRollout(game, {"red": red, "bleu": "random"})
    with pytest.raises(SpaceError, match="team 'blue' does not fit"):
        TeamRollout(game, {"red": red, "blue": red})
    pool = OpponentPool(lambda: DQNPolicy.for_env(game["red"], seed=0))
    for player in (Frozen(red), pool):
        with pytest.raises(SpaceError, match="team 'blue' does not fit"):
            TeamRollout(game, {"red": red, "blue": player})
    with pytest.raises(ConfigError, match="no team learns"):
        TeamRollout(game, {"red": "random", "blue": "random"})
    with pytest.raises(ConfigError, match="cannot be played by 'clever'"):
        TeamRollout(game, {"red": red, "blue": "clever"})
    with pytest.raises(ConfigError, match="takes a Game"):
        TeamRollout(make_env_manager("CartPole-v1", env_num=1), {"red": red})
    with pytest.raises(ConfigError, match="env manager of GameEnvs"):
        Game(make_env_manager("CartPole-v1", env_num=1))
    assert game.closed


def test_an_agent_alone_in_its_team_has_the_rows_of_its_turns():
    games = [make_tictactoe() for _ in range(2)]
    policies = [cls.for_env(game["x"], seed=0) for cls, game in zip(
        (IPPOPolicy, PPOPolicy), games, strict=True
    )]  # fmt: skip
    rows = []
    for game, policy in zip(games, policies, strict=True):
        rollout = TeamRollout(game, {"x": policy, "o": "random"})
        with game:
            rows.append(rollout.collect(60)["x"])
            assert rollout.workers["x"].env_episode > 10
    joint, _ = rows
    mask = joint["obs"]["action_mask"]
    assert mask.shape[1:] == (1, 9)
    assert mask.gather(-1, joint["action"].unsqueeze(-1)).all()
    for batch in rows:
        # X is at move in the same games: it has the same number of stones as its opponent.
        board = batch["obs"] if batch is not joint else batch["obs"]["agents"][:, 0]
        stones = board.reshape(-1, 9, 2).sum(1)
        assert torch.equal(stones[:, 0], stones[:, 1])


def turns_of(policy_cls, game, n_sample, team="rest"):
    policy = policy_cls.for_env(game[team], seed=0)
    rollout = TeamRollout(game, {team: policy, **dict.fromkeys(set(game.teams) - {team}, "random")})
    with game:
        rows = rollout.collect(n_sample)[team]
        return rows, rollout.workers[team].episode_returns


def test_a_team_that_takes_turns_has_a_row_for_each_of_its_turns_and_all_of_its_rewards():
    game = make_game(Auction, teams={"a": "a", "rest": "[bc]"}, env_num=2, seed=0)
    rows, returns = turns_of(MAPPOPolicy, game, 12)
    # b bids, c bids, a bids and b leaves, c bids: what each has earned is known at its next turn.
    assert rows["reward"].tolist() == [[0, 0], [112, 112], [0, 100]] * 4
    assert rows["terminated"].tolist() == rows["done"].tolist() == [False, False, True] * 4
    assert rows["obs"]["agent_mask"].tolist() == [[1, 1], [1, 1], [0, 1]] * 4
    assert rows["next_obs"]["agent_mask"].tolist() == [[1, 1], [0, 1], [0, 0]] * 4
    # The second number of an observation is that of bids; those that wait see it, too.
    assert rows["obs"]["agents"][..., 1].tolist() == [[1, 1], [2, 2], [4, 4]] * 4
    assert (
        rows["obs"]["action_mask"].tolist()
        == [
            [[1, 1, 0], [0, 0, 1]],
            [[0, 0, 1], [1, 1, 0]],
            [[1, 1, 0], [1, 1, 0]],
        ]
        * 4
    )
    assert returns == [(112 + 212) / 2] * 4


def test_a_row_of_a_team_lasts_while_others_take_their_turns():
    game = make_game(Auction, teams={"ab": ["a", "b"], "c": "c"}, env_num=2, seed=0)
    rows, returns = turns_of(MAPPOPolicy, game, 6, team="ab")
    # a bids, b bids and c bids, a bids and b leaves and c bids: the row ends with a's last turn.
    assert rows["reward"].tolist() == [[0, 0], [111, 0], [101, 112]] * 2
    assert rows["terminated"].tolist() == [False, False, True] * 2
    assert returns == [(212 + 112) / 2] * 2


@pytest.mark.parametrize(
    ("turns", "reward", "is_cut"),
    [
        # b leaves without a turn of its own.
        ([("a", dict.fromkeys("abc", "terminations"))], [1, 1], [0, 0]),
        ([("a", dict.fromkeys("abc", "truncations"))], [1, 1], [1, 1]),
        (
            [("a", {"a": "terminations"}), ("c", dict.fromkeys("bc", "truncations"))],
            [1, 101],
            [0, 1],
        ),
        # a leaves before b, in the same row.
        (
            [("a", {}), ("c", {"a": "truncations"}), ("c", dict.fromkeys("bc", "terminations"))],
            [101, 201],
            [1, 0],
        ),
    ],
)
def test_a_row_of_a_team_has_what_all_have_earned_who_wait_and_who_was_cut_off(
    turns, reward, is_cut
):
    teams, kwargs = {"ab": ["a", "b"], "c": "c"}, {"turns": turns}
    game = make_game(Exits, teams=teams, env_num=2, seed=0, env_kwargs=kwargs)
    rows, returns = turns_of(MAPPOPolicy, game, 4, team="ab")
    assert rows["reward"].reshape(-1, 2).tolist() == [reward] * 4
    assert rows["next_obs"]["agent_mask"].reshape(-1, 2).tolist() == [is_cut] * 4
    assert rows["truncated"].flatten().tolist() == [any(is_cut)] * 4
    assert rows["done"].all()
    assert returns == [sum(reward) / 2] * 4
    # An agent that learns alone has no row without an action.
    game = make_game(Exits, teams=teams, env_num=2, seed=0, env_kwargs=kwargs)
    rows, _ = turns_of(PPOPolicy, game, 4, team="ab")
    assert rows["reward"].tolist() == reward[:1] * 4
    assert rows["truncated"].tolist() == [bool(is_cut[0])] * 4


def test_an_agent_that_is_no_longer_there_has_left_a_game_in_which_agents_take_turns():
    turns = [("b", {}), ("c", {"b": ""}), ("c", {}), ("c", {"a": "", "c": ""})]
    env = GameEnv(Exits(turns), {"ab": ["a", "b"], "c": "c"})
    env.reset(seed=0)
    moves = {"ab": (0, 0), "c": (0,)}
    flags = [env.step(moves)[0]["flags"]["ab"][1].tolist() for _ in range(3)]
    assert flags == [[0, 0, 0], [1, 1, 0], [0, 0, 0]]


@pytest.mark.parametrize("start", [0, 5])
def test_a_game_of_a_team_that_takes_turns_starts_anew_where_its_env_fails(start):
    broken = []

    class Once(Auction):
        def action_space(self, agent):
            return gym.spaces.Discrete(2, start=start)

        def step(self, action):
            if self.t == 2 and not broken:
                broken.append(True)
                raise RuntimeError("broken")
            super().step(action)

    game = make_game(Once, teams={"ab": ["a", "b"], "c": "c"}, env_num=1, seed=0)
    rows, returns = turns_of(MAPPOPolicy, game, 6, team="ab")
    assert broken
    assert rows["reward"].tolist() == [[0, 0], [111, 0], [101, 112]] * 2
    assert returns == [(212 + 112) / 2] * 2


@pytest.mark.parametrize("answer", ["error", "none"])
def test_an_env_whose_agents_see_nothing_while_they_wait_is_reported(answer):
    class Blind(Auction):
        def observe(self, agent):
            if agent == self.agent_selection:
                return super().observe(agent)
            if answer == "none":
                return None
            raise KeyError(agent)

    teams = {"a": "a", "rest": "[bc]"}
    game = make_game(Blind, teams=teams, env_num=1, seed=0, max_retry=0)
    with pytest.raises(EnvProtocolError, match=r"observe\('b'\) failed while.*a team of its own"):
        turns_of(MAPPOPolicy, game, 1)
    alone = make_game(Blind, teams={name: name for name in "abc"}, env_num=1, seed=0)
    assert len(turns_of(PPOPolicy, alone, 2, team="b")[1]) >= 1


def test_joint_actions_of_agents_that_take_turns_are_discrete():
    game = make_game(Telephone, teams={"all": "*"}, env_kwargs={"box": True}, env_num=1, seed=0)
    with pytest.raises(SpaceError, match=r"team 'all' take turns.*such as PPO or SAC"):
        MAPPOPolicy.for_env(game["all"], seed=0)
    assert game["all"].env_num == 2  # for an algorithm of a single agent


def rows_against(rule, team="red"):
    game = make_duel()
    other = {"red": "blue", "blue": "red"}[team]
    cls = {"red": DQNPolicy, "blue": SACPolicy}[other]
    rollout = TeamRollout(game, {team: rule, other: cls.for_env(game[other], seed=0)})
    with game:
        return rollout.collect(4)[other]


@pytest.mark.parametrize(
    ("team", "action", "message"),
    [
        ("red", 4, r"the action 4, which Discrete\(4\) does not have"),
        ("red", -1, "the action -1"),
        ("red", 1.5, "its dtype is float64"),
        ("red", None, "its dtype is object"),
        ("blue", 0.5, r"its shape is \(\), but the space has \(2,\)"),
        ("blue", [0.0, 0.0, 0.0], r"its shape is \(3,\)"),
    ],
)
def test_an_action_of_a_function_that_the_space_lacks_names_the_team(team, action, message):
    with pytest.raises(PolicyOutputError, match=f"plays for team '{team}' returned .*{message}"):
        rows_against(lambda obs, mask: action, team)


def test_an_error_in_a_function_says_for_which_team_it_plays():
    with pytest.raises(ZeroDivisionError) as caught:
        rows_against(lambda obs, mask: 1 // 0)
    assert caught.value.__notes__ == ["raised by the function that plays for team 'red'"]


def test_a_function_that_takes_no_mask_is_refused_before_the_first_step():
    game = make_duel()
    with pytest.raises(ConfigError, match="team 'red' must take the observation and the action"):
        against(game, "blue", {"red": lambda obs: 0})
    assert game.closed
    against(game, "blue", {"red": lambda *inputs: 0})
    against(game, "blue", {"red": max})  # without a signature


def test_a_frozen_team_with_memories_plays_as_where_it_is_called_step_by_step():
    games = []

    class Noted(Duel):
        def reset(self, seed=None, options=None):
            obs, infos = super().reset(seed=seed)
            games.append([])
            self.last = obs
            return obs, infos

        def step(self, actions):
            games[-1].append((self.last, actions))
            result = super().step(actions)
            self.last = result[0]
            return result

    game = make_game(Noted, teams=TEAMS, env_num=1, seed=0)
    red = RecurrentMAPPOPolicy.for_env(game["red"], seed=0)
    blue = SACPolicy.for_env(game["blue"], seed=0)
    rollout = TeamRollout(game, {"red": Frozen(red), "blue": blue})
    with game:
        rollout.collect(12)
    act, played = ActingPolicy(red), [moves for moves in games if moves]
    assert [len(moves) for moves in played] == [5, 5, 2]
    names = ("red_0", "red_1")
    for moves in played:
        for obs, actions in moves:
            seen = {
                "agents": np.stack([obs[name] for name in names]),
                "agent_mask": np.ones(2, np.int8),
            }
            assert act(seen).tolist() == [actions[name] for name in names]
        act.reset()


def test_a_team_that_never_acts_is_reported():
    class Late(Duel):
        def reset(self, seed=None, options=None):
            obs, infos = super().reset(seed=seed)
            self.agents = ["red_0", "red_1"]
            return {agent: obs[agent] for agent in self.agents}, infos

    game = make_game(Late, teams=TEAMS, env_num=1, seed=0)
    rollout = TeamRollout(game, {"red": "random", "blue": SACPolicy.for_env(game["blue"], seed=0)})
    with game, pytest.raises(EnvTimeout, match="team 'blue'"):
        rollout.collect(1)


def test_a_game_that_fails_starts_anew_and_its_rows_are_dropped():
    game = make_duel(fails_at=4)
    rollout = TeamRollout(game, {"red": DQNPolicy.for_env(game["red"], seed=0), "blue": "random"})
    with game:
        rows = rollout.collect(12)["red"]
        assert not rows["done"].any()
        assert len(rows["episode_id"].unique()) == 4
        assert rollout.workers["red"].dropped_steps == 0
        with pytest.raises(Exception, match="broken"):
            rollout.collect(60)
        assert game.closed


def test_returns_do_not_have_what_was_earned_before_a_failure():
    broken = []

    class Once(Duel):
        def step(self, actions):
            if self.t == 2 and not broken:
                broken.append(True)
                raise RuntimeError("broken")
            return super().step(actions)

    game = make_game(Once, teams=TEAMS, env_num=1, seed=0)
    rollout = TeamRollout(game, {"red": DQNPolicy.for_env(game["red"], seed=0), "blue": "random"})
    with game:
        rows = rollout.collect(11)["red"]
        assert rollout.workers["red"].episode_returns == [5.0, 55.0]
        assert rollout.workers["red"].dropped_steps == 4
    assert rows["terminated"].sum() == 2


def test_envs_of_a_team_are_stepped_and_reset_together():
    game = make_duel()
    envs = game["red"]
    with game:
        with pytest.raises(EnvStateError, match="nobody acts for the team 'blue'"):
            envs.step(envs.sample_actions())
        with pytest.raises(EnvStateError, match="reset together"):
            envs.reset([0])
        joint = against(game, "red", {"blue": "random"}).joint
        joint.step(joint.sample_actions())
        with pytest.raises(EnvStateError, match="stepped without these envs"):
            envs.step(envs.sample_actions())
        envs.reset()
        assert envs.step(envs.sample_actions()).is_full


def test_a_card_game_is_played_by_two_algorithms():
    pytest.importorskip("rlcard")
    game = make_game(
        lambda: pettingzoo.make("aec", "classic/leduc_holdem-v4"),
        teams={"first": "player_0", "second": "player_1"},
        env_num=2,
        seed=0,
    )
    policies = {
        "first": DQNPolicy.for_env(game["first"], seed=0),
        "second": PPOPolicy.for_env(game["second"], seed=0),
    }
    rollout = TeamRollout(game, policies)
    with game:
        rows = rollout.collect(40, policy_kwargs={"first": {"eps": 1.0}})
        assert all(batch["obs"].shape[1:] == (36,) for batch in rows.values())
        allowed = rows["first"]["action_mask"].gather(-1, rows["first"]["action"][:, None])
        assert allowed.all()
        # A player that has folded at once has ended a game in which the other never acted.
        n_first, n_second = (len(rollout.workers[t].episode_returns) for t in ("first", "second"))
        assert n_first > 5 and n_second > 5
