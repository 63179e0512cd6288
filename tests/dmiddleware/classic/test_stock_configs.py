"""The nested configs of stock policies: their defaults, and what they refuse."""

from __future__ import annotations

import copy
import pickle
import re
from typing import Any

import pytest

from dmiddleware.classic import create_policy, get_policy_cls
from dmiddleware.errors import ConfigError
from dmiddleware.policy import POLICY_REGISTRY, DQNSettings
from dmiddleware.schedule import Schedule

IMPOSSIBLE = [
    ("dqn", "on_policy", True),
    ("ppo", "on_policy", False),
    ("dqn", "discount_factor", 1.5),
    ("dqn", "learn.batch_size", 0),
    ("dqn", "learn.learning_rate", 0.0),
    ("dqn", "learn.learning_rate", {"start": 1e-3}),
    ("dqn", "collect.n_sample", 0),
    ("dqn", "collect.n_episode", 2.5),
    ("dqn", "other.eps.type", "square"),
    ("dqn", "other.eps.by", "episode"),
    ("dqn", "other.eps", {"start": 1.2}),
    ("dqn", "other.eps", {"decay": 0}),
    ("ppo", "learn.clip_ratio", {"start": 0.2, "end": 0.0}),
    ("ppo", "collect.n_sample", 0),
    ("ppo", "collect.n_episode", 0),
    ("ppo_recurrent", "learn.recompute_advantage", True),
    ("bc", "collect.n_sample", 0),
    ("bc", "collect.n_episode", 0),
]


def nested(path: str, value: Any) -> Any:
    for key in reversed(path.split(".")):
        value = {key: value}
    return value


@pytest.mark.parametrize(("name", "path", "value"), IMPOSSIBLE)
def test_an_invalid_value_is_rejected_with_its_path(name: str, path: str, value: Any) -> None:
    section = "other.eps" if path.startswith("other.eps") else path
    with pytest.raises(ConfigError, match=re.escape(section)):
        create_policy({"type": name, **nested(path, value)})


@pytest.mark.parametrize("name", list(POLICY_REGISTRY))
def test_the_defaults_are_possible_and_have_the_sections_of_di_engine(name: str) -> None:
    cls = get_policy_cls({"type": name})
    if not POLICY_REGISTRY.get(name).__module__.startswith("dmiddleware."):
        return  # of another test
    defaults = cls.default_config()
    merged = cls.merged_config({})
    assert defaults == merged
    assert {"learn", "collect"} <= set(defaults)
    assert defaults.cfg_type == f"{POLICY_REGISTRY.get(name).__name__}Dict"


def test_keys_are_named_with_their_paths() -> None:
    for given, message in (
        ({"learn": {"batchsize": 3}}, r"learn\.batchsize; did you mean learn\.batch_size"),
        ({"learn": {"double": 1}}, r"learn\.double must be True or False, got 1"),
        ({"learn": {"learning_rate": "1e-4"}}, r"learn\.learning_rate must be .* write 1\.0e-4"),
        ({"learning_rate": 3}, r"unknown key learning_rate; did you mean learn\.learning_r"),
        ({"n_step": 3}, r"did you mean nstep\?"),
        ({"discount": 0.9}, r"did you mean discount_factor\?"),
    ):
        with pytest.raises(ConfigError, match=message):
            create_policy({"type": "dqn", **given})


def test_a_nested_config_becomes_the_settings_of_the_policy() -> None:
    model = {"obs_shape": 4, "action_shape": 2}
    policy = create_policy(
        {
            "type": "dqn",
            "model": model,
            "discount_factor": 0.9,
            "nstep": 3,
            "learn": {"batch_size": 1e2, "update_per_collect": 4},
            "collect": {"n_sample": 8},
            "other": {"eps": {"end": 0.1}},
        }
    )
    assert policy.policy.cfg == DQNSettings(
        model=model,
        discount=0.9,
        n_step=3,
        batch_size=100,
        eps=Schedule.linear(1.0, 0.1, decay=10_000),
    )
    assert (policy.cfg.learn.batch_size, policy.cfg.learn.update_per_collect) == (100, 4)
    assert policy.collect_mode.get_attribute("n_sample") == 8
    assert policy.collect_mode.spec.settings.eps.end == 0.1


@pytest.mark.parametrize("kind", [copy.deepcopy, lambda cfg: pickle.loads(pickle.dumps(cfg))])
def test_names_that_an_env_chose_hide_no_methods_of_the_config(kind: Any) -> None:
    model = {"obs_shape": {"items": 2, "logit": 2}, "action_shape": 2}
    again = kind(create_policy({"type": "ppo", "model": model}).cfg)
    assert again.model.obs_shape["items"] == again.model.obs_shape.logit == 2
    assert dict(again.model.obs_shape.items()) == model["obs_shape"]
