from __future__ import annotations

import math

import pytest
from torch import nn

from dmiddleware.env import make_env_manager
from dmiddleware.errors import ConfigError
from dmiddleware.worker import BattleInteractionSerialEvaluator, create_serial_evaluator
from tests.dmiddleware.battle_envs import InTurns, Together, battle_envs
from tests.dmiddleware.counting_fixtures import CountingPolicy


class Varied(Together):
    """Player 0 wins in even episodes, and in the others the game is a draw by its result."""

    def step(self, actions):
        *result, infos = super().step(actions)
        if self.episode % 2:
            infos[0]["result"] = "draws"
        return *result, infos


def players(n=2):
    return [CountingPolicy({}, nn.Linear(4, 2)).eval_mode for _ in range(n)]


@pytest.fixture
def evaluator(tmp_path):
    made = []

    def make(envs=None, policy=None, **cfg):
        envs = battle_envs(Varied, lengths=(2, 4)) if envs is None else envs
        policy = players(envs.n_player) if policy is None else policy
        made.append(BattleInteractionSerialEvaluator(cfg, envs, policy, exp_name=str(tmp_path)))
        return made[-1]

    yield make
    for one in made:
        one.close()


def logged(folder):
    lines = (folder / "log" / "evaluator" / "evaluator_logger.txt").read_text().splitlines()
    values = {}
    for names, row in zip(lines[1::2], lines[2::2], strict=False):
        values |= dict(zip(names.split(), row.split(), strict=False))
    return values


def test_each_player_gets_the_infos_of_all_episodes(evaluator, tmp_path):
    stop, infos = evaluator(n_episode=5).eval(train_iter=3)
    assert not stop
    assert [[info["eval_episode_return"] for info in own] for own in infos] == [
        [2.0, 2.0, 4.0, 4.0, 2.0],
        [-2.0, -2.0, -4.0, -4.0, -2.0],
    ]
    assert [info["player"] for info in infos[1]] == [1] * 5
    values = logged(tmp_path)
    assert values["win_rate"] == "0.6"
    assert values["draw_rate"] == "0.4"
    assert values["loss_rate"] == "0"
    assert values["reward_mean"] == "2.8"
    assert values["reward_max"] == "4"
    assert values["envstep_count"] == "14"
    assert values["episode_count"] == "5"


def test_the_best_mean_return_of_player_0_is_saved(evaluator):
    saved = []
    worker = evaluator(battle_envs(lengths=(2,)), n_episode=2)
    assert worker.best_return == -math.inf
    worker.eval(saved.append)
    worker.eval(saved.append)
    assert saved == ["ckpt_best.safetensors"]
    assert worker.best_return == 2.0
    worker.reset_env(battle_envs(lengths=(3,)))
    worker.eval(saved.append)
    assert len(saved) == 2
    worker.reset()
    assert worker.best_return == -math.inf


def test_it_stops_at_the_stop_value_after_training(evaluator):
    worker = evaluator(battle_envs(InTurns, 1, lengths=(3,)), n_episode=1, stop_value=3.0)
    assert not worker.eval(train_iter=0)[0]
    assert worker.eval(train_iter=1)[0]
    assert not evaluator(n_episode=2, stop_value=99).eval(train_iter=1)[0]


def test_three_players_can_be_evaluated(evaluator):
    envs = battle_envs(InTurns, 2, n_player=3, lengths=(4,))
    _, infos = evaluator(envs).eval(n_episode=2)
    assert [own[0]["eval_episode_return"] for own in infos] == [4.0, 40.0, 400.0]


def test_other_policies_can_be_evaluated(evaluator):
    worker = evaluator(n_episode=2)
    mine = players()
    worker.reset_policy(mine)
    assert [mode.spec for mode in worker.policy] == [one.spec for one in mine]
    worker.reset_policy()
    worker.eval()


def test_its_state_can_be_restored(evaluator):
    worker, other = evaluator(n_episode=2), evaluator(n_episode=2)
    worker.should_eval(50)
    worker.eval()
    other.load_state_dict(worker.state_dict())
    assert other.best_return == worker.best_return
    assert not other.should_eval(60)
    assert other.should_eval(100)


def test_what_does_not_fit_is_refused(evaluator):
    with pytest.raises(ConfigError, match="two or more policies"):
        evaluator(policy=players(1))
    with pytest.raises(ConfigError, match="takes a BattleEnvManager"):
        BattleInteractionSerialEvaluator({}, make_env_manager("CartPole-v1", env_num=1), players())
    with pytest.raises(ConfigError, match=r"eval\(n_episode="):
        evaluator().eval()
    with pytest.raises(ConfigError, match="cannot be spread"):
        evaluator().eval(n_episode=1)
    with pytest.raises(ConfigError, match="save_ckpt_fn"):
        evaluator().eval("best")


def test_it_is_created_by_name_with_the_classic_defaults():
    worker = create_serial_evaluator({"type": "battle_interaction"})
    assert type(worker) is BattleInteractionSerialEvaluator
    assert dict(worker.default_config()) == {
        "eval_freq": 50,
        "n_episode": None,
        "stop_value": None,
        "log_to_file": True,
        "cfg_type": "BattleInteractionSerialEvaluatorDict",
    }
