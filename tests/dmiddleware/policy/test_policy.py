import copy
import dataclasses
import pickle

import gymnasium as gym
import pytest
import torch

from dmiddleware.errors import ConfigError, PolicyError, StructureError
from dmiddleware.policy import (
    BCPolicy,
    CollectMode,
    Component,
    DecisionTransformerPolicy,
    DiscreteSACPolicy,
    DQNPolicy,
    DQNSettings,
    EvalMode,
    IQLPolicy,
    LearnMode,
    Policy,
    PPOPolicy,
    RecurrentPPOPolicy,
    SACPolicy,
)


class MineSettings(DQNSettings):
    learning_rate = 0.5
    mine: int = 3


class Mine(DQNPolicy):
    cfg: MineSettings


def test_settings_have_the_defaults_of_the_classes_from_the_base_down():
    assert Mine.settings_class() is MineSettings
    cfg = MineSettings()
    assert cfg.learning_rate == 0.5
    assert cfg.batch_size == 64
    assert cfg.mine == 3
    assert (cfg.cuda, cfg.multi_gpu, cfg.bp_update_sync) == (False, False, True)
    assert cfg.model == {}


def test_a_subclass_has_the_settings_of_its_base_class():
    class Same(Mine):
        """It declares no settings."""

    assert Same.settings_class() is MineSettings


def test_settings_cannot_be_changed():
    with pytest.raises(dataclasses.FrozenInstanceError):
        DQNSettings().learning_rate = 9.0
    assert DQNSettings().learning_rate == 1e-3


def test_an_annotation_that_is_no_class_of_settings_is_refused():
    class Wrong(DQNPolicy):
        cfg: int

    with pytest.raises(PolicyError, match="not a subclass of PolicySettings"):
        Wrong.settings_class()


def test_modes_have_the_documented_fields(small):
    def names(mode):
        return [one.name for one in dataclasses.fields(mode)]

    policy = DQNPolicy({"model": small})
    common = ["forward", "state_dict", "load_state_dict", "spec"]
    assert isinstance(policy.learn_mode, LearnMode)
    assert names(policy.learn_mode) == common
    assert isinstance(policy.collect_mode, CollectMode)
    acting = ["reset", "seed"]
    collecting = ["train_batch", "step_together", "transitions"]
    assert names(policy.collect_mode) == [*common, *acting, *collecting]
    assert isinstance(policy.eval_mode, EvalMode)
    assert names(policy.eval_mode) == [*common, *acting]
    with pytest.raises(AttributeError):
        policy.learn_mode.forward = None


def test_a_policy_that_does_not_learn_has_neither_targets_nor_optimizers(small):
    (q,) = (DQNPolicy({"model": small}, modes=["collect"]).components[name] for name in ("q",))
    assert not q.has_target and q.optimizer is None
    learning = DQNPolicy({"model": small}).components["q"]
    assert learning.has_target and learning.optimizer is not None


@pytest.mark.parametrize("use", ["learn", "eval"])
def test_a_mode_that_was_not_asked_for_says_so(small, transitions, use):
    policy = DQNPolicy({"model": small}, modes=["collect"])
    with pytest.raises(PolicyError, match=f"cannot {use}; add '{use}'"):
        if use == "learn":
            policy.learn_mode.forward(transitions())
        else:
            policy.eval_mode.forward(torch.zeros(1, 4))


@pytest.mark.parametrize("field", [["leern"], []])
def test_an_unknown_or_empty_field_is_rejected(small, field):
    with pytest.raises(ConfigError, match="subset of learn, collect, eval"):
        DQNPolicy({"model": small}, modes=field)


def test_a_policy_that_cannot_learn_names_the_method_to_write(linear):
    class Mute(Policy):
        pass

    with pytest.raises(PolicyError, match=r"write update\(self, batch\)"):
        Mute({}, model=linear())
    Mute({}, model=linear(), modes=["eval"])


@pytest.mark.parametrize("make", [DQNPolicy, BCPolicy])
def test_a_batch_without_rows_is_rejected(small, transitions, make):
    with pytest.raises(StructureError, match="the batch has no rows"):
        make({"model": small}).learn_mode.forward(transitions(0))


def test_cuda_without_a_device_is_rejected(small, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match="finds no CUDA device"):
        DQNPolicy({"model": small, "cuda": True})


def test_a_given_model_is_used_as_it_is(linear):
    model = linear()
    policy = DQNPolicy({}, model=model)
    assert policy.model is model


def test_something_else_as_model_is_rejected():
    with pytest.raises(PolicyError, match=r"torch\.nn\.Module, got 'resnet'"):
        DQNPolicy({}, model="resnet")


def test_a_policy_without_default_model_says_what_to_do(batched):
    with pytest.raises(PolicyError, match="has no default model; pass model="):
        type(batched)({})


def test_a_model_option_that_is_missing_is_named():
    with pytest.raises(ConfigError, match="obs_shape"):
        DQNPolicy({"model": {"action_shape": 2}})


def test_a_model_type_in_the_config_replaces_the_default(small):
    policy = DQNPolicy({"model": {**small, "type": "actor"}}, modes=["collect"])
    assert type(policy.model).__name__ == "Actor"


def test_the_same_seed_builds_the_same_policy_whatever_was_drawn_before(small):
    first = DQNPolicy({"model": small, "seed": 3})
    torch.rand(5)
    before = torch.get_rng_state()
    second = DQNPolicy({"model": small, "seed": 3})
    assert torch.equal(torch.get_rng_state(), before)
    other = DQNPolicy({"model": small, "seed": 4})
    obs = torch.randn(64, 4)
    answers = [p.collect_mode.forward(obs, eps=0.5) for p in (first, second, other)]
    assert torch.equal(answers[0]["action"], answers[1]["action"])
    assert torch.equal(answers[0]["logit"], answers[1]["logit"])
    assert not torch.equal(answers[0]["logit"], answers[2]["logit"])
    assert not torch.equal(answers[0]["action"], answers[2]["action"])


def test_the_spec_has_the_settings_that_others_read(small):
    given = {"batch_size": 17, "discount": 0.9}
    policy = DQNPolicy({"model": small, **given, "n_step": 3})
    for mode in (policy.learn_mode, policy.collect_mode, policy.eval_mode):
        spec = mode.spec
        assert spec.settings is policy.cfg
        assert policy.cfg.batch_size == 17
        assert (spec.discount, spec.n_step, spec.gae_lambda) == (0.9, 3, None)
        assert spec.kind is DQNPolicy and spec.model is policy.model


def test_repr_names_the_policy_and_shows_its_model(small):
    policy = DQNPolicy({"model": small})
    assert repr(policy).startswith("DQNPolicy(device=cpu, model=QNetwork(")


def test_learning_names_the_columns_that_a_batch_lacks(small, transitions):
    batch = {key: transitions(4)[key] for key in ("obs", "action", "reward")}
    with pytest.raises(StructureError, match="the batch lacks next_obs, terminated"):
        DQNPolicy({"model": small}).learn_mode.forward(batch)


def test_dropout_is_on_while_learning_and_off_while_acting(transitions):
    class Noisy(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(4, 2)
            self.seen = []

        def forward(self, obs):
            self.seen.append(self.training)
            return {"logit": self.layer(obs)}

    model = Noisy()
    policy = DQNPolicy({"double": False}, model=model)
    policy.collect_mode.forward(torch.zeros(1, 4))
    policy.learn_mode.forward(transitions(4))
    policy.eval_mode.forward(torch.zeros(1, 4))
    assert model.seen == [False, True, False]


def test_a_module_that_sets_its_mode_itself_is_asked(transitions):
    class Frozen(torch.nn.Linear):
        def train(self, mode=True):
            return super().train(False)

    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = torch.nn.Sequential(Frozen(4, 4), torch.nn.Dropout(0.5))
            self.head = torch.nn.Linear(4, 2)
            self.seen = []

        def forward(self, obs):
            self.seen.append([one.training for one in self.inner])
            return {"logit": self.head(self.inner(obs))}

    model = Net()
    policy = DQNPolicy({"double": False}, model=model)
    policy.learn_mode.forward(transitions(4))
    policy.eval_mode.forward(torch.zeros(1, 4))
    policy.learn_mode.forward(transitions(4))
    assert model.seen[1:] == [[False, False], [False, True]]


def test_acting_makes_no_graph(small):
    output = DQNPolicy({"model": small}).collect_mode.forward(torch.zeros(2, 4))
    assert not output["logit"].requires_grad


def test_reset_takes_env_ids_or_none(small):
    policy = DQNPolicy({"model": small})
    for mode in (policy.collect_mode, policy.eval_mode):
        mode.reset()
        mode.reset([0, 2])


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda p: pickle.loads(pickle.dumps(p))])
def test_a_copy_is_independent(small, transitions, copied):
    policy = DQNPolicy({"model": small, "seed": 0})
    policy.learn_mode.forward(transitions(8))
    twin = copied(policy)
    ours = policy.learn_mode.forward(transitions(8, seed=1))
    assert twin.train_iter == 1
    assert twin.learn_mode.forward(transitions(8, seed=1)) == ours
    ours, theirs = (p.learn_mode.state_dict()["model"] for p in (policy, twin))
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_collect_and_eval_modes_can_be_seeded():
    policy = PPOPolicy.for_env(gym.make("CartPole-v1"))
    obs = torch.randn(64, 4)
    for mode, kwargs in ((policy.collect_mode, {}), (policy.eval_mode, {"deterministic": False})):
        draws = []
        for seed in (1, 1, 2):
            mode.seed(seed)
            draws.append(mode.forward(obs, **kwargs)["action"])
        assert torch.equal(draws[0], draws[1])
        assert not torch.equal(draws[0], draws[2])


@pytest.mark.parametrize(
    ("cls", "env", "options"),
    [
        (PPOPolicy, "CartPole-v1", {}),
        (RecurrentPPOPolicy, "CartPole-v1", {}),
        (DiscreteSACPolicy, "CartPole-v1", {}),
        (BCPolicy, "CartPole-v1", {}),
        pytest.param(
            DecisionTransformerPolicy, "CartPole-v1", {"obs_norm": False}, marks=pytest.mark.slow
        ),
        (SACPolicy, "Pendulum-v1", {}),
        (IQLPolicy, "Pendulum-v1", {}),
    ],
)
def test_evaluations_that_draw_actions_do_not_change_what_is_collected(cls, env, options):
    policies = [cls.for_env(gym.make(env), seed=0, **options) for _ in range(3)]
    obs = torch.randn(64, policies[0].model.obs_shape[0])

    def act(mode, **kwargs):
        state = mode.spec.initial_state(64)
        if state is not None:
            kwargs |= {"state": state, "is_first": torch.ones(64, dtype=torch.bool)}
            kwargs |= {"prev_reward": torch.zeros(64), "prev_action": torch.zeros(64).long()}
        return mode.forward(obs, **kwargs)["action"]

    first = [act(policy.eval_mode, deterministic=False) for policy in policies[1:]]
    kwargs = {"deterministic": False} if cls in (BCPolicy, DecisionTransformerPolicy) else {}
    collected = [act(policy.collect_mode, **kwargs) for policy in policies]
    assert torch.equal(*first)
    assert torch.equal(collected[0], collected[1])
    # The generator is part of what a resumed run continues from.
    policies[0].learn_mode.load_state_dict(policies[1].learn_mode.state_dict())
    drawn = [act(policy.eval_mode, deterministic=False) for policy in policies]
    assert not torch.equal(drawn[0], first[0])
    assert torch.equal(drawn[0], drawn[1])


def test_the_modes_expose_discount_nstep_and_lambda(small):
    dqn = DQNPolicy({"model": small, "discount": 0.9, "n_step": 3})
    ppo = PPOPolicy({"model": small, "gae_lambda": 0.8})
    assert dqn.discount == dqn.learn_mode.spec.discount == 0.9
    assert dqn.n_step == dqn.learn_mode.spec.n_step == 3
    assert ppo.cfg.gae_lambda == ppo.collect_mode.spec.gae_lambda == 0.8
    assert (ppo.discount, ppo.n_step) == (0.99, 1)
    assert BCPolicy({"model": small}).discount is None


def test_checking_spaces_leaves_the_policy_as_it_was(linear, batched, cartpole_spaces):
    class Counting(type(batched)):
        def make_components(self):
            self.model.register_buffer("calls", torch.zeros(()))
            return {"model": Component(self.model, acts=True)}

        def act_collect(self, obs, env_id, *, shift=0):
            self.model.calls += 1
            return super().act_collect(obs, env_id, shift=shift)

    policy = Counting({}, model=linear(), modes=["collect"])
    policy.check_spaces(*cartpole_spaces)
    assert float(policy.model.calls) == 0
    policy.collect_mode.forward(torch.zeros(1, 4))
    assert float(policy.model.calls) == 1
