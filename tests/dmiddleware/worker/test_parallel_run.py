"""How classic_run finds its part, and starts workers."""

import contextlib

import pytest

from dmiddleware.errors import ConfigError, RegistryError
from dmiddleware.pipeline import CurrentNode, running_as
from dmiddleware.worker import PROCESS_ROLE_REGISTRY, classic_run
from dmiddleware.worker.errors import CoordinatorError
from dmiddleware.worker.worker_process import WorkerProcess

MAIN = {"exp_name": "exp", "env": {"id": "CartPole-v1"}, "policy": {"type": "dqn"}}


def test_the_router_needs_a_run_of_several_processes():
    with pytest.raises(ConfigError, match="ditask --roles coordinator=1"):
        classic_run(MAIN, {"communication": "router"})


def test_flask_starts_its_workers_itself():
    with (
        running_as(CurrentNode(roles=("learner",))),
        pytest.raises(ConfigError, match="starts its workers itself"),
    ):
        classic_run(MAIN, {"communication": "flask_fs"})


@pytest.mark.parametrize("roles", [("evaluator",), ()])
def test_a_process_with_another_role_has_no_part(roles):
    with (
        running_as(CurrentNode(roles=roles)),
        pytest.raises(ConfigError, match="the roles are coordinator, learner, collector"),
    ):
        classic_run(MAIN)


def test_the_role_is_the_one_that_ditask_has_given():
    role_of = PROCESS_ROLE_REGISTRY.get("router")
    assert role_of() is None
    with running_as(CurrentNode(roles=("collector",))):
        assert role_of() == "collector"


@pytest.mark.parametrize(
    ("system", "word"),
    [
        ({"communication": "smoke"}, "router"),
        ({"communications": "router"}, "communication"),
        ({"learner_num": 2}, "learner_num"),
        ({"collector_num": 0}, "collector_num"),
    ],
)
def test_an_unusable_system_config_is_refused(system, word):
    with pytest.raises(ConfigError, match=word):
        classic_run(MAIN, system)


def test_what_to_create_may_be_in_a_config_of_its_own():
    main = {"exp_name": "exp", "env": {}, "policy": {}}
    create = {
        "env": {"type": "CartPole-v1"},
        "policy": {"type": "dqn", "import_names": ["json"]},
        "commander": {"type": "no_such_name"},
    }
    with (
        running_as(CurrentNode(roles=("coordinator",))),
        pytest.raises(RegistryError, match="no_such_name"),
    ):
        classic_run(main, create=create)


@pytest.mark.process
def test_a_worker_process_listens_and_ends_when_it_is_closed(tmp_path):
    cfg = {"type": "flask_fs", "port": 0, "path_data": str(tmp_path), "path_policy": str(tmp_path)}
    with contextlib.closing(WorkerProcess("collector", cfg)) as worker:
        assert worker.read_port(60) > 0
    worker.close()


@pytest.mark.slow
@pytest.mark.process
def test_a_worker_process_that_cannot_start_says_so(capfd):
    with (
        contextlib.closing(WorkerProcess("learner", {"type": "flask_sf"})) as worker,
        pytest.raises(CoordinatorError, match="learner did not listen"),
    ):
        worker.read_port(60)
    assert "did you mean flask_fs" in capfd.readouterr().err
