"""What C51, QR-DQN, IQN and Rainbow have in common, and the first two."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dmiddleware.classic.monitored import monitored_of
from dmiddleware.errors import ConfigError
from dmiddleware.policy import C51Policy, IQNPolicy, QRDQNPolicy, RainbowPolicy
from dmiddleware.rl import categorical_target, clipped_share, quantile_huber_loss, taken_rows
from dmiddleware.tree import as_tree

SMALL = {"obs_shape": 2, "action_shape": 2, "encoder_hidden_sizes": [32]}
C51 = {**SMALL, "n_atoms": 21, "v_min": -2.0, "v_max": 2.0}
QR = {**SMALL, "n_quantiles": 8}
TWO = [(C51Policy, C51), (QRDQNPolicy, QR)]


def one_step_rainbow(cfg: dict[str, Any]) -> RainbowPolicy:
    """Build a Rainbow that learns from transitions of one step."""
    return RainbowPolicy({**cfg, "n_step": 1})


MAKE_TWO = pytest.mark.parametrize(("make", "model"), TWO)
MAKE = pytest.mark.parametrize(
    ("make", "model"), [*TWO, (IQNPolicy, {**SMALL, "n_quantiles": 8}), (one_step_rainbow, C51)]
)


def test_the_projection_keeps_mass_and_mean() -> None:
    generator = torch.Generator().manual_seed(0)
    support = torch.linspace(-5, 5, 51)
    prob = torch.rand(64, 51, generator=generator).softmax(-1)
    reward = torch.rand(64, generator=generator) * 2 - 1
    terminated = torch.arange(64) % 3 == 0
    target = categorical_target(prob, reward, terminated, discount=0.8, support=support)
    torch.testing.assert_close(target.sum(-1), torch.ones(64))
    mean = reward + 0.8 * ~terminated * (prob * support).sum(-1)
    torch.testing.assert_close((target * support).sum(-1), mean)


def test_the_projection_is_that_of_the_paper() -> None:
    """Algorithm 1 for one return between two atoms, one on an atom, and one beyond the ends."""
    support = torch.linspace(0, 4, 5)
    prob = torch.eye(5)[[1, 2, 4]]
    reward = torch.tensor([0.25, 1.0, 3.0])
    target = categorical_target(
        prob, reward, torch.zeros(3, dtype=torch.bool), discount=1.0, support=support
    )
    wanted = [[0, 0.75, 0.25, 0, 0], [0, 0, 0, 1, 0], [0, 0, 0, 0, 1]]
    torch.testing.assert_close(target, torch.tensor(wanted))


@pytest.mark.parametrize("kappa", [1.0, 0.25])
@pytest.mark.parametrize("given", [True, False])
def test_the_quantile_loss_is_that_of_the_paper(given: bool, kappa: float) -> None:
    generator = torch.Generator().manual_seed(0)
    quantiles, target = torch.randn(2, 6, 4, generator=generator) * 2
    quantiles.requires_grad_()
    tau = torch.rand(6, 4, generator=generator)
    if not given:
        tau[:] = torch.tensor([0.125, 0.375, 0.625, 0.875])
    wanted = []
    for row in range(6):
        losses = []
        for i in range(4):
            for j in range(4):
                error = target[row, j] - quantiles[row, i]
                is_small = abs(error) <= kappa
                huber = 0.5 * error**2 if is_small else kappa * (abs(error) - 0.5 * kappa)
                losses.append(abs(tau[row, i] - (error < 0).float()) * huber / kappa / 4)
        wanted.append(torch.stack(losses).sum())
    weight = torch.rand(6, generator=generator)
    by_hand = torch.stack(wanted)
    loss = quantile_huber_loss(quantiles, target, tau=tau if given else None, kappa=kappa)
    torch.testing.assert_close(loss, by_hand)
    torch.testing.assert_close(
        *(torch.autograd.grad((one * weight).sum(), quantiles)[0] for one in (loss, by_hand))
    )


def test_the_rows_of_actions_are_taken_from_one_or_several_numbers_each() -> None:
    output, action = torch.arange(12.0).reshape(2, 3, 2), torch.tensor([2, 0])
    assert taken_rows(output, action).tolist() == [[4.0, 5.0], [6.0, 7.0]]
    assert taken_rows(output[..., 0], action).tolist() == [4.0, 6.0]


def chain() -> Any:
    """Two states: action 1 moves on and, in the last state, ends the episode with a reward."""
    first, last = torch.tensor([1.0, 0.0]), torch.tensor([0.0, 1.0])
    return as_tree(
        {
            "obs": torch.stack([first, first, last, last]),
            "action": torch.tensor([0, 1, 0, 1]),
            "reward": torch.tensor([0.0, 0.0, 0.0, 1.0]),
            "next_obs": torch.stack([first, last, first, first]),
            "terminated": torch.tensor([False, False, False, True]),
        }
    )


@pytest.mark.learning
@MAKE
def test_it_finds_the_values_of_a_chain(make: Any, model: dict[str, Any]) -> None:
    policy = make(
        {
            "model": model,
            "discount": 0.9,
            "target_update_freq": 20,
            "learning_rate": 0.01,
            "seed": 0,
        }
    )
    for _ in range(600):
        policy.learn_mode.forward(chain())
    q = policy.collect_mode.forward(torch.eye(2))["logit"]
    torch.testing.assert_close(q, torch.tensor([[0.81, 0.9], [0.81, 1.0]]), rtol=0, atol=0.05)


@MAKE
def test_weights_enter_the_loss_and_priorities_come_back(make: Any, model: dict[str, Any]) -> None:
    policy, data = make({"model": model, "seed": 0}), chain()
    data["weight"] = torch.zeros(4)
    output = policy.learn_mode.forward(data)
    assert output["total_loss"] == 0.0
    assert (output["priority"] > 0).all()


@MAKE_TWO
def test_the_online_network_chooses_the_action_of_the_target(
    make: Any, model: dict[str, Any]
) -> None:
    outputs = []
    for double in (True, False):
        policy = make({"model": model, "seed": 0, "double": double})
        target = policy.components["q"].target
        with torch.no_grad():
            # The networks now prefer different actions.
            for bias in (target.head[0].bias, policy.model.head[0].bias):
                bias.zero_()
            n = len(target.head[0].bias) // 2
            ramp = torch.linspace(0, 3, n)
            target.head[0].bias[:n] = ramp
            policy.model.head[0].bias[n:] = ramp
        outputs.append(policy.learn_mode.forward(chain())["target_q_value"])
    assert outputs[0] != pytest.approx(outputs[1], abs=1e-3)


@MAKE
def test_a_forbidden_action_is_not_bootstrapped_from(make: Any, model: dict[str, Any]) -> None:
    values = []
    for allowed in ([True, False], [False, True]):
        policy, data = make({"model": model, "seed": 3}), chain()
        data["next_action_mask"] = torch.tensor([allowed] * 4)
        values.append(policy.learn_mode.forward(data)["target_q_value"])
    assert values[0] != pytest.approx(values[1], abs=1e-6)


@MAKE
def test_an_interrupted_run_continues_bit_for_bit(make: Any, model: dict[str, Any]) -> None:
    whole, first, second = (
        make({"model": model, "seed": seed, "priority": False}) for seed in (0, 0, 1)
    )
    outputs = [whole.learn_mode.forward(chain()) for _ in range(4)]
    for _ in range(2):
        first.learn_mode.forward(chain())
    second.learn_mode.load_state_dict(first.learn_mode.state_dict())
    assert [second.learn_mode.forward(chain()) for _ in range(2)] == outputs[2:]


def test_the_priority_of_c51_is_the_divergence_from_its_target() -> None:
    cfg = {"model": C51, "seed": 0, "priority": True, "learning_rate": 0.01}
    policy, data = C51Policy(cfg), chain()
    data["terminated"][:] = True
    data["reward"][:] = 0.1
    with torch.no_grad():
        log_prob = policy.model(data["obs"])["log_prob"]
    # The target has half of its probability at the returns 0 and 0.2, the atoms 10 and 11.
    half = math.log(0.5)
    wanted = [(half - log_prob[row, row % 2, 10:12].mean()).item() for row in range(4)]
    assert policy.learn_mode.forward(data)["priority"].tolist() == pytest.approx(wanted, rel=1e-4)
    for _ in range(150):
        priority = policy.learn_mode.forward(data)["priority"]
    # Nothing remains where the prediction is right, and it is never negative.
    assert 0.0 <= priority.min() <= priority.max() < 0.1


@settings(deadline=None, max_examples=60)
@given(
    rows=st.lists(st.tuples(st.integers(-9, 9), st.booleans()), min_size=1, max_size=5),
    discount=st.sampled_from([0.0, 0.9, 1.0]),
)
def test_the_clipped_share_is_that_of_a_literal_loop(
    rows: list[tuple[int, bool]], discount: float
) -> None:
    support = torch.linspace(-2.0, 2.0, 5)
    prob = torch.rand(len(rows), 5, generator=torch.Generator().manual_seed(0)).softmax(-1)
    reward = torch.tensor([number + 0.25 for number, _ in rows])
    terminated = torch.tensor([ended for _, ended in rows])
    wanted = 0.0
    for row, (_, ended) in enumerate(rows):
        for atom, value in enumerate(support.tolist()):
            moved = float(reward[row]) + (0.0 if ended else discount * value)
            if abs(moved) > 2.5:
                wanted += float(prob[row, atom]) / len(rows)
    share = clipped_share(prob, reward, terminated, discount=discount, support=support)
    assert share.item() == pytest.approx(wanted, abs=1e-5)


SUPPORTS = pytest.mark.parametrize("make", [C51Policy, one_step_rainbow])


@SUPPORTS
@pytest.mark.parametrize("reward", [50.0, -50.0, 2.7])
def test_returns_outside_of_the_support_are_logged_and_warned_of_once(
    make: Any, reward: float, caplog: pytest.LogCaptureFixture
) -> None:
    policy, data = make({"model": C51, "seed": 0}), chain()
    data["terminated"][:] = True
    data["reward"][:] = reward
    for _ in range(3):
        output = policy.learn_mode.forward(data)
        assert output["clipped_share"] == pytest.approx(1.0)
    warnings = [one for one in caplog.records if "v_min" in one.getMessage()]
    assert len(warnings) == 1
    assert "[-2, 2]" in warnings[0].getMessage()
    assert "clipped_share" in monitored_of(type(policy))


@SUPPORTS
def test_returns_within_the_support_are_not_warned_of(
    make: Any, caplog: pytest.LogCaptureFixture
) -> None:
    policy, data = make({"model": C51, "seed": 0}), chain()
    for _ in range(3):
        assert policy.learn_mode.forward(data)["clipped_share"] < 0.05
    assert not caplog.records


def test_a_dueling_network_joins_the_streams_for_each_number() -> None:
    policy = QRDQNPolicy({"model": {**QR, "dueling": True}, "seed": 0})
    model = policy.model
    features = model.encoder(torch.eye(2))
    advantage = model.head(features).unflatten(-1, (2, 8))
    wanted = model.value_head(features)[:, None] + advantage - advantage.mean(1, keepdim=True)
    torch.testing.assert_close(model(torch.eye(2))["quantiles"], wanted)


def test_a_support_without_width_is_refused() -> None:
    with pytest.raises(ValueError, match="v_min below v_max"):
        C51Policy({"model": {**C51, "v_min": 2.0}})


@pytest.mark.parametrize("value", ["low", None, math.nan, -math.inf, [0.0], True])
@pytest.mark.parametrize("name", ["v_min", "v_max"])
@pytest.mark.parametrize("cls", [C51Policy, RainbowPolicy])
def test_a_support_that_is_not_of_finite_numbers_is_named(cls: Any, name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=f"{name} must be a finite number, got"):
        cls({"model": {**C51, name: value}})
