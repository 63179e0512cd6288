"""The commander of a training by self-play."""

import json

import pytest
import torch

from dmiddleware.data import save_checkpoint
from dmiddleware.errors import ConfigError
from dmiddleware.worker import OneVsOneCommander, create_parallel_commander

ME = "naive_sp_player_default_0"


def main_config(folder, stop_value=0.8, **league):
    options = {"eval_opponent_difficulty": ["easy", "hard"], "one_phase_step": 5}
    return {
        "exp_name": str(folder / "trial"),
        "env": {
            "collector_id": "games:make_game",
            "evaluator_id": "Solo-v0",
            "kwargs": {"size": 3},
            "stop_value": stop_value,
        },
        "policy": {
            "type": "dqn_command",
            "model": {"obs_shape": 4, "action_shape": 2},
            "collect": {"collector": {"type": "marine"}},
            "other": {
                "commander": {
                    "type": "one_vs_one",
                    "league": {"path_policy": str(folder), "naive_sp_player": options, **league},
                },
            },
        },
    }


@pytest.fixture
def commander(tmp_path, now):
    made = create_parallel_commander(main_config(tmp_path), clock=now)
    assert isinstance(made, OneVsOneCommander)
    yield made
    made.close()


def publish(folder, name):
    state = {"model": {"w": torch.zeros(1)}, "iter": 0}
    save_checkpoint(folder / f"{name}.safetensors", {"version": 0, "state": state})


def evaluation(*results, reward_mean=0.0):
    return {
        "eval_flag": True,
        "game_result": [list(results)],
        "reward_mean": reward_mean,
        "train_iter": [4],
        "step_count": 9,
    }


def test_the_first_task_evaluates_one_policy_against_the_easiest_opponent(commander):
    learner = commander.get_learner_task()
    assert learner["league_save_checkpoint_path"] == learner["policy_id"]
    cfg = commander.get_collector_task()["collector_cfg"]
    assert cfg["eval_flag"] is True
    assert cfg["env"]["id"] == "Solo-v0"
    assert cfg["env"]["kwargs"] == {"size": 3, "eval_opponent": "easy"}
    assert cfg["policy_update_path"] == [learner["policy_id"]]
    assert cfg["policy_update_flag"] == [True]
    assert cfg["collect_setting"] == [{}]
    assert [one["type"] for one in cfg["policy"]] == ["dqn_command"]


def test_two_policies_play_when_collecting(commander):
    learner = commander.get_learner_task()
    commander.get_collector_task()
    task = commander.get_collector_task()
    cfg = task["collector_cfg"]
    assert cfg["eval_flag"] is False
    assert cfg["env"]["id"] == "games:make_game"
    assert cfg["env"]["kwargs"] == {"size": 3}
    assert cfg["policy_update_path"] == [learner["policy_id"]] * 2
    assert cfg["policy_update_flag"] == [True, True]
    assert cfg["collect_setting"] == [{"eps": 1.0}] * 2
    assert len(cfg["policy"]) == 2
    assert commander.get_collector_task() is None
    assert json.loads(json.dumps(task)) == task


def test_a_marine_collector_takes_the_tasks(commander):
    from dmiddleware.worker.collector.parallel import get_parallel_collector_cls

    commander.get_learner_task()
    for _ in range(2):
        cfg = commander.get_collector_task()["collector_cfg"]
        get_parallel_collector_cls(cfg).merged_config(cfg)


def test_the_player_becomes_an_opponent_as_it_learns(commander, tmp_path):
    learner = commander.get_learner_task()
    publish(tmp_path, learner["policy_id"])
    commander.update_learner_info(learner["task_id"], {"learner_step": 9})
    assert commander.league.historical_players == []
    commander.update_learner_info(learner["task_id"], {"learner_step": 10})
    (snapshot,) = commander.league.historical_players
    assert (tmp_path / f"{snapshot.checkpoint_path}.safetensors").is_file()
    commander.update_learner_info(learner["task_id"], {"priority_info": {}})

    commander.finish_learner_task(learner["task_id"], {"buffer_id": learner["buffer_id"]})
    assert len(commander.league.historical_players) == 2


def test_games_against_snapshots_are_counted(tmp_path):
    cfg = main_config(tmp_path, naive_sp_player={"branch_probs": {"pfsp": 1.0, "sp": 0.0}})
    commander = OneVsOneCommander(cfg)
    learner = commander.get_learner_task()
    publish(tmp_path, learner["policy_id"])
    commander.league.judge_snapshot(ME, force=True)
    (snapshot,) = commander.league.historical_players
    commander.get_collector_task()
    task = commander.get_collector_task()
    assert task["collector_cfg"]["policy_update_flag"] == [True, False]
    result = {"eval_flag": False, "game_result": [["wins"], ["wins", "losses"]], "step_count": 30}
    assert commander.finish_collector_task(task["task_id"], result) is False
    assert commander.league.payoff.record(ME, snapshot.player_id)["games"] > 2
    assert commander.league.player_rank()[ME] > 1000
    assert commander.envstep == 30
    commander.close()


def evaluate(commander, now, result):
    now.s += 60.0
    task = commander.get_collector_task()
    assert task["collector_cfg"]["eval_flag"]
    is_over = commander.finish_collector_task(task["task_id"], result)
    return is_over, task["collector_cfg"]["env"]["kwargs"]["eval_opponent"]


def test_the_training_ends_at_stop_value_against_the_hardest_opponent(commander, now):
    commander.get_learner_task()
    narrow = evaluation(*["wins"] * 7, *["losses"] * 3, reward_mean=0.9)
    clear = evaluation(*["wins"] * 8, *["losses"] * 2, reward_mean=0.9)
    assert evaluate(commander, now, narrow) == (False, "easy")
    assert evaluate(commander, now, clear) == (False, "easy")
    assert evaluate(commander, now, evaluation(*["wins"] * 10, reward_mean=0.7)) == (False, "hard")
    assert evaluate(commander, now, evaluation()) == (False, "hard")
    assert evaluate(commander, now, clear) == (True, "hard")


def test_results_of_unknown_jobs_do_not_count(commander):
    commander.get_learner_task()
    assert commander.finish_collector_task("late", evaluation("wins", reward_mean=9.0)) is False
    assert not commander.league.is_hardest(ME)


def test_a_failed_task_gives_its_job_and_its_place_back(commander):
    commander.get_learner_task()
    commander.get_collector_task()
    task = commander.get_collector_task()
    assert commander.get_collector_task() is None
    commander.notify_fail_collector_task(task)
    assert task["task_id"] not in commander.state_dict()["jobs"]
    assert commander.get_collector_task() is not None


def test_a_state_continues_in_another_process(commander, tmp_path):
    learner = commander.get_learner_task()
    publish(tmp_path, learner["policy_id"])
    commander.update_learner_info(learner["task_id"], {"learner_step": 10})
    task = commander.get_collector_task()
    other = OneVsOneCommander(main_config(tmp_path))
    other.load_state_dict(json.loads(json.dumps(commander.state_dict())))
    clear = evaluation(*["wins"] * 10)
    other.finish_collector_task(task["task_id"], clear)
    assert other.league.is_hardest(ME)
    assert len(other.league.historical_players) == 1
    other.close()


def test_a_pretrained_player_starts_from_its_checkpoint(tmp_path):
    league = {"use_pretrain": True, "pretrain_checkpoint_path": {"default": "start.safetensors"}}
    commander = OneVsOneCommander(main_config(tmp_path, **league))
    hook = commander.get_learner_task()["learner_cfg"]["hook"]
    assert hook == {"load_ckpt_before_run": "start.safetensors"}


def test_a_league_with_several_learning_players_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="one player"):
        OneVsOneCommander(main_config(tmp_path, active_players={"naive_sp_player": 2}))
    with pytest.raises(ConfigError, match="pfsp"):
        OneVsOneCommander(main_config(tmp_path, naive_sp_player={"branch_probs": {"pfps": 1}}))
