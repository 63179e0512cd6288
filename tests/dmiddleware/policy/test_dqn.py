import copy

import gymnasium as gym
import numpy as np
import pytest
import torch
import torch.nn.functional as F

from dmiddleware.classic import as_command_mode
from dmiddleware.errors import ConfigError, NonFiniteLoss, SpaceError
from dmiddleware.policy import DQNPolicy, Policy
from dmiddleware.tree import as_tree


class Table(torch.nn.Module):
    """Q-values of two actions in two states: the observation is the state as a one-hot vector."""

    def __init__(self):
        super().__init__()
        self.q = torch.nn.Linear(2, 2, bias=False)  # weight [action, state]

    def forward(self, obs):
        return {"logit": self.q(obs)}


def policy_with_tables(cfg):
    """Return a policy whose online and target network are known tables."""
    policy = DQNPolicy({"discount": 0.5, **cfg}, model=Table())
    state = policy.learn_mode.state_dict()
    state["model"] = {"q.weight": torch.tensor([[1.0, 3.0], [2.0, 1.0]])}
    state["target"]["q"] = {"q.weight": torch.tensor([[0.5, 2.0], [4.0, 5.0]])}
    policy.learn_mode.load_state_dict(state)
    return policy


def table_batch(**columns):
    state = torch.eye(2)
    return as_tree(
        {
            "obs": state[[0, 1, 0, 1]],
            "action": torch.tensor([0, 1, 1, 0]),  # of the values 1, 1, 2, 3
            "reward": torch.tensor([1.0, -2.0, 0.0, 0.25]),
            "next_obs": state[[1, 0, 0, 0]],
            "terminated": torch.tensor([False, True, False, False]),
            **columns,
        }
    )


# In state 1, the target network's value of the online network's best action is 2, its best is 5.
# So the targets are 2 (double) or 3.5, then -2, 2 and 2.25.
@pytest.mark.parametrize(
    ("double", "loss", "wanted", "target", "gradient"),
    [
        (True, "huber", 0.8203125, 1.0625, [[-0.25, 0.1875], [0.0, 0.25]]),
        (True, "mse", 2.640625, 1.0625, [[-0.5, 0.375], [0.0, 1.5]]),
        (False, "huber", 1.1953125, 1.4375, [[-0.25, 0.1875], [0.0, 0.25]]),
        (False, "mse", 3.953125, 1.4375, [[-1.25, 0.375], [0.0, 1.5]]),
    ],
)
def test_loss_and_gradient_are_those_computed_by_hand(double, loss, wanted, target, gradient):
    policy = policy_with_tables({"double": double, "loss": loss})
    output = policy.learn_mode.forward(table_batch())
    assert output["total_loss"] == pytest.approx(wanted)
    assert output["target_q_value"] == pytest.approx(target)
    assert output["q_value"] == pytest.approx(1.75)
    assert "priority" not in output
    assert policy.model.q.weight.grad.tolist() == gradient


def test_discount_and_weight_columns_are_honoured():
    policy = policy_with_tables({"n_step": 3})
    discount = torch.tensor([0.25, 0.5, 0.125, 0.5])
    weight = torch.tensor([1.0, 0.5, 2.0, 0.0])
    output = policy.learn_mode.forward(table_batch(discount=discount, weight=weight))
    # Huber's losses are 0.125, 2.5, 1 and 0.28125.
    assert output["total_loss"] == pytest.approx((0.125 + 0.5 * 2.5 + 2 * 1.0) / 4)
    assert output["priority"].tolist() == [0.5, 3.0, 1.5, 0.75]
    assert output["priority"].dtype == torch.float32


def test_priorities_are_given_on_request(small, transitions):
    output = DQNPolicy({"model": small, "priority": True}).learn_mode.forward(transitions(8))
    assert output["priority"].shape == (8,)


def test_a_truncated_row_bootstraps(small, transitions):
    batch = transitions(4)
    batch["terminated"][:] = False
    policy, other = (DQNPolicy({"model": small, "seed": 0}) for _ in range(2))
    plain = policy.learn_mode.forward(batch)["total_loss"]
    batch["truncated"][:] = True
    batch["done"][:] = True
    assert other.learn_mode.forward(batch)["total_loss"] == plain


def test_a_hard_target_is_copied_only_at_its_updates(small, transitions):
    policy = DQNPolicy({"model": small, "target_update_freq": 3})
    first = copy.deepcopy(policy.components["q"].target.state_dict())
    for update in range(1, 7):
        policy.learn_mode.forward(transitions(8, seed=update))
        target = policy.components["q"].target.state_dict()
        online = policy.model.state_dict()
        moved = [not torch.equal(first[name], target[name]) for name in first]
        assert all(moved) if update >= 3 else not any(moved)
        equal = [torch.equal(online[name], target[name]) for name in online]
        assert all(equal) if update % 3 == 0 else not any(equal)


def test_a_soft_target_moves_by_a_fraction(small, transitions):
    policy = DQNPolicy({"model": small, "target_update_freq": 1, "target_tau": 0.25})
    before = copy.deepcopy(policy.components["q"].target.state_dict())
    policy.learn_mode.forward(transitions(8))
    online = policy.model.state_dict()
    for name, value in policy.components["q"].target.state_dict().items():
        torch.testing.assert_close(value, 0.75 * before[name] + 0.25 * online[name])


def test_buffers_of_the_model_reach_the_target(transitions):
    class Counting(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(4, 2)
            self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

        def forward(self, obs):
            self.calls += 1
            return {"logit": self.layer(obs)}

    policy = DQNPolicy({"target_update_freq": 2}, model=Counting())
    for seed in range(2):
        policy.learn_mode.forward(transitions(4, seed=seed))
    assert int(policy.components["q"].target.calls) == int(policy.model.calls) > 2


def test_the_gradient_is_clipped_to_its_norm(small, transitions):
    batch = transitions(16)
    policy = DQNPolicy({"model": small, "grad_clip_norm": 0.01, "seed": 0})
    output = policy.learn_mode.forward(batch)
    gradients = [p.grad.flatten() for p in policy.model.parameters()]
    assert output["grad_norm"] > 0.01
    assert torch.cat(gradients).norm().item() == pytest.approx(0.01, rel=1e-3)


def test_epsilon_decides_how_often_actions_are_random(small):
    policy = DQNPolicy({"model": small, "seed": 0})
    obs = torch.randn(4000, 4)
    greedy = policy.eval_mode.forward(obs)["action"]
    assert torch.equal(policy.collect_mode.forward(obs)["action"], greedy)
    explored = policy.collect_mode.forward(obs, eps=0.4)["action"]
    # Half of the random actions happen to be the greedy one.
    assert (explored != greedy).float().mean().item() == pytest.approx(0.2, abs=0.03)
    assert explored.dtype == torch.int64


def test_collecting_gives_the_values_of_the_actions(small):
    policy = DQNPolicy({"model": small})
    obs = torch.randn(3, 4)
    with torch.no_grad():
        wanted = policy.model(obs)["logit"]
    assert torch.equal(policy.collect_mode.forward(obs)["logit"], wanted)


@pytest.mark.parametrize("column", ["reward", "obs"])
def test_a_loss_that_is_not_finite_names_the_iterations_and_changes_nothing(
    small, transitions, column
):
    policy = DQNPolicy({"model": small})
    policy.learn_mode.forward(transitions(16))
    before = policy.learn_mode.state_dict()
    batch = transitions(16)
    batch[column][3] = float("nan")
    with pytest.raises(NonFiniteLoss, match=r"total_loss is nan.*train_iter 7 to 22"):
        policy.learn_mode.forward(batch)
    after = policy.learn_mode.state_dict()
    assert all(torch.equal(before["model"][k], after["model"][k]) for k in before["model"])
    assert after["train_iter"] == 1


def test_a_gradient_that_is_not_finite_is_caught_before_the_step(transitions):
    class Root(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.zeros(2))

        def forward(self, obs):
            # The root of 0 is 0, its slope is infinite.
            return {"logit": self.weight.sqrt().expand(len(obs), 2)}

    policy = DQNPolicy({"grad_clip_norm": 1.0}, model=Root())
    batch = transitions(4)
    rows = as_tree({key: batch[key] for key in batch if key != "collect_iter"})
    with pytest.raises(NonFiniteLoss, match=r"grad_norm is .* without a column collect"):
        policy.learn_mode.forward(rows)
    assert policy.model.weight.tolist() == [0.0, 0.0]


def test_the_commander_lowers_epsilon_with_the_env_steps(small):
    eps = {"type": "linear", "start": 1.0, "end": 0.1, "decay": 100}
    policy = DQNPolicy({"model": small, "eps": eps})
    mode = as_command_mode(policy, user="the test")
    got = [mode.get_setting_collect({"envstep": n})["eps"] for n in (0, 50, 1000)]
    assert got == pytest.approx([1.0, 0.55, 0.1])


def test_dueling_is_an_option_of_the_model(small, transitions):
    policy = DQNPolicy({"model": {**small, "dueling": True}})
    assert policy.model.value_head is not None
    policy.learn_mode.forward(transitions(8))


def test_images_and_nested_observations_are_learned_from(transitions):
    model = {"obs_shape": {"image": (1, 36, 36), "speed": 2}, "action_shape": 2}
    policy = DQNPolicy({"model": {**model, "encoder_hidden_sizes": [8]}})
    plain = transitions(4)
    obs = {"image": torch.zeros(4, 1, 36, 36, dtype=torch.uint8), "speed": torch.randn(4, 2)}
    batch = as_tree({**dict(plain.items()), "obs": obs, "next_obs": obs})
    assert np.isfinite(policy.learn_mode.forward(batch)["total_loss"])


def test_shapes_are_taken_from_spaces(cartpole_spaces):
    policy = DQNPolicy.for_env(cartpole_spaces, model={"encoder_hidden_sizes": [8]})
    assert policy.cfg.model["obs_shape"] == 4
    assert policy.cfg.model["action_shape"] == 2
    policy.collect_mode.spec.check_spaces(*cartpole_spaces)


def test_spaces_that_do_not_fit_are_rejected(small, cartpole_spaces, pendulum_spaces):
    check = DQNPolicy({"model": small}).collect_mode.spec.check_spaces
    check(*cartpole_spaces)
    with pytest.raises(SpaceError, match=r"\(4,\).*\(3,\)"):
        check(pendulum_spaces[0], cartpole_spaces[1])
    with pytest.raises(SpaceError, match=r"size 2.*action_shape to 5"):
        check(cartpole_spaces[0], gym.spaces.Discrete(5))
    with pytest.raises(SpaceError, match=r"supports discrete actions.*Box.*use PPO"):
        DQNPolicy.for_env(pendulum_spaces)


def test_a_model_without_shapes_is_tried_with_an_observation(linear, cartpole_spaces):
    policy = DQNPolicy({"seed": 0}, model=linear())
    before = policy.generator.get_state()
    policy.check_spaces(*cartpole_spaces)
    with pytest.raises(SpaceError, match="cannot take observations of Box"):
        policy.check_spaces(gym.spaces.Box(0, 1, (7,)), cartpole_spaces[1])
    with pytest.raises(SpaceError, match=r"supports discrete actions.*takes Box"):
        policy.check_spaces(cartpole_spaces[0], gym.spaces.Box(0, 1, (1,)))
    assert torch.equal(policy.generator.get_state(), before)


def test_trying_a_model_draws_nothing_from_the_generator(linear, cartpole_spaces):
    policy = DQNPolicy({}, model=linear(), modes=["collect"])
    before = policy.generator.get_state()
    policy.check_spaces(*cartpole_spaces)
    assert torch.equal(policy.generator.get_state(), before)
    policy.collect_mode.forward(torch.zeros(1, 4))
    assert not torch.equal(policy.generator.get_state(), before)


@pytest.mark.parametrize("field", ["collect", "eval"])
def test_trying_a_model_leaves_no_hidden_state(linear, cartpole_spaces, field):
    class Counting(Policy):
        _hidden = None

        def act_collect(self, obs, env_id):
            if self._hidden is None:
                self._hidden = torch.zeros(len(obs), dtype=torch.int64)
            self._hidden += 1
            return {"action": self._hidden % 2, "hidden": self._hidden.clone()}

        def act_eval(self, obs, env_id):
            return self.act_collect(obs, env_id)

        def reset(self, env_ids=None):
            self._hidden = None

    policy = Counting({}, model=linear(), modes=[field])
    policy.check_spaces(*cartpole_spaces)
    mode = getattr(policy, f"{field}_mode")
    assert mode.forward(torch.zeros(3, 4))["hidden"].tolist() == [1, 1, 1]


def test_a_learner_alone_has_no_action_to_check(linear, cartpole_spaces):
    DQNPolicy({}, model=linear(), modes=["learn"]).check_spaces(*cartpole_spaces)


def test_one_update_lowers_the_loss_on_its_batch(small, transitions):
    policy = DQNPolicy({"model": small, "seed": 0})
    batch = transitions(64)
    losses = [policy.learn_mode.forward(batch)["total_loss"] for _ in range(200)]
    assert losses[-1] < 0.8 * losses[0]


def test_huber_is_the_loss_that_torch_has(small, transitions):
    policy = DQNPolicy({"model": small, "discount": 0.0})
    batch = transitions(8)
    q = policy.model(batch["obs"])["logit"]
    taken = q.gather(1, batch["action"][:, None]).squeeze(1)
    wanted = F.smooth_l1_loss(taken, batch["reward"]).item()
    assert policy.learn_mode.forward(batch)["total_loss"] == pytest.approx(wanted, rel=1e-6)


@pytest.mark.parametrize("field", ["collect", "eval"])
def test_loading_weights_to_act_with_updates_the_target_network(small, field):
    source, policy = (DQNPolicy({"model": small, "seed": seed}) for seed in (1, 2))
    getattr(policy, f"{field}_mode").load_state_dict(source.collect_mode.state_dict())
    wanted = source.model.state_dict()
    for name, value in policy.components["q"].target.state_dict().items():
        assert torch.equal(value, wanted[name]), name


@pytest.mark.parametrize("double", [True, False])
def test_the_target_is_computed_in_eval_mode(transitions, double):
    class Recording(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(4, 2)
            self.frozen = torch.nn.Dropout().eval()
            self.seen = []

        def train(self, mode=True):
            super().train(mode)
            self.frozen.eval()
            return self

        def forward(self, obs):
            self.seen.append((self.training, float(obs[0, 0])))
            return {"logit": self.layer(obs)}

    model = Recording()
    batch = transitions()
    DQNPolicy({"double": double}, model=model).learn_mode.forward(batch)
    obs, next_obs = float(batch["obs"][0, 0]), float(batch["next_obs"][0, 0])
    assert model.seen == [(False, next_obs)] * double + [(True, obs)]
    assert model.training
    assert not model.frozen.training, "a module that stays in eval mode is left there"


@pytest.mark.parametrize(
    ("column", "fits"),
    [([0.9, 0.81, 1.0], True), ([0.99**3], False), ([0.9, 0.729], False), ([0.81, 0.5], False)],
)
def test_a_column_discount_must_be_made_of_the_policys_own_discount(
    small, transitions, column, fits
):
    policy = DQNPolicy({"model": small, "discount": 0.9, "n_step": 2})
    batch = transitions(n=len(column), discount=torch.tensor(column))
    if fits:
        policy.learn_mode.forward(batch)
        return
    with pytest.raises(ConfigError, match=r"discount 0\.9 up to n_step=2"):
        policy.learn_mode.forward(batch)


def test_a_policy_for_several_steps_rejects_rows_of_single_steps(small, transitions):
    policy = DQNPolicy({"model": small, "n_step": 3})
    with pytest.raises(ConfigError, match="n_step=3, but the batch has no column discount"):
        policy.learn_mode.forward(transitions(8))
