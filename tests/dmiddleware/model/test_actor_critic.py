import numpy as np
import pytest
import torch
from gymnasium import spaces

from dmiddleware.errors import SpaceError
from dmiddleware.model import (
    Actor,
    ActorCritic,
    ImageEncoder,
    action_kind_of,
    action_shape_of,
    obs_shape_of,
)

KINDS = [Actor, ActorCritic]


def built(kind, observation_space, action_space, **options):
    """Return the network for an environment's spaces."""
    return kind(
        obs_shape_of(observation_space),
        action_shape_of(action_space),
        action_space=action_kind_of(action_space),
        **options,
    )


@pytest.mark.parametrize("share_encoder", [None, False, True])
@pytest.mark.parametrize("lead", [(), (1,), (8,), (3, 8)], ids=str)
def test_discrete_output_has_logits_and_a_value(lead, share_encoder):
    output = ActorCritic(4, 3, share_encoder=share_encoder)(torch.randn(*lead, 4))
    assert set(output) == {"logit", "value"}
    assert output["logit"].shape == (*lead, 3)
    assert output["value"].shape == lead


@pytest.mark.parametrize("lead", [(), (1,), (8,), (3, 8)], ids=str)
def test_continuous_output_has_a_gaussian_and_a_value(lead):
    network = ActorCritic(4, 2, action_space="continuous", log_std_init=-0.5)
    output = network(torch.randn(*lead, 4))
    assert set(output) == {"mu", "sigma", "value"}
    assert output["mu"].shape == output["sigma"].shape == (*lead, 2)
    torch.testing.assert_close(output["sigma"], torch.full((*lead, 2), np.exp(-0.5)).float())


def test_sigma_depends_on_its_own_parameter_only():
    network = Actor(4, 2, action_space="continuous")
    output = network(torch.randn(5, 4))
    output["sigma"].sum().backward()
    assert network.log_std.grad.tolist() == [5.0, 5.0]
    assert all(p.grad is None for name, p in network.named_parameters() if name != "log_std")


@pytest.mark.parametrize("share_encoder", [False, True])
@pytest.mark.parametrize("action_space", ["discrete", "continuous"])
def test_actor_and_critic_alone_return_the_same_as_together(action_space, share_encoder):
    network = ActorCritic(4, 2, action_space=action_space, share_encoder=share_encoder)
    obs = torch.randn(6, 4)
    whole, actor = network(obs), network.compute_actor(obs)
    assert torch.equal(network.compute_critic(obs), whole.pop("value"))
    assert set(actor) == set(whole)
    assert all(torch.equal(actor[key], whole[key]) for key in actor)


def test_separate_encoders_keep_the_critics_gradient_from_the_actor():
    network = ActorCritic(4, 2, share_encoder=False)
    network.compute_critic(torch.randn(3, 4)).sum().backward()
    assert all(p.grad is None for p in network.encoder.parameters())
    assert all(p.grad is not None for p in network.critic_encoder.parameters())


def test_a_shared_encoder_gets_the_critics_gradient():
    network = ActorCritic(4, 2, share_encoder=True)
    network.compute_critic(torch.randn(3, 4)).sum().backward()
    assert all(p.grad is not None for p in network.encoder.parameters())


def test_vectors_get_separate_tanh_encoders_by_default():
    network = ActorCritic(4, 2)
    assert network.critic_encoder is not None
    names = [type(layer).__name__ for layer in network.encoder]
    assert names == ["Linear", "Tanh", "Linear", "Tanh"]
    assert network.encoder.out_features == 64


def test_images_get_one_shared_convolutional_encoder_by_default():
    network = ActorCritic((4, 84, 84), 2)
    assert network.critic_encoder is None
    assert type(network.encoder) is ImageEncoder
    assert network.encoder.out_features == 512
    assert not any(type(module).__name__ == "Tanh" for module in network.modules())


def test_first_policy_is_close_to_uniform_and_first_value_has_unit_gain():
    network = ActorCritic(4, 3)
    logit = network(torch.randn(100, 4))["logit"]
    assert logit.abs().max() < 0.1
    assert network.value_head.weight.norm().item() == pytest.approx(1.0, abs=1e-5)


def test_the_default_initialization_of_torch_can_be_kept():
    torch.manual_seed(0)
    network = ActorCritic(4, 3, init=None)
    assert network.policy_head.bias.any()
    assert network.policy_head.weight.abs().max() > 0.05


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("action_space", "name"),
    [
        (spaces.Discrete(5, start=2), "discrete"),
        (spaces.Box(-2, 2, (5,)), "continuous"),
        (spaces.MultiBinary(5), "multi_binary"),
    ],
    ids=str,
)
def test_a_network_built_from_spaces_knows_its_kind_of_action(kind, action_space, name):
    observation_space = spaces.Box(-1, 1, (4,))
    network = built(kind, observation_space, action_space, encoder_hidden_sizes=(16,))
    assert type(network) is kind
    assert (network.action_space, network.action_shape) == (name, 5)
    network.check_spaces(observation_space, action_space)


def test_a_kind_of_action_that_does_not_exist_is_rejected():
    with pytest.raises(SpaceError, match=r"must be one of 'discrete', .*, got 'hybrid'"):
        ActorCritic(4, 2, action_space="hybrid")


@pytest.mark.parametrize("lead", [(), (8,), (3, 8)], ids=str)
@pytest.mark.parametrize(
    ("space", "sizes"),
    [
        (spaces.MultiDiscrete([2, 3]), {"logit": 5}),
        (spaces.MultiBinary((2, 3)), {"logit": 6}),
        (spaces.Box(-1, 1, (2, 3)), {"mu": 6, "sigma": 6}),
        (
            spaces.Tuple((spaces.Box(-1, 1, ()), spaces.Discrete(4), spaces.MultiBinary(2))),
            {"logit": 6, "mu": 1, "sigma": 1},
        ),
    ],
    ids=str,
)
def test_an_action_of_any_kind_has_its_logits_and_means(space, sizes, lead):
    network = built(ActorCritic, spaces.Box(-1, 1, (4,)), space)
    output = network(torch.randn(*lead, 4))
    value = output.pop("value")
    assert value.shape == lead
    assert {name: column.shape for name, column in output.items()} == {
        name: (*lead, size) for name, size in sizes.items()
    }
    network.check_spaces(spaces.Box(-1, 1, (4,)), space)


def test_a_discrete_network_rejects_a_continuous_environment():
    network = ActorCritic(4, 2)
    with pytest.raises(SpaceError, match=r"built for discrete actions of size 2, .*continuous"):
        network.check_spaces(spaces.Box(-1, 1, (4,)), spaces.Box(-1, 1, (2,)))


@pytest.mark.parametrize("kind", KINDS)
def test_weights_can_be_loaded_into_another_network(kind):
    one, other = (kind(4, 2, action_space="continuous") for _ in range(2))
    with torch.no_grad():
        one.log_std.add_(1.0)
    other.load_state_dict(one.state_dict())
    obs = torch.randn(3, 4)
    assert all(torch.equal(one(obs)[key], other(obs)[key]) for key in one(obs))


def test_nested_observations_with_an_image_go_through():
    network = ActorCritic({"camera": (1, 36, 36), "body": 3}, 2, encoder_hidden_sizes=(16,))
    assert network.critic_encoder is None
    obs = {"camera": torch.zeros(4, 1, 36, 36, dtype=torch.uint8), "body": torch.randn(4, 3)}
    assert network(obs)["value"].shape == (4,)
