"""Configs: defaults merged along the class hierarchy, and strictly checked."""

from __future__ import annotations

import re

import pytest
from easydict import EasyDict

from dmiddleware.classic.config import (
    Configurable,
    Option,
    at_least,
    check_value,
    count,
    fraction,
    merge_config,
    optional,
    positive,
    scheduled,
    whole,
)
from dmiddleware.errors import ConfigError
from dmiddleware.schedule import Schedule


class Policy(Configurable):
    config = {
        "cuda": False,
        "learn": {"batch_size": 64, "learning_rate": 1e-3, "hook": None},
        "other": {"eps": {"start": 1.0, "decay": 10_000}},
    }


class DQN(Policy):
    config = {"learn": {"target_update": 100}, "double": True, "layers": [128, 64]}

    @classmethod
    def check_config(cls, cfg):
        super().check_config(cfg)
        check_value(cfg.learn.batch_size > 0, "learn.batch_size", cfg.learn.batch_size, "positive")


class Open(Configurable):
    config = {"model": {"hidden": 64}, "env": {"kwargs": {"render": False}}}
    config_open = ("env.kwargs",)


def test_defaults_are_merged_from_the_base_classes_down():
    cfg = DQN.default_config()
    assert isinstance(cfg, EasyDict)
    assert cfg.learn == {
        "batch_size": 64, "learning_rate": 1e-3, "hook": None, "target_update": 100,
    }  # fmt: skip
    assert (cfg.cuda, cfg.double) == (False, True)
    assert cfg.cfg_type == "DQNDict"
    assert Policy.default_config().cfg_type == "PolicyDict"
    assert "double" not in Policy.default_config()


def test_defaults_are_fresh_copies():
    cfg = DQN.default_config()
    cfg.learn.batch_size = 1
    cfg.layers.append(3)
    assert DQN.default_config().learn.batch_size == 64
    assert DQN.default_config().layers == [128, 64]


def test_given_values_are_merged_in_and_not_changed():
    given = {"learn": {"batch_size": 32}, "layers": [8]}
    cfg = DQN.merged_config(given)
    assert (cfg.learn.batch_size, cfg.learn.target_update, cfg.layers) == (32, 100, [8])
    cfg.layers.append(9)
    assert given == {"learn": {"batch_size": 32}, "layers": [8]}
    assert DQN.merged_config(None) == DQN.merged_config({}) == DQN.default_config()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"learn": {"batchsize": 1}}, "DQN: unknown key learn.batchsize; did you mean learn.batch"),
        ({"other": {"eps": {"stat": 1}}}, "unknown key other.eps.stat; did you mean other.eps.st"),
        ({"zzzzzzzzz": 1}, "unknown key zzzzzzzzz; known here are: cfg_type, cuda, double"),
        ({"learn": {"type": "x"}}, "unknown key learn.type"),
        ({"learn": {4: "x"}}, "unknown key learn.4; known here are: batch_size"),
        ("config.yaml", "DQN: the config must be a dictionary, got 'config.yaml'"),
        ({"learn": 3}, "learn must be a dictionary, got 3"),
        ({"cuda": 1}, "cuda must be of type bool like its default False, got 1 of type int"),
        ({"double": None}, "double must be of type bool like its default True, got None"),
        ({"learn": {"batch_size": True}}, "learn.batch_size must be of type int"),
        ({"learn": {"batch_size": "64"}}, "batch_size must be of type int like its default 64"),
        ({"learn": {"batch_size": 6.5}}, "learn.batch_size must be of type int"),
        ({"layers": 3}, "layers must be of type list"),
        ({"learn": {"batch_size": -1}}, "learn.batch_size must be positive, got -1"),
    ],
)
def test_mistakes_are_refused_with_the_full_path(given, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        DQN.merged_config(given)


@pytest.mark.parametrize(
    "given",
    [
        {"learn": {"batch_size": 1e3}},  # how people write a thousand
        {"learn": {"learning_rate": 1}},
        {"learn": {"hook": object()}},  # None accepts anything
        {"learn": {"learning_rate": None}},
        {"layers": (1, 2)},
        {"type": "dqn", "import_names": ["mine"]},
    ],
)
def test_equivalent_values_are_accepted(given):
    DQN.merged_config(given)


def test_open_dictionaries_take_any_key_and_others_do_not():
    cfg = Open.merged_config({"env": {"kwargs": {"gravity": 9.8, "nested": {"a": 1}}}})
    assert cfg.env.kwargs == {"render": False, "gravity": 9.8, "nested": {"a": 1}}
    with pytest.raises(ConfigError, match=r"model\.gravity"):
        Open.merged_config({"model": {"gravity": 9.8}})


def test_open_dictionaries_of_base_classes_stay_open():
    class Derived(Open):
        config_open = ("model",)

    cfg = Derived.merged_config({"env": {"kwargs": {"x": 1}}, "model": {"y": 2}})
    assert (cfg.env.kwargs.x, cfg.model.y) == (1, 2)


def test_functions_are_accepted_where_the_default_is_one():
    class WithFunction(Configurable):
        config = {"wrap": len}

    assert WithFunction.merged_config({"wrap": max}).wrap is max
    with pytest.raises(ConfigError, match="wrap must be of type"):
        WithFunction.merged_config({"wrap": 3})


def test_plain_dictionaries_can_be_merged():
    cfg = merge_config({"a": {"b": 1}}, {"a": {"b": 2}}, owner="mine")
    assert cfg.a.b == 2
    with pytest.raises(ConfigError, match=r"mine: unknown key a\.c"):
        merge_config({"a": {"b": 1}}, {"a": {"c": 2}}, owner="mine")


def test_check_value_names_the_path_the_value_and_what_is_wanted():
    check_value(True, "a.b", 3, "odd")
    with pytest.raises(ConfigError, match=r"a\.b must be even, got 3"):
        check_value(False, "a.b", 3, "even")


def test_an_open_dictionary_need_not_be_declared():
    class Outer(Configurable):
        config = {"a": {"b": 1}}
        config_open = ("a.inner", "c.inner")

    cfg = {"a": {"inner": {"x": 1}}, "c": {"inner": {}}, "exp_name": "e", "instance_name": "i"}
    merged = Outer.merged_config(cfg)
    assert (merged.a.inner.x, merged.a.b, merged.c.inner) == (1, 1, {})
    assert "c" not in Outer.merged_config({})
    with pytest.raises(ConfigError, match=r"c\.innr; did you mean c\.inner"):
        Outer.merged_config({"c": {"innr": {}}})
    with pytest.raises(ConfigError, match="dictionary"):
        Outer.merged_config({"c": 3})


def test_a_lenient_class_keeps_unknown_keys_with_one_warning(caplog):
    class Lenient(Configurable):
        config = {"rate": 1.0}
        config_strict = False

    merged = Lenient.merged_config({"rat": 2.0, "own": {"x": 1}})
    assert (merged.rat, merged.own.x, merged.rate) == (2.0, 1, 1.0)
    assert len(caplog.records) == 1
    assert "did you mean rate" in caplog.text
    with pytest.raises(ConfigError):
        Lenient.merged_config({"rate": "fast"})


class Counted(Configurable):
    config = {
        "n": Option(1, count, "a count"),
        "limit": Option(None, optional(whole), "a limit"),
        "rate": Option(1.0, positive, "a rate"),
        "plain": 5,
    }


def test_whole_numbers_in_scientific_notation_become_integers():
    cfg = Counted.merged_config({"n": 1e3, "limit": 2e6, "rate": 2.0, "plain": 1e2})
    assert [type(cfg[key]) for key in ("n", "limit", "rate", "plain")] == [int, int, float, int]
    assert (cfg.n, cfg.limit, cfg.plain) == (1000, 2_000_000, 100)
    assert Counted.merged_config({"limit": None}).limit is None


def test_an_option_takes_numbers_and_schedules_within_its_range():
    values = scheduled(fraction)
    assert values.fits(0.5)
    assert values.fits({"start": 1.0, "end": 0.0})
    assert values.fits(Schedule.piecewise([(0, 0.0), (1, 1.0), (2, 0.5)]))
    assert not values.fits(1.5)
    with pytest.raises(ConfigError, match=r"must be a number from 0 to 1, got 1\.5"):
        values.fits({"start": 1.5, "end": 0.0})
    with pytest.raises(ConfigError, match=r"got 1\.1"):
        values.fits(Schedule.piecewise([(0, 0.0), (1, 1.1), (2, 0.5)]))


def test_the_schedule_of_a_learning_rate_may_reach_zero():
    values = scheduled(positive, reach=at_least(0))
    assert values.fits({"start": 1.0, "end": 0.0})
    assert not values.fits(0.0)
    with pytest.raises(ConfigError, match=r"got -0\.1"):
        values.fits({"start": 1.0, "end": -0.1})
