"""Environments whose spaces have parts of any name."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import treetensor.torch as ttorch
from gymnasium import spaces
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dmiddleware.data import (
    OfflineDataset,
    as_tree,
    leaves,
    load_checkpoint,
    nest,
    save_checkpoint,
    save_dataset,
    to_dict,
)
from dmiddleware.data.wire_adapters import TREE_ADAPTERS
from dmiddleware.env import make_env_manager
from dmiddleware.errors import SpaceError
from dmiddleware.policy import DQNPolicy, PPOPolicy
from dmiddleware.reward import GAIL, ICM, RND, IntrinsicCritic
from dmiddleware.rollout import RolloutCollector
from dmiddleware.settings import plain_values
from dmiddleware.tree import with_columns
from dmiddleware.worker import SampleSerialCollector
from tests.dmiddleware.policy.every_policy import others_are_slow
from tests.dmiddleware.policy.one_round import ANY_ACTION, BOX, STOCK, Drawn, one_round

# What a tree, a dictionary, a module and a config have as attributes, and other hostile names.
NAMES = sorted(
    {
        *(name for kind in (ttorch.Tensor, dict, torch.nn.Module) for name in dir(kind)),
        *("", " ", "\n", "a b", "a/b", "a:b", "a\\b", "'", "[0]", "é", "日本", "²", "٣", "0", "10"),
        *("obs", "action", "logit", "done", "state", "info", "self", "class", "None"),
    }
)
PARTS = spaces.Dict(dict.fromkeys(NAMES, BOX))
NESTED = spaces.Dict(
    {
        "": spaces.Dict({"": BOX, "keys": BOX}),
        "items": spaces.Tuple((BOX, spaces.Dict({"get": spaces.Discrete(3)}))),
        "_detach": spaces.Dict({"items": spaces.Dict({"values": spaces.MultiBinary(2)})}),
    }
)
NESTED_ACTIONS = spaces.Dict(
    {
        "items": spaces.Dict({"keys": spaces.Tuple((BOX, spaces.Dict({"get": BOX})))}),
        "_detach": spaces.Discrete(3),
        "²": spaces.MultiBinary(2),
    }
)
ACTIONS = spaces.Dict(dict.fromkeys(filter(None, NAMES), spaces.Discrete(2)))


@pytest.mark.parametrize("cls", others_are_slow(STOCK))
def test_a_policy_sees_parts_of_any_name(cls: Any, tmp_path: Path) -> None:
    one_round(cls, NESTED, folder=tmp_path)


@pytest.mark.parametrize("cls", ANY_ACTION)
def test_a_policy_acts_in_parts_of_any_name(cls: Any, tmp_path: Path) -> None:
    one_round(cls, BOX, NESTED_ACTIONS, folder=tmp_path)


@pytest.mark.parametrize("cls", [DQNPolicy, PPOPolicy])
def test_parts_of_any_name_reach_other_processes(cls: Any, tmp_path: Path) -> None:
    actions = NESTED_ACTIONS if cls is PPOPolicy else None
    one_round(cls, NESTED, actions, folder=tmp_path, mode="async", obs_norm=True)


def test_no_name_of_an_observation_is_special(tmp_path: Path) -> None:
    one_round(DQNPolicy, PARTS, folder=tmp_path)


@pytest.mark.slow
def test_no_name_of_an_action_is_special(tmp_path: Path) -> None:
    one_round(PPOPolicy, BOX, ACTIONS, folder=tmp_path)


def test_a_part_of_an_action_needs_a_name() -> None:
    with pytest.raises(SpaceError, match="not empty, got ''"):
        one_round(PPOPolicy, BOX, spaces.Dict({"": BOX}))


@pytest.mark.parametrize("kind", [copy.deepcopy, lambda cfg: pickle.loads(pickle.dumps(cfg))])
def test_the_config_of_a_policy_can_be_copied(kind: Any) -> None:
    policy = PPOPolicy.for_env(Drawn(PARTS, ACTIONS), seed=0)
    again = kind(policy.cfg)
    assert plain_values(again) == plain_values(policy.cfg)
    assert again == policy.cfg
    assert set(again.model["obs_shape"]) == set(NAMES)


def collected(observation_space: Any) -> Any:
    with make_env_manager(lambda: Drawn(observation_space, BOX), env_num=1, seed=0) as envs:
        return RolloutCollector(PPOPolicy.for_env(envs, seed=0), envs).collect(24)


def test_rows_survive_a_data_set_a_checkpoint_and_the_wire(tmp_path: Path) -> None:
    rows = collected(NESTED)
    columns = as_tree({name: rows[name] for name in ("obs", "next_obs", "done", "episode_id")})
    save_dataset(tmp_path / "data", columns)
    save_checkpoint(tmp_path / "rows.ckpt", columns)
    (adapter,) = (one for one in TREE_ADAPTERS if one.type is type(columns))
    with OfflineDataset(tmp_path / "data") as dataset:
        stored = dataset.rows(slice(None))
        for found in (
            stored,
            load_checkpoint(tmp_path / "rows.ckpt"),
            adapter.from_plain(adapter.to_plain(columns)),
        ):
            assert dict(leaves(found)).keys() == dict(leaves(columns)).keys()
        for name in ("obs", "next_obs"):
            for (path, one), (_, other) in zip(
                leaves(stored[name]), leaves(columns[name]), strict=True
            ):
                assert torch.equal(one, other[:, 0]), path


def test_learned_rewards_see_parts_of_any_name() -> None:
    env, rows = Drawn(NESTED, BOX), collected(NESTED)
    policy = PPOPolicy.for_env(env, seed=0)
    models = [RND.for_env(env, policy), ICM.for_env(env, policy), GAIL.for_env(env, rows)]
    for model in models:
        model.update(rows)
        assert model.reward(rows).isfinite().all()
    critic = IntrinsicCritic.for_env(env, policy)
    estimated = critic.estimate(with_columns(rows, learned_reward=rows["reward"]))
    assert estimated["learned_adv"].isfinite().all()


def test_a_classic_collector_takes_parts_of_any_name() -> None:
    with make_env_manager(lambda: Drawn(NESTED, NESTED_ACTIONS), env_num=2, seed=0) as envs:
        policy = PPOPolicy.for_env(envs, seed=0)
        samples = SampleSerialCollector({}, env=envs, policy=policy.collect_mode).collect(12)
    assert len(samples) >= 12
    assert set(dict(leaves(samples[0]["obs"]))) == set(dict(leaves(collected(NESTED)["obs"])))


KEYS = st.text(st.characters(blacklist_characters=".", blacklist_categories=["Cs"]), max_size=6)
TREES = st.recursive(
    st.just(0),
    lambda inner: st.dictionaries(KEYS | st.sampled_from(NAMES), inner, min_size=1, max_size=4),
    max_leaves=8,
).filter(lambda tree: isinstance(tree, dict))


@settings(suppress_health_check=[HealthCheck.too_slow], deadline=None)
@given(tree=TREES)
def test_a_tree_of_any_names_is_rebuilt_from_its_paths(tree: Any) -> None:
    def filled(node: Any) -> Any:
        if isinstance(node, dict):
            return {key: filled(inner) for key, inner in node.items()}
        return torch.zeros(2)

    built = as_tree(filled(tree))
    paths = dict(leaves(built))
    assert to_dict(nest(paths)).keys() == tree.keys()
    assert dict(leaves(nest(paths))).keys() == paths.keys()

    def shape(node: Any) -> Any:
        return {k: shape(v) for k, v in node.items()} if isinstance(node, dict) else 0

    assert shape(to_dict(nest(paths))) == tree
