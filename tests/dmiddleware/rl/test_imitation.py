import math

import pytest
import torch

from dmiddleware.rl import Categorical, Gaussian, bc_loss


def bc_discrete_loss(logit, action, **options):
    return bc_loss(Categorical(logit), action, **options)


def bc_continuous_loss(mu, action, **options):
    return bc_loss(Gaussian(mu, torch.ones_like(mu)), action, **options)


def test_discrete_loss_is_the_mean_negative_log_likelihood():
    logit = torch.tensor([[0.0, 1.0], [2.0, 0.0]])
    wanted = [math.log(1 + math.exp(-1)), math.log(1 + math.exp(2))]
    loss = bc_discrete_loss(logit, torch.tensor([1, 1]))
    assert loss.item() == pytest.approx(sum(wanted) / 2)


def test_discrete_loss_weights_the_samples():
    logit = torch.tensor([[0.0, 1.0], [2.0, 0.0]])
    loss = bc_discrete_loss(logit, torch.tensor([1, 1]), weight=torch.tensor([0.0, 2.0]))
    assert loss.item() == pytest.approx(math.log(1 + math.exp(2)))


def test_label_smoothing_gives_every_action_some_probability():
    sure = torch.tensor([[50.0, 0.0]])
    action = torch.tensor([0])
    assert bc_discrete_loss(sure, action).item() == pytest.approx(0.0, abs=1e-6)
    smoothed = bc_discrete_loss(sure, action, label_smoothing=0.1)
    assert smoothed.item() == pytest.approx(0.05 * 50.0, rel=1e-5)


def test_continuous_loss_averages_over_dimensions_and_rows():
    mu = torch.tensor([[0.0, 2.0], [0.0, 0.0]])
    loss = bc_continuous_loss(mu, torch.zeros(2, 2))
    assert loss.item() == pytest.approx((4.0 / 2 + 0.0) / 2)


def test_continuous_loss_weights_the_samples():
    mu = torch.tensor([[0.0, 2.0], [6.0, 0.0]])
    loss = bc_continuous_loss(mu, torch.zeros(2, 2), weight=torch.tensor([1.0, 0.0]))
    assert loss.item() == pytest.approx(2.0 / 2)


def test_both_losses_have_gradients_towards_the_expert():
    logit = torch.zeros(1, 2, requires_grad=True)
    bc_discrete_loss(logit, torch.tensor([0])).backward()
    assert logit.grad[0, 0] < 0 < logit.grad[0, 1]
    mu = torch.ones(1, 1, requires_grad=True)
    bc_continuous_loss(mu, torch.zeros(1, 1)).backward()
    assert mu.grad.item() == 2.0
