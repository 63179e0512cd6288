"""Networks of several agents."""

from __future__ import annotations

import gymnasium as gym
import pytest
import torch

from dmiddleware.env import AgentSpaces, team_spaces
from dmiddleware.errors import SpaceError
from dmiddleware.model import (
    AgentActorCritic,
    CentralizedActorCritic,
    QMIXNetwork,
    VDNNetwork,
    team_shapes,
)
from dmiddleware.tree import as_tree

SHAPES = {"obs_shape": {"agents": 4, "state": 5}, "action_shape": 3, "n_agent": 2}
WITHOUT_STATE = {**SHAPES, "obs_shape": {"agents": 4}}


def team_obs(*lead: int, seed: int = 0, state: bool = True) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    obs = {
        "agents": torch.randn(*lead, 2, 4, generator=generator),
        "agent_mask": torch.ones(*lead, 2, dtype=torch.int8),
    }
    if state:
        obs["state"] = torch.randn(*lead, 5, generator=generator)
    return obs


@pytest.mark.parametrize("lead", [(), (6,), (3, 6)])
@pytest.mark.parametrize("as_batch", [True, False])
def test_all_networks_take_any_leading_dimensions(lead: tuple[int, ...], as_batch: bool) -> None:
    obs = team_obs(*lead)
    given = as_tree(obs) if as_batch else obs
    for cls in (VDNNetwork, QMIXNetwork):
        model = cls(**SHAPES)
        q = model(given)["logit"]
        assert q.shape == (*lead, 2, 3)
        assert model.mix(q.amax(-1), given).shape == lead
    for cls in (AgentActorCritic, CentralizedActorCritic):
        output = cls(**SHAPES)(given)
        assert output["logit"].shape == (*lead, 2, 3)
        assert output["value"].shape == (*lead, 2)


@pytest.mark.parametrize("cls", [VDNNetwork, QMIXNetwork])
def test_noisy_layers_are_refused(cls: type[VDNNetwork]) -> None:
    cls(**SHAPES, noisy=False)
    with pytest.raises(ValueError, match="no noisy layers"):
        cls(**SHAPES, noisy=True)


def test_agents_that_see_the_same_can_differ() -> None:
    obs = team_obs(1)
    obs["agents"][:, 1] = obs["agents"][:, 0]
    for cls in (VDNNetwork, AgentActorCritic):
        logit = cls(**SHAPES)(obs)["logit"][0]
        assert not torch.allclose(logit[0], logit[1])


def test_an_agents_outputs_depend_on_its_own_observation_only() -> None:
    obs, other = team_obs(1), team_obs(1)
    other["agents"][:, 1] += 1.0
    other["state"] = other["state"] + 1.0
    for cls in (VDNNetwork, QMIXNetwork, AgentActorCritic, CentralizedActorCritic):
        model = cls(**SHAPES)
        before, after = (model(one)["logit"][0] for one in (obs, other))
        assert torch.equal(before[0], after[0])
        assert not torch.equal(before[1], after[1])


def test_a_centralized_critic_sees_the_state_and_an_independent_one_does_not() -> None:
    obs, other = team_obs(1), team_obs(1)
    other["state"] = other["state"] + 1.0
    values = {
        cls: [model.compute_critic(one) for one in (obs, other)]
        for cls in (AgentActorCritic, CentralizedActorCritic)
        if (model := cls(**SHAPES))
    }
    assert torch.equal(*values[AgentActorCritic])
    assert not torch.equal(*values[CentralizedActorCritic])


def test_without_a_state_a_centralized_critic_sees_all_agents() -> None:
    obs, other = team_obs(1, state=False), team_obs(1, state=False)
    other["agents"][:, 1] += 1.0
    model = CentralizedActorCritic(**WITHOUT_STATE)
    before, after = (model.compute_critic(one)[0] for one in (obs, other))
    assert not torch.equal(before[0], after[0])
    mixed = QMIXNetwork(**WITHOUT_STATE)
    assert not torch.equal(*(mixed.mix(torch.ones(1, 2), one) for one in (obs, other)))


def test_the_value_of_the_team_is_monotonic_in_each_agents_value() -> None:
    torch.manual_seed(0)
    model, obs = QMIXNetwork(**SHAPES), team_obs(200)
    q = torch.randn(200, 2, requires_grad=True)
    mixed = model.mix(q, obs)
    slope = torch.autograd.grad(mixed.sum(), q)[0]
    assert (slope >= 0).all()
    assert (slope > 0).any()
    assert not torch.allclose(model.mix(q, obs), model.mix(q, team_obs(200, seed=1)))


def test_vdn_adds_the_values_up_and_leaves_out_absent_agents() -> None:
    obs, q = team_obs(2), torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    assert VDNNetwork(**SHAPES).mix(q, obs).tolist() == [3.0, 7.0]
    obs["agent_mask"] = torch.tensor([[1, 0], [0, 0]], dtype=torch.int8)
    assert VDNNetwork(**SHAPES).mix(q, obs).tolist() == [1.0, 0.0]
    model = QMIXNetwork(**SHAPES)
    assert torch.equal(model.mix(q, obs), model.mix(q + torch.tensor([[0.0, 9.0], [9, 9]]), obs))


def test_forbidden_actions_have_the_lowest_value() -> None:
    obs = team_obs(1)
    obs["action_mask"] = torch.tensor([[[1, 0, 1], [0, 0, 1]]], dtype=torch.int8)
    q = VDNNetwork(**SHAPES)(obs)["logit"][0]
    assert q[1].argmax() == 2
    assert (q == torch.finfo(q.dtype).min).tolist() == [[False, True, False], [True, True, False]]


@pytest.mark.parametrize(
    "shape", [("one_hot", 4), (3, 40, 40), {"near": 2, "far": ("one_hot", 3)}], ids=str
)
def test_agents_may_see_integers_images_and_dictionaries(shape: object) -> None:
    agents: object = torch.zeros(5, 2, dtype=torch.int64)
    if shape == (3, 40, 40):
        agents = torch.zeros(5, 2, 3, 40, 40, dtype=torch.uint8)
    elif isinstance(shape, dict):
        agents = {"near": torch.zeros(5, 2, 2), "far": torch.zeros(5, 2, dtype=torch.int64)}
    obs = {**team_obs(5), "agents": agents}
    model = CentralizedActorCritic({"agents": shape, "state": 5}, 3, n_agent=2)
    output = model(as_tree(obs))
    assert output["logit"].shape == (5, 2, 3)
    assert not torch.equal(output["value"][:, 0], output["value"][:, 1])
    assert VDNNetwork({"agents": shape}, 3, n_agent=2)(obs)["logit"].shape == (5, 2, 3)


def test_continuous_actions_have_means_and_deviations() -> None:
    output = AgentActorCritic(**{**SHAPES, "action_space": "continuous"})(team_obs(4))
    assert output["mu"].shape == output["sigma"].shape == (4, 2, 3)


@pytest.mark.parametrize("obs_shape", [4, {"state": 4}, {"agents": 4, "other": 2}], ids=str)
def test_shapes_that_are_not_those_of_a_team_are_refused(obs_shape: object) -> None:
    with pytest.raises(SpaceError, match="needs an obs_shape with the key 'agents'"):
        VDNNetwork(obs_shape, 3, n_agent=2)  # type: ignore[arg-type]


def test_invalid_sizes_are_refused() -> None:
    with pytest.raises(ValueError, match="n_agent"):
        VDNNetwork({"agents": 4}, 3, n_agent=0)
    with pytest.raises(ValueError, match="mixing_size"):
        QMIXNetwork(**SHAPES, mixing_size=0)
    for shape in ({"agents": ("one_hot", 3)}, {"agents": 4, "state": {"a": 2}}):
        with pytest.raises(SpaceError, match="needs a state that is a Box"):
            QMIXNetwork(shape, 3, n_agent=2)


def test_the_spaces_of_another_env_are_refused() -> None:
    box = gym.spaces.Box(-1, 1, (4,))
    one = AgentSpaces(2, box, gym.spaces.Discrete(3), gym.spaces.Box(-1, 1, (5,)))
    model = VDNNetwork(**SHAPES)
    model.check_spaces(*team_spaces(one))
    assert team_shapes(*team_spaces(one)) == {**SHAPES, "action_space": "discrete"}
    for other in (
        one._replace(n_agent=3),
        one._replace(state=None),
        one._replace(action=gym.spaces.Discrete(4)),
        one._replace(action=gym.spaces.Box(-1, 1, (3,))),
        one._replace(observation=gym.spaces.Box(-1, 1, (3,))),
    ):
        with pytest.raises(SpaceError, match="was built for"):
            model.check_spaces(*team_spaces(other))
