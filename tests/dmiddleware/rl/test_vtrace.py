import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dmiddleware.errors import StructureError
from dmiddleware.rl import discounted_return, vtrace


def rollout(seed, n_steps=7, n_envs=3):
    generator = torch.Generator().manual_seed(seed)
    shape = (n_steps, n_envs)
    reward, value, log_prob, old_log_prob = torch.randn(4, *shape, generator=generator).double()
    terminated = torch.rand(shape, generator=generator) < 0.15
    done = terminated | (torch.rand(shape, generator=generator) < 0.15)
    # The successor's value is the next row's, unless another episode follows.
    next_value = torch.randn(shape, generator=generator).double()
    next_value[:-1] = torch.where(done[:-1], next_value[:-1], value[1:])
    columns = {"log_prob": log_prob, "old_log_prob": old_log_prob}
    return (reward, value, next_value, terminated, done), columns


def clipped(ratio, bound):
    return ratio if bound is None else min(bound, ratio)


def by_equation_1(rows, log_prob, old_log_prob, discount, decay, rho_clip, c_clip, adv_clip):
    """Sum equation 1 row by row, with all its products, and the advantages of section 4.2."""
    reward, value, next_value, terminated, done = rows
    n_steps, n_envs = reward.shape
    target, adv = torch.zeros_like(value), torch.zeros_like(value)
    for env in range(n_envs):

        def ratio(t, env=env):
            return math.exp(log_prob[t, env] - old_log_prob[t, env])

        def bootstrap(t, env=env):
            return 0.0 if terminated[t, env] else next_value[t, env]

        for s in range(n_steps):
            total, traces = value[s, env].clone(), 1.0
            for t in range(s, n_steps):
                error = reward[t, env] + discount * bootstrap(t) - value[t, env]
                total += discount ** (t - s) * traces * clipped(ratio(t), rho_clip) * error
                if done[t, env]:
                    break
                traces *= decay * clipped(ratio(t), c_clip)
            target[s, env] = total
        for s in range(n_steps):
            is_last = done[s, env] or s == n_steps - 1
            following = bootstrap(s) if is_last else target[s + 1, env]
            error = reward[s, env] + discount * following - value[s, env]
            adv[s, env] = clipped(ratio(s), adv_clip) * error
    return target, adv


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    n_steps=st.integers(1, 9),
    discount=st.sampled_from([0.0, 0.9, 1.0]),
    decay=st.sampled_from([0.0, 0.8, 1.0]),
    clips=st.sampled_from([(1.0, 1.0, 1.0), (2.0, 0.5, 0.3), (None, 1.0, None), (None, None, 4.0)]),
)
def test_targets_and_advantages_equal_a_double_loop(seed, n_steps, discount, decay, clips):
    rows, columns = rollout(seed, n_steps)
    rho, c, adv = clips
    expected = by_equation_1(rows, *columns.values(), discount, decay, rho, c, adv)
    got = vtrace(
        *rows,
        **columns,
        discount=discount,
        trace_decay=decay,
        rho_clip=rho,
        c_clip=c,
        adv_rho_clip=adv,
    )
    for ours, theirs in zip(got, expected, strict=True):
        torch.testing.assert_close(ours, theirs)


def test_on_policy_targets_are_n_step_bellman_targets():
    rows, columns = rollout(3)
    same = columns["log_prob"]
    got = vtrace(*rows, log_prob=same, old_log_prob=same, discount=0.9, rho_clip=2.0)
    reward, _, next_value, terminated, done = rows
    expected = discounted_return(reward, terminated, done, discount=0.9, next_value=next_value)
    torch.testing.assert_close(got.value, expected)


def test_an_action_that_the_policy_never_takes_changes_no_value():
    rows, columns = rollout(3)
    never = torch.full_like(columns["log_prob"], -math.inf)
    got = vtrace(*rows, log_prob=never, old_log_prob=columns["old_log_prob"], discount=0.9)
    torch.testing.assert_close(got.value, rows[1])
    assert not got.adv.any()


def test_there_is_no_gradient():
    rows, columns = rollout(3)
    columns["log_prob"].requires_grad_()
    got = vtrace(*rows, **columns, discount=0.9)
    assert not got.value.requires_grad
    assert not got.adv.requires_grad


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"discount": 1.5}, "discount"),
        ({"trace_decay": -0.1}, "trace_decay"),
        ({"c_clip": 0.0}, "c_clip must be positive"),
        ({"adv_rho_clip": -1.0}, "adv_rho_clip must be positive"),
        ({"rho_clip": 0.5}, r"rho_clip must be at least c_clip, got 0\.5 and 1\.0"),
        ({"c_clip": None}, "rho_clip must be at least c_clip"),
    ],
)
def test_impossible_options_are_refused(options, message):
    rows, columns = rollout(3)
    with pytest.raises(ValueError, match=message):
        vtrace(*rows, **columns, **{"discount": 0.9, **options})


def test_columns_of_another_shape_are_refused():
    rows, columns = rollout(3)
    columns["log_prob"] = columns["log_prob"].unsqueeze(-1)
    with pytest.raises(StructureError, match="log_prob"):
        vtrace(*rows, **columns, discount=0.9)
