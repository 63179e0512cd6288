import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector.utils import batch_space

from dmiddleware.classic import as_eval_mode
from dmiddleware.errors import SpaceError
from dmiddleware.model import (
    MLP,
    ActorCritic,
    ActorQ,
    ActorQV,
    AgentActorCritic,
    CentralizedActorCritic,
    DecisionTransformer,
    DiscreteActorQ,
    ImageEncoder,
    NestedEncoder,
    OneHotEncoder,
    QMIXNetwork,
    QNetwork,
    RecurrentQNetwork,
    VDNNetwork,
    VectorEncoder,
    make_encoder,
    obs_shape_of,
)
from dmiddleware.policy import DQNPolicy
from dmiddleware.tree import as_tree, from_numpy

LEADS = [(), (5,), (2, 5)]


@pytest.mark.parametrize("lead", LEADS, ids=str)
@pytest.mark.parametrize("shape", [(), (4,), (2, 3), (2, 3, 2, 2)], ids=str)
def test_vectors_of_any_shape_are_flattened(shape, lead):
    encoder = VectorEncoder(shape, (8, 6))
    features = encoder(torch.randn((*lead, *shape)))
    assert features.shape == (*lead, 6)


def test_leading_dimensions_do_not_change_the_features():
    encoder = VectorEncoder((2, 3), (8,))
    obs = torch.randn(4, 5, 2, 3)
    torch.testing.assert_close(encoder(obs).flatten(0, 1), encoder(obs.flatten(0, 1)))


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float16, torch.int8, torch.int64, torch.uint8]
)
@pytest.mark.parametrize("make", [VectorEncoder, make_encoder])
def test_numbers_of_other_dtypes_are_not_scaled(make, dtype):
    encoder = make((3,), (8,))
    obs = torch.tensor([[1, 2, 3]], dtype=dtype)
    torch.testing.assert_close(encoder(obs), encoder(obs.float()))


def test_pixels_are_scaled_to_the_unit_interval():
    encoder = VectorEncoder((28, 28), (8,))
    obs = torch.randint(256, (2, 28, 28), dtype=torch.uint8)
    before = obs.clone()
    torch.testing.assert_close(encoder(obs), encoder(obs / 255))
    assert torch.equal(obs, before)


def test_an_image_as_bytes_equals_the_image_as_fractions():
    encoder = ImageEncoder((1, 36, 36), (8,))
    image = torch.randint(256, (2, 1, 36, 36), dtype=torch.uint8)
    torch.testing.assert_close(encoder(image), encoder(image.float() / 255))


@pytest.mark.parametrize("lead", LEADS, ids=str)
def test_integers_are_encoded_one_hot(lead):
    encoder = OneHotEncoder((4,), (6,))
    obs = torch.randint(4, lead)
    features = encoder(obs)
    assert features.shape == (*lead, 6)
    by_hand = torch.relu(encoder[0](torch.eye(4)[obs]))
    torch.testing.assert_close(features, by_hand)


@pytest.mark.parametrize("lead", LEADS, ids=str)
def test_several_integers_are_encoded_side_by_side(lead):
    encoder = OneHotEncoder((2, 3), (6,))
    first, second = torch.randint(2, lead), torch.randint(3, lead)
    features = encoder(torch.stack((first, second), dim=-1))
    by_hand = torch.relu(encoder[0](torch.cat((torch.eye(2)[first], torch.eye(3)[second]), -1)))
    torch.testing.assert_close(features, by_hand)


@pytest.mark.parametrize("lead", LEADS, ids=str)
def test_images_of_any_leading_dimensions_give_features(lead):
    encoder = ImageEncoder((4, 84, 84), (32,))
    assert encoder(torch.zeros(*lead, 4, 84, 84, dtype=torch.uint8)).shape == (*lead, 32)


def test_the_convolutions_are_those_of_the_paper():
    encoder = ImageEncoder((4, 84, 84))
    assert encoder.convolutions(torch.zeros(1, 4, 84, 84)).shape == (1, 64, 7, 7)
    assert encoder.linear[0].in_features == 64 * 7 * 7
    assert encoder.out_features == 512


def test_other_convolutions_may_be_chosen():
    encoder = ImageEncoder((3, 20, 24), (9,), conv_layers=[(8, 4, 2), (5, 3, 1)])
    kinds = [(type(one), getattr(one, "stride", None)) for one in encoder.convolutions]
    assert kinds[::2] == [(torch.nn.Conv2d, (2, 2)), (torch.nn.Conv2d, (1, 1))]
    assert encoder.convolutions(torch.zeros(2, 3, 20, 24)).shape == (2, 5, 7, 9)
    assert encoder(torch.zeros(4, 2, 3, 20, 24)).shape == (4, 2, 9)


def test_numbers_are_the_residual_sections_of_impala():
    encoder = ImageEncoder((3, 64, 64), (256,), conv_layers=(16, 32, 32))
    kinds = [layer for layer in encoder.modules() if isinstance(layer, torch.nn.Conv2d)]
    assert len(kinds) == 15  # as the paper counts them
    images = torch.rand(2, 3, 64, 64)
    features = encoder.convolutions(images)
    assert features.shape == (2, 32, 8, 8)
    assert encoder(images).shape == (2, 256)
    section = encoder.convolutions[0]
    x = torch.nn.functional.max_pool2d(section.first(images), 3, 2, 1)
    for block in section.blocks:
        x = x + block[3](block[1](x.relu()).relu())
    torch.testing.assert_close(section(images), x)
    assert features.min() == 0


@pytest.mark.parametrize("side", [1, 2, 5, 36, 64])
def test_sections_and_convolutions_may_be_mixed_for_images_of_any_size(side):
    encoder = ImageEncoder((1, side + 3, side + 4), (8,), conv_layers=[(6, 4, 1), 4, 5])
    assert encoder(torch.zeros(2, 1, side + 3, side + 4)).shape == (2, 8)


@pytest.mark.parametrize("network", [QNetwork, ActorCritic, RecurrentQNetwork])
def test_networks_pass_their_convolutions_to_the_encoder(network):
    made = network((1, 10, 10), 3, conv_layers=[(6, 3, 1)])
    assert [one.out_channels for one in made.encoder.convolutions[::2]] == [6]


@pytest.mark.parametrize(
    ("network", "options"),
    [
        (ActorQ, {}),
        (ActorQV, {}),
        (DiscreteActorQ, {}),
        (DecisionTransformer, {}),
        (AgentActorCritic, {"n_agent": 2}),
        (CentralizedActorCritic, {"n_agent": 2}),
        (VDNNetwork, {"n_agent": 2}),
        (QMIXNetwork, {"n_agent": 2}),
    ],
)
def test_all_encoders_of_a_network_have_the_chosen_convolutions(network, options):
    shape = (1, 10, 10)
    made = network(
        {"agents": shape} if "n_agent" in options else shape, 3, conv_layers=[(6, 3, 1)], **options
    )
    encoders = [one for one in made.modules() if isinstance(one, ImageEncoder)]
    assert encoders
    assert all([one.out_channels for one in e.convolutions[::2]] == [6] for e in encoders)


def test_the_encoder_of_the_critics_has_the_activation_and_the_norm_of_the_network():
    made = ActorQ((1, 40, 40), 2, activation="elu", norm="layer")
    for encoder in (made.actor.encoder, made.critic.encoder):
        kinds = [type(one) for one in encoder.linear]
        assert kinds[:3] == [torch.nn.Linear, torch.nn.LayerNorm, torch.nn.ELU]
    values = made.critic(torch.zeros(5, 1, 40, 40), torch.zeros(5, 2))
    assert values.shape == (2, 5)


def test_convolutions_of_nested_observations_are_for_their_images():
    shape = {"camera": (1, 12, 12), "joints": (7,)}
    made = make_encoder(shape, conv_layers=[(6, 3, 1)])
    assert made({"camera": torch.zeros(2, 1, 12, 12), "joints": torch.zeros(2, 7)}).shape[0] == 2


@pytest.mark.parametrize(
    ("layers", "error", "message"),
    [
        ([], ValueError, "at least one layer"),
        ([(8, 4)], ValueError, r"\(channels, kernel size, stride\).*got \(8, 4\)"),
        ([16, 0], ValueError, "conv_layers must be an integer ≥ 1, got 0"),
        ([(8, 0, 1)], ValueError, r"a list of integers ≥ 1, got \(8, 0, 1\)"),
        ([(8, 8, 4), (8, 4, 2)], SpaceError, "at least 20 by 20, got 19 by 30.*conv_layers"),
    ],
)
def test_convolutions_that_do_not_fit_are_rejected(layers, error, message):
    with pytest.raises(error, match=message):
        ImageEncoder((1, 19, 30), conv_layers=layers)


def test_convolutions_without_an_image_are_rejected():
    with pytest.raises(ValueError, match=r"images \(C, H, W\).*shape \(4,\); leave them out"):
        make_encoder(4, conv_layers=[(8, 3, 1)])


@pytest.mark.parametrize("side", [(36, 36), (36, 99), (37, 41), (210, 160)], ids=str)
def test_images_of_every_allowed_size_fit(side):
    encoder = ImageEncoder((1, *side), (8,))
    assert encoder(torch.zeros(2, 1, *side)).shape == (2, 8)


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ((3, 35, 84), r"at least 36 by 36, got 35 by 84.*ResizeObservation.*FlattenObservation"),
        ((3, 84, 20), r"at least 36 by 36, got 84 by 20"),
        ((84, 84, 3), r"channels last; networks take channels first.*\(3, 84, 84\)"),
        ((96, 80, 1), r"channels last; networks take channels first.*\(1, 96, 80\)"),
        ((84, 84), r"images \(C, H, W\), got shape \(84, 84\).*FrameStackObservation"),
    ],
)
def test_images_that_do_not_fit_are_rejected_with_what_to_do(shape, message):
    with pytest.raises(SpaceError, match=message):
        ImageEncoder(shape)


NESTED = spaces.Dict(
    {
        "camera": spaces.Box(0, 255, (1, 40, 36), np.uint8),
        "body.parts": spaces.Dict({"joints": spaces.Box(-1, 1, (7,)), "gear": spaces.Discrete(6)}),
        "touch": spaces.Tuple((spaces.MultiBinary(4), spaces.MultiDiscrete([2, 3]))),
    }
)


@pytest.mark.parametrize("lead", [(5,), (2, 5)], ids=str)
@pytest.mark.parametrize("hidden_sizes", [None, (12, 10)], ids=str)
def test_nested_observations_become_one_vector(lead, hidden_sizes):
    space = NESTED
    for size in reversed(lead):
        space = batch_space(space, size)
    encoder = make_encoder(obs_shape_of(NESTED), hidden_sizes)
    features = encoder(from_numpy(space.sample()))
    assert features.shape == (*lead, 10 if hidden_sizes else 128)


def test_every_leaf_of_a_nested_observation_matters():
    torch.manual_seed(0)
    encoder = NestedEncoder(
        {"a": 3, "b": {"c": 2, "d": ("one_hot", 4)}}, (16, 16), activation="tanh"
    )
    obs = {"a": torch.zeros(1, 3), "b": {"c": torch.zeros(1, 2), "d": torch.tensor([0])}}
    before = encoder(as_tree(obs))
    for changed in (
        {**obs, "a": torch.ones(1, 3)},
        {**obs, "b": {**obs["b"], "c": torch.ones(1, 2)}},
        {**obs, "b": {**obs["b"], "d": torch.tensor([1])}},
    ):
        assert not torch.allclose(encoder(as_tree(changed)), before, atol=1e-4)


@pytest.mark.parametrize("lead", LEADS, ids=str)
def test_arrays_of_numbers_are_encoded_as_one_vector(lead):
    encoder = NestedEncoder({"b": (2, 2), "a": 3, "c": {"d": ()}}, (8,))
    a, b, d = torch.randn(*lead, 3), torch.randn(*lead, 2, 2), torch.randn(lead)
    joined = torch.cat([a, b.flatten(-2), d.unsqueeze(-1)], -1)
    by_hand = torch.relu(encoder.encoders[0][0](joined))
    torch.testing.assert_close(encoder({"a": a, "b": b, "c": {"d": d}}), by_hand)


def test_a_nested_observation_may_be_a_plain_dictionary_with_more_keys():
    encoder = NestedEncoder({"a": 3}, (8,))
    a = torch.randn(2, 3)
    torch.testing.assert_close(encoder({"a": a, "other": None}), encoder(as_tree({"a": a})))


def test_the_order_of_keys_does_not_matter():
    torch.manual_seed(1)
    one = NestedEncoder({"a": 3, "b": 2}, (8,))
    other = NestedEncoder({"b": 2, "a": 3}, (8,))
    other.load_state_dict(one.state_dict())
    obs = as_tree({"a": torch.randn(4, 3), "b": torch.randn(4, 2)})
    assert torch.equal(one(obs), other(obs))


@pytest.mark.parametrize(
    ("shape", "kind", "width"),
    [
        (4, MLP, 64),
        ((4,), MLP, 64),
        ((2, 3), VectorEncoder, 64),
        ([4, 84, 84], ImageEncoder, 512),
        (("one_hot", 5), OneHotEncoder, 64),
        (["one_hot", 2, 3], OneHotEncoder, 64),
        ({"a": 4, "b": (2, 3)}, NestedEncoder, 64),
        ({"a": 4, "b": ("one_hot", 5)}, NestedEncoder, 128),
    ],
    ids=str,
)
def test_the_shape_decides_the_encoder(shape, kind, width):
    encoder = make_encoder(shape)
    assert type(encoder) is kind
    assert encoder.out_features == width


def test_options_reach_every_part_of_an_encoder():
    encoder = make_encoder(
        {"a": 4, "b": (1, 36, 36)}, (8,), activation="elu", norm="layer", init="orthogonal"
    )
    names = [type(module).__name__ for module in encoder.modules()]
    assert names.count("ELU") == names.count("LayerNorm") == 3
    assert not any(p.any() for name, p in encoder.named_parameters() if name.endswith("0.bias"))


@pytest.mark.parametrize("shape", [4, (1, 36, 36), ("one_hot", 4), {"a": 4}], ids=str)
def test_hidden_sizes_set_the_width_of_every_encoder(shape):
    assert make_encoder(shape, (24, 12)).out_features == 12


@pytest.mark.parametrize("shape", [4, ("one_hot", 4), {"a": (1, 36, 36)}], ids=str)
def test_no_hidden_layer_at_all_is_rejected(shape):
    with pytest.raises(ValueError, match="hidden_sizes needs at least one layer"):
        make_encoder(shape, ())


def test_an_image_may_have_convolutions_alone():
    encoder = make_encoder((4, 84, 84), ())
    assert encoder.out_features == 3136  # of Mnih et al. (2015)
    assert encoder(torch.zeros(2, 4, 84, 84, dtype=torch.uint8)).shape == (2, 3136)


def test_the_remedy_for_channels_last_works():
    class Camera(gym.Env):
        observation_space = gym.spaces.Box(0, 255, (48, 40, 3), np.uint8)
        action_space = gym.spaces.Discrete(2)

        def reset(self, *, seed=None, options=None):
            return self.observation_space.low, {}

    with pytest.raises(SpaceError) as caught:
        DQNPolicy.for_env(Camera())
    remedy = str(caught.value).partition("wrap the env in ")[2]
    env = eval(remedy, {"gymnasium": gym, "env": Camera()})
    policy = DQNPolicy.for_env(env)
    obs, _ = env.reset()
    assert obs.shape == env.observation_space.shape == (3, 48, 40)
    as_eval_mode(policy, user="the test").forward({0: obs})
