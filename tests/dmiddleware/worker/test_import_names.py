"""Modules of DI-engine in ``import_names`` are left out by everything that builds by name."""

import importlib.util

import pytest

from dmiddleware.classic import create_buffer, create_policy, get_buffer_cls, get_policy_cls
from dmiddleware.worker import (
    create_comm_collector,
    create_comm_learner,
    create_learner,
    create_parallel_collector,
    create_parallel_commander,
    create_serial_collector,
    create_serial_evaluator,
    get_parallel_collector_cls,
    get_serial_collector_cls,
)

DING = ["ding.policy.dqn", "dizoo.classic_control.cartpole.envs.cartpole_env"]
MODEL = {"obs_shape": 4, "action_shape": 2, "import_names": ["ding.model.template.q_learning"]}
BUILDERS = {
    create_policy: {"type": "dqn", "model": MODEL},
    get_policy_cls: {"type": "dqn_command"},
    create_buffer: {"type": "naive"},
    get_buffer_cls: {"type": "advanced"},
    create_learner: {"type": "base"},
    create_serial_collector: {"type": "sample"},
    get_serial_collector_cls: {"type": "episode"},
    create_serial_evaluator: {"type": "interaction"},
    create_parallel_collector: {"type": "no_such_name"},
    get_parallel_collector_cls: {"type": "zergling"},
    create_comm_collector: {"type": "no_such_name"},
    create_comm_learner: {"type": "no_such_name"},
}


def built(build, cfg):
    """Build a part; an unknown name is looked up after the imports."""
    try:
        return build(cfg)
    except KeyError as error:
        assert "no_such_name" in str(error)


@pytest.mark.skipif(importlib.util.find_spec("ding") is not None, reason="DI-engine is installed")
@pytest.mark.parametrize("build", BUILDERS, ids=lambda build: build.__name__)
def test_modules_of_di_engine_are_left_out(build, tmp_path, monkeypatch, caplog):
    monkeypatch.chdir(tmp_path)
    caplog.set_level("INFO")
    part = built(build, {**BUILDERS[build], "import_names": DING})
    assert "ding.policy.dqn" in caplog.text
    if hasattr(part, "close") and not isinstance(part, type):
        part.close()


def test_other_modules_are_imported(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for build, cfg in BUILDERS.items():
        with pytest.raises(ModuleNotFoundError, match="no_module_of_this_name"):
            build({**cfg, "import_names": ["no_module_of_this_name"]})


def test_a_commander_follows_the_same_rule():
    cfg = {
        "exp_name": "run",
        "env": {},
        "policy": {"other": {"commander": {"type": "no_such_name", "import_names": DING}}},
    }
    with pytest.raises(KeyError, match="no_such_name"):
        create_parallel_commander(cfg)
