"""What all parallel commanders share, shown with the naive one."""

import json

import pytest

from dmiddleware.errors import ConfigError, RegistryError
from dmiddleware.worker import (
    BaseParallelCommander,
    NaiveCommander,
    create_parallel_commander,
    get_parallel_commander_cls,
)
from dmiddleware.worker.commander import COMMANDER_REGISTRY


def main_config(env=(), **commander):
    return {
        "exp_name": "trial",
        "env": {"id": "CartPole-v1", **dict(env)},
        "policy": {
            "type": "dqn",
            "learn": {"learner": {"train_iterations": 9}},
            "collect": {"collector": {"type": "zergling", "print_freq": 7}},
            "other": {
                "replay_buffer": {"type": "naive", "replay_buffer_size": 100},
                "commander": {"type": "naive", **commander},
            },
        },
    }


def naive(env=(), **commander):
    return NaiveCommander(main_config(env, **commander))


def test_a_collector_task_has_all_that_a_collector_needs():
    task = naive().get_collector_task()
    assert task == {
        "task_id": "collector_task_0",
        "buffer_id": "buffer_naive",
        "collector_cfg": {
            "type": "zergling",
            "print_freq": 7,
            "collect_setting": {"eps": 0.9},
            "eval_flag": False,
            "policy": main_config()["policy"],
            "policy_update_path": "policy_naive",
            "env": {"id": "CartPole-v1", "env_num": 1, "manager": {}},
            "exp_name": "trial",
        },
    }
    assert json.loads(json.dumps(task)) == task
    assert type(task["collector_cfg"]["policy"]) is dict


def test_a_learner_task_has_all_that_a_learner_needs():
    task = naive().get_learner_task()
    assert task == {
        "task_id": "learner_task_0",
        "policy_id": "policy_naive",
        "buffer_id": "buffer_naive",
        "learner_cfg": {"train_iterations": 9, "exp_name": "trial"},
        "replay_buffer_cfg": {"type": "naive", "replay_buffer_size": 100},
        "policy": main_config()["policy"],
    }
    assert type(task["policy"]["other"]) is dict


def test_changing_a_task_does_not_change_the_next_one():
    commander = naive(collector_task_space=2)
    first = commander.get_collector_task()
    first["collector_cfg"]["policy"]["learn"]["learner"]["train_iterations"] = 0
    second = commander.get_collector_task()
    assert second["task_id"] == "collector_task_1"
    assert second["collector_cfg"]["policy"]["learn"]["learner"]["train_iterations"] == 9


def test_only_as_many_tasks_run_as_there_is_space():
    commander = naive(collector_task_space=2)
    tasks = [commander.get_collector_task() for _ in range(3)]
    assert tasks[2] is None
    assert commander.finish_collector_task(tasks[0]["task_id"], {}) is False
    assert commander.get_collector_task() is not None
    commander.notify_fail_collector_task(tasks[1])
    assert commander.get_collector_task() is not None
    assert commander.get_collector_task() is None


def test_a_finished_learner_task_names_its_buffer_and_gives_its_place_back():
    commander = naive()
    task = commander.get_learner_task()
    assert commander.get_learner_task() is None
    assert commander.finish_learner_task(task["task_id"], {"buffer_id": "b"}) == "b"
    again = commander.get_learner_task()
    commander.notify_fail_learner_task(again)
    assert commander.get_learner_task() is not None


def test_places_given_back_too_often_are_not_counted():
    commander = naive()
    commander.finish_collector_task("unknown", {})
    commander.notify_fail_collector_task({})
    assert commander.get_collector_task() is not None
    assert commander.get_collector_task() is None


def test_a_smaller_task_space_takes_effect_when_tasks_end():
    commander = naive(collector_task_space=2)
    tasks = [commander.get_collector_task() for _ in range(2)]
    commander.decrease_collector_task_space()
    commander.finish_collector_task(tasks[0]["task_id"], {})
    assert commander.get_collector_task() is None
    commander.finish_collector_task(tasks[1]["task_id"], {})
    assert commander.get_collector_task() is not None
    assert commander.get_collector_task() is None


def test_a_task_space_shrinks_to_none_and_grows_again():
    commander = naive()
    commander.decrease_collector_task_space()
    commander.decrease_collector_task_space()
    assert commander.get_collector_task() is None
    commander.increase_collector_task_space()
    assert commander.get_collector_task() is not None


def test_the_workers_judge_whether_they_are_done():
    commander = naive()
    assert commander.judge_collector_finish("c", {"collector_done": True}) is True
    assert commander.judge_collector_finish("c", {"collector_done": False}) is False
    assert commander.judge_learner_finish("l", {"learner_done": True}) is True
    assert commander.judge_learner_finish("l", {"learner_step": 3}) is False
    commander.update_learner_info("l", {"learner_step": 3})
    commander.close()


def test_a_state_continues_in_another_commander():
    commander = naive(collector_task_space=2)
    commander.get_collector_task()
    commander.get_learner_task()
    state = json.loads(json.dumps(commander.state_dict()))
    other = naive(collector_task_space=9)
    other.load_state_dict(state)
    assert other.get_learner_task() is None
    assert other.get_collector_task()["task_id"] == "collector_task_1"
    assert other.get_collector_task() is None


@pytest.mark.parametrize(
    ("env", "env_num", "episode_num"),
    [
        ({"collector_env_num": 8, "collector_episode_num": 2}, 8, 2),
        ({"env_num": 3, "manager": {"episode_num": 4}}, 3, 4),
        ({"collector_env_num": 2, "n_evaluator_episode": 9}, 2, None),
    ],
)
def test_a_collector_plays_in_its_own_number_of_envs(env, env_num, episode_num):
    task_env = naive(env).get_collector_task()["collector_cfg"]["env"]
    assert (task_env["env_num"], task_env["manager"].get("episode_num")) == (env_num, episode_num)


def test_each_task_plays_other_episodes():
    commander = naive({"seed": 5}, collector_task_space=2)
    seeds = {commander.get_collector_task()["collector_cfg"]["env"]["seed"] for _ in range(2)}
    assert len(seeds) == 2
    assert naive({"seed": 5}).get_collector_task()["collector_cfg"]["env"]["seed"] in seeds


def test_commanders_are_created_by_name():
    assert isinstance(create_parallel_commander(main_config()), NaiveCommander)
    assert get_parallel_commander_cls(main_config()) is NaiveCommander
    with pytest.raises(RegistryError, match="naive"):
        create_parallel_commander(main_config(type="naiv"))
    with pytest.raises(ConfigError, match="type"):
        create_parallel_commander({"policy": {}})


def test_a_custom_commander_is_found_through_its_module(tmp_path, monkeypatch):
    (tmp_path / "own_commander.py").write_text(
        "from dmiddleware.worker import NaiveCommander\n"
        "from dmiddleware.worker.commander import COMMANDER_REGISTRY\n"
        "@COMMANDER_REGISTRY.register('own')\n"
        "class OwnCommander(NaiveCommander): pass\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    cfg = main_config(type="own", import_names=["own_commander"])
    assert type(create_parallel_commander(cfg)).__name__ == "OwnCommander"
    assert "own" in COMMANDER_REGISTRY


@pytest.mark.parametrize(
    ("cfg", "word"),
    [
        ({"collector_task_space": 2}, "main config"),
        (None, "main config"),
        (main_config(collector_task_spce=1), "collector_task_space"),
        (main_config(eval_interval=0), "eval_interval"),
    ],
)
def test_an_unusable_config_is_refused(cfg, word):
    with pytest.raises(ConfigError, match=word):
        NaiveCommander(cfg)


def test_defaults_are_those_of_the_classic_commanders():
    assert NaiveCommander.default_config() == {
        "collector_task_space": 1,
        "learner_task_space": 1,
        "eval_interval": 60.0,
        "cfg_type": "NaiveCommanderDict",
    }
    with pytest.raises(TypeError):
        BaseParallelCommander(main_config())
