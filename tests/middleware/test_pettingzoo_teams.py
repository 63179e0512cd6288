"""Teams of PettingZoo's own environments, with and without a memory, in chains of two steps."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import pettingzoo
import pytest
import torch

from dmiddleware import Task
from dmiddleware.data import TensorBuffer
from dmiddleware.policy import (
    IPPOPolicy,
    MAPPOPolicy,
    Policy,
    PPOPolicy,
    QMIXPolicy,
    R2D2Policy,
    RecurrentIPPOPolicy,
    RecurrentMAPPOPolicy,
    RecurrentPPOPolicy,
    RecurrentQMIXPolicy,
    RecurrentSACPolicy,
)
from dmiddleware.rl import Schedule
from dmiddleware.rollout import Game, against, evaluate_episodes, make_game
from middleware import (
    DataPusher,
    EpsGreedyHandler,
    GAEEstimator,
    InteractionEvaluator,
    OffPolicyLearner,
    OnlineRLContext,
    OnPolicyLearner,
    TeamCollector,
)
from tests.dmiddleware.team_games import Telephone

SPREAD = {"all": "agent_*"}
ADVERSARY = {"good": "agent_*", "bad": "adversary_0"}
SMALL = {"hidden_size": 8, "encoder_hidden_sizes": [8], "head_hidden_sizes": [8]}
N_STEPS = 5


def game_of(module: str, teams: Mapping[str, str], *, turns: bool = False, **options: Any) -> Game:
    """Return two games of ``N_STEPS`` steps."""
    env = pytest.importorskip(f"mpe2.{module}")
    make = env.env if turns else env.parallel_env
    return make_game(partial(make, max_cycles=N_STEPS, **options), teams=teams, env_num=2, seed=0)


def learners_of(team: str, policy: Policy) -> list[Any]:
    """Return what learns from the trajectories of a team."""
    if policy.on_policy:
        return [GAEEstimator(policy, name=team), OnPolicyLearner(policy, name=team)]
    options: dict[str, Any] = {} if policy.initial_state(1) is None else {"unroll_len": 4}
    buffer = TensorBuffer(200, seed=0, **options)
    explorers = [] if policy.explores else [EpsGreedyHandler(policy, name=team)]
    learner = OffPolicyLearner(policy, buffer, update_per_collect=2, name=team)
    return [*explorers, DataPusher(buffer, name=team), learner]


def trained(game: Game, policies: Mapping[str, Policy], n_sample: int = 24) -> dict[str, Any]:
    """Let the teams learn for two steps; return what they collected in the last one."""
    before = {
        team: {name: weight.clone() for name, weight in policy.model.state_dict().items()}
        for team, policy in policies.items()
    }
    with Task(OnlineRLContext(), seed=0) as task:
        task.use(TeamCollector(game, policies, n_sample=n_sample))
        for team, policy in policies.items():
            for part in learners_of(team, policy):
                task.use(part)
        task.run(max_step=2)
        parts = {team: task.ctx.part(team) for team in policies}
    for team, policy in policies.items():
        weights = policy.model.state_dict()
        assert all(weight.isfinite().all() for weight in weights.values())
        assert any(not torch.equal(weight, before[team][name]) for name, weight in weights.items())
    return {team: part.trajectories for team, part in parts.items()}


def made(cls: Any, game: Game, team: str) -> Policy:
    has_memory = cls.__name__.startswith("Recurrent") or cls is R2D2Policy
    model = SMALL if has_memory and cls is not RecurrentSACPolicy else None
    options = {"epoch_per_collect": 1} if cls.on_policy else {}
    policy: Policy = cls.for_env(game[team], seed=0, batch_size=8, model=model, **options)
    return policy


@pytest.mark.parametrize("cls", [RecurrentMAPPOPolicy, MAPPOPolicy])
def test_a_team_learns_simple_spread_together(cls: Any) -> None:
    game = game_of("simple_spread_v3", SPREAD)
    policy = made(cls, game, "all")
    rows = trained(game, {"all": policy})["all"]
    assert rows["action"].shape == (12, 2, 3)
    assert rows["obs"]["state"].shape == (12, 2, 54)
    assert rows["truncated"].any() and not rows["terminated"].any()
    if cls is RecurrentMAPPOPolicy:
        goes_on = ~rows["done"][:-1]
        assert torch.equal(rows["prev_action"][1:][goes_on], rows["action"][:-1][goes_on])
    logged = []
    eval_envs = against(game_of("simple_spread_v3", SPREAD), "all", {}).joint
    with Task(OnlineRLContext(), seed=0) as task:
        task.use(InteractionEvaluator(policy, eval_envs, n_episode=2))
        task.use(lambda ctx: logged.append(ctx.eval_value))
        task.run(max_step=1)
    assert logged[0] < 0


@pytest.mark.parametrize(
    ("good", "bad", "continuous"),
    [
        (RecurrentMAPPOPolicy, R2D2Policy, False),
        (QMIXPolicy, RecurrentPPOPolicy, False),
        (RecurrentIPPOPolicy, RecurrentSACPolicy, True),
    ],
)
def test_teams_with_memories_learn_simple_adversary_against_each_other(
    good: Any, bad: Any, continuous: bool
) -> None:
    game = game_of("simple_adversary_v3", ADVERSARY, continuous_actions=continuous)
    policies = {"good": made(good, game, "good"), "bad": made(bad, game, "bad")}
    rows = trained(game, policies)
    n_steps = len(rows["good"]["done"])
    assert rows["good"]["obs"]["agents"].shape == (n_steps, 2, 2, 10)
    assert rows["bad"]["obs"].shape == (n_steps, 2, 8)
    # All act at the same time, so their episodes end together.
    assert torch.equal(rows["good"]["done"], rows["bad"]["done"])


def test_agents_that_take_turns_learn_simple_adversary_with_memories() -> None:
    game = game_of("simple_adversary_v3", ADVERSARY, turns=True)
    policies = {
        "good": made(RecurrentPPOPolicy, game, "good"),
        "bad": made(R2D2Policy, game, "bad"),
    }
    rows = trained(game, policies, n_sample=12)
    assert rows["good"]["obs"].shape == (6, 4, 10)  # a lane for each agent of both games
    assert rows["bad"]["obs"].shape[-1] == 8


@pytest.mark.parametrize(
    ("good", "bad"), [(MAPPOPolicy, R2D2Policy), (RecurrentMAPPOPolicy, QMIXPolicy)]
)
def test_a_team_that_takes_turns_learns_simple_adversary_as_one(good: Any, bad: Any) -> None:
    game = game_of("simple_adversary_v3", ADVERSARY, turns=True)
    policies = {"good": made(good, game, "good"), "bad": made(bad, game, "bad")}
    rows = trained(game, policies)["good"]
    assert rows["action"].shape[-1] == 2
    allowed = rows["obs"]["action_mask"]
    assert allowed.gather(-1, rows["action"].unsqueeze(-1)).all()
    # One of them moves, and the other waits.
    waits = rows["action"] == allowed.shape[-1] - 1
    assert (waits.sum(-1) == 1).all()
    assert rows["truncated"].any() and not rows["terminated"].any()


@pytest.mark.parametrize("cls", [MAPPOPolicy, QMIXPolicy, RecurrentQMIXPolicy])
def test_partners_at_a_card_table_learn_as_one_and_play_by_its_rules(cls: Any) -> None:
    pytest.importorskip("rlcard")
    illegal = []

    def make() -> Any:
        table = pettingzoo.make("aec", "classic/texas_holdem-v4", num_players=4)
        step = table.unwrapped.step
        table.unwrapped.step = lambda move: (illegal.append(is_illegal(table, move)), step(move))
        return table

    def is_illegal(table: Any, move: Any) -> bool:
        if move is None:
            return False
        return not table.observe(table.agent_selection)["action_mask"][move]

    game = make_game(make, teams={"us": "player_[02]", "them": "player_[13]"}, env_num=2, seed=0)
    rows = trained(game, {"us": made(cls, game, "us"), "them": made(PPOPolicy, game, "them")})
    ours = rows["us"]
    assert len(illegal) > 50 and not any(illegal)
    assert ours["done"].any()
    # Partners win and lose each for themselves; all that they do is known by the end of a hand.
    assert (ours["reward"][~ours["done"]] == 0).all() and (ours["reward"] != 0).any()


@pytest.mark.parametrize("cls", [MAPPOPolicy, IPPOPolicy, QMIXPolicy])
def test_a_team_learns_a_task_in_which_one_acts_for_the_other(cls: Any) -> None:
    game = make_game(Telephone, teams={"all": "*"}, env_num=16, seed=0)
    others = make_game(Telephone, teams={"all": "*"}, env_num=16, seed=1)
    envs = against(others, "all", {}).joint
    with Task(OnlineRLContext(), seed=0) as task:
        if cls.on_policy:
            policy = cls.for_env(game["all"], seed=0, learning_rate=1e-3, batch_size=128)
            task.use(TeamCollector(game, {"all": policy}, n_sample=512))
            for part in learners_of("all", policy):
                task.use(part)
            task.run(max_step=10)
        else:
            eps = Schedule.linear(1.0, 0.05, decay=3000)
            policy = cls.for_env(game["all"], seed=0, eps=eps, target_update_freq=100)
            buffer = TensorBuffer(10_000, seed=0)
            task.use(EpsGreedyHandler(policy, name="all"))
            task.use(TeamCollector(game, {"all": policy}, n_sample=64))
            task.use(DataPusher(buffer, name="all"))
            task.use(OffPolicyLearner(policy, buffer, update_per_collect=8, name="all"))
            task.run(max_step=100)
    with envs:
        returns = evaluate_episodes(policy, envs, 64).get_episode_return()
    assert sum(returns) / len(returns) > 0.9  # chance: 1/9
