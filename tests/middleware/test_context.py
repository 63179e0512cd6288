"""The contexts of reinforcement learning, and the roles that they know."""

from __future__ import annotations

import numpy as np

from dmiddleware.launch.roles import KNOWN_ROLES, LEAD
from dmiddleware.pipeline import FieldKind
from middleware import OfflineRLContext, OnlineRLContext, Role


def test_an_online_context_keeps_only_its_counters():
    ctx = OnlineRLContext()
    kinds = OnlineRLContext.field_kinds()
    assert {name for name, kind in kinds.items() if kind is FieldKind.KEPT} == {
        "total_step", "task", "env_step", "env_episode", "train_iter", "last_eval_iter",
        "last_eval_value", "trained_env_step",
    }  # fmt: skip
    for name in kinds:
        if name not in ("task", "logged"):
            setattr(ctx, name, 3)
    new = ctx.renew()
    assert (new.env_step, new.env_episode, new.train_iter, new.last_eval_iter) == (3, 3, 3, 3)
    assert new.last_eval_value == 3
    assert new.collect_kwargs == {}
    produced_fields = {name for name, kind in kinds.items() if kind is FieldKind.PRODUCED}
    assert produced_fields == {
        "trajectories", "trajectory_end_idx", "episodes", "train_data", "train_output",
        "eval_value", "eval_output",
    }  # fmt: skip
    assert all(getattr(new, name) is None for name in (*produced_fields, "obs", "action"))


def test_an_offline_context_keeps_its_counters():
    ctx = OfflineRLContext(train_epoch=1, train_iter=2, trained_env_step=3, train_data=[1])
    new = ctx.renew()
    assert (new.train_epoch, new.train_iter, new.trained_env_step) == (1, 2, 3)
    assert new.train_data is None


def test_before_the_first_evaluation_every_return_is_an_improvement():
    assert OnlineRLContext().last_eval_value == -np.inf
    assert OnlineRLContext().last_eval_iter == -1


def test_the_roles_are_those_that_the_launcher_knows():
    roles = ["learner", "collector", "evaluator", "coordinator", "aggregator"]
    assert [str(role) for role in Role] == roles
    assert set(Role) == set(KNOWN_ROLES)
    assert Role.LEARNER == LEAD
