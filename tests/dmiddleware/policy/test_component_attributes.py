"""Components that a class declares by annotations are its attributes."""

from __future__ import annotations

import copy
import pickle
from typing import Annotated, Any

import pytest
import torch
from torch import nn

from dmiddleware.errors import PolicyError
from dmiddleware.policy import Component, Policy, PolicySettings, SACPolicy, TargetRule, adam
from dmiddleware.reward import RewardModel
from dmiddleware.schedule import LearningRate, Schedule, Scheduled
from dmiddleware.settings import Positive
from dmiddleware.tree import as_tree


class LineSettings(PolicySettings):
    learning_rate: LearningRate = 0.1
    weight: Annotated[float | Schedule, Scheduled(Positive)] = 2.0


class Line(Policy):
    """A regression whose weight is a setting."""

    cfg: LineSettings
    net: Component[nn.Linear]
    bonus: Component[nn.Linear] | None
    anything: Component[Any] | None

    def make_components(self):
        return {"net": Component(self.model, adam(self.cfg.learning_rate), acts=True)}

    def update(self, batch):
        weight = self.now(self.cfg.weight)
        loss = weight * self.net.module(batch["obs"]).square().mean()
        self.net.step(loss)
        return {"total_loss": loss, "seen_weight": torch.as_tensor(weight)}


def line(**options):
    return Line({"seed": 0, **options}, nn.Linear(2, 1), ["learn"])


def test_a_declared_component_is_the_one_of_the_dictionary():
    policy = line()
    assert policy.net is policy.components["net"]
    assert policy.bonus is None and policy.anything is None
    twin = copy.deepcopy(policy)
    assert twin.net is twin.components["net"] is not policy.net


def test_a_subclass_inherits_declarations_and_may_add_its_own():
    class Bonus(Line):
        bonus: Component[nn.Linear]

        def make_components(self):
            return {**super().make_components(), "bonus": Component(nn.Linear(1, 1))}

    policy = Bonus({}, nn.Linear(2, 1), ["learn"])
    assert policy.bonus is policy.components["bonus"]
    assert policy.net is policy.components["net"]


class Misnamed(Line):
    def make_components(self):
        return {"network": Component(self.model)}


class Undefined(Line):
    critic: Component[Undefinable]  # noqa: F821


class Taken(Line):
    model: Component[nn.Linear]

    def make_components(self):
        return {**super().make_components(), "model": Component(nn.Linear(1, 1))}


@pytest.mark.parametrize(
    ("cls", "model", "words"),
    [
        (Misnamed, nn.Linear(2, 1), "Misnamed declares the component net, but has only .*network"),
        (Line, nn.Identity(), r"net with Component\[Linear\], but its module is of type Identity"),
        (Taken, nn.Linear(2, 1), "another attribute of this name"),
        (Undefined, nn.Linear(2, 1), "name 'Undefinable' is not defined; define or import"),
    ],
)
def test_a_declaration_that_does_not_hold_is_refused(cls, model, words):
    with pytest.raises(PolicyError, match=words):
        cls({}, model, ["learn"])


def test_a_module_is_refused_by_its_declared_type_and_not_by_that_of_its_model():
    class Networks(nn.Module):
        def __init__(self):
            super().__init__()
            self.actor, self.critic = nn.Identity(), nn.Identity()

    policy = SACPolicy({}, Networks(), ["collect"])
    assert isinstance(policy.actor.module, nn.Identity)
    assert policy.temperature.module.log_alpha.item() == 0.0


def test_the_components_of_a_reward_are_attributes_too():
    class Distance(RewardModel):
        columns = ("obs",)
        net: Component[nn.Linear]

        def reward_of(self, batch):
            return self.net.module(batch["obs"]).squeeze(-1)

        def update_minibatch(self, batch):
            loss = self.reward_of(batch).square().mean()
            self.net.step(loss)
            return {"loss": loss}

    options = {"batch_size": 4, "epochs": 50}
    model = Distance({"net": Component(nn.Linear(2, 1), adam(0.1))}, **options)
    rows = as_tree({"obs": torch.ones(4, 2), "done": torch.zeros(4, dtype=torch.bool)})
    model.update(rows)
    assert model.reward(rows).abs().max() < 0.1
    with pytest.raises(PolicyError, match="declares the component net"):
        Distance({"network": Component(nn.Linear(2, 1))}, **options)


BATCH = {"obs": torch.ones(4, 2)}


def test_a_setting_that_is_a_number_is_its_own_present_value():
    assert line().now(0.5) == 0.5
    assert line().learn_mode.forward(BATCH)["seen_weight"] == 2.0


def test_an_update_sees_the_present_value_of_a_schedule():
    policy = line(weight=Schedule.linear(2.0, 1.0, decay=4, by="update"))
    twin = pickle.loads(pickle.dumps(policy))
    for pupil in (policy, twin):
        weights = [pupil.learn_mode.forward(BATCH)["seen_weight"] for _ in range(5)]
        assert weights == [2.0, 1.75, 1.5, 1.25, 1.0]


def test_two_settings_with_equal_schedules_have_present_values_of_their_own():
    rate = Schedule.linear(2.0, 1.0, decay=4, by="update")
    policy = line(weight=Schedule.linear(2.0, 1.0, decay=4, by="update"), learning_rate=rate)
    policy.learn_mode.forward(BATCH)
    values = policy.now(policy.cfg.weight), policy.now(policy.cfg.learning_rate)
    assert values[0] is not values[1]
    assert values[0] == values[1] == 2.0


def test_a_schedule_that_is_not_a_setting_has_no_present_value():
    with pytest.raises(PolicyError, match="pass a setting that updates read"):
        line().now(Schedule.linear(2.0, 1.0))


def test_a_component_without_a_target_network_says_how_to_get_one():
    policy = line()
    assert not policy.net.has_target
    with pytest.raises(PolicyError, match=r"give it a rule, such as target=TargetRule"):
        policy.net.target  # noqa: B018
    component = Component(nn.Linear(2, 1), target=TargetRule())
    component.prepare(not_finite=torch.zeros(()))
    assert torch.equal(component.target.weight, component.module.weight)
