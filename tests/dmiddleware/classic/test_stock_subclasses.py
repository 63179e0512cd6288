"""Subclasses of the stock policies, as DI-engine's users write their algorithms."""

import copy

import pytest
import torch
from torch import nn

from dmiddleware.classic import (
    CommandModePolicy,
    Policy,
    collate,
    create_policy,
    get_policy_cls,
)
from dmiddleware.classic.model_wrappers import model_wrap
from dmiddleware.env import EnvTimestep
from dmiddleware.errors import CheckpointMismatch, ConfigError, PolicyError
from dmiddleware.model import MODEL_REGISTRY
from dmiddleware.policy import POLICY_REGISTRY, DQNPolicy
from dmiddleware.worker import serial_run

DQN = get_policy_cls({"type": "dqn"})
HOOKS = [
    "_init_learn", "_forward_learn", "_reset_learn", "_monitor_vars_learn", "_state_dict_learn",
    "_load_state_dict_learn", "_init_collect", "_forward_collect", "_process_transition",
    "_get_train_sample", "_reset_collect", "_state_dict_collect", "_load_state_dict_collect",
    "_init_eval", "_forward_eval", "_reset_eval", "_state_dict_eval", "_load_state_dict_eval",
    "_init_command", "_get_setting_learn", "_get_setting_collect", "_get_setting_eval",
    "_get_batch_size", "_get_n_sample", "_get_n_episode", "_create_model", "default_model",
]  # fmt: skip


@pytest.fixture
def model(small):
    return {"model": small, "seed": 0}


TIMESTEP = EnvTimestep(
    env_id=0, next_obs=torch.zeros(4), reward=1.0, done=False, terminated=False, truncated=False,
    info={},
)  # fmt: skip


def use_every_mode(policy, rows):
    """Call whatever workers call of a policy, and return what they got."""
    learn, collect, eval_, command = (
        policy.learn_mode, policy.collect_mode, policy.eval_mode, policy.command_mode,
    )  # fmt: skip
    obs = torch.arange(8.0).reshape(2, 4)
    answers = collect.forward({3: obs[0], 5: obs[1]}, eps=0.0)
    transition = collect.process_transition(obs[0], answers[3], TIMESTEP)
    return {
        "learn": learn.forward(rows),
        "monitored": learn.monitor_vars(),
        "reset": (learn.reset(), collect.reset([3]), eval_.reset(None)),
        "acted": answers,
        "batch": collect.forward(obs, eps=0.0),
        "transition": transition,
        "samples": collect.get_train_sample(rows),
        "evaluated": (eval_.forward({0: obs[0]}), eval_.forward(obs)),
        "settings": [setting({"envstep": 100}) for setting in command],
        "sizes": [policy.get_attribute(name) for name in ("batch_size", "n_sample", "n_episode")],
        "loaded": [
            mode.load_state_dict(mode.state_dict()) for mode in (learn, collect, eval_)
        ],
        "state": learn.state_dict(),
    }  # fmt: skip


def same(one, two):
    if isinstance(one, dict):
        return one.keys() == two.keys() and all(same(one[key], two[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(two) and all(map(same, one, two))
    if isinstance(one, torch.Tensor):
        return torch.equal(one, two)
    return one == two


@pytest.fixture
def rows(transitions):
    batch = transitions(8)
    return [{key: batch[key][row] for key in batch} for row in range(8)]


@pytest.mark.parametrize("hook", HOOKS)
def test_each_hook_of_a_subclass_is_called_and_super_does_what_the_algorithm_does(
    hook, model, rows
):
    called = []

    def watched(self, *args, **kwargs):
        called.append(hook)
        return getattr(super(Watched, self), hook)(*args, **kwargs)

    Watched = type("Watched", (DQN,), {hook: watched})
    got = use_every_mode(Watched(model), rows)
    assert called
    assert same(got, use_every_mode(create_policy({"type": "dqn", **model}), rows))


def test_a_created_policy_is_a_policy_with_a_model_and_its_name(model):
    policy = create_policy({"type": "dqn", **model})
    assert isinstance(policy, Policy)
    assert isinstance(policy, CommandModePolicy)
    assert policy._model is policy.policy.model
    assert policy.default_model() == ("q_network", [])
    assert policy._cfg is policy.cfg
    assert (policy._device, policy._cuda, policy._rank) == ("cpu", False, 0)


class OwnLearning(DQN):
    """DQN as DI-engine writes it: a loss of one's own on a list of samples."""

    config = {"type": "own_learning", "learn": {"learning_rate": 0.01, "strength": 2.0}}

    def _init_learn(self):
        self._optimizer = torch.optim.SGD(
            self._model.parameters(), lr=self._cfg.learn.learning_rate, momentum=0.9
        )
        self._gamma = self._cfg.discount_factor
        self._target_model = model_wrap(
            copy.deepcopy(self._model), wrapper_name="target", update_kwargs={"freq": 2}
        )
        self._learn_model = model_wrap(self._model, wrapper_name="argmax_sample")

    def _forward_learn(self, data):
        assert isinstance(data, list)
        names = ("obs", "next_obs", "action", "reward", "done")
        batch = collate([{name: sample[name] for name in names} for sample in data])
        self._learn_model.train()
        q = self._learn_model.forward(batch["obs"])["logit"]
        with torch.no_grad():
            best = self._learn_model.forward(batch["next_obs"])["action"]
            following = self._target_model.forward(batch["next_obs"])["logit"]
        target = batch["reward"] + self._gamma * ~batch["done"] * following.gather(
            1, best[:, None]
        ).squeeze(1)
        chosen = q.gather(1, batch["action"][:, None]).squeeze(1)
        loss = self._cfg.learn.strength * (chosen - target).square().mean()
        self._optimizer.zero_grad()
        loss.backward()
        self._optimizer.step()
        self._target_model.update(self._learn_model.state_dict())
        return {"cur_lr": self._cfg.learn.learning_rate, "total_loss": loss.item()}

    def _monitor_vars_learn(self):
        return ["cur_lr", "total_loss"]


def test_an_own_update_learns_from_samples(model, rows):
    policy = OwnLearning(model)
    losses = [policy.learn_mode.forward(rows)["total_loss"] for _ in range(40)]
    assert losses[-1] < losses[0] / 2
    assert policy.train_iter == 40
    assert policy.learn_mode.spec.learn_columns == ()


def test_an_own_optimizer_and_target_network_are_resumed(model, rows):
    whole = OwnLearning(model)
    for _ in range(6):
        whole.learn_mode.forward(rows)
    stopped, resumed = OwnLearning(model), OwnLearning({**model, "seed": 1})
    for _ in range(4):
        stopped.learn_mode.forward(rows)
    resumed.learn_mode.load_state_dict(stopped.learn_mode.state_dict())
    for _ in range(2):
        resumed.learn_mode.forward(rows)
    assert same(whole.learn_mode.state_dict(), resumed.learn_mode.state_dict())
    without = create_policy({"type": "dqn", **model}).learn_mode.state_dict()
    with pytest.raises(CheckpointMismatch, match="attributes"):
        resumed.learn_mode.load_state_dict(without)


class Passing(DQN):
    """Looks at the samples that the stock update gets."""

    def _forward_learn(self, data):
        self.seen = data
        return super()._forward_learn(data)


def test_samples_of_several_steps_have_their_rewards_side_by_side(model, rows):
    cfg = {**model, "nstep": 3, "discount_factor": 0.5}
    for row in rows:
        row["terminated"] = row["done"] = torch.tensor(row is rows[-2])
    rows[-1]["truncated"] = rows[-1]["done"] = torch.tensor(True)
    episodes = [rows[:-1], rows[-1:]]
    own, stock = Passing(cfg), DQN(cfg)
    theirs, ours = (
        [row for episode in episodes for row in policy.collect_mode.get_train_sample(episode)]
        for policy in (own, stock)
    )
    assert [row["reward"].tolist() for row in theirs[:2]] == [
        pytest.approx([float(rows[step + k]["reward"]) for k in range(3)]) for step in range(2)
    ]
    assert [float(row["value_gamma"]) for row in theirs[4:]] == [0.125, 0.25, 0.5, 0.5]
    assert theirs[5]["reward"][2] == 0
    assert torch.equal(theirs[0]["next_obs"], rows[2]["next_obs"])
    assert bool(theirs[4]["done"])
    got, expected = own.learn_mode.forward(theirs), stock.learn_mode.forward(ours)
    assert len(own.seen) == len(rows)
    assert got["total_loss"] == pytest.approx(expected["total_loss"])


def test_the_models_that_di_engine_wraps_are_there(model, rows):
    class Usual(DQN):
        def _forward_learn(self, data):
            batch = collate(data)
            output = self._learn_model.forward(batch["obs"])
            assert torch.equal(output["action"], output["logit"].argmax(-1))
            loss = output["logit"].square().mean()
            self._optimizer.zero_grad()
            loss.backward()
            self._optimizer.step()
            self._target_model.update(self._learn_model.state_dict(), direct=True)
            return {"total_loss": loss.item(), "gamma": self._gamma, "nstep": self._nstep}

    policy = Usual({**model, "discount_factor": 0.5, "nstep": 3})
    before = copy.deepcopy(policy._model.state_dict())
    assert policy.learn_mode.forward(rows)["gamma"] == 0.5
    assert policy.learn_mode.forward(rows)["nstep"] == 3
    assert not same(dict(before), dict(policy._model.state_dict()))
    assert same(dict(policy._target_model.state_dict()), dict(policy._model.state_dict()))


def test_settings_of_a_subclass_are_defaults_and_may_be_named_as_in_di_engine(model):
    class Deeper(OwnLearning):
        config = {"learn": {"batch_size": 7, "target_theta": 0.25}, "mine": {"depth": 3}}

    cfg = Deeper.default_config()
    assert (cfg.learn.strength, cfg.learn.batch_size, cfg.mine.depth) == (2.0, 7, 3)
    assert (cfg.learn.target_tau, cfg.learn.ignore_done) == (0.25, False)
    assert (cfg.type, cfg.cfg_type) == ("own_learning", "DeeperDict")
    policy = Deeper({**model, "mine": {"depth": 4}, "learn": {"strength": 5.0}})
    assert (policy.cfg.mine.depth, policy.cfg.learn.strength) == (4, 5.0)
    assert policy.get_attribute("batch_size") == 7
    assert policy.policy.cfg.target_tau == 0.25


def test_a_subclass_may_have_a_model_of_its_own(model):
    @MODEL_REGISTRY.register("twice_as_much")
    class Twice(nn.Module):
        def __init__(self, obs_shape, action_shape):
            super().__init__()
            self.layer = nn.Linear(obs_shape, 2 * action_shape)

        def forward(self, obs):
            return {"logit": self.layer(obs)[..., ::2]}

    class WithModel(DQN):
        def default_model(self):
            return "twice_as_much", []

    policy = WithModel({"model": {"obs_shape": 4, "action_shape": 2}})
    assert type(policy._model) is Twice
    assert policy.eval_mode.forward(torch.zeros(3, 4))["action"].shape == (3,)


def test_an_own_model_to_collect_with_acts(model):
    class Worst(nn.Module):
        def __init__(self, best):
            super().__init__()
            self.best = best

        def forward(self, obs, eps):
            return {"action": self.best(obs)["logit"].argmin(-1)}

    class Contrary(DQN):
        def _init_collect(self):
            self._collect_model = Worst(self._model)

    policy = Contrary(model)
    obs = torch.randn(6, 4)
    assert torch.equal(
        policy.collect_mode.forward(obs, eps=0.0)["action"],
        policy._model(obs)["logit"].argmin(-1),
    )
    assert policy.collect_mode.forward({4: obs[0]}, eps=0.0)[4]["action"].shape == ()


def test_the_stock_update_uses_the_optimizer_of_a_subclass(model, rows):
    class Still(DQN):
        def _init_learn(self):
            super()._init_learn()
            self._optimizer = torch.optim.SGD(self._model.parameters(), lr=0.0)

    class Fast(DQN):
        def _init_learn(self):
            self._optimizer = torch.optim.SGD(self._model.parameters(), lr=0.5, momentum=0.9)

    still, fast = Still(model), Fast(model)
    before = copy.deepcopy(dict(still._model.state_dict()))
    for policy in (still, fast):
        assert policy.learn_mode.forward(rows)["total_loss"] > 0
    assert same(before, dict(still._model.state_dict()))
    assert not same(before, dict(fast._model.state_dict()))
    assert fast._optimizer is fast.policy.components["q"].optimizer
    state = fast.learn_mode.state_dict()
    assert "momentum_buffer" in state["optimizer"]["q"]["state"]["0"]
    resumed = Fast({**model, "seed": 3})
    resumed.learn_mode.load_state_dict(state)
    for policy in (fast, resumed):
        policy.learn_mode.forward(rows)
    assert same(dict(fast._model.state_dict()), dict(resumed._model.state_dict()))


def test_an_optimizer_that_the_algorithm_cannot_use_is_refused(model):
    class Half(DQN):
        def _init_learn(self):
            self._optimizer = torch.optim.SGD([next(self._model.parameters())], lr=0.1)

    with pytest.raises(ConfigError, match="parameters"):
        Half(model)

    class WithActor(DQN):
        def _init_learn(self):
            self._optimizer_actor = torch.optim.SGD(self._model.parameters(), lr=0.1)

    with pytest.raises(PolicyError, match=r"_optimizer_actor.*trains q"):
        WithActor(model)


@pytest.mark.parametrize("name", ["_gamma", "_model", "_learn_model", "_target_model"])
def test_an_attribute_that_no_hook_reads_is_refused(name, model):
    class Ignored(DQN):
        def _init_learn(self):
            setattr(self, name, nn.Linear(1, 1))

    with pytest.raises(PolicyError, match="_forward_learn"):
        Ignored(model)


@pytest.mark.parametrize("name", ["update", "act_collect", "make_components", "train_batch"])
def test_a_method_that_nothing_calls_is_refused(name):
    with pytest.raises(PolicyError, match=rf"{name}.*DQNPolicy"):
        type("Unused", (DQN,), {name: lambda self, *args: None})


def test_a_subclass_acts_on_batches_too_and_takes_the_keywords_of_its_hook(model):
    class Shifted(DQN):
        def _forward_collect(self, data, eps, shift=0):
            answers = super()._forward_collect(data, eps=eps)
            return {
                env_id: {"action": (answer["action"] + shift) % 2}
                for env_id, answer in answers.items()
            }

    mode, stock = Shifted(model).collect_mode, DQN(model).collect_mode
    obs = torch.randn(5, 4)
    expected = 1 - stock.forward(obs, eps=0.0)["action"]
    assert torch.equal(mode.forward(obs, eps=0.0, shift=1)["action"], expected)
    assert not mode.spec.explores


def test_a_state_of_the_stock_policy_acts_in_a_subclass(model):
    stock, own = DQN({**model, "seed": 4}), OwnLearning(model)
    own.eval_mode.load_state_dict(stock.learn_mode.state_dict())
    obs = torch.randn(5, 4)
    assert same(own.eval_mode.forward(obs), stock.eval_mode.forward(obs))


def test_a_policy_is_built_for_an_env(cartpole_spaces):
    policy = get_policy_cls({"type": "ppo"}).for_env(cartpole_spaces, seed=0)
    assert policy.spec.spaces() == tuple(cartpole_spaces)
    assert policy.eval_mode.forward(torch.zeros(2, 4))["action"].shape == (2,)


@pytest.mark.parametrize("name", ["sac", "td3", "ddpg", "discrete_sac"])
def test_eps_of_a_config_is_not_passed_to_an_algorithm_that_explores_by_itself(name, caplog):
    model = {"obs_shape": 4, "action_shape": 2}
    policy = create_policy({"type": name, "model": model, "other": {"eps": {"start": 0.9}}})
    assert "other.eps" in caplog.text
    settings = policy.command_mode.get_setting_collect({"envstep": 7})
    assert settings == {}
    assert policy.collect_mode.forward(torch.zeros(2, 4), **settings)["action"].shape[0] == 2


def test_a_subclass_that_declares_eps_gets_it():
    class Random(get_policy_cls({"type": "sac"})):
        config = {"other": {"eps": {"type": "linear", "start": 1.0, "end": 0.0, "decay": 10}}}

    policy = Random({"model": {"obs_shape": 4, "action_shape": 2}})
    assert policy.command_mode.get_setting_collect({"envstep": 5}) == {"eps": 0.5}


def test_a_registered_subclass_trains_in_a_serial_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    seen = []

    @POLICY_REGISTRY.register("counting_dqn")
    class Counting(OwnLearning):
        def _forward_learn(self, data):
            seen.append(len(data))
            return super()._forward_learn(data)

        def _get_setting_collect(self, command_info):
            return {"eps": 1.0}

        def _forward_collect(self, data, eps):
            assert eps == 1.0
            return super()._forward_collect(data, eps=eps)

    main = {
        "exp_name": "run",
        "env": {"id": "CartPole-v1", "collector_env_num": 2, "evaluator_env_num": 1,
                "n_evaluator_episode": 1},
        "policy": {
            "type": "counting_dqn",
            "model": {"obs_shape": 4, "action_shape": 2, "encoder_hidden_size_list": [8]},
            "learn": {"batch_size": 4, "update_per_collect": 2},
            "collect": {"n_sample": 8},
            "other": {"replay_buffer": {"replay_buffer_size": 50}},
        },
    }  # fmt: skip
    policy = serial_run(main, max_train_iter=4, show_progress=False)
    assert type(policy) is Counting
    assert seen == [4] * 4


def test_the_policy_behind_the_interface_stays_the_stock_one(model):
    policy = create_policy({"type": "dqn", **model})
    assert type(policy.policy) is DQNPolicy
    assert policy.learn_mode.spec.kind is DQNPolicy
    assert OwnLearning(model).learn_mode.spec.kind is OwnLearning
