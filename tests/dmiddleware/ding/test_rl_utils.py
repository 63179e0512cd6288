"""The losses and returns of ``ding.rl_utils``, against computations written out in NumPy."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from numpy.testing import assert_allclose
from scipy import stats
from scipy.special import log_softmax, logsumexp, softmax

import dmiddleware.ding as door
from dmiddleware.ding import rl_utils

GAMMA = 0.9
B, N, T = 6, 4, 3


@pytest.fixture
def generator() -> Iterator[torch.Generator]:
    yield torch.Generator().manual_seed(3)


def normal(generator: torch.Generator, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def actions(generator: torch.Generator, *shape: int) -> torch.Tensor:
    return torch.randint(N, shape, generator=generator)


def flags(generator: torch.Generator, *shape: int) -> torch.Tensor:
    return (torch.rand(*shape, generator=generator) < 0.5).double()


def picked(q: Any, action: Any) -> np.ndarray:
    return np.take_along_axis(np.asarray(q.detach()), np.asarray(action)[..., None], -1)[..., 0]


def gradient(loss: torch.Tensor, x: torch.Tensor) -> np.ndarray:
    return torch.autograd.grad(loss, x, retain_graph=True)[0].numpy()


def slope_at(q: torch.Tensor, action: Any, slopes: np.ndarray) -> np.ndarray:
    """Return a gradient that has these slopes at the actions taken, and is 0 elsewhere."""
    whole = np.zeros(q.shape)
    np.put_along_axis(whole, np.asarray(action)[..., None], slopes[..., None], -1)
    return whole


def n_step_target(reward: Any, value: np.ndarray, done: Any, discount: Any = None) -> np.ndarray:
    total = sum(GAMMA**k * np.asarray(row) for k, row in enumerate(reward))
    factor = GAMMA ** len(reward) if discount is None else np.asarray(discount)
    return total + factor * value * (1 - np.asarray(done))


@pytest.mark.parametrize("value_gamma", [None, "rows"])
def test_q_learning_compares_n_rewards_and_the_value_after_them(
    generator: torch.Generator, value_gamma: str | None
) -> None:
    q = normal(generator, B, N).requires_grad_()
    next_q, reward = normal(generator, B, N), normal(generator, T, B)
    action, next_action, done = actions(generator, B), actions(generator, B), flags(generator, B)
    weight = normal(generator, B).abs()
    discount = None if value_gamma is None else normal(generator, B).abs()
    data = rl_utils.q_nstep_td_data(q, next_q, action, next_action, reward, done, weight)
    loss, losses = rl_utils.q_nstep_td_error(data, GAMMA, nstep=T, value_gamma=discount)
    error = picked(q, action) - n_step_target(reward, picked(next_q, next_action), done, discount)
    assert_allclose(losses.detach(), error**2)
    assert_allclose(loss.item(), (error**2 * weight.numpy()).mean())
    assert_allclose(gradient(loss, q), slope_at(q, action, 2 * error * weight.numpy() / B))


def test_rewards_that_are_summed_already_give_the_same_loss(generator: torch.Generator) -> None:
    q, next_q, reward = (normal(generator, *s) for s in ((B, N), (B, N), (T, B)))
    rest = actions(generator, B), actions(generator, B), reward, flags(generator, B), None
    data = rl_utils.q_nstep_td_data(q, next_q, *rest)
    summed = data._replace(reward=sum(GAMMA**k * row for k, row in enumerate(reward)))
    loss, _ = rl_utils.q_nstep_td_error(data, GAMMA, nstep=T)
    same, _ = rl_utils.q_nstep_td_error(summed, GAMMA, nstep=T, cum_reward=True)
    assert_allclose(same, loss)
    each, _ = rl_utils.q_nstep_td_error(data, [torch.tensor(GAMMA)] * B, nstep=T)
    assert_allclose(each, loss, rtol=1e-6)
    one = data._replace(reward=reward[:1])
    q_1step = rl_utils.q_1step_td_data(q, next_q, *rest[:2], reward[0], *rest[3:])
    expected, _ = rl_utils.q_nstep_td_error(one, GAMMA)
    assert_allclose(rl_utils.q_1step_td_error(q_1step, GAMMA), expected)


def test_branches_and_agents_have_losses_of_their_own(generator: torch.Generator) -> None:
    n_agents = 2
    q, next_q = normal(generator, B, n_agents, N), normal(generator, B, n_agents, N)
    action, next_action = (actions(generator, B, n_agents) for _ in range(2))
    reward, done, weight = normal(generator, T, B), flags(generator, B), normal(generator, B).abs()
    data = rl_utils.q_nstep_td_data(q, next_q, action, next_action, reward, done, weight)
    columns = [
        rl_utils.q_nstep_td_error(
            data._replace(
                q=q[:, i],
                next_n_q=next_q[:, i],
                action=action[:, i],
                next_n_action=next_action[:, i],
            ),
            GAMMA,
            nstep=T,
        )[1]
        for i in range(n_agents)
    ]
    expected = torch.stack(columns, 1)
    _, losses = rl_utils.q_nstep_td_error(data._replace(reward=reward[..., None]), GAMMA, nstep=T)
    assert_allclose(losses, expected)
    loss, losses = rl_utils.bdq_nstep_td_error(data, GAMMA, nstep=T)
    assert_allclose(losses, expected.mean(1))
    assert_allclose(loss, (expected.mean(1) * weight).mean())
    v, next_v = q[..., 0], next_q[..., 0]
    v_data = rl_utils.v_1step_td_data(v, next_v, reward[0], done, None)
    _, losses = rl_utils.v_1step_td_error(v_data, GAMMA)
    expected_v = n_step_target(reward[:1, :, None], next_v.numpy(), done[:, None])
    assert_allclose(losses, (v.numpy() - expected_v) ** 2)


def test_values_on_another_scale_are_compared_on_that_scale(generator: torch.Generator) -> None:
    q, next_q = normal(generator, B, N), normal(generator, B, N)
    reward, done = normal(generator, T, B), flags(generator, B)
    action, next_action = actions(generator, B), actions(generator, B)
    data = rl_utils.q_nstep_td_data(q, next_q, action, next_action, reward, done, None)

    def scaled(x: np.ndarray) -> np.ndarray:
        return np.sign(x) * (np.sqrt(np.abs(x) + 1) - 1) + 0.01 * x

    value = rl_utils.value_inv_transform(next_q)
    assert_allclose(scaled(value.numpy()), next_q, rtol=1e-9)
    target = scaled(n_step_target(reward, picked(value, next_action), done))
    _, losses = rl_utils.q_nstep_td_error_with_rescale(data, GAMMA, nstep=T)
    assert_allclose(losses, (picked(q, action) - target) ** 2)


def test_v_learning_and_the_soft_ones_have_their_papers_targets(generator: torch.Generator) -> None:
    q, next_q, target_q = (normal(generator, B, N) for _ in range(3))
    reward, done, action = normal(generator, T, B), flags(generator, B), actions(generator, B)
    v, next_v = normal(generator, B), normal(generator, B)
    data: Any = rl_utils.v_nstep_td_data(v, next_v, reward, done, None, None)
    _, losses = rl_utils.v_nstep_td_error(data, GAMMA, nstep=T)
    assert_allclose(losses, (v.numpy() - n_step_target(reward, next_v.numpy(), done)) ** 2)
    one = reward[:1]
    data = rl_utils.q_v_1step_td_data(q, next_v, action, reward[0], done, None)
    _, losses = rl_utils.q_v_1step_td_error(data, GAMMA)
    target = n_step_target(one, next_v.numpy(), done)
    assert_allclose(losses, (picked(q, action) - target) ** 2)
    data = rl_utils.q_nstep_td_data(q, next_q, action, action, reward, done, None)
    _, losses, soft = rl_utils.q_nstep_sql_td_error(data, GAMMA, 0.5, nstep=T)
    expected = 0.5 * logsumexp(next_q.numpy() / 0.5, axis=-1)
    assert_allclose(soft, expected)
    assert_allclose(losses, (picked(q, action) - n_step_target(reward, expected, done)) ** 2)
    data = rl_utils.m_q_1step_td_data(q, target_q, next_q, action, reward[0], done, None)
    loss, losses, gap, clipped = rl_utils.m_q_1step_td_error(data, GAMMA, 0.3, 0.9)
    bonus = 0.3 * picked(torch.tensor(log_softmax(target_q.numpy() / 0.3, -1)), action)
    policy = softmax(next_q.numpy() / 0.3, -1)
    entropy = next_q.numpy() - 0.3 * log_softmax(next_q.numpy() / 0.3, -1)
    increased = one.numpy() + 0.9 * np.clip(bonus, -1, 1)
    target = n_step_target(increased, (policy * entropy).sum(-1), done)
    assert_allclose(losses, (picked(q, action) - target) ** 2)
    assert_allclose(loss, losses.mean())
    best = np.sort(target_q.numpy(), -1)
    assert_allclose(gap, (best[:, -1] - best[:, -2]).mean())
    assert_allclose(clipped[:, 0], np.abs(bonus) > 1)


def test_demonstrations_add_a_margin_and_a_loss_of_one_step(generator: torch.Generator) -> None:
    q, next_q, near_q = (normal(generator, B, N) for _ in range(3))
    action, next_action, near_action = (actions(generator, B) for _ in range(3))
    reward, done, near_done = normal(generator, T, B), flags(generator, B), flags(generator, B)
    is_expert = flags(generator, B)
    data = rl_utils.dqfd_nstep_td_data(
        q,
        next_q,
        action,
        next_action,
        reward,
        done,
        near_done,
        None,
        near_q,
        near_action,
        is_expert,
    )
    loss, priority, parts = rl_utils.dqfd_nstep_td_error(data, GAMMA, 2.0, 3.0, 0.8, 4.0, nstep=T)
    taken = picked(q, action)
    far = (taken - n_step_target(reward, picked(next_q, next_action), done)) ** 2
    near = (taken - n_step_target(reward[:1], picked(near_q, near_action), near_done)) ** 2
    margin = np.full((B, N), 0.8)
    np.put_along_axis(margin, action.numpy()[:, None], 0.0, -1)
    expert = is_expert.numpy() * ((q.numpy() + margin).max(-1) - taken)
    assert_allclose(loss, (2 * far + 4 * near + 3 * expert).mean())
    assert_allclose(priority, 2 * far + 4 * near + 3 * expert)
    assert_allclose([part.item() for part in parts], [far.mean(), near.mean(), expert.mean()])
    same, _, _ = rl_utils.dqfd_nstep_td_error_with_rescale(
        data,
        GAMMA,
        2.0,
        3.0,
        4.0,
        0.8,
        nstep=T,
        trans_fn=lambda x: x,
        inv_trans_fn=lambda x: x,
    )
    assert_allclose(same, loss)
    with pytest.raises(ValueError, match="cum_reward"):
        rl_utils.dqfd_nstep_td_error(data, GAMMA, 1.0, 1.0, 0.8, cum_reward=True)


def projected(prob: np.ndarray, reward: np.ndarray, factor: np.ndarray) -> np.ndarray:
    """Share each return's probability between its two neighbors, one by one."""
    support = np.linspace(-2, 2, prob.shape[-1])
    target = np.zeros_like(prob)
    for row in range(len(prob)):
        for atom, mass in enumerate(prob[row]):
            place = (np.clip(reward[row] + factor[row] * support[atom], -2, 2) + 2) / (
                support[1] - support[0]
            )
            low = min(int(place), len(support) - 2)
            target[row, low] += mass * (low + 1 - place)
            target[row, low + 1] += mass * (place - low)
    return target


def test_categorical_targets_are_projected(generator: torch.Generator) -> None:
    n_atoms = 5
    dist = normal(generator, B, N, n_atoms).softmax(-1).requires_grad_()
    next_dist = normal(generator, B, N, n_atoms).softmax(-1)
    action, next_action = actions(generator, B), actions(generator, B)
    reward, done, weight = normal(generator, T, B), flags(generator, B), normal(generator, B).abs()
    data = rl_utils.dist_nstep_td_data(dist, next_dist, action, next_action, reward, done, weight)
    loss, losses = rl_utils.dist_nstep_td_error(data, GAMMA, -2.0, 2.0, n_atoms, nstep=T)
    rows = np.arange(B)
    total = n_step_target(reward, np.zeros(B), done)
    factor = GAMMA**T * (1 - done.numpy())
    target = projected(next_dist.numpy()[rows, next_action], total, factor)
    prob = dist.detach().numpy()[rows, action]
    assert_allclose(losses.detach(), -(target * np.log(prob)).sum(-1), rtol=1e-6)
    assert_allclose(loss.item(), (losses.detach() * weight).mean())
    slopes = np.zeros(dist.shape)
    slopes[rows, action] = -target / prob * weight.numpy()[:, None] / B
    assert_allclose(gradient(loss, dist), slopes, rtol=1e-5, atol=1e-7)
    one = rl_utils.dist_1step_td_data(dist, next_dist, action, next_action, reward[0], done, None)
    near = data._replace(reward=reward[:1], weight=None)
    expected, _ = rl_utils.dist_nstep_td_error(near, GAMMA, -2.0, 2.0, n_atoms)
    assert_allclose(
        rl_utils.dist_1step_td_error(one, GAMMA, -2.0, 2.0, n_atoms).item(), expected.item()
    )
    with pytest.raises(ValueError, match="positive"):
        rl_utils.dist_nstep_td_error(data._replace(dist=dist * 0), GAMMA, -2.0, 2.0, n_atoms, T)


def quantile_loss(estimate: np.ndarray, target: np.ndarray, tau: np.ndarray) -> np.ndarray:
    error = target[:, None, :] - estimate[:, :, None]
    huber = np.where(np.abs(error) <= 1, 0.5 * error**2, np.abs(error) - 0.5)
    return (np.abs(tau[:, :, None] - (error < 0)) * huber).mean(-1).sum(-1)


def test_quantile_losses_differ_in_where_the_fractions_come_from(
    generator: torch.Generator,
) -> None:
    n_quantiles = 3
    q, next_q = (2 * normal(generator, B, N, n_quantiles) for _ in range(2))
    q.requires_grad_()
    action, next_action = actions(generator, B), actions(generator, B)
    reward, done = normal(generator, T, B), flags(generator, B)
    tau = torch.rand(B, n_quantiles, generator=generator, dtype=torch.float64)
    rows, columns = np.arange(B), (reward, done)
    estimate = q.detach().numpy()[rows, action]
    following = next_q.numpy()[rows, next_action]
    target = n_step_target(reward[..., None], following, done[:, None])
    expected = quantile_loss(estimate, target, tau.numpy())
    cases: list[tuple[Callable[..., Any], Any]] = [
        (
            rl_utils.qrdqn_nstep_td_error,
            rl_utils.qrdqn_nstep_td_data(
                q, next_q, action, next_action, *columns, tau[..., None], None
            ),
        ),
        (
            rl_utils.fqf_nstep_td_error,
            rl_utils.fqf_nstep_td_data(q.mT, next_q.mT, action, next_action, *columns, tau, None),
        ),
        (
            rl_utils.iqn_nstep_td_error,
            rl_utils.iqn_nstep_td_data(
                q.permute(2, 0, 1),
                next_q.permute(2, 0, 1),
                action,
                next_action,
                *columns,
                tau.t()[..., None],
                None,
            ),
        ),
    ]
    slopes = []
    for function, data in cases:
        loss, losses = function(data, GAMMA, nstep=T)
        assert_allclose(losses.detach(), expected, rtol=1e-6)
        assert_allclose(loss.item(), expected.mean(), rtol=1e-6)
        slopes.append(gradient(loss, q))
    assert_allclose(slopes[1], slopes[0])
    assert_allclose(slopes[2], slopes[0])
    assert np.abs(slopes[0]).sum() > 0


def test_fractions_move_to_where_the_distance_is_least(generator: torch.Generator) -> None:
    def inverse(tau: np.ndarray) -> np.ndarray:
        return tau**3

    def distance(tau: np.ndarray) -> float:
        middle = (tau[1:] + tau[:-1]) / 2
        grid = np.linspace(0, 1, 200_001)
        step = np.clip(np.searchsorted(tau, grid, side="right") - 1, 0, len(middle) - 1)
        return float(np.abs(inverse(grid) - inverse(middle)[step]).mean())

    edges = np.array([0.0, 0.2, 0.55, 1.0])
    quantiles = torch.tensor(edges[None], requires_grad=True)
    inner = torch.tensor(inverse(edges[1:-1]))[None, :, None]
    middle = torch.tensor(inverse((edges[1:] + edges[:-1]) / 2))[None, :, None]
    loss = rl_utils.fqf_calculate_fraction_loss(
        inner, middle, quantiles, torch.zeros(1, dtype=torch.long)
    )
    slopes = []
    for i in (1, 2):
        moved = [edges + sign * 1e-3 * np.eye(4)[i] for sign in (1, -1)]
        slopes.append((distance(moved[0]) - distance(moved[1])) / 2e-3)
    assert_allclose(gradient(loss, quantiles)[0, 1:-1], slopes, atol=2e-3)


def test_advantages_follow_a_literal_loop(generator: torch.Generator) -> None:
    value, next_value, reward = (normal(generator, 8, B) for _ in range(3))
    done, ends = flags(generator, 8, B), flags(generator, 8, B)
    adv = rl_utils.gae(rl_utils.gae_data(value, next_value, reward, done, ends), GAMMA, 0.8)
    expected = np.zeros((9, B))
    delta = (reward + GAMMA * next_value * (1 - done) - value).numpy()
    for t in range(7, -1, -1):
        expected[t] = delta[t] + GAMMA * 0.8 * (1 - ends[t].numpy()) * expected[t + 1]
    assert_allclose(adv, expected[:-1])
    teams = rl_utils.gae_data(value[..., None], next_value[..., None], reward, done, ends)
    assert_allclose(rl_utils.gae(teams, GAMMA, 0.8)[..., 0], expected[:-1])
    never = rl_utils.gae_data(value, next_value, reward, None, None)
    zeros = rl_utils.gae_data(value, next_value, reward, done * 0, None)
    assert_allclose(rl_utils.gae(never), rl_utils.gae(zeros))


def test_lambda_returns_have_a_gradient_and_a_loss(generator: torch.Generator) -> None:
    value = normal(generator, T + 1, B).requires_grad_()
    reward, done = normal(generator, T, B), flags(generator, T, B)
    returns = rl_utils.generalized_lambda_returns(value, reward, GAMMA, 0.7, done)
    expected = np.zeros((T, B))
    following = value[-1].detach().numpy()
    for t in range(T - 1, -1, -1):
        mixed = 0.7 * following + 0.3 * value[t + 1].detach().numpy()
        following = reward[t].numpy() + GAMMA * (1 - done[t].numpy()) * mixed
        expected[t] = following
    assert_allclose(returns.detach(), expected)
    assert_allclose(gradient(returns[-1].sum(), value)[-1], GAMMA * (1 - done[-1]))
    loss = rl_utils.td_lambda_error(rl_utils.td_lambda_data(value, reward, None), GAMMA, 0.7)
    target = rl_utils.generalized_lambda_returns(value, reward, GAMMA, 0.7).detach()
    error = (value[:-1] - target).detach().numpy()
    assert_allclose(loss.item(), 0.5 * (error**2).mean())
    assert_allclose(gradient(loss, value)[:-1], error / error.size)


def test_upgo_follows_the_trajectory_while_it_is_better_than_expected() -> None:
    reward = torch.tensor([[1.0], [-5.0], [1.0]])
    value = torch.tensor([[0.0], [0.0], [0.0], [2.0]])
    # Step 1 is worse than its value, so the return of step 0 ends before it.
    assert rl_utils.upgo_returns(reward, value).flatten().tolist() == [1.0, -2.0, 3.0]
    logit = torch.zeros(3, 1, 2, requires_grad=True)
    action, rho = torch.zeros(3, 1, dtype=torch.long), torch.full((3, 1), 0.5)
    loss = rl_utils.upgo_loss(logit, rho, action, reward, value)
    assert_allclose(loss.item(), math.log(2) * 0.5 * (1.0 - 2.0 + 3.0) / 3, rtol=1e-6)
    parts = rl_utils.tb_cross_entropy(torch.zeros(3, 1, 4, 2), torch.zeros(3, 1, 4).long())
    assert_allclose(parts, np.full((3, 1), -4 * math.log(2)), rtol=1e-6)


def test_retrace_corrects_the_following_value_by_a_clipped_ratio(
    generator: torch.Generator,
) -> None:
    q, v = normal(generator, T + 1, B, N), normal(generator, T + 1, B, 1)
    ratio = torch.rand(T, B, N, generator=generator).double() * 2
    reward, weight = normal(generator, T, B), flags(generator, T, B)
    action = actions(generator, T, B)
    retraced = rl_utils.compute_q_retraces(q, v, reward, action, weight, ratio, GAMMA)
    following = v[-1, :, 0].numpy()
    for t in range(T - 1, -1, -1):
        expected = reward[t].numpy() + GAMMA * weight[t].numpy() * following
        assert_allclose(retraced[t, :, 0], expected)
        trace = np.minimum(picked(ratio[t], action[t]), 1)
        following = trace * (expected - picked(q[t], action[t])) + v[t, :, 0].numpy()
    assert_allclose(retraced[-1], v[-1])


@pytest.mark.parametrize("dual_clip", [None, 1.5])
@pytest.mark.parametrize("is_continuous", [False, True])
def test_ppo_and_happo_clip_ratios(
    generator: torch.Generator, dual_clip: float | None, is_continuous: bool
) -> None:
    outputs: Any
    if is_continuous:
        action: Any = normal(generator, B, N)
        mu, sigma = normal(generator, 2, B, N), normal(generator, 2, B, N).exp()
        outputs = [{"mu": mu[i], "sigma": sigma[i]} for i in range(2)]
        log_prob = [stats.norm(mu[i], sigma[i]).logpdf(action).sum(-1) for i in range(2)]
        entropy = stats.norm(mu[0], sigma[0]).entropy().sum(-1)
    else:
        action = actions(generator, B)
        outputs = list(normal(generator, 2, B, N))
        log_prob = [picked(torch.tensor(log_softmax(x.numpy(), -1)), action) for x in outputs]
        entropy = -(softmax(outputs[0].numpy(), -1) * log_softmax(outputs[0].numpy(), -1)).sum(-1)
    adv, value, old_value, ret, weight = (normal(generator, B) for _ in range(5))
    weight = weight.abs()
    ratio = np.exp(log_prob[0] - log_prob[1])

    def clipped_loss(advantage: np.ndarray) -> float:
        surrogate = np.minimum(ratio * advantage, np.clip(ratio, 0.8, 1.2) * advantage)
        if dual_clip is not None:
            bounded = np.maximum(surrogate, dual_clip * advantage)
            surrogate = np.where(advantage < 0, bounded, surrogate)
        return float(-(surrogate * weight.numpy()).mean())

    moved = old_value + (value - old_value).clamp(-0.2, 0.2)
    value_error = torch.maximum((value - ret) ** 2, (moved - ret) ** 2)
    function = rl_utils.ppo_error_continuous if is_continuous else rl_utils.ppo_error
    data = rl_utils.ppo_data(*outputs, action, value, old_value, adv, ret, weight, outputs[1])
    loss, info = function(data, dual_clip=dual_clip)
    assert_allclose(loss.policy_loss, clipped_loss(adv.numpy()))
    assert_allclose(loss.value_loss, 0.5 * (value_error * weight).mean())
    assert_allclose(loss.entropy_loss, (entropy * weight.numpy()).mean())
    assert_allclose(loss.kl_div, np.log(ratio).mean())
    assert_allclose(info.approx_kl, -np.log(ratio).mean())
    assert_allclose(info.clipfrac, ((ratio < 0.8) | (ratio > 1.2)).mean(), rtol=1e-6)
    factor = normal(generator, B, 1).abs()
    happo = rl_utils.happo_data(*data[:-1], factor)
    function = rl_utils.happo_error_continuous if is_continuous else rl_utils.happo_error
    loss, info = function(happo, dual_clip=dual_clip, use_value_clip=False)
    assert_allclose(loss.policy_loss, clipped_loss((adv * factor[:, 0]).numpy()))
    assert_allclose(loss.value_loss, 0.5 * ((value - ret) ** 2 * weight).mean())
    share = N if is_continuous else 1
    assert_allclose(loss.entropy_loss, (entropy * weight.numpy()).mean() / share)


def test_kl_divergences_are_estimated_in_three_ways() -> None:
    log_ratio = torch.tensor([0.3, -0.2])
    k1, k2, k3 = (rl_utils.calculate_kl_div(log_ratio, kind).item() for kind in ("k1", "k2", "k3"))
    assert_allclose(k1, 0.05, rtol=1e-6)
    assert_allclose(k2, (0.09 + 0.04) / 4, rtol=1e-6)
    assert_allclose(k3, (math.exp(-0.3) + math.exp(0.2) - 2 + 0.1) / 2, rtol=1e-5)
    with pytest.raises(ValueError, match="k4"):
        rl_utils.calculate_kl_div(log_ratio, "k4")


def test_ppo_averages_ratios_over_agents_that_share_an_advantage(
    generator: torch.Generator,
) -> None:
    new, old = normal(generator, B, 2, N), normal(generator, B, 2, N)
    action, adv = actions(generator, B, 2), normal(generator, B)
    data = rl_utils.ppo_policy_data(new, old, action, adv, None, None)
    policy, _ = rl_utils.ppo_policy_error(data, clip_ratio=100.0)
    log_probs = [picked(torch.tensor(log_softmax(x.numpy(), -1)), action) for x in (new, old)]
    ratio = np.exp(log_probs[0] - log_probs[1]).mean(1)
    assert_allclose(policy.policy_loss, -(ratio * adv.numpy()).mean())
    silent, _ = rl_utils.ppo_policy_error(data, entropy_bonus=False)
    assert silent.entropy_loss == 0.0


def test_the_other_policy_losses_are_their_papers(generator: torch.Generator) -> None:
    logit = normal(generator, B, N).requires_grad_()
    action, adv = actions(generator, B), normal(generator, B)
    value, ret = normal(generator, B), normal(generator, B)
    log_prob = log_softmax(logit.detach().numpy(), -1)
    loss = rl_utils.a2c_error(rl_utils.a2c_data(logit, action, value, adv, ret, None))
    taken = picked(torch.tensor(log_prob), action)
    assert_allclose(loss.policy_loss.item(), -(taken * adv.numpy()).mean())
    assert_allclose(loss.value_loss, ((value - ret) ** 2).mean())
    assert_allclose(loss.entropy_loss.item(), -(np.exp(log_prob) * log_prob).sum(-1).mean())
    slope = slope_at(logit, action, np.ones(B)) - np.exp(log_prob)
    assert_allclose(gradient(loss.policy_loss, logit), -slope * adv.numpy()[:, None] / B)
    old = normal(generator, B, N)
    joint = rl_utils.ppg_joint_error(rl_utils.ppg_data(logit, old, action, value, value, ret, None))
    old_log_prob = log_softmax(old.numpy(), -1)
    divergence = (np.exp(old_log_prob) * (old_log_prob - log_prob)).sum(-1)
    assert_allclose(joint.behavioral_cloning_loss.item(), divergence.mean())
    assert_allclose(joint.auxiliary_loss, 0.5 * ((value - ret) ** 2).mean())


def test_coma_compares_an_action_with_what_the_agent_would_do(generator: torch.Generator) -> None:
    logit, q, target_q = (normal(generator, T, B, 2, N) for _ in range(3))
    action, reward = actions(generator, T, B, 2), normal(generator, T, B)
    data = rl_utils.coma_data(logit, action, q, target_q, reward, None)
    loss = rl_utils.coma_error(data, GAMMA, 0.6)
    policy, taken = softmax(logit.numpy(), -1), picked(q, action)
    adv = taken - (policy * q.numpy()).sum(-1)
    log_prob = picked(torch.tensor(np.log(policy)), action)
    assert_allclose(loss.policy_loss, -(log_prob * adv).mean())
    following = picked(target_q, action)
    returns = following[1:].copy()
    for t in range(T - 2, -1, -1):
        mixed = following[t + 1] if t == T - 2 else 0.6 * returns[t + 1] + 0.4 * following[t + 1]
        returns[t] = reward[t].numpy()[:, None] + GAMMA * mixed
    assert_allclose(loss.q_value_loss, ((returns - taken[:-1]) ** 2).mean())


@pytest.mark.parametrize("is_continuous", [False, True])
def test_vtrace_corrects_for_the_policy_that_acted(
    generator: torch.Generator, is_continuous: bool
) -> None:
    value = normal(generator, T + 1, B).requires_grad_()
    reward = normal(generator, T, B)
    outputs: Any
    if is_continuous:
        action: Any = normal(generator, T, B, N)
        mu = normal(generator, 2, T, B, N)
        outputs = [{"mu": mu[i], "sigma": torch.ones_like(mu[i])} for i in range(2)]
        log_prob = [stats.norm(mu[i], 1.0).logpdf(action).sum(-1) for i in range(2)]
    else:
        action = actions(generator, T, B)
        outputs = list(normal(generator, 2, T, B, N))
        log_prob = [picked(torch.tensor(log_softmax(x.numpy(), -1)), action) for x in outputs]
    ratio = np.exp(log_prob[0] - log_prob[1])
    v, r = value.detach().numpy(), reward.numpy()
    target, adv = v.copy(), np.zeros((T, B))
    for t in range(T - 1, -1, -1):
        rho, c = np.minimum(ratio[t], 1.1), np.minimum(ratio[t], 1.0)
        adv[t] = np.minimum(ratio[t], 0.9) * (r[t] + GAMMA * target[t + 1] - v[t])
        delta = rho * (r[t] + GAMMA * v[t + 1] - v[t])
        target[t] = v[t] + delta + GAMMA * 0.95 * c * (target[t + 1] - v[t + 1])
    data = rl_utils.vtrace_data(*outputs, action, value, reward, None)
    function = (
        rl_utils.vtrace_error_continuous_action
        if is_continuous
        else rl_utils.vtrace_error_discrete_action
    )
    loss = function(data, GAMMA, 0.95, rho_clip_ratio=1.1, rho_pg_clip_ratio=0.9)
    assert_allclose(loss.policy_loss.item(), -(log_prob[0] * adv).mean())
    assert_allclose(loss.value_loss.item(), ((v[:-1] - target[:-1]) ** 2).mean())
    assert_allclose(gradient(loss.value_loss, value)[-1], 0.0)
    weights = rl_utils.compute_importance_weights(*outputs, action)
    assert_allclose(weights, ratio)


def test_epsilon_and_noise_are_those_of_their_settings() -> None:
    eps = rl_utils.get_epsilon_greedy_fn(0.9, 0.1, 100)
    assert_allclose([eps(0), eps(100)], [0.9, 0.8 / math.e + 0.1])
    line = rl_utils.get_epsilon_greedy_fn(1.0, 0.0, 10, "linear")
    assert_allclose([line(5), line(20)], [0.5, 0.0])
    with pytest.raises(ValueError, match="cosine"):
        rl_utils.get_epsilon_greedy_fn(1.0, 0.0, 10, "cosine")
    torch.manual_seed(0)
    gauss = rl_utils.create_noise_generator("gauss", {"mu": 2.0, "sigma": 0.1})
    noise = gauss((10_000,), "cpu")
    assert_allclose([noise.mean(), noise.std()], [2.0, 0.1], rtol=0.02)
    process = rl_utils.create_noise_generator("ou", {"mu": 1.0, "sigma": 0.0, "theta": 2.0})
    steps = [process((1,), "cpu").item() for _ in range(2)]
    assert_allclose(steps, [0.02, 0.02 * 0.98], rtol=1e-6)
    with pytest.raises(KeyError, match="pink"):
        rl_utils.create_noise_generator("pink", {})
    with pytest.raises(ValueError, match="sigma"):
        rl_utils.create_noise_generator("gauss", {"sigma": -1.0})


def test_scales_of_values_have_inverses() -> None:
    x = torch.tensor([-30.0, 0.0, 7.0], dtype=torch.float64)
    assert_allclose(rl_utils.inv_symlog(rl_utils.symlog(x)), x)
    assert_allclose(rl_utils.symlog(x), np.sign(x.numpy()) * np.log(np.abs(x.numpy()) + 1))
    for distortion in rl_utils.beta_function_map.values():
        assert 0.0 < distortion(0.3) < 1.0
    assert_allclose(rl_utils.beta_function_map["Pow"](0.3, -1.0), 1 - math.sqrt(0.7))
    assert rl_utils.discount_cumsum(np.array([1.0, 2.0, 3.0])).tolist() == [6.0, 5.0, 3.0]
    with pytest.raises(ValueError, match="gamma"):
        rl_utils.discount_cumsum(np.ones(2), gamma=0.5)


def transitions(n: int) -> list[dict[str, Any]]:
    return [
        {
            "obs": torch.tensor([float(i)]),
            "next_obs": torch.tensor([i + 1.0]),
            "reward": torch.tensor([10.0**i]),
            "action": torch.tensor([i]),
            "value": torch.tensor([0.5]),
            "done": i == n - 1,
        }
        for i in range(n)
    ]


def test_transitions_get_n_rewards_and_what_comes_after_them() -> None:
    rows = rl_utils.get_nstep_return_data(transitions(4), nstep=3, gamma=0.5)
    assert [row["reward"].tolist() for row in rows] == [
        [1.0, 10.0, 100.0],
        [10.0, 100.0, 1000.0],
        [100.0, 1000.0, 0.0],
        [1000.0, 0.0, 0.0],
    ]
    assert [row["next_obs"].item() for row in rows] == [3.0, 4.0, 4.0, 4.0]
    assert [row["done"] for row in rows] == [False, True, True, True]
    assert [row["value_gamma"] for row in rows] == [0.125, 0.125, 0.25, 0.5]
    summed = rl_utils.get_nstep_return_data(transitions(3), 2, cum_reward=True, gamma=0.5)
    assert [row["reward"].item() for row in summed] == [6.0, 60.0, 100.0]
    same = transitions(2)
    assert rl_utils.get_nstep_return_data(same, 1) is same


def test_advantages_of_a_cut_trajectory_use_the_value_of_its_last_transition() -> None:
    rows = rl_utils.get_gae_with_default_last_value(transitions(3), False, 0.9, 0.5)
    assert len(rows) == 2
    last = 10 + 0.9 * 0.5 - 0.5
    assert_allclose([row["adv"].item() for row in rows], [0.95 + 0.45 * last, last], rtol=1e-6)
    ended = rl_utils.get_gae_with_default_last_value(transitions(3), True, 0.9, 0.5)
    assert len(ended) == 3
    assert_allclose(ended[-1]["adv"].item(), 99.5)


@pytest.mark.parametrize(
    ("rest", "pieces"),
    [
        ("drop", [[0, 1], [2, 3]]),
        ("last", [[0, 1], [2, 3], [3, 4]]),
        ("null_padding", [[0, 1], [2, 3], [4, 0]]),
    ],
)
def test_trajectories_are_cut_into_pieces(rest: str, pieces: list[list[int]]) -> None:
    cut = rl_utils.get_train_sample(transitions(5), 2, rest)
    assert [[x.item() for x in piece["action"]] for piece in cut] == pieces
    assert cut[-1]["done"][-1] is (rest != "drop")
    with pytest.raises(ValueError, match="first"):
        rl_utils.get_train_sample(transitions(5), 2, "first")


def test_a_short_trajectory_is_padded() -> None:
    rows = transitions(1)
    rows[0]["obs"] = {"x": rows[0]["obs"] + 1}
    rows[0]["value_gamma"] = 0.9
    (piece,) = rl_utils.get_train_sample(rows, 2, "last")
    assert piece["obs"]["x"][1].item() == 0.0
    assert piece["value_gamma"] == [0.9, 0.0]
    assert rl_utils.get_train_sample(rows, 1) is rows


def test_wrong_numbers_of_rewards_and_discounts_are_refused(generator: torch.Generator) -> None:
    data = rl_utils.nstep_return_data(normal(generator, 2, B), normal(generator, B), None)
    with pytest.raises(ValueError, match="2 rewards"):
        rl_utils.nstep_return(data, GAMMA, 3)
    with pytest.raises(TypeError, match="str"):
        rl_utils.nstep_return(data, "0.9", 2)


def test_calls_of_losses_have_the_shapes_that_acceleration_would_need() -> None:
    q, reward = torch.zeros(B, N), torch.zeros(T, B)
    data: Any = rl_utils.q_nstep_td_data(q, q, None, None, reward, None, None)
    assert rl_utils.shape_fn_qntd([data], {}) == [T, B, N]
    data = rl_utils.dist_nstep_td_data(q, q, None, None, reward, None, None)
    assert rl_utils.shape_fn_dntd([], {"data": data}) == [T, B, N]
    data = rl_utils.td_lambda_data(q, reward, None)
    assert rl_utils.shape_fn_td_lambda([data], {}) == (T, B)
    data = rl_utils.gae_data(None, None, reward, None, None)
    assert rl_utils.shape_fn_gae([data], {}) == (T, B)
    data = rl_utils.vtrace_data(q, None, None, None, None, None)
    assert rl_utils.shape_fn_vtrace_discrete_action([data], {}) == (B, N)
    data = rl_utils.ppo_policy_data(q, None, None, None, None, None)
    assert rl_utils.shape_fn_ppo([data], {}) == (B, N)


def test_losses_of_other_algorithms_are_refused_by_name() -> None:
    door.open_door()
    try:
        with pytest.raises(door.NotHere, match="language models"):
            from ding.rl_utils.grpo import grpo_policy_error  # noqa: F401
        from ding.rl_utils import gae
        from ding.rl_utils.gae import gae as same

        assert gae is same is rl_utils.gae
    finally:
        door.close_door()
