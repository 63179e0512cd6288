"""The commander of a training with one learner."""

import json
import re
from pathlib import Path

import pytest

from dmiddleware.errors import ConfigError
from dmiddleware.worker import SoloCommander, create_parallel_commander
from tests.dmiddleware.worker.commander.now import Now

ID = r"[A-Za-z0-9_.-]+"


def main_config(stop_value=195, **commander):
    return {
        "exp_name": "trial",
        "env": {
            "id": "CartPole-v1",
            "collector_env_num": 4,
            "collector_episode_num": 2,
            "evaluator_env_num": 5,
            "evaluator_episode_num": 1,
            "stop_value": stop_value,
            "seed": 0,
        },
        "policy": {
            "type": "dqn_command",
            "model": {"obs_shape": 4, "action_shape": 2},
            "other": {
                "eps": {"type": "linear", "start": 1.0, "end": 0.0, "decay": 1000},
                "replay_buffer": {"type": "naive"},
                "commander": {"type": "solo", "eval_interval": 60, **commander},
            },
        },
    }


@pytest.fixture
def commander(now):
    made = SoloCommander(main_config(collector_task_space=3), clock=now)
    yield made
    made.close()
    made.close()


RESULT = {
    "train_iter": 12,
    "real_episode_count": 5,
    "step_count": 400,
    "avg_step_per_episode": 80.0,
    "avg_time_per_step": 0.25,
    "avg_time_per_episode": 20.0,
    "reward_mean": 80.5,
    "reward_std": 3.5,
}


def test_nothing_is_collected_before_a_learner_has_buffer_and_policy(commander):
    assert commander.get_collector_task() is None
    learner = commander.get_learner_task()
    task = commander.get_collector_task()
    assert task["buffer_id"] == learner["buffer_id"]
    assert task["collector_cfg"]["policy_update_path"] == learner["policy_id"]
    assert re.fullmatch("collector_task_" + ID, task["task_id"])
    assert re.fullmatch("policy_" + ID, learner["policy_id"])
    assert re.fullmatch("buffer_" + ID, learner["buffer_id"])
    assert json.loads(json.dumps([task, learner])) == [task, learner]


def test_the_first_task_evaluates_and_then_one_in_each_interval(commander, now):
    commander.get_learner_task()
    flags = []
    for now.s in (0.0, 1.0, 59.9, 60.0, 61.0, 300.0):
        task = commander.get_collector_task()
        flags.append(task["collector_cfg"]["eval_flag"])
        commander.finish_collector_task(task["task_id"], {"eval_flag": False})
    assert flags == [True, False, False, True, False, True]


def test_evaluators_and_collectors_play_in_their_own_envs(commander):
    commander.get_learner_task()
    evaluator, collector = (commander.get_collector_task()["collector_cfg"] for _ in range(2))
    assert (evaluator["env"]["env_num"], evaluator["env"]["manager"]) == (5, {"episode_num": 1})
    assert (collector["env"]["env_num"], collector["env"]["manager"]) == (4, {"episode_num": 2})
    assert evaluator["collect_setting"] == {}
    assert collector["collect_setting"] == {"eps": 1.0}


def test_the_episodes_of_an_evaluation_are_shared_by_its_envs():
    cfg = main_config()
    del cfg["env"]["evaluator_episode_num"]
    cfg["env"]["n_evaluator_episode"] = 11
    commander = SoloCommander(cfg)
    commander.get_learner_task()
    env = commander.get_collector_task()["collector_cfg"]["env"]
    assert (env["env_num"], env["manager"]) == (5, {"episode_num": 3})


def test_exploration_follows_the_steps_of_all_collectors(commander):
    commander.get_learner_task()
    commander.get_collector_task()
    for steps in (100, 150):
        task = commander.get_collector_task()
        commander.finish_collector_task(task["task_id"], {"eval_flag": False, "step_count": steps})
    commander.finish_collector_task("evaluation", {"eval_flag": True, "step_count": 999})
    assert commander.envstep == 250
    assert commander.get_collector_task()["collector_cfg"]["collect_setting"]["eps"] == 0.75


def test_an_evaluation_at_stop_value_ends_the_training(commander):
    commander.get_learner_task()
    commander.get_collector_task()
    result = {"eval_flag": True, "reward_mean": 194.9, "step_count": 1}
    assert commander.finish_collector_task("a", result) is False
    assert commander.finish_collector_task("b", {**result, "eval_flag": False}) is False
    assert commander.finish_collector_task("c", {**result, "reward_mean": None}) is False
    assert commander.finish_collector_task("d", {**result, "reward_mean": 195.0}) is True
    assert commander.get_collector_task() is None
    assert commander.get_learner_task() is None
    assert commander.finish_collector_task("e", result) is True


def test_without_stop_value_the_training_never_ends_by_itself():
    commander = SoloCommander(main_config(stop_value=None))
    result = {"eval_flag": True, "reward_mean": 1e9}
    assert commander.finish_collector_task("a", result) is False
    commander.close()


def test_a_finished_learner_takes_its_buffer_and_progress_along(commander, now):
    first = commander.get_learner_task()
    commander.get_collector_task()
    commander.update_learner_info(first["task_id"], {"learner_step": 7})
    result = {"buffer_id": first["buffer_id"]}
    assert commander.finish_learner_task(first["task_id"], result) == first["buffer_id"]
    assert commander.get_collector_task() is None
    second = commander.get_learner_task()
    assert second["buffer_id"] != first["buffer_id"]
    assert commander.get_collector_task()["collector_cfg"]["eval_flag"] is True
    assert commander.state_dict()["learner_info"] == {"learner_step": 0}
    # A second report about the first learner changes nothing.
    assert commander.finish_learner_task(first["task_id"], result) == first["buffer_id"]
    assert commander.get_collector_task()["buffer_id"] == second["buffer_id"]


def test_a_failed_learner_gets_a_successor_with_another_buffer(commander):
    first = commander.get_learner_task()
    commander.notify_fail_learner_task(first)
    assert commander.get_collector_task() is None
    assert commander.get_learner_task()["buffer_id"] != first["buffer_id"]


def test_results_are_logged_by_iteration_and_by_step(commander, monkeypatch):
    written = {}

    def record(self, tag, value, step):
        written[tag] = (value, step)

    monkeypatch.setattr("dmiddleware.tensorboard.TensorboardWriter.add_scalar", record)
    commander.finish_collector_task("a", {**RESULT, "eval_flag": False})
    commander.finish_collector_task("b", {**RESULT, "eval_flag": True, "train_iter": [20, 0]})
    wanted = {
        "episode_count": 5,
        "step_count": 400,
        "avg_step_per_episode": 80.0,
        "avg_time_per_step": 0.25,
        "avg_time_per_episode": 20.0,
        "reward_mean": 80.5,
        "reward_std": 3.5,
    }
    places = {"collector_iter": 12, "evaluator_iter": 20}
    places |= {"collector_step": 400, "evaluator_step": 400}
    assert written == {
        f"{prefix}/{name}": (value, at)
        for prefix, at in places.items()
        for name, value in wanted.items()
    }
    log = Path("trial/log/commander/commander_logger.txt").read_text()
    assert "evaluator: iteration 20" in log


def test_a_state_continues_in_another_process(commander, now):
    now.s = 100.0
    learner = commander.get_learner_task()
    commander.get_collector_task()
    task = commander.get_collector_task()
    commander.update_learner_info(learner["task_id"], {"learner_step": 7, "priority_info": {}})
    commander.finish_collector_task(task["task_id"], {"eval_flag": False, "step_count": 500})
    now.s = 130.0
    state = json.loads(json.dumps(commander.state_dict()))

    later = Now()
    other = SoloCommander(main_config(), clock=later)
    other.load_state_dict(state)
    assert other.get_learner_task() is None
    assert other.envstep == 500
    task = other.get_collector_task()
    assert task["buffer_id"] == learner["buffer_id"]
    assert task["collector_cfg"]["eval_flag"] is False
    assert task["collector_cfg"]["collect_setting"]["eps"] == 0.5
    later.s = 30.0
    assert other.get_collector_task()["collector_cfg"]["eval_flag"] is True
    assert other.state_dict()["learner_info"] == {"learner_step": 7}


def test_a_policy_without_a_command_mode_is_collected_without_settings():
    cfg = main_config()
    cfg["policy"] = {
        "type": "solo_test_policy",
        "other": {"commander": {"type": "solo"}},
    }
    from dmiddleware.classic import Policy
    from dmiddleware.policy import POLICY_REGISTRY

    class Plain(Policy):
        pass

    POLICY_REGISTRY.register("solo_test_policy")(Plain)
    commander = create_parallel_commander(cfg)
    assert isinstance(commander, SoloCommander)
    commander.get_learner_task()
    assert commander.get_collector_task()["collector_cfg"]["collect_setting"] == {}


def test_a_policy_that_cannot_be_built_is_refused_at_once():
    cfg = main_config()
    cfg["policy"]["learn"] = {"batchsize": 3}
    with pytest.raises(ConfigError, match="batch_size"):
        SoloCommander(cfg)
