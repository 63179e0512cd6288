"""Opponents, snapshots and evaluations of a league."""

import json
from collections import Counter

import pytest
import torch

from dmiddleware.data import load_checkpoint, save_checkpoint
from dmiddleware.errors import CheckpointDamaged, ConfigError
from dmiddleware.worker import OneVsOneLeague

ME = "naive_sp_player_default_0"
CKPT = f"{ME}_ckpt"


def league(folder, **cfg):
    return OneVsOneLeague({"path_policy": str(folder), "seed": 0, **cfg})


def publish(folder, value, name=CKPT):
    state = {"model": {"w": torch.tensor([float(value)])}, "iter": value}
    save_checkpoint(folder / f"{name}.safetensors", {"version": value, "state": state})


def learn(made, iterations, player_id=ME):
    made.update_active_player({"player_id": player_id, "train_iteration": iterations})


def with_snapshots(folder, n, **cfg):
    made = league(folder, **cfg)
    for number in range(n):
        publish(folder, number)
        learn(made, 20 * (number + 1))
        assert made.judge_snapshot(ME)
    return made


def beat(made, snapshot, result, n=10):
    made.finish_job({"player_id": [ME, snapshot.player_id], "result": [[result] * n]})


def test_defaults_are_those_of_the_classic_league():
    assert OneVsOneLeague.default_config() == {
        "player_category": ["default"],
        "active_players": {"naive_sp_player": 1},
        "naive_sp_player": {
            "one_phase_step": 10,
            "branch_probs": {"pfsp": 0.5, "sp": 0.5},
            "strong_win_rate": 0.7,
            "eval_opponent_difficulty": [None],
        },
        "use_pretrain": False,
        "use_pretrain_init_historical": False,
        "pretrain_checkpoint_path": {},
        "payoff": {"type": "battle", "decay": 0.99, "min_win_rate_games": 8},
        "path_policy": "./policy",
        "seed": None,
        "cfg_type": "OneVsOneLeagueDict",
    }


def test_without_snapshots_a_player_plays_against_itself(tmp_path):
    for probs in ({"pfsp": 1.0, "sp": 0.0}, {"pfsp": 0.0, "sp": 1.0}):
        made = league(tmp_path, naive_sp_player={"branch_probs": probs})
        assert made.get_job_info(ME) == {
            "agent_num": 2,
            "launch_player": ME,
            "player_id": [ME, ME],
            "checkpoint_path": [CKPT, CKPT],
            "player_active_flag": [True, True],
        }


def test_branch_probs_divide_self_play_and_snapshots(tmp_path):
    made = with_snapshots(tmp_path, 1, naive_sp_player={"branch_probs": {"pfsp": 0.75, "sp": 0.25}})
    (snapshot,) = made.historical_players
    jobs = [made.get_job_info(ME) for _ in range(2000)]
    drawn = Counter(job["player_id"][1] for job in jobs)
    assert drawn[snapshot.player_id] / 2000 == pytest.approx(0.75, abs=0.05)
    job = next(job for job in jobs if job["player_id"][1] != ME)
    assert job["checkpoint_path"] == [CKPT, snapshot.checkpoint_path]
    assert job["player_active_flag"] == [True, False]


def test_a_player_meets_those_more_often_whom_it_cannot_beat(tmp_path):
    probs = {"branch_probs": {"pfsp": 1.0, "sp": 0.0}}
    made = with_snapshots(tmp_path, 3, naive_sp_player=probs, payoff={"decay": 1.0})
    beaten, equal, stronger = made.historical_players
    beat(made, beaten, "wins")
    beat(made, stronger, "losses")
    drawn = Counter(made.get_job_info(ME)["player_id"][1] for _ in range(3000))
    assert drawn[beaten.player_id] == 0
    assert drawn[equal.player_id] / 3000 == pytest.approx(0.25 / 1.25, abs=0.03)
    assert drawn[stronger.player_id] / 3000 == pytest.approx(1 / 1.25, abs=0.03)


def test_a_player_that_beats_everyone_meets_all_alike(tmp_path):
    probs = {"branch_probs": {"pfsp": 1.0, "sp": 0.0}}
    made = with_snapshots(tmp_path, 2, naive_sp_player=probs)
    for snapshot in made.historical_players:
        beat(made, snapshot, "wins")
    drawn = Counter(made.get_job_info(ME)["player_id"][1] for _ in range(1000))
    assert set(drawn.values()) == {drawn.most_common()[0][1], drawn.most_common()[-1][1]}
    assert min(drawn.values()) > 400


def test_a_player_is_kept_after_two_phases(tmp_path):
    made = league(tmp_path)
    publish(tmp_path, 7)
    kept = []
    for iterations in (0, 9, 10, 19, 20, 21, 39, 40):
        learn(made, iterations)
        kept.append(made.judge_snapshot(ME))
    assert kept == [False] * 4 + [True, False, False, True]
    first, second = made.historical_players
    assert first.parent_id == ME
    assert first.player_id != second.player_id
    assert first.checkpoint_path != second.checkpoint_path


@pytest.mark.parametrize(("result", "is_kept"), [("wins", True), ("draws", False)])
def test_a_player_that_beats_all_its_snapshots_is_kept_after_one_phase(tmp_path, result, is_kept):
    made = with_snapshots(tmp_path, 2)
    beat(made, made.historical_players[0], "wins")
    beat(made, made.historical_players[1], result)
    learn(made, 49)
    assert made.judge_snapshot(ME) is False
    learn(made, 50)
    assert made.judge_snapshot(ME) is is_kept


def test_a_snapshot_keeps_the_policy_as_it_was(tmp_path):
    made = with_snapshots(tmp_path, 1)
    publish(tmp_path, 99)
    (snapshot,) = made.historical_players
    copy = load_checkpoint(tmp_path / f"{snapshot.checkpoint_path}.safetensors")
    assert (copy["version"], copy["state"]["model"]["w"].item()) == (0, 0.0)


def test_a_damaged_policy_leaves_no_snapshot(tmp_path):
    made = league(tmp_path)
    publish(tmp_path, 1)
    file = tmp_path / f"{CKPT}.safetensors"
    file.write_bytes(file.read_bytes()[:-3])
    with pytest.raises(CheckpointDamaged):
        made.judge_snapshot(ME, force=True)
    assert made.historical_players == []
    assert [path.name for path in tmp_path.iterdir()] == [file.name]


def test_a_snapshot_waits_until_the_policy_is_published(tmp_path, caplog):
    made = league(tmp_path)
    learn(made, 20)
    assert made.judge_snapshot(ME) is False
    assert "does not exist" in caplog.text
    publish(tmp_path, 1)
    assert made.judge_snapshot(ME) is True


def test_a_snapshot_can_be_forced(tmp_path):
    made = league(tmp_path)
    publish(tmp_path, 0)
    assert made.judge_snapshot(ME) is False
    assert made.judge_snapshot(ME, force=True) is True


def test_a_learner_that_starts_again_is_kept_after_its_own_phases(tmp_path):
    made = with_snapshots(tmp_path, 2)
    learn(made, 0)
    made.set_checkpoint(ME, "second")
    publish(tmp_path, 1, "second")
    learn(made, 20)
    assert made.judge_snapshot(ME) is True
    assert made.historical_players[-1].checkpoint_path.startswith("second")


def test_won_evaluations_make_the_opponent_harder(tmp_path):
    options = {"eval_opponent_difficulty": ["easy", "hard"]}
    made = league(tmp_path, naive_sp_player=options)
    job = made.get_job_info(ME, eval_flag=True)
    assert job == {
        "agent_num": 1,
        "launch_player": ME,
        "player_id": [ME],
        "checkpoint_path": [CKPT],
        "player_active_flag": [True],
        "eval_opponent": "easy",
    }
    assert made.is_hardest(ME) is False
    assert made.update_active_player({"player_id": ME, "eval_win": False}) is False
    assert made.update_active_player({"player_id": ME, "eval_win": True}) is True
    assert made.get_job_info(ME, eval_flag=True)["eval_opponent"] == "hard"
    assert made.update_active_player({"player_id": ME, "eval_win": True}) is False
    assert made.is_hardest(ME) is True


def test_ratings_rank_the_players(tmp_path):
    made = with_snapshots(tmp_path, 2)
    weak, strong = made.historical_players
    beat(made, weak, "wins")
    beat(made, strong, "losses")
    ranks = made.player_rank()
    assert list(ranks) == [strong.player_id, ME, weak.player_id]
    assert sum(ranks.values()) == pytest.approx(3000)


def test_games_with_an_unknown_result_are_refused_whole(tmp_path):
    made = with_snapshots(tmp_path, 1)
    (snapshot,) = made.historical_players
    with pytest.raises(ConfigError, match="won"):
        made.finish_job({"player_id": [ME, snapshot.player_id], "result": [["wins", "won"]]})
    assert made.payoff.record(ME, snapshot.player_id)["games"] == 0


def test_a_state_continues_in_another_process(tmp_path):
    made = with_snapshots(tmp_path, 2, naive_sp_player={"eval_opponent_difficulty": [1, 2]})
    beat(made, made.historical_players[0], "losses")
    made.update_active_player({"player_id": ME, "eval_win": True})
    other = league(tmp_path, seed=5, naive_sp_player={"eval_opponent_difficulty": [1, 2]})
    other.load_state_dict(json.loads(json.dumps(made.state_dict())))
    assert other.player_rank() == made.player_rank()
    assert [other.get_job_info(ME) for _ in range(50)] == [made.get_job_info(ME) for _ in range(50)]
    assert other.is_hardest(ME)


def test_a_pretrained_player_is_an_opponent_from_the_start(tmp_path):
    source = tmp_path / "learner.safetensors"
    save_checkpoint(source, {"model": {"w": torch.ones(1)}, "optimizer": {}, "last_iter": 3})
    made = league(
        tmp_path / "policies",
        use_pretrain=True,
        use_pretrain_init_historical=True,
        pretrain_checkpoint_path={"default": str(source)},
        naive_sp_player={"branch_probs": {"pfsp": 1.0, "sp": 0.0}},
    )
    assert made.pretrain_checkpoint(ME) == str(source)
    name = made.get_job_info(ME)["checkpoint_path"][1]
    published = load_checkpoint(tmp_path / "policies" / f"{name}.safetensors")
    assert published["version"] == 0
    assert published["state"].keys() == {"model", "iter"}
    assert league(tmp_path).pretrain_checkpoint(ME) is None


@pytest.mark.parametrize(
    ("cfg", "word"),
    [
        ({"use_pretrain": True}, "pretrain_checkpoint_path"),
        ({"naive_sp_player": {"branch_probs": {"pfsp": 0, "sp": 0}}}, "branch_probs"),
        ({"naive_sp_player": {"one_phase_step": 0}}, "one_phase_step"),
        ({"naive_sp_player": {"branch_probs": {"psfp": 1}}}, "pfsp"),
        ({"naive_sp_player": {"eval_opponent_difficulty": []}}, "eval_opponent"),
        ({"payoff": {"type": "square"}}, "payoff.type"),
        ({"player_category": []}, "player_category"),
    ],
)
def test_an_unusable_config_is_refused(cfg, word):
    with pytest.raises(ConfigError, match=word):
        OneVsOneLeague(cfg)


def test_an_unknown_player_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=ME):
        league(tmp_path).get_job_info("nobody")
