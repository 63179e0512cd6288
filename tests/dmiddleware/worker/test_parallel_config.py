"""Configs of DI-engine's parallel pipelines, in which keys are elsewhere than here."""

from typing import Any

import pytest

from dmiddleware.errors import ConfigError
from dmiddleware.worker.parallel_config import parallel_configs


def pipeline() -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """Return the three configs of a pipeline."""
    main = {
        "policy": {
            "learn": {"learner": {"learner_num": 1, "send_policy_freq": 4, "hook": {}}},
            "collect": {"n_sample": 16, "collector": {"collector_num": 3}},
            "other": {"commander": {"collector_task_space": 0}},
        }
    }
    create = {
        "policy": {"type": "dqn_command"},
        "comm_learner": {"type": "flask_fs", "import_names": ["ding.worker.learner.comm"]},
        "comm_collector": {"type": "mine", "import_names": ["my.collector"]},
    }
    return main, create, {"coordinator": {}, "path_data": "./data"}


def test_the_numbers_of_workers_move_to_the_config_of_the_processes() -> None:
    main, _, system = parallel_configs(*pipeline())
    assert main["policy"]["learn"]["learner"] == {"hook": {}}
    assert main["policy"]["collect"] == {"n_sample": 16, "collector": {}}
    assert (system["learner_num"], system["collector_num"]) == (1, 3)
    assert system["learner"] == {"send_policy_freq": 4}


def test_the_config_of_the_processes_has_the_last_word() -> None:
    main, create, system = pipeline()
    _, _, system = parallel_configs(main, create, {**system, "collector_num": 5})
    assert system["collector_num"] == 5


def test_only_types_of_workers_that_others_have_written_are_taken() -> None:
    _, create, system = parallel_configs(*pipeline())
    assert create == {"policy": {"type": "dqn_command"}}
    assert "type" not in system["learner"]
    assert system["collector"] == {"type": "mine", "import_names": ["my.collector"]}


def test_the_numbers_of_an_operator_server_count(caplog: pytest.LogCaptureFixture) -> None:
    main, create, system = pipeline()
    del main["policy"]["collect"]["collector"]["collector_num"]
    system["coordinator"] = {
        "operator_server": {"init_replicas_request": {"collectors": {"replicas": 2}}}
    }
    main, _, system = parallel_configs(main, create, system)
    assert (system["collector_num"], system["coordinator"]) == (2, {})
    assert main["policy"]["other"]["commander"] == {"collector_task_space": 2}
    assert "operator_server is not asked for 2 collectors" in caplog.text


def test_the_given_configs_stay_as_they_are() -> None:
    configs = pipeline()
    parallel_configs(*configs)
    assert configs == pipeline()


@pytest.mark.parametrize(
    ("main", "word"),
    [({"policy": {"learn": 3}}, "learn is 3"), (None, "None"), ([], "dictionary")],
)
def test_what_is_no_config_is_refused(main: Any, word: str) -> None:
    with pytest.raises(ConfigError, match=word):
        parallel_configs(main, {}, {})
