import pytest
import torch

from dmiddleware.errors import StructureError
from dmiddleware.rl import (
    ensemble_td_loss,
    q_target,
    sequence_priority,
    td_loss,
    td_target,
    weighted_mean,
)


def batch(size: int = 16, n_actions: int = 3, seed: int = 0):
    generator = torch.Generator().manual_seed(seed)
    q, next_q, next_online = torch.randn(3, size, n_actions, generator=generator)
    action = torch.randint(n_actions, (size,), generator=generator)
    reward = torch.randn(size, generator=generator)
    terminated = torch.rand(size, generator=generator) < 0.3
    return q, next_q, next_online, action, reward, terminated


def test_target_takes_the_best_next_value_where_the_episode_continues():
    _, next_q, _, _, reward, terminated = batch()
    target = q_target(next_q, reward, terminated, discount=0.9)
    for b in range(len(reward)):
        future = 0.0 if terminated[b] else 0.9 * max(next_q[b].tolist())
        assert target[b].item() == pytest.approx(reward[b].item() + future, abs=1e-6)


def test_double_target_lets_the_online_network_choose_and_the_target_network_evaluate():
    _, next_q, next_online, _, reward, terminated = batch()
    target = q_target(next_q, reward, terminated, discount=0.9, next_q_online=next_online)
    for b in range(len(reward)):
        chosen = next_online[b].tolist().index(max(next_online[b].tolist()))
        future = 0.0 if terminated[b] else 0.9 * next_q[b, chosen].item()
        assert target[b].item() == pytest.approx(reward[b].item() + future, abs=1e-6)


def test_target_takes_a_discount_for_each_row():
    next_q = torch.full((2, 2), 10.0)
    discount = torch.tensor([0.5, 0.25])
    target = q_target(next_q, torch.zeros(2), torch.zeros(2).bool(), discount=discount)
    assert target.tolist() == [5.0, 2.5]


def test_target_does_not_read_the_next_values_of_terminated_rows():
    next_q = torch.full((1, 2), torch.nan)
    target = q_target(next_q, torch.ones(1), torch.ones(1).bool(), discount=0.9)
    assert target.item() == 1.0


def test_target_has_no_gradient_and_leaves_the_values_alone():
    next_q = torch.ones(2, 2, requires_grad=True)
    target = q_target(next_q, torch.zeros(2), torch.zeros(2).bool(), discount=0.5)
    assert not target.requires_grad
    assert next_q.tolist() == [[1.0, 1.0], [1.0, 1.0]]


def literal_huber(error: float, delta: float) -> float:
    if abs(error) <= delta:
        return 0.5 * error**2
    return delta * (abs(error) - 0.5 * delta)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("criterion", ["huber", "mse"])
def test_loss_is_the_weighted_mean_over_the_actions_taken(criterion, weighted):
    q, _, _, action, target, _ = batch()
    weight = torch.linspace(0.1, 1.0, len(target)) if weighted else None
    loss, td_error = td_loss(q, action, target, weight=weight, criterion=criterion, huber_delta=0.7)
    total = 0.0
    for b in range(len(target)):
        error = target[b].item() - q[b, action[b]].item()
        assert td_error[b].item() == pytest.approx(error, abs=1e-6)
        one = literal_huber(error, 0.7) if criterion == "huber" else error**2
        total += one * (weight[b].item() if weighted else 1.0)
    assert loss.item() == pytest.approx(total / len(target), rel=1e-5)


def test_huber_clips_the_gradient_of_the_error():
    q = torch.tensor([[0.0, 5.0]], requires_grad=True)
    td_loss(q, torch.tensor([0]), torch.tensor([100.0])).loss.backward()
    assert q.grad.tolist() == [[-1.0, 0.0]]


def test_td_error_has_no_gradient():
    q = torch.zeros(1, 2, requires_grad=True)
    assert not td_loss(q, torch.tensor([0]), torch.ones(1)).td_error.requires_grad


def test_an_unknown_criterion_is_rejected():
    with pytest.raises(ValueError, match="criterion must be 'huber' or 'mse', got 'l1'"):
        td_loss(torch.zeros(1, 2), torch.tensor([0]), torch.zeros(1), criterion="l1")


def test_a_loss_that_is_not_a_number_says_so():
    loss, td_error = td_loss(torch.tensor([[torch.nan, 0.0]]), torch.tensor([0]), torch.zeros(1))
    assert loss.isnan()
    assert td_error.isnan().all()


def test_huber_of_a_huge_error_does_not_overflow():
    loss, _ = td_loss(torch.tensor([[1e30, 0.0]]), torch.tensor([0]), torch.zeros(1))
    assert torch.isfinite(loss)


@pytest.mark.parametrize("name", ["action", "target", "weight"])
def test_a_column_with_a_trailing_one_is_rejected_not_broadcast(name):
    columns = {"action": torch.zeros(4).long(), "target": torch.zeros(4), "weight": torch.ones(4)}
    columns[name] = columns[name].unsqueeze(1)
    with pytest.raises(StructureError, match=rf"{name} has shape \(4, 1\).*\(4,\)"):
        td_loss(torch.zeros(4, 2), **columns)


def test_a_reward_with_an_extra_dimension_is_rejected():
    with pytest.raises(StructureError, match="reward"):
        q_target(torch.zeros(4, 2), torch.zeros(4, 1), torch.zeros(4).bool(), discount=0.9)


def test_the_priority_of_a_sequence_mixes_its_largest_and_its_mean_error():
    error = torch.tensor([[1.0, -3.0, 9.0], [-2.0, 5.0, 9.0]])
    assert sequence_priority(error, eta=0.5)[:2].tolist() == [1.75, 4.5]
    mask = torch.tensor([[True, True, False], [True, False, False]])
    priority = sequence_priority(error, mask, eta=0.5)
    assert priority.tolist() == [1.75, 3.0, 0.0]
    # By default the largest error counts nine times as much as the mean.
    torch.testing.assert_close(sequence_priority(error)[0], torch.tensor(0.9 * 2 + 0.1 * 1.5))
    with pytest.raises(StructureError, match="mask"):
        sequence_priority(error, mask[0])


@pytest.mark.parametrize("per_row", [False, True])
@pytest.mark.parametrize("n_values", [None, 3])
def test_a_target_adds_the_discounted_value_where_the_episode_continues(n_values, per_row):
    _, values, _, _, reward, terminated = batch()
    discount = torch.linspace(0.1, 0.9, len(reward)) if per_row else 0.9
    next_value = values[:, 0] if n_values is None else values
    target = td_target(next_value, reward, terminated, discount=discount)
    assert target.shape == next_value.shape
    for b in range(len(reward)):
        gamma = discount[b].item() if per_row else discount
        for one, value in zip(target[b].flatten(), next_value[b].flatten(), strict=True):
            future = 0.0 if terminated[b] else gamma * value.item()
            assert one.item() == pytest.approx(reward[b].item() + future, abs=1e-6)


def test_a_target_has_no_gradient_and_leaves_the_values_alone():
    value = torch.ones(2, requires_grad=True)
    target = td_target(value, torch.zeros(2), torch.zeros(2).bool(), discount=0.5)
    assert not target.requires_grad
    assert value.tolist() == [1.0, 1.0]


@pytest.mark.parametrize("name", ["reward", "terminated", "discount"])
@pytest.mark.parametrize("shape", [(4,), (4, 3)])
def test_a_column_of_a_target_with_a_trailing_one_is_rejected(name, shape):
    columns = {
        "reward": torch.zeros(4),
        "terminated": torch.zeros(4).bool(),
        "discount": torch.ones(4),
    }
    columns[name] = columns[name].unsqueeze(1)
    with pytest.raises(StructureError):
        td_target(torch.zeros(shape), **columns)


@pytest.mark.parametrize("weighted", [False, True])
def test_the_loss_of_several_critics_is_the_sum_of_their_weighted_mean_squares(weighted):
    generator = torch.Generator().manual_seed(0)
    q, target = torch.randn(3, 5, generator=generator), torch.randn(5, generator=generator)
    weight = torch.linspace(0.2, 1.0, 5)
    loss, td_error = ensemble_td_loss(q, target, weight=weight if weighted else None)
    total = 0.0
    for b in range(5):
        errors = [target[b].item() - q[n, b].item() for n in range(3)]
        total += sum(error**2 for error in errors) * (weight[b].item() if weighted else 1.0)
        assert td_error[b].item() == pytest.approx(sum(map(abs, errors)) / 3, rel=1e-5)
    assert loss.item() == pytest.approx(total / 5, rel=1e-5)


def test_the_errors_of_several_critics_have_no_gradient_but_their_loss_has():
    loss, td_error = ensemble_td_loss(torch.zeros(2, 3, requires_grad=True), torch.ones(3))
    assert loss.requires_grad
    assert not td_error.requires_grad


@pytest.mark.parametrize("name", ["target", "weight"])
def test_a_column_for_several_critics_with_a_trailing_one_is_rejected(name):
    columns = {"target": torch.zeros(4), "weight": torch.ones(4)}
    columns[name] = columns[name].unsqueeze(1)
    with pytest.raises(StructureError, match=name):
        ensemble_td_loss(torch.zeros(2, 4), **columns)


def test_a_weighted_mean_without_weights_is_the_mean():
    losses = torch.tensor([1.0, 2.0, 6.0])
    assert weighted_mean(losses, None).item() == 3.0
    assert weighted_mean(losses, torch.tensor([1.0, 0.5, 0.0])).item() == pytest.approx(2 / 3)
    with pytest.raises(StructureError, match="weight"):
        weighted_mean(losses, torch.ones(3, 1))
