import copy
import pickle

import gymnasium as gym
import pytest
import torch

from dmiddleware.errors import ConfigError, PolicyError, StructureError
from dmiddleware.policy import (
    BatchedPolicy,
    BCPolicy,
    CollectMode,
    DecisionTransformerPolicy,
    DiscreteSACPolicy,
    DQNPolicy,
    EvalMode,
    IQLPolicy,
    LearnMode,
    Policy,
    PPOPolicy,
    RecurrentPPOPolicy,
    SACPolicy,
)


def test_default_config_merges_the_classes_from_the_base_down():
    class Mine(DQNPolicy):
        config = {"learn": {"learning_rate": 0.5}, "mine": 3}

    cfg = Mine.default_config()
    assert cfg.cfg_type == "MineDict"
    assert cfg.learn.learning_rate == 0.5
    assert cfg.learn.batch_size == 64
    assert cfg.mine == 3
    assert (cfg.on_policy, cfg.cuda, cfg.multi_gpu, cfg.bp_update_sync) == (
        False,
        False,
        False,
        True,
    )
    assert cfg.traj_len_inf is False
    assert cfg.model == {}


def test_default_config_is_a_fresh_copy():
    DQNPolicy.default_config().learn.learning_rate = 9.0
    assert DQNPolicy.default_config().learn.learning_rate == 1e-3


def test_the_base_class_has_no_default_config():
    with pytest.raises(ConfigError, match="Policy is the base"):
        Policy.default_config()


def test_modes_have_the_documented_fields(small):
    policy = DQNPolicy({"model": small})
    assert isinstance(policy.learn_mode, LearnMode)
    assert policy.learn_mode._fields == (
        "forward",
        "reset",
        "info",
        "monitor_vars",
        "get_attribute",
        "set_attribute",
        "state_dict",
        "load_state_dict",
    )
    assert isinstance(policy.collect_mode, CollectMode)
    assert policy.collect_mode._fields == (
        "forward",
        "process_transition",
        "get_train_sample",
        "reset",
        "get_attribute",
        "set_attribute",
        "state_dict",
        "load_state_dict",
        "seed",
    )
    assert isinstance(policy.eval_mode, EvalMode)
    assert policy.eval_mode._fields == (
        "forward",
        "reset",
        "get_attribute",
        "set_attribute",
        "state_dict",
        "load_state_dict",
        "seed",
    )
    with pytest.raises(AttributeError):
        policy.learn_mode.forward = None


def test_only_enabled_parts_are_built(small):
    built = []

    class Watched(DQNPolicy):
        def _init_learn(self):
            built.append("learn")

        def _init_collect(self):
            built.append("collect")

        def _init_eval(self):
            built.append("eval")

    Watched({"model": small}, enable_field=["collect"])
    assert built == ["collect"]
    built.clear()
    Watched({"model": small})
    assert built == ["learn", "collect", "eval"]


@pytest.mark.parametrize("use", ["learn", "eval"])
def test_a_part_that_is_not_enabled_says_so(small, transitions, use):
    policy = DQNPolicy({"model": small}, enable_field=["collect"])
    with pytest.raises(PolicyError, match=f"cannot {use}; add '{use}'"):
        if use == "learn":
            policy.learn_mode.forward(transitions())
        else:
            policy.eval_mode.forward(torch.zeros(1, 4))


@pytest.mark.parametrize("field", [["leern"], []])
def test_an_unknown_or_empty_field_is_rejected(small, field):
    with pytest.raises(ConfigError, match="subset of learn, collect, eval"):
        DQNPolicy({"model": small}, enable_field=field)


def test_a_policy_that_cannot_learn_names_the_method_to_write(linear):
    class Mute(Policy):
        def _forward_eval(self, data):
            return {}

    with pytest.raises(PolicyError, match=r"write _forward_learn\(self, batch\)"):
        Mute({}, model=linear())
    Mute({}, model=linear(), enable_field="eval")


@pytest.mark.parametrize("field", ["collect", "eval"])
@pytest.mark.parametrize(
    ("base", "method"),
    [(Policy, r"\(self, data.*BatchedPolicy"), (BatchedPolicy, r"_batch\(self, obs")],
)
def test_a_policy_that_cannot_act_names_the_method_to_write(linear, field, base, method):
    class Mute(base):
        pass

    with pytest.raises(PolicyError, match=rf"write _forward_{field}{method}"):
        Mute({}, model=linear(), enable_field=[field])


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
    assert policy.get_attribute("model") is model


def test_something_else_as_model_is_rejected():
    with pytest.raises(PolicyError, match=r"torch\.nn\.Module, got 'resnet'"):
        DQNPolicy({}, model="resnet")


def test_a_policy_without_default_model_says_what_to_do(per_env):
    with pytest.raises(PolicyError, match="has no default model; pass model="):
        type(per_env)({})


def test_a_model_option_that_is_missing_is_named():
    with pytest.raises(ConfigError, match="obs_shape"):
        DQNPolicy({"model": {"action_shape": 2}})


def test_a_model_type_in_the_config_replaces_the_default(small):
    policy = DQNPolicy({"model": {**small, "type": "actor"}}, enable_field=["collect"])
    assert type(policy.get_attribute("model")).__name__ == "Actor"


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


def test_attributes_are_read_through_getter_then_field_then_property(small):
    policy = DQNPolicy({"model": small, "learn": {"batch_size": 17}, "collect": {"n_sample": 9}})
    assert policy.learn_mode.get_attribute("batch_size") == 17
    assert policy.collect_mode.get_attribute("n_sample") == 9
    assert policy.collect_mode.get_attribute("n_episode") is None
    assert policy.collect_mode.get_attribute("batched") is True
    assert policy.eval_mode.get_attribute("train_iter") == 0
    policy.learn_mode.set_attribute("train_iter", 5)
    assert policy.learn_mode.get_attribute("train_iter") == 5


def test_sizes_are_read_from_the_top_of_the_config_too(linear, per_env):
    class Flat(type(per_env)):
        config = {"n_sample": 3, "n_episode": 4, "batch_size": 5}

    policy = Flat({}, model=linear())
    got = [policy.get_attribute(name) for name in ("n_sample", "n_episode", "batch_size")]
    assert got == [3, 4, 5]


def test_an_unknown_attribute_names_near_misses(small):
    with pytest.raises(AttributeError, match=r"'batch_sise'.*did you mean: batch_size"):
        DQNPolicy({"model": small}).get_attribute("batch_sise")


def test_repr_names_the_policy_and_shows_its_model(small):
    policy = DQNPolicy({"model": small})
    assert repr(policy).startswith("DQNPolicy(device=cpu, model=QNetwork(")
    assert policy.learn_mode.info() == repr(policy)


def test_learning_collates_a_list_of_samples(small, transitions):
    batch = transitions(8)
    rows = [{key: batch[key][i] for key in batch} for i in range(8)]
    one, other = (DQNPolicy({"model": small, "seed": 0}) for _ in range(2))
    assert one.learn_mode.forward(rows) == other.learn_mode.forward(batch)


def test_learning_names_the_columns_that_a_batch_lacks(small, transitions):
    batch = transitions(4)
    rows = [{key: batch[key][i] for key in ("obs", "action", "reward")} for i in range(4)]
    with pytest.raises(StructureError, match="the batch lacks next_obs, terminated"):
        DQNPolicy({"model": small}).learn_mode.forward(rows)


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
    policy = DQNPolicy({"learn": {"double": False}}, model=model)
    policy.collect_mode.forward(torch.zeros(1, 4))
    policy.learn_mode.forward(transitions(4))
    policy.eval_mode.forward(torch.zeros(1, 4))
    assert model.seen == [False, True, False]


def test_acting_makes_no_graph(small):
    output = DQNPolicy({"model": small}).collect_mode.forward(torch.zeros(2, 4))
    assert not output["logit"].requires_grad


def test_reset_takes_env_ids_or_none(small):
    policy = DQNPolicy({"model": small})
    for mode in (policy.learn_mode, policy.collect_mode, policy.eval_mode):
        mode.reset()
        mode.reset([0, 2])


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda p: pickle.loads(pickle.dumps(p))])
def test_a_copy_is_independent(small, transitions, copied):
    policy = DQNPolicy({"model": small, "seed": 0})
    policy.learn_mode.forward(transitions(8))
    twin = copied(policy)
    ours = policy.learn_mode.forward(transitions(8, seed=1))
    assert twin.get_attribute("train_iter") == 1
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
        (DecisionTransformerPolicy, "CartPole-v1", {"obs_norm": False}),
        (SACPolicy, "Pendulum-v1", {}),
        (IQLPolicy, "Pendulum-v1", {}),
    ],
)
def test_evaluations_that_draw_actions_do_not_change_what_is_collected(cls, env, options):
    policies = [cls.for_env(gym.make(env), seed=0, **options) for _ in range(3)]
    obs = torch.randn(64, policies[0].get_attribute("model").obs_shape[0])

    def act(mode, **kwargs):
        state = mode.get_attribute("initial_state")(64)
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
    dqn = DQNPolicy({"model": small, "discount_factor": 0.9, "nstep": 3})
    ppo = PPOPolicy({"model": small, "gae_lambda": 0.8})
    assert dqn.discount_factor == dqn.learn_mode.get_attribute("discount_factor") == 0.9
    assert dqn.nstep == dqn.learn_mode.get_attribute("nstep") == 3
    assert ppo.gae_lambda == ppo.collect_mode.get_attribute("gae_lambda") == 0.8
    assert (ppo.discount_factor, ppo.nstep) == (0.99, 1)
    assert BCPolicy({"model": small}).discount_factor is None


def test_checking_spaces_leaves_the_policy_as_it_was(linear, batched, cartpole_spaces):
    class Counting(type(batched)):
        def _init_common(self):
            self._model.register_buffer("calls", torch.zeros(()))

        def _forward_collect_batch(self, obs, env_id, *, shift=0):
            self._model.calls += 1
            return super()._forward_collect_batch(obs, env_id, shift=shift)

    policy = Counting({}, model=linear(), enable_field=["collect"])
    policy.get_attribute("check_spaces")(*cartpole_spaces)
    assert float(policy.get_attribute("model").calls) == 0
    policy.collect_mode.forward(torch.zeros(1, 4))
    assert float(policy.get_attribute("model").calls) == 1
