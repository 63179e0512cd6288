import pytest
import torch

from dmiddleware.errors import ConfigError
from dmiddleware.policy import DQNSettings
from dmiddleware.rl import Schedule, epsilon_greedy


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize(("setting", "got"), [(1.5, "1.5"), ({"start": 1.0, "end": -0.1}, "-0.1")])
def test_epsilon_is_a_probability(setting, got):
    eps = DQNSettings(eps={"type": "exp", "start": 1.0, "end": 0.0, "decay": 2}).eps
    assert Schedule.of(eps)(2) < 0.4
    with pytest.raises(ConfigError, match=f"got {got}"):
        DQNSettings(eps=setting)


@pytest.mark.parametrize("lead", [(), (7,), (3, 7)], ids=str)
def test_without_exploration_the_best_action_is_taken(lead):
    q = torch.randn(*lead, 5, generator=seeded())
    action = epsilon_greedy(q, 0.0, generator=seeded())
    assert action.shape == lead
    assert action.dtype == torch.int64
    assert torch.equal(action, q.argmax(-1))


def test_random_actions_come_as_often_as_epsilon_says_and_evenly():
    q = torch.tensor([0.0, 1.0, 0.0, 0.0]).expand(100_000, 4)
    action = epsilon_greedy(q, 0.4, generator=seeded())
    shares = torch.bincount(action, minlength=4) / len(action)
    wanted = torch.tensor([0.1, 0.7, 0.1, 0.1])
    torch.testing.assert_close(shares, wanted, atol=0.006, rtol=0)


def test_few_rows_explore_as_often_and_as_evenly():
    q, generator = torch.tensor([0.0, 1.0, 0.0]).expand(8, 3), seeded()
    action = torch.cat([epsilon_greedy(q, 0.3, generator=generator) for _ in range(2500)])
    shares = torch.bincount(action, minlength=3) / len(action)
    torch.testing.assert_close(shares, torch.tensor([0.1, 0.8, 0.1]), atol=0.01, rtol=0)


def test_every_row_of_a_grid_explores_independently():
    q = torch.tensor([0.0, 1.0]).expand(10_000, 1, 2)
    action = epsilon_greedy(q, 0.5, generator=seeded())
    assert action.double().mean().item() == pytest.approx(0.75, abs=0.02)


def test_each_row_may_have_its_own_epsilon():
    q = torch.tensor([0.0, 1.0]).expand(2, 10_000, 2)
    eps = torch.tensor([[0.0], [1.0]]).expand(2, 10_000)
    calm, wild = epsilon_greedy(q, eps, generator=seeded()).double().mean(-1).tolist()
    assert calm == 1.0
    assert wild == pytest.approx(0.5, abs=0.02)


@pytest.mark.parametrize("eps", [0.0, 0.5, 1.0])
def test_a_masked_action_is_neither_best_nor_drawn(eps):
    q = torch.tensor([0.0, 9.0, 1.0]).expand(10_000, 3)
    mask = torch.tensor([True, False, True]).expand(10_000, 3)
    action = epsilon_greedy(q, eps, generator=seeded(), mask=mask)
    counts = torch.bincount(action, minlength=3)
    assert counts[1] == 0
    assert counts[0].item() / 10_000 == pytest.approx(eps / 2, abs=0.02)


def test_a_mask_that_allows_nothing_is_rejected():
    with pytest.raises(ValueError, match="allows no action"):
        epsilon_greedy(torch.zeros(1, 2), 0.1, mask=torch.zeros(1, 2, dtype=torch.bool))


def test_epsilon_does_not_change_how_many_random_numbers_are_drawn():
    states = []
    for eps in (0.0, 1.0):
        generator = seeded()
        epsilon_greedy(torch.zeros(8, 2), eps, generator=generator)
        states.append(generator.get_state())
    assert torch.equal(*states)


@pytest.mark.parametrize("lead", [(), (6,), (64,), (65,), (3, 4)], ids=str)
def test_one_epsilon_for_all_rows_draws_as_one_for_each(lead):
    q = torch.randn(*lead, 5, generator=torch.Generator().manual_seed(1))
    one, each = (torch.Generator().manual_seed(2) for _ in range(2))
    for _ in range(50):
        expected = epsilon_greedy(q, torch.full(lead, 0.5), generator=each)
        assert torch.equal(epsilon_greedy(q, 0.5, generator=one), expected)
