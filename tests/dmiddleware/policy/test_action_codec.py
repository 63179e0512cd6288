import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces
from hypothesis import given, settings
from hypothesis import strategies as st

from dmiddleware.data import as_tree, leaves, to_numpy
from dmiddleware.errors import (
    CheckpointMismatch,
    ConfigError,
    PolicyOutputError,
    SpaceError,
    StructureError,
)
from dmiddleware.policy import ActionCodec
from dmiddleware.rl import Bernoulli, Categorical, Gaussian, Hybrid, MultiCategorical, TanhGaussian

number = st.floats(-100, 100, width=32)
width = st.floats(0.125, 100, width=32)


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def codec_for(space, **options):
    codec = ActionCodec(**options)
    codec.set_space(space)
    return codec


def box(first, last, **options):
    return codec_for(spaces.Box(np.float32(first), np.float32(last)), **options)


HYBRID = spaces.Dict(
    {
        "move": spaces.Discrete(3, start=-1),
        "aim": spaces.Box(-2.0, 2.0, (2, 2), np.float32),
        "tools": spaces.Tuple((spaces.MultiBinary((2, 1)), spaces.MultiDiscrete([[2], [3]]))),
    }
)
SPACES = {
    "discrete": (spaces.Discrete(4), Categorical),
    "discrete with start": (spaces.Discrete(4, start=3), Categorical),
    "multi discrete": (spaces.MultiDiscrete([2, 3, 4]), MultiCategorical),
    "multi discrete with start": (spaces.MultiDiscrete([2, 3], start=[1, -2]), MultiCategorical),
    "multi discrete of rank 2": (spaces.MultiDiscrete([[2, 3], [4, 5]]), MultiCategorical),
    "multi binary": (spaces.MultiBinary(4), Bernoulli),
    "multi binary of rank 2": (spaces.MultiBinary((2, 3)), Bernoulli),
    "box": (spaces.Box(-1.0, 3.0, (3,), np.float32), Gaussian),
    "box of rank 0": (spaces.Box(-1.0, 3.0, (), np.float32), Gaussian),
    "box of rank 2": (spaces.Box(-1.0, 3.0, (2, 3), np.float64), Gaussian),
    "dict": (HYBRID, Hybrid),
    "tuple": (spaces.Tuple((spaces.Discrete(2), spaces.Box(-1.0, 1.0, (1,)))), Hybrid),
}


def outputs_of(codec, lead=(6,)):
    """Random outputs of a network with as many numbers as the codec says."""
    parts = codec.state_dict()["parts"].values()
    n_logits = sum(sum(one["sizes"]) for one in parts if one["kind"] != "continuous")
    n_means = codec.n_outputs - n_logits
    outputs = {}
    if n_logits:
        outputs["logit"] = torch.randn(*lead, n_logits, generator=seeded())
    if n_means:
        outputs["mu"] = torch.randn(*lead, n_means, generator=seeded())
        outputs["sigma"] = torch.rand(*lead, n_means, generator=seeded()) + 0.1
    return outputs


def rows_of(action, n):
    """The actions of a batch as the environment gets them, one by one."""
    plain = to_numpy(action)

    def row(value, index, space):
        if isinstance(space, spaces.Dict):
            return {key: row(value[key], index, inner) for key, inner in space.spaces.items()}
        if isinstance(space, spaces.Tuple):
            return tuple(row(value[str(k)], index, inner) for k, inner in enumerate(space.spaces))
        array = np.asarray(value[index])
        if isinstance(space, spaces.Discrete):
            return int(array)
        return array.astype(space.dtype)

    return lambda space: [row(plain, index, space) for index in range(n)]


@pytest.mark.parametrize(("space", "kind"), SPACES.values(), ids=SPACES)
def test_draws_and_modes_are_actions_of_the_space(space, kind):
    codec = ActionCodec.for_space(space)
    distribution = codec.distribution(outputs_of(codec, (200,)))
    assert type(distribution) is kind
    for raw in (distribution.sample(seeded()), distribution.mode()):
        assert distribution.log_prob(raw).shape == (200,)
        for action in rows_of(codec.to_env(raw), 200)(space):
            assert action in space


@pytest.mark.parametrize(("space", "kind"), SPACES.values(), ids=SPACES)
def test_the_raw_actions_of_what_was_sampled_from_the_space_give_it_back(space, kind):
    codec = ActionCodec.for_space(space)
    space.seed(0)
    batch = gym.vector.utils.batch_space(space, 50)
    batch.seed(0)
    action = as_tree({"action": batch.sample()})["action"]
    again = codec.to_env(codec.to_raw(action))
    for (path, one), (_, other) in zip(leaves(action), leaves(again), strict=True):
        torch.testing.assert_close(one.double(), other.double(), rtol=1e-5, atol=1e-5, msg=path)
    log_prob = codec.distribution(outputs_of(codec, (50,))).log_prob(codec.to_raw(action))
    assert torch.isfinite(log_prob).all()


@pytest.mark.parametrize(("space", "kind"), SPACES.values(), ids=SPACES)
@pytest.mark.parametrize("lead", [(3, 5), ()], ids=str)
def test_any_leading_dimensions_are_mapped(space, kind, lead):
    codec = ActionCodec.for_space(space)
    raw = codec.distribution(outputs_of(codec, lead)).sample(seeded())
    action = codec.to_env(raw)
    shapes = [tuple(leaf.shape) for _, leaf in leaves(action)]
    sample = as_tree({"action": space.sample()})["action"]
    assert shapes == [(*lead, *leaf.shape) for _, leaf in leaves(sample)]
    if codec.is_lossless:
        for (_, one), (_, other) in zip(leaves(raw), leaves(codec.to_raw(action)), strict=True):
            assert torch.equal(one.long(), other)


@settings(deadline=None)
@given(low=number, width=width, raw=st.lists(st.floats(-1, 1, width=32), min_size=1, max_size=5))
def test_mapping_to_env_actions_and_back_is_the_identity(low, width, raw):
    codec = box([low], [low + width])
    raw = torch.tensor(raw).unsqueeze(-1)
    error = 1e-5 * (abs(low) + width)
    torch.testing.assert_close(
        codec.to_raw(codec.to_env(raw)), raw, rtol=1e-4, atol=max(1e-5, 4 * error / width)
    )


@settings(deadline=None)
@given(
    low=number,
    width=width,
    raw=st.lists(st.floats(-1e6, 1e6, width=32), min_size=1, max_size=5),
    bounding=st.sampled_from(["rescale", "clip", "tanh"]),
)
def test_no_action_is_outside_the_box(low, width, raw, bounding):
    space = spaces.Box(np.float32([low]), np.float32([low + width]), dtype=np.float32)
    codec = codec_for(space, bounding=bounding)
    for action in codec.to_env(torch.tensor(raw).unsqueeze(-1)).numpy():
        assert action in space


def test_rescaling_maps_the_unit_interval_to_the_bounds():
    codec = box([-2.0, 0.0], [2.0, 10.0])
    raw = torch.tensor([[-1.0, -1.0], [0.0, 0.0], [0.5, 0.5], [1.0, 1.0], [9.0, 9.0]])
    assert codec.to_env(raw).tolist() == [[-2, 0], [0, 5], [1, 7.5], [2, 10], [2, 10]]


def test_clipping_leaves_what_is_inside():
    codec = box([-2.0], [2.0], bounding="clip")
    assert codec.to_env(torch.tensor([[-3.0], [0.5], [3.0]])).flatten().tolist() == [-2, 0.5, 2]
    assert codec.to_raw(torch.tensor([[0.5]])).item() == 0.5


def test_tanh_gives_a_squashed_gaussian_between_the_bounds():
    codec = box([-2.0], [2.0], bounding="tanh")
    distribution = codec.distribution({"mu": torch.full((1, 1), 9.0), "sigma": torch.ones(1, 1)})
    assert type(distribution) is TanhGaussian
    assert codec.to_env(distribution.mode()).item() == pytest.approx(2.0)
    with pytest.raises(SpaceError, match="needs finite bounds"):
        box([-np.inf], [2.0], bounding="tanh")


def test_a_dimension_without_bounds_is_left_as_it_is():
    codec = box([-np.inf, 0.0], [np.inf, 4.0])
    assert codec.to_env(torch.tensor([[50.0, 0.5]])).tolist() == [[50.0, 3.0]]
    assert codec.to_raw(torch.tensor([[50.0, 3.0]])).tolist() == [[50.0, 0.5]]


def test_one_bound_alone_is_rejected():
    with pytest.raises(ConfigError, match="belong together"):
        ActionCodec(low=[0.0])


@pytest.mark.parametrize(("low", "high"), [([1.0], [1.0]), ([0.0, 0.0], [1.0]), (0.0, 1.0)])
def test_invalid_bounds_are_rejected(low, high):
    with pytest.raises(ConfigError, match="each lower bound below"):
        ActionCodec(low=low, high=high)


def test_bounds_of_another_length_or_for_other_actions_are_rejected():
    with pytest.raises(ConfigError, match="as long as the action, 2"):
        box([0.0, 0.0], [1.0, 1.0], low=[0.0], high=[1.0])
    with pytest.raises(ConfigError, match="are the bounds of a Box"):
        codec_for(spaces.Discrete(2), low=[0.0], high=[1.0])


@pytest.mark.parametrize(
    ("space", "other"),
    [
        (spaces.Discrete(3), spaces.Discrete(3, start=1)),
        (spaces.Discrete(3), spaces.Discrete(4)),
        (spaces.Discrete(3), spaces.Box(0.0, 1.0, (3,))),
        (spaces.MultiDiscrete([2, 2]), spaces.MultiDiscrete([2, 2], start=[1, 0])),
        (spaces.Box(0.0, 1.0, (2,)), spaces.Box(0.0, 2.0, (2,))),
        (HYBRID, spaces.Dict({"move": spaces.Discrete(3)})),
    ],
    ids=str,
)
def test_another_space_is_rejected(space, other):
    codec = ActionCodec.for_space(space)
    codec.set_space(space)
    with pytest.raises(SpaceError, match="the environment takes"):
        codec.set_space(other)


def test_without_a_space_actions_are_those_of_the_outputs():
    logit, mu = torch.randn(3, 2), torch.randn(3, 2)
    discrete, continuous = ActionCodec(), ActionCodec()
    assert type(discrete.distribution({"logit": logit})) is Categorical
    assert type(continuous.distribution({"mu": mu})) is Gaussian
    raw = continuous.distribution({"mu": mu}).sample()
    torch.testing.assert_close(raw, mu)
    assert continuous.to_env(raw) is raw
    assert continuous.to_raw(raw) is raw
    with pytest.raises(StructureError, match="logit and mu, and the action space is not known"):
        ActionCodec().distribution({"logit": logit, "mu": mu})
    with pytest.raises(StructureError, match="returned nothing, but the action needs mu"):
        ActionCodec().distribution({})


def test_bounds_are_not_adopted_once_actions_were_used_without_them():
    space = spaces.Box(-3.0, 3.0, (2, 1))
    used, fresh = ActionCodec(), ActionCodec()
    raw = used.distribution({"mu": torch.full((1, 2), 9.0)}).mode()
    used.to_env(raw)
    used.set_space(space)
    fresh.set_space(space)
    assert used.to_env(raw).tolist() == [[[9.0], [9.0]]]
    assert fresh.to_env(raw).tolist() == [[[3.0], [3.0]]]


@pytest.mark.parametrize(("space", "kind"), SPACES.values(), ids=SPACES)
def test_a_restored_codec_maps_as_the_saved_one(space, kind):
    codec, restored = ActionCodec.for_space(space), ActionCodec()
    restored.load_state_dict(codec.state_dict())
    raw = codec.distribution(outputs_of(codec)).sample(seeded())
    for (_, one), (_, other) in zip(
        leaves(codec.to_env(raw)), leaves(restored.to_env(raw)), strict=True
    ):
        assert torch.equal(one, other)
    restored.set_space(space)
    with pytest.raises(CheckpointMismatch, match="the same kind of environment"):
        ActionCodec.for_space(spaces.Discrete(99)).load_state_dict(codec.state_dict())


def test_a_state_without_details_leaves_the_present_ones():
    codec = ActionCodec.for_space(spaces.Discrete(3, start=2))
    bare = ActionCodec()
    bare.distribution({"logit": torch.zeros(1, 3)})
    codec.load_state_dict(bare.state_dict())
    assert codec.to_env(torch.tensor([0])).item() == 2


@pytest.mark.parametrize(
    ("name", "firsts"),
    [
        ("discrete with start", [0]),
        ("multi discrete", [0, 2, 5]),
        ("multi discrete with start", [0, 2]),
        ("multi discrete of rank 2", [0, 2, 5, 9]),
        ("multi binary of rank 2", []),
        ("dict", [0, 5, 7]),
    ],
)
def test_only_allowed_actions_are_drawn_and_recognised(name, firsts):
    codec = ActionCodec.for_space(SPACES[name][0])
    outputs = outputs_of(codec, (500,))
    mask = torch.rand(outputs["logit"].shape, generator=seeded(1)) < 0.4
    mask[:, firsts] = True  # every choice keeps an option
    masked, free = codec.distribution(outputs, mask), codec.distribution(outputs)

    def check(raw):
        codec.check_allowed(torch.zeros(500), {"action": codec.to_env(raw)}, mask=mask, user="it")

    for raw in (masked.sample(seeded()), masked.mode()):
        check(raw)
    with pytest.raises(PolicyOutputError, match="its action_mask allows only"):
        check(free.sample(seeded()))


def test_a_forbidden_action_of_a_team_is_named_with_what_its_agent_may_do():
    codec = ActionCodec.for_space(spaces.Discrete(3))
    mask = torch.tensor([[[True, True, True], [True, False, True]]])
    with pytest.raises(PolicyOutputError, match=r"the action 1, .* allows only \[0, 2\]"):
        codec.check_allowed(None, {"action": torch.tensor([[1, 1]])}, mask=mask, user="it")


def test_a_mask_of_another_length_is_rejected():
    codec = ActionCodec.for_space(spaces.Discrete(3))
    with pytest.raises(StructureError, match="2 entries, but the action has 3"):
        codec.distribution({"logit": torch.zeros(1, 3)}, torch.ones(1, 2, dtype=torch.bool))


def test_discrete_actions_must_be_integers():
    codec = ActionCodec.for_space(spaces.Discrete(3))
    assert codec.to_raw(torch.tensor([1], dtype=torch.uint8)).dtype == torch.int64
    with pytest.raises(StructureError, match=r"must be integers, got torch\.float32"):
        codec.to_raw(torch.zeros(2))


def test_features_of_an_action_are_one_hot_choices_bits_and_scaled_numbers():
    codec = ActionCodec.for_space(HYBRID)
    action = as_tree(
        {
            "move": torch.tensor([-1, 1]),
            "aim": torch.tensor([[[2.0, 0.0], [-2.0, 1.0]], [[0.0, 0.0], [0.0, 0.0]]]),
            "tools": {
                "0": torch.tensor([[[1], [0]], [[0], [1]]]),
                "1": torch.tensor([[[1], [2]], [[0], [0]]]),
            },
        }
    )
    features = codec.features(action)
    assert features.shape == (2, codec.n_outputs)
    assert features.dtype == torch.float32
    aim, move, bits, choices = [1.0, 0.0, -1.0, 0.5], [1, 0, 0], [1, 0], [0, 1, 0, 0, 1]
    assert features[0].tolist() == [*aim, *move, *bits, *choices]


@pytest.mark.parametrize("name", SPACES)
def test_features_have_as_many_numbers_as_outputs(name):
    space, _ = SPACES[name]
    codec = ActionCodec.for_space(space)
    action = codec.to_env(codec.distribution(outputs_of(codec)).sample(seeded()))
    assert codec.features(action).shape == (6, codec.n_outputs)
