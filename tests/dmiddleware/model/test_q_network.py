import math

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces

from dmiddleware.errors import SpaceError
from dmiddleware.model import (
    CategoricalQNetwork,
    FractionQuantileQNetwork,
    ImplicitQuantileQNetwork,
    QNetwork,
    QuantileQNetwork,
    action_shape_of,
    obs_shape_of,
)

NETWORKS = [
    QNetwork,
    CategoricalQNetwork,
    QuantileQNetwork,
    ImplicitQuantileQNetwork,
    FractionQuantileQNetwork,
]


@pytest.mark.parametrize("dueling", [False, True])
@pytest.mark.parametrize("lead", [(), (8,), (3, 8)], ids=str)
def test_every_action_has_a_value(lead, dueling):
    network = QNetwork(4, 3, dueling=dueling)
    output = network(torch.randn(*lead, 4))
    assert list(output) == ["logit"]
    assert output["logit"].shape == (*lead, 3)


def test_the_values_are_those_of_the_plain_layers():
    network = QNetwork(4, 2, encoder_hidden_sizes=(8, 6))
    plain = torch.nn.Sequential(*network.encoder, *network.head)
    obs = torch.randn(5, 4)
    assert torch.equal(network(obs)["logit"], plain(obs))


@pytest.mark.parametrize("part", ["encoder", "head", "value_head"])
@pytest.mark.parametrize(
    "register",
    ["register_forward_pre_hook", "register_forward_hook", "register_full_backward_hook"],
)
def test_hooks_of_its_parts_are_called(part, register):
    called = []
    network = QNetwork(4, 2, dueling=True)
    getattr(getattr(network, part), register)(lambda *_: called.append(part))
    network(torch.randn(5, 4, requires_grad=True))["logit"].sum().backward()
    assert called == [part]


def test_a_part_that_was_compiled_runs_compiled():
    compiled = []

    def backend(graph, example_inputs):
        compiled.append(graph)
        return graph.forward

    network = QNetwork(4, 2)
    network.encoder.compile(backend=backend)
    network(torch.randn(5, 4))
    assert compiled


def test_dueling_streams_are_joined_by_equation_9():
    network = QNetwork(4, 3, dueling=True, head_hidden_sizes=(5,))
    obs = torch.randn(6, 4)
    features = network.encoder(obs)
    assert [len(network.head), len(network.value_head)] == [3, 3]
    advantage, value = network.head(features), network.value_head(features)
    wanted = value + (advantage - advantage.mean(1, keepdim=True))
    torch.testing.assert_close(network(obs)["logit"], wanted)
    torch.testing.assert_close(network(obs)["logit"].mean(1), value.squeeze(1))


def test_default_layers_are_those_of_the_benchmarks():
    sizes = [layer.out_features for layer in QNetwork(4, 2).encoder if hasattr(layer, "weight")]
    assert sizes == [128, 128, 64]


@pytest.mark.parametrize(
    "observation_space",
    [
        spaces.Box(-1, 1, (4,)),
        spaces.Box(0, 255, (4, 84, 84), np.uint8),
        spaces.Discrete(16),
        spaces.Dict({"a": spaces.Box(-1, 1, (2,)), "b": spaces.Discrete(3)}),
    ],
    ids=str,
)
def test_a_network_built_from_spaces_takes_what_they_give(observation_space):
    action_space = spaces.Discrete(5)
    network = QNetwork(
        obs_shape_of(observation_space), action_shape_of(action_space), encoder_hidden_sizes=(16,)
    )
    network.check_spaces(observation_space, action_space)
    assert network.action_shape == 5
    assert network.action_space == "discrete"


def test_a_whole_episode_of_a_real_environment_goes_through():
    with gym.make("FrozenLake-v1") as env:
        network = QNetwork(obs_shape_of(env.observation_space), action_shape_of(env.action_space))
        obs, _ = env.reset(seed=0)
        done = False
        while not done:
            action = network(torch.tensor([obs]))["logit"].argmax(-1).item()
            obs, _, terminated, truncated, _ = env.step(action)
            done = terminated or truncated


def test_other_observations_than_the_network_was_built_for_are_rejected():
    network = QNetwork(4, 2)
    with pytest.raises(
        SpaceError,
        match=r"QNetwork was built for observations of shape \(4,\).*obs_shape to \(3,\)",
    ):
        network.check_spaces(spaces.Box(-1, 1, (3,)), spaces.Discrete(2))


@pytest.mark.parametrize(
    ("space", "remedy"),
    [(spaces.Discrete(3), "action_shape to 3"), (spaces.Box(-1, 1, (2,)), "use PPO")],
    ids=str,
)
def test_other_actions_than_the_network_was_built_for_are_rejected(space, remedy):
    network = QNetwork(4, 2)
    with pytest.raises(SpaceError, match=remedy):
        network.check_spaces(spaces.Box(-1, 1, (4,)), space)


def test_a_network_of_nested_shapes_accepts_its_space_in_any_order():
    network = QNetwork({"b": ["one_hot", 3], "a": [2]}, 2)
    space = spaces.Dict({"a": spaces.Box(-1, 1, (2,)), "b": spaces.Discrete(3)})
    network.check_spaces(space, spaces.Discrete(2))


@pytest.mark.parametrize("action_shape", [0, -1, 2.0, (2,), None, True])
def test_an_invalid_number_of_actions_is_rejected(action_shape):
    with pytest.raises(SpaceError, match="action_shape must be a positive integer"):
        QNetwork(4, action_shape)


def test_weights_can_be_loaded_into_another_network():
    one, other = QNetwork(4, 2, dueling=True), QNetwork(4, 2, dueling=True)
    other.load_state_dict(one.state_dict())
    obs = torch.randn(3, 4)
    assert torch.equal(one(obs)["logit"], other(obs)["logit"])


def test_a_network_can_be_copied_and_every_parameter_learns():
    network = QNetwork({"a": 2, "b": (1, 36, 36)}, 2, encoder_hidden_sizes=(8,), dueling=True)
    obs = {"a": torch.randn(3, 2), "b": torch.rand(3, 1, 36, 36)}
    network(obs)["logit"].square().sum().backward()
    assert all(p.grad is not None for p in network.parameters())


def test_masks_are_left_to_the_policy():
    network = QNetwork({"observation": 3}, 2)
    obs = {"observation": torch.randn(5, 3)}
    masked = {**obs, "action_mask": torch.eye(2)[[0, 1, 0, 1, 1]]}
    assert torch.equal(network(masked)["logit"], network(obs)["logit"])


@pytest.mark.parametrize("dueling", [False, True])
@pytest.mark.parametrize("network_cls", NETWORKS)
def test_a_noisy_network_has_noise_only_when_it_is_given(network_cls, dueling):
    network = network_cls(4, 3, noisy=True, dueling=dueling, head_hidden_sizes=(8,))
    obs = torch.randn(5, 4)
    still = network(obs)
    assert all(torch.equal(still[name], network(obs)[name]) for name in still)
    noise = torch.randn(5, network.n_noise)
    moved = network(obs, noise)["logit"]
    assert not torch.allclose(moved, still["logit"], atol=1e-3)
    for row in range(5):
        alone = network(obs[row], noise[row])["logit"]
        torch.testing.assert_close(moved[row], alone, rtol=1e-4, atol=1e-5)


def test_both_streams_have_their_part_of_the_noise():
    network = QNetwork(4, 3, dueling=True, noisy=True)
    obs, noise = torch.randn(6, 4), torch.randn(network.n_noise)
    features, n = network.encoder(obs), network.head.n_noise
    advantage = network.head(features, noise[:n])
    value = network.value_head(features, noise[n:])
    wanted = value + advantage - advantage.mean(1, keepdim=True)
    torch.testing.assert_close(network(obs, noise)["logit"], wanted)


def test_a_plain_network_has_no_noise():
    assert QNetwork(4, 2, dueling=True).n_noise == 0


def test_an_implicit_quantile_network_is_that_of_the_paper():
    network = ImplicitQuantileQNetwork(4, 3, n_cosines=6)
    obs, tau = torch.randn(5, 4), torch.rand(5, 7)
    output = network(obs, tau=tau)
    for row in range(5):
        features = network.encoder(obs[row])
        for index in range(7):
            # Equation 4.
            cosines = torch.tensor([math.cos(math.pi * i * tau[row, index]) for i in range(6)])
            embedded = torch.relu(network.embedding(cosines))
            wanted = network.head(features * embedded)
            torch.testing.assert_close(output["quantiles"][row, :, index], wanted)
    torch.testing.assert_close(output["logit"], output["quantiles"].mean(-1))
    assert output["tau"] is tau


@pytest.mark.parametrize("lead", [(), (8,), (3, 8)], ids=str)
def test_an_implicit_quantile_network_has_fixed_fractions_of_its_own(lead):
    network = ImplicitQuantileQNetwork(4, 3, n_quantiles=5)
    obs = torch.randn(*lead, 4)
    output = network(obs)
    assert output["tau"].tolist() == pytest.approx([0.1, 0.3, 0.5, 0.7, 0.9])
    assert output["quantiles"].shape == (*lead, 3, 5)
    given = network(obs, tau=output["tau"].expand(*lead, 5))
    torch.testing.assert_close(given["quantiles"], output["quantiles"])


@pytest.mark.parametrize("lead", [(), (8,), (3, 8)], ids=str)
def test_a_fraction_quantile_network_proposes_fractions(lead):
    network = FractionQuantileQNetwork(4, 3, n_quantiles=5)
    torch.nn.init.normal_(network.proposal.weight)
    output = network(torch.randn(*lead, 4), with_edges=True)
    fractions, quantiles = output["fractions"], output["quantiles"]
    assert fractions.shape == (*lead, 6)
    assert (fractions.diff() > 0).all()
    torch.testing.assert_close(fractions[..., [0, -1]], torch.tensor([0.0, 1.0]).expand(*lead, 2))
    torch.testing.assert_close(output["tau"], (fractions[..., 1:] + fractions[..., :-1]) / 2)
    assert output["edges"].shape == (*lead, 3, 4)
    weighted = sum(fractions.diff()[..., None, i] * quantiles[..., i] for i in range(5))
    torch.testing.assert_close(output["logit"], weighted)


def test_a_fraction_quantile_network_starts_with_about_equal_intervals():
    fractions = FractionQuantileQNetwork(4, 3, n_quantiles=4)(torch.randn(9, 4))["fractions"]
    wanted = torch.tensor([0.0, 0.25, 0.5, 0.75, 1.0]).expand(9, 5)
    torch.testing.assert_close(fractions, wanted, rtol=0, atol=0.02)


@pytest.mark.parametrize("option", ["n_cosines", "n_quantiles"])
def test_a_number_of_fractions_or_cosines_must_be_positive(option):
    with pytest.raises(ValueError, match=option):
        ImplicitQuantileQNetwork(4, 3, **{option: 0})


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_values_on_a_gpu_equal_those_on_the_cpu():
    network = QNetwork(("one_hot", 5), 3, dueling=True)
    obs = torch.arange(5)
    here = network(obs)["logit"]
    there = network.cuda()(obs.cuda())["logit"]
    torch.testing.assert_close(here, there.cpu(), rtol=1e-3, atol=1e-4)
