"""The base class of learned rewards."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dmiddleware.data import Batch, as_tree
from dmiddleware.errors import CheckpointMismatch, ConfigError, NonFiniteData, NonFiniteLoss
from dmiddleware.policy import Component, adam
from dmiddleware.reward import RewardModel
from dmiddleware.rl import RunningMeanStd


class Predictor(RewardModel):
    """The reward of an observation is the error of a linear prediction of its sum."""

    columns = ("obs",)

    def __init__(self, *, name: str = "net", **options: Any) -> None:
        torch.manual_seed(0)
        self.net = torch.nn.Linear(3, 1)
        self.stats = RunningMeanStd((3,))
        self.seen: list[Batch] = []
        parts = {name: Component(self.net, adam(0.01)), "stats": Component(self.stats)}
        super().__init__(parts, **{"batch_size": 4, "epochs": 2, **options})

    def reward_of(self, batch: Batch) -> torch.Tensor:
        error: torch.Tensor = self.net(batch["obs"]).squeeze(-1) - batch["obs"].sum(-1)
        return error.square()

    def update_minibatch(self, batch: Batch) -> dict[str, torch.Tensor]:
        self.seen.append(batch)
        self.stats.update(batch["obs"])
        loss = self.reward_of(batch).mean()
        self.components["net"].step(loss)
        return {"loss": loss}


def rows(*lead: int) -> Batch:
    generator = torch.Generator().manual_seed(1)
    return as_tree(
        {
            "obs": torch.randn(*lead, 3, generator=generator),
            "done": torch.zeros(lead, dtype=torch.bool),
            "other": torch.zeros(lead),
        }
    )


@pytest.mark.parametrize("lead", [(5,), (7, 3), (600, 2)])
def test_rewards_have_the_shape_of_the_rows(lead: tuple[int, ...]) -> None:
    model, batch = Predictor(), rows(*lead)
    with torch.no_grad():
        wanted = (model.net(batch["obs"])[..., 0] - batch["obs"].sum(-1)).square()
    got = model.reward(batch)
    assert not got.requires_grad
    torch.testing.assert_close(got, wanted)


def test_every_epoch_takes_every_row_once_and_only_the_columns_that_are_read() -> None:
    model, batch = Predictor(), rows(6, 2)
    losses = [model.update(batch)["loss"] for _ in range(40)]
    assert losses[0] > 2 * losses[-1]
    first = model.seen[:6]
    assert [len(one["obs"]) for one in first] == [4] * 6
    assert set(first[0].keys()) == {"obs"}
    for epoch in (first[:3], first[3:]):
        seen = torch.cat([one["obs"] for one in epoch])
        assert sorted(seen[:, 0].tolist()) == sorted(batch["obs"].flatten(0, 1)[:, 0].tolist())


def test_a_model_continues_from_a_saved_state() -> None:
    whole, first, second = Predictor(seed=3), Predictor(seed=3), Predictor(seed=4)
    batch = rows(6, 2)
    losses = [whole.update(batch) for _ in range(4)]
    for _ in range(2):
        first.update(batch)
    second.load_state_dict(first.state_dict())
    assert [second.update(batch) for _ in range(2)] == losses[2:]
    assert second.stats.count == whole.stats.count


def test_the_state_of_another_model_is_refused() -> None:
    with pytest.raises(
        CheckpointMismatch, match="the components other, stats, but Predictor has net"
    ):
        Predictor().load_state_dict(Predictor(name="other").state_dict())


class Undefined(Predictor):
    """Its loss is NaN."""

    def reward_of(self, batch: Batch) -> torch.Tensor:
        return super().reward_of(batch) * float("nan")


def test_a_loss_that_is_not_finite_is_rejected_and_changes_no_weight() -> None:
    model = Undefined()
    with pytest.raises(NonFiniteLoss, match="Undefined was NaN"):
        model.update(rows(8))
    assert model.net.weight.isfinite().all()


def test_an_observation_that_is_not_finite_is_rejected_and_changes_no_weight() -> None:
    model, batch = Predictor(), rows(8)
    batch["obs"][2, 0] = float("nan")
    with pytest.raises(NonFiniteData, match="nan at"):
        model.update(batch)
    assert model.net.weight.isfinite().all()


class Rooted(Predictor):
    """Its loss is 0 at first, where the slope of the root is infinite."""

    def reward_of(self, batch: Batch) -> torch.Tensor:
        return (self.net(batch["obs"]) - self.net(batch["obs"]).detach()).abs().sqrt().squeeze(-1)


def test_weights_that_an_unchecked_gradient_broke_are_named() -> None:
    with pytest.raises(NonFiniteLoss, match=r"Rooted: the weights of net .* grad_clip_norm"):
        Rooted().update(rows(8))


@pytest.mark.parametrize("options", [{"batch_size": 0}, {"epochs": 0}, {"epochs": 1.5}])
def test_invalid_options_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=f"{next(iter(options))} must be an integer ≥ 1"):
        Predictor(**options)
