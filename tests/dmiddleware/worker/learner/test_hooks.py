from __future__ import annotations

import pytest

from dmiddleware.errors import ConfigError, RegistryError
from dmiddleware.worker.learner import (
    LearnerHook,
    LoadCkptHook,
    LogReduceHook,
    LogShowHook,
    SaveCkptHook,
    add_learner_hook,
    build_learner_hook_by_cfg,
    merge_hooks,
    register_learner_hook,
    show_hooks,
)

POSITIONS = {"before_run", "after_run", "before_iter", "after_iter"}


class Recorder(LearnerHook):
    """Appends its name to a tape."""

    tape: list[str] = []

    def __init__(self, *args, position, ext_args=None):
        super().__init__(*args, position=position)
        self.ext_args = ext_args

    def __call__(self, engine):
        self.tape.append(self.name)


def names(hooks, position):
    return [hook.name for hook in hooks[position]]


def test_short_forms_build_the_standard_hooks():
    hooks = build_learner_hook_by_cfg(
        {
            "load_ckpt_before_run": "",
            "log_show_after_iter": 100,
            "save_ckpt_after_iter": 1000,
            "save_ckpt_after_run": True,
            "log_reduce_after_iter": True,
        }
    )
    assert set(hooks) == POSITIONS
    assert [type(hook) for hook in hooks["before_run"]] == [LoadCkptHook]
    assert [type(hook) for hook in hooks["after_iter"]] == [
        LogReduceHook,
        LogShowHook,
        SaveCkptHook,
    ]
    assert [type(hook) for hook in hooks["after_run"]] == [SaveCkptHook]
    assert hooks["before_iter"] == []


def test_false_omits_a_hook():
    hooks = build_learner_hook_by_cfg(
        {"save_ckpt_after_run": False, "log_reduce_after_iter": False, "log_show_after_iter": None}
    )
    assert all(own == [] for own in hooks.values())


def test_long_forms_build_registered_types():
    register_learner_hook("recorder_of_test_hooks", Recorder)
    hooks = build_learner_hook_by_cfg(
        {
            "mine": {
                "name": "late",
                "type": "recorder_of_test_hooks",
                "priority": 50,
                "position": "before_iter",
                "ext_args": {"a": 1},
            },
            "early": {
                "type": "recorder_of_test_hooks",
                "priority": 1,
                "position": "before_iter",
            },
        }
    )
    assert names(hooks, "before_iter") == ["early", "late"]
    assert hooks["before_iter"][1].ext_args == {"a": 1}


@pytest.mark.parametrize(
    ("cfg", "error", "message"),
    [
        ({"log_show_after_itr": 5}, ConfigError, "did you mean log_show_after_iter"),
        ({"save_ckpt_after_run": 5}, ConfigError, "True or False"),
        ({"log_show_after_iter": 0}, ConfigError, "at least 1"),
        ({"log_show_after_iter": 1.5}, ConfigError, "integer"),
        ({"log_show_after_iter": True}, ConfigError, "integer"),
        ({"x": {"type": "log_show", "priority": 1}}, ConfigError, "lacks position"),
        (
            {"x": {"type": "log_show", "positions": "after_iter"}},
            ConfigError,
            "did you mean position",
        ),
        ({"x": {"type": "log_sow", "position": "after_iter"}}, RegistryError, "log_show"),
        (
            {"x": {"type": "log_show", "position": "after_iter", "ext_args": {"frq": 1}}},
            ConfigError,
            "frq",
        ),
        (
            {"x": {"type": "log_show", "position": "after_itr"}},
            ConfigError,
            "did you mean after_iter",
        ),
        ({"load_ckpt_before_run": 5}, ConfigError, "load_path"),
        (
            {"x": {"type": "log_show", "position": "after_iter", "ext_args": 3}},
            ConfigError,
            "ext_args",
        ),
        (
            {"x": {"type": "log_show", "position": "after_iter", "priority": "high"}},
            ConfigError,
            "priority",
        ),
        (
            {"x": {"type": "log_show", "position": "after_iter", "priority": -1}},
            ConfigError,
            "at least 0",
        ),
    ],
)
def test_a_hook_that_cannot_be_built_is_rejected(cfg, error, message):
    with pytest.raises(error, match=message):
        build_learner_hook_by_cfg(cfg)


def test_equal_priorities_keep_their_order():
    hooks = build_learner_hook_by_cfg({})
    for name, priority in (("a", 5), ("b", 1), ("c", 5), ("d", 1)):
        add_learner_hook(hooks, Recorder(name, priority, position="after_run"))
    assert names(hooks, "after_run") == ["b", "d", "a", "c"]


def test_merging_sorts_by_priority_and_keeps_the_originals():
    one, other = build_learner_hook_by_cfg({}), build_learner_hook_by_cfg({})
    for hooks, prefix in ((one, "1"), (other, "2")):
        for name, priority in (("a", 5), ("b", 1)):
            add_learner_hook(hooks, Recorder(prefix + name, priority, position="after_run"))
    merged = merge_hooks(one, other)
    assert names(merged, "after_run") == ["1b", "2b", "1a", "2a"]
    assert names(one, "after_run") == ["1b", "1a"]


def test_hooks_with_different_positions_are_not_merged():
    with pytest.raises(ConfigError, match="after_run"):
        merge_hooks({"after_run": []}, {})


def test_only_learner_hooks_are_accepted():
    with pytest.raises(TypeError, match="LearnerHook"):
        add_learner_hook({}, lambda engine: None)
    with pytest.raises(TypeError, match="subclass of LearnerHook"):
        register_learner_hook("a_function", print)


def test_hooks_are_described_in_text():
    hooks = build_learner_hook_by_cfg({"log_show_after_iter": 7, "log_reduce_after_iter": True})
    lines = show_hooks(hooks).splitlines()
    assert "after_iter: log_reduce_after_iter (10), log_show_after_iter (20)" in lines
    assert "before_run: -" in lines
