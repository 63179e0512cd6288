"""What a communicating learner sends, and how often."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

from dmiddleware.errors import ConfigError
from dmiddleware.policy import DQNPolicy
from dmiddleware.worker import BaseLearner, SendLearnInfoHook, SendPolicyHook
from dmiddleware.worker.comm.hooks import LearnInfos
from tests.dmiddleware.worker.comm.comm_workers import Learner, sample


@pytest.fixture
def learner():
    policy = DQNPolicy(
        {
            "model": {"obs_shape": 4, "action_shape": 2, "encoder_hidden_sizes": [8]},
            "priority": True,
            "batch_size": 2,
        },
        modes=["learn"],
    )
    with BaseLearner({"hook": {"save_ckpt_after_run": False}}, policy) as learner:
        learner.policies, learner.infos = [], []
        learner.send_policy = learner.policies.append
        learner.send_learn_info = learner.infos.append
        yield learner


def batch(*ids):
    return [
        {**sample(index), "replay_unique_id": name, "replay_buffer_idx": index, "IS": 1.0}
        for index, name in enumerate(ids)
    ]


def test_the_policy_is_sent_before_the_run_and_every_nth_iteration(learner):
    freq = {"send_policy_freq": 2}
    for position in ("before_run", "after_iter"):
        learner.register_hook(SendPolicyHook("p", 100, position=position, ext_args=freq))
    learner.call_hook("before_run")
    for _ in range(5):
        learner.train(batch("a", "b"))
    assert [state["iter"] for state in learner.policies] == [0, 2, 4]


def test_what_was_sent_does_not_change_with_the_next_update_and_can_be_loaded(learner):
    learner.register_hook(SendPolicyHook("p", 100, position="after_iter"))
    learner.train(batch("a", "b"))
    (sent,) = learner.policies
    before = {name: value.clone() for name, value in sent["model"].items()}
    learner.train(batch("a", "b"))
    assert all(torch.equal(value, before[name]) for name, value in sent["model"].items())
    assert set(sent) == {"model", "acting", "iter"}, "no optimizer"
    cfg = {"model": {"obs_shape": 4, "action_shape": 2, "encoder_hidden_sizes": [8]}}
    DQNPolicy(cfg).collect_mode.load_state_dict({"model": sent["model"]})


def test_only_rank_0_sends_the_policy(learner):
    learner._rank = 1
    SendPolicyHook("p", 100, position="before_run")(learner)
    assert learner.policies == []


def test_infos_between_two_sends_are_merged_and_the_rest_is_sent_at_the_end(learner):
    infos = LearnInfos()
    for position in ("after_iter", "after_run"):
        learner.register_hook(
            SendLearnInfoHook("i", 100, position=position, ext_args={"freq": 2}, infos=infos)
        )
    for names in ("ab", "cd", "ef"):
        learner.train(batch(*names))
    learner.call_hook("after_run")
    first, last = learner.infos
    assert first["learner_step"] == 2 and not first["learner_done"]
    assert first["priority_info"]["replay_unique_id"] == ["a", "b", "c", "d"]
    assert len(first["priority_info"]["priority"]) == 4
    assert last["learner_step"] == 3 and last["learner_done"]
    assert last["priority_info"]["replay_unique_id"] == ["e", "f"], "the last ones are not repeated"
    assert json.loads(json.dumps(first)) == first


def test_priorities_of_any_kind_become_lists():
    infos = LearnInfos()
    for values in (torch.tensor([0.5]), np.array([1, 2]), [np.float32(3.0), "x"]):
        infos.add({"priority_info": {"priority": values}})
    assert infos.take() == {"priority_info": {"priority": [0.5, 1, 2, 3.0, "x"]}}
    assert not infos


@pytest.mark.parametrize("freq", [0, 1.5, "x", True])
def test_an_impossible_frequency_is_refused(freq):
    with pytest.raises(ConfigError, match="freq"):
        SendLearnInfoHook("i", 100, position="after_iter", ext_args={"freq": freq})
    with pytest.raises(ConfigError, match="send_policy_freq"):
        SendPolicyHook("i", 100, position="after_iter", ext_args={"send_policy_freq": freq})


def test_a_worker_gives_its_learner_these_hooks():
    hooks = Learner({"send_policy_freq": 3}).hooks4call
    assert [(type(hook), hook.position, hook.priority) for hook in hooks] == [
        (SendPolicyHook, "before_run", 100),
        (SendPolicyHook, "after_iter", 100),
        (SendLearnInfoHook, "after_iter", 100),
        (SendLearnInfoHook, "after_run", 100),
    ]


def test_the_hooks_can_be_named_in_a_config(learner):
    cfg = {"send": {"type": "send_learn_info", "position": "after_run", "ext_args": {"freq": 1}}}
    with BaseLearner({"hook": cfg}) as other:
        assert isinstance(other.hooks["after_run"][-1], SendLearnInfoHook)
