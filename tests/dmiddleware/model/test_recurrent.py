import gymnasium as gym
import pytest
import torch
from gymnasium import spaces

from dmiddleware.data import as_tree
from dmiddleware.errors import SpaceError
from dmiddleware.model import RecurrentActorCritic, RecurrentCore, RecurrentQNetwork

CORES = ["lstm", "gru"]
T, B = 9, 4


def starts(p=0.3, seed=0):
    """Return ``[T, B]`` bool: where episodes start, also in the middle of a sequence."""
    return torch.rand(T, B, generator=torch.Generator().manual_seed(seed)) < p


def step_by_step(core, x, state, is_first):
    """What the core must return, by torch's cell and one step after the other."""
    kind = torch.nn.LSTMCell if isinstance(core.layer, torch.nn.LSTM) else torch.nn.GRUCell
    cell = kind(x.shape[-1], core.out_features)
    weights = core.layer.state_dict()
    cell.load_state_dict({name.removesuffix("_l0"): weights[name] for name in weights})
    outputs = []
    for t in range(len(x)):
        state = torch.where(is_first[t].unsqueeze(-1), torch.zeros(()), state)
        if kind is torch.nn.GRUCell:
            state = hidden = cell(x[t], state)
        else:
            hidden, memory = cell(x[t], state.chunk(2, -1))
            state = torch.cat([hidden, memory], -1)
        outputs.append(hidden)
    return torch.stack(outputs), state


@pytest.mark.parametrize("p", [0.0, 0.1, 0.7, 1.0])
@pytest.mark.parametrize("core", CORES)
def test_a_core_equals_its_cell_with_states_reset_where_episodes_start(core, p):
    torch.manual_seed(0)
    layer = RecurrentCore(3, 5, core=core)
    x, state, is_first = torch.randn(T, B, 3), torch.randn(B, layer.state_size), starts(p)
    found, wanted = layer(x, state, is_first), step_by_step(layer, x, state, is_first)
    for mine, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(mine, theirs)
    if p == 0.0:
        torch.testing.assert_close(layer(x, state), wanted)


@pytest.mark.parametrize("core", CORES)
def test_no_gradient_flows_into_an_earlier_episode(core):
    layer = RecurrentCore(3, 5, core=core)
    x = torch.randn(T, B, 3, requires_grad=True)
    is_first = torch.zeros(T, B, dtype=torch.bool)
    is_first[4, 1] = True
    layer(x, torch.zeros(B, layer.state_size), is_first)[0][-1].sum().backward()
    of_steps = x.grad.abs().sum(-1)
    assert (of_steps[:4, 1] == 0).all()
    assert (of_steps[4:, 1] > 0).all()
    assert (of_steps[:, 0] > 0).all()


@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("core", CORES)
def test_a_sequence_equals_its_steps(core, residual):
    torch.manual_seed(0)
    network = RecurrentActorCritic(
        3, 2, core=core, hidden_size=8, encoder_hidden_sizes=[8], residual=residual
    )
    obs, is_first = torch.randn(T, B, 3), starts()
    seen = {
        "is_first": is_first,
        "prev_action": torch.randint(2, (T, B)),
        "prev_reward": torch.randn(T, B),
    }
    first_state = torch.randn(B, network.core.state_size)
    whole = network(obs, first_state, **seen)
    state = first_state
    for t in range(T):
        step = network(obs[t], state, **{name: seen[name][t] for name in seen})
        state = step["state"]
        torch.testing.assert_close(step["logit"], whole["logit"][t])
        torch.testing.assert_close(step["value"], whole["value"][t])
    torch.testing.assert_close(state, whole["state"])


def test_the_previous_action_of_another_episode_is_not_seen():
    network = RecurrentQNetwork(3, 4, hidden_size=8, prev_reward=False)
    obs, state = torch.randn(4, 3), torch.zeros(4, network.core.state_size)
    before, after = (
        network(obs, state, is_first=torch.tensor([True, False] * 2), prev_action=action)["logit"]
        for action in (torch.zeros(4, dtype=torch.int64), torch.full((4,), 3))
    )
    assert torch.equal(before[[0, 2]], after[[0, 2]])
    assert not (before[[1, 3]] == after[[1, 3]]).all(-1).any()


def test_the_state_of_an_episode_that_starts_does_not_matter():
    network = RecurrentQNetwork(3, 4, hidden_size=8, prev_action=False, prev_reward=False)
    obs, first = torch.randn(2, 3), torch.ones(2, dtype=torch.bool)
    state = torch.randn(2, network.core.state_size)
    fresh = network(obs, network.initial_state(2), is_first=first)
    torch.testing.assert_close(network(obs, state, is_first=first), fresh)
    other = network(obs, state, is_first=first, within_episode=True)
    assert not torch.equal(other["logit"], fresh["logit"])


@pytest.mark.parametrize("prev_action", [False, True])
@pytest.mark.parametrize("prev_reward", [False, True])
def test_a_network_asks_only_for_what_it_sees(prev_action, prev_reward):
    network = RecurrentQNetwork(3, 2, prev_action=prev_action, prev_reward=prev_reward)
    wanted = {"is_first", *["prev_action"] * prev_action, *["prev_reward"] * prev_reward}
    assert set(network.act_inputs) == wanted
    width = network.core.layer.input_size
    assert width == 64 + 2 * prev_action + prev_reward


def test_all_kinds_of_actions_are_seen():
    space = spaces.Dict(
        {
            "aim": spaces.Box(-1.0, 1.0, (2,)),
            "buttons": spaces.MultiBinary(3),
            "gear": spaces.MultiDiscrete([2, 3]),
            "turn": spaces.Discrete(4),
        }
    )
    kinds = {
        "aim": "continuous", "buttons": "multi_binary", "gear": "multi_discrete",
        "turn": "discrete",
    }  # fmt: skip
    shapes = {"aim": 2, "buttons": 3, "gear": [2, 3], "turn": 4}
    network = RecurrentActorCritic(3, shapes, action_space=kinds, hidden_size=8)
    network.check_spaces(spaces.Box(-1.0, 1.0, (3,)), space)
    assert network.core.layer.input_size == 64 + (2 + 3 + 5 + 4) + 1
    action = as_tree(
        {
            "aim": torch.tensor([[0.25, -1.0]]),
            "buttons": torch.tensor([[1, 0, 1]]),
            "gear": torch.tensor([[1, 2]]),
            "turn": torch.tensor([3]),
        }
    )
    seen = {}
    network.core.register_forward_hook(lambda core, args, output: seen.update(x=args[0]))
    inputs = {"prev_action": action, "prev_reward": torch.tensor([7.0])}
    first = torch.zeros(1, dtype=torch.bool)
    output = network(torch.zeros(1, 3), network.initial_state(1), is_first=first, **inputs)
    assert seen["x"][0, 0, 64:].tolist() == [
        0.25, -1.0, 1, 0, 1, 0, 1, 0, 0, 1, 0, 0, 0, 1, 7.0,
    ]  # fmt: skip
    assert output["logit"].shape == (1, 12)
    assert output["mu"].shape == output["sigma"].shape == (1, 2)


def test_an_image_is_encoded_first():
    network = RecurrentQNetwork((2, 36, 36), 3, hidden_size=8, prev_action=False)
    obs = torch.zeros(T, B, 2, 36, 36, dtype=torch.uint8)
    seen = {"is_first": starts(), "prev_reward": torch.zeros(T, B)}
    output = network(obs, network.initial_state(B), **seen)
    assert output["logit"].shape == (T, B, 3)
    assert output["state"].shape == (B, 16)


def test_the_weights_of_the_core_start_orthogonal():
    core = RecurrentActorCritic(3, 2, hidden_size=4).core.layer
    weight = core.weight_hh_l0.detach()
    torch.testing.assert_close(weight.T @ weight, torch.eye(4))
    assert (core.bias_hh_l0 == 0).all()


def test_a_residual_core_adds_the_features_of_the_encoder():
    network = RecurrentQNetwork(3, 2, hidden_size=8, encoder_hidden_sizes=[8], residual=True)
    for parameter in network.core.parameters():
        parameter.data.zero_()  # an LSTM without weights returns 0
    obs, is_first = torch.randn(T, B, 3), starts()
    columns = {"prev_action": torch.zeros(T, B).long(), "prev_reward": torch.zeros(T, B)}
    output = network(obs, network.initial_state(B), is_first=is_first, **columns)
    torch.testing.assert_close(output["logit"], network.head(network.encoder(obs))["logit"])
    with pytest.raises(ValueError, match="hidden_size must be 8"):
        RecurrentQNetwork(3, 2, hidden_size=9, encoder_hidden_sizes=[8], residual=True)


@pytest.mark.parametrize("wrong", [{"core": "rnn"}, {"hidden_size": 0}, {"init": "xavier"}])
def test_wrong_options_are_rejected(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        RecurrentQNetwork(3, 2, **wrong)


def test_an_env_with_other_spaces_is_rejected():
    env = gym.make("CartPole-v1")
    with pytest.raises(SpaceError, match="RecurrentQNetwork was built for"):
        RecurrentQNetwork(3, 2).check_spaces(env.observation_space, env.action_space)
