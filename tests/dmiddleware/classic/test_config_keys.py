"""Keys that DI-engine's configs of policies have."""

import logging
import math

import pytest
import torch
from torch import nn

from dmiddleware.classic import Policy, create_policy, get_policy_cls
from dmiddleware.errors import ConfigError, RegistryError
from dmiddleware.policy import POLICY_REGISTRY

VECTOR = {"obs_shape": 4, "action_shape": 2}


def config_of(name):
    model = dict(VECTOR)
    if name in (
        "sac",
        "td3",
        "ddpg",
        "d4pg",
        "tqc",
        "crossq",
        "fasttd3",
        "cql",
        "td3_bc",
        "iql",
        "bcq",
        "edac",
    ):
        model["action_space"] = "continuous"
    return {"type": name, "model": model}


@pytest.mark.parametrize(
    "name",
    [
        "dqn",
        "sql",
        "mdqn",
        "c51",
        "rainbow",
        "qrdqn",
        "iqn",
        "fqf",
        "sac",
        "td3",
        "d4pg",
        "ppo",
        "a2c",
    ],
)
def test_keys_that_mean_nothing_are_kept_with_one_warning(name, caplog):
    cfg = {
        **config_of(name), "load_path": "x/ckpt_best.pth.tar", "priority_IS_weight": False,
        "collect": {"env_num": 8}, "eval": {"env_num": 5}, "command": {}, "multi_agent": False,
    }  # fmt: skip
    policy = create_policy(cfg)
    assert policy.cfg.load_path == "x/ckpt_best.pth.tar"
    assert policy.cfg.priority_IS_weight is False
    assert policy.cfg.collect.env_num == 8
    (record,) = caplog.records
    assert "load_path" in record.message and "load_ckpt_before_run" in record.message
    create_policy({**policy.cfg, "type": name})
    assert len(caplog.records) == 1


@pytest.mark.parametrize(
    ("name", "given", "path", "value"),
    [
        ("ppo", {"collect": {"discount_factor": 0.9}}, "discount_factor", 0.9),
        ("sac", {"learn": {"discount_factor": 0.9}}, "discount_factor", 0.9),
        ("ppo", {"collect": {"gae_lambda": 0.5}}, "gae_lambda", 0.5),
        ("ppo", {"recompute_adv": True}, "learn.recompute_advantage", True),
        ("ppo", {"learn": {"value_norm": True}}, "value_norm", True),
        ("sac", {"learn": {"target_theta": 0.01}}, "learn.target_tau", 0.01),
        ("a2c", {"learn": {"grad_norm": 0.25}}, "learn.grad_clip_norm", 0.25),
        (
            "ppo",
            {"learn": {"grad_clip_type": "clip_norm", "grad_clip_value": 2.0}},
            "learn.grad_clip_norm",
            2.0,
        ),
        ("bcq", {"learn": {"learning_rate_q": 0.01}}, "learn.learning_rate_critic", 0.01),
        ("bcq", {"learn": {"lmbda": 0.5}}, "learn.min_weight", 0.5),
        (
            "bcq",
            {"model": {**VECTOR, "action_space": "continuous", "phi": 0.1}},
            "learn.max_perturbation",
            0.1,
        ),
        ("edac", {"learn": {"with_q_entropy": False}}, "learn.backup_entropy", False),
        ("td3", {"learn": {"noise": True, "noise_sigma": 0.3}}, "learn.target_noise", 0.3),
        ("td3", {"learn": {"noise": False, "noise_sigma": 0.3}}, "learn.target_noise", 0.0),
        (
            "td3",
            {"learn": {"noise": True, "noise_range": {"min": -0.4, "max": 0.4}}},
            "learn.target_noise_clip",
            0.4,
        ),
        ("sql", {"learn": {"alpha": 0.12}}, "learn.alpha", 0.12),
        ("sql", {"other": {"eps": {"start": 0.95}}}, "other.eps.start", 0.95),
        ("mdqn", {"entropy_tau": 0.01}, "learn.temperature", 0.01),
        ("mdqn", {"m_alpha": 0.8}, "learn.munchausen_weight", 0.8),
        ("dqfd", {"learn": {"lambda1": 0.5}}, "learn.n_step_weight", 0.5),
        ("dqfd", {"learn": {"lambda2": 3.0}}, "learn.margin_weight", 3.0),
        ("dqfd", {"learn": {"lambda3": 0}}, "learn.l2_weight", 0),
        ("dqfd", {"learn": {"margin_function": 0.5}}, "learn.margin", 0.5),
        ("fqf", {"learn": {"learning_rate_quantile": 1e-4}}, "learn.learning_rate", 1e-4),
        ("fqf", {"learn": {"learning_rate_fraction": 1e-8}}, "learn.learning_rate_fraction", 1e-8),
        ("fqf", {"learn": {"ent_coef": 0.1}}, "learn.entropy_weight", 0.1),
        ("discrete_cql", {"learn": {"min_q_weight": 4.0}}, "learn.cql_alpha", 4.0),
        ("cql", {"learn": {"min_q_weight": 10.0}}, "learn.cql_alpha", 5.0),
        ("cql", {"learn": {"lagrange_thresh": -1.0}}, "learn.lagrange_gap", None),
        (
            "cql",
            {"learn": {"with_lagrange": True, "lagrange_thresh": 5.0, "min_q_weight": 5.0}},
            "learn.lagrange_gap",
            pytest.approx(1.0 - math.log(30)),
        ),
        ("iql", {"learn": {"beta": 0.05}}, "learn.inverse_temperature", 20.0),
        ("iql", {"learn": {"beta": 0.05}}, "learn.max_advantage_weight", 20.0),
        ("iql", {"learn": {"tau": 0.9}}, "learn.expectile", 0.9),
        ("iql", {"learn": {"learning_rate_q": 1e-3}}, "learn.learning_rate_value", 1e-3),
        ("iql", {"learn": {"learning_rate_q": 1e-3}}, "learn.learning_rate_critic", 1e-3),
        ("iql", {"learn": {"learning_rate_policy": 1e-3}}, "learn.learning_rate_actor", 1e-3),
        ("dt", {"rtg_scale": 200}, "return_scale", 200),
        ("dt", {"rtg_target": 195}, "target_return", 195),
        ("dt", {"batch_size": 8}, "learn.batch_size", 8),
        ("dt", {"wt_decay": 1e-4}, "learn.weight_decay", 1e-4),
        ("dt", {"clip_grad_norm_p": 0.5}, "learn.grad_clip_norm", 0.5),
        (
            "dt",
            {"warmup_steps": 10},
            "learn.learning_rate",
            {"type": "linear", "start": 1e-5, "end": 1e-4, "decay": 10, "by": "update"},
        ),
        (
            "dt",
            {"learn": {"learning_rate": 1e-3}, "warmup_steps": 10},
            "learn.learning_rate",
            {"type": "linear", "start": 1e-4, "end": 1e-3, "decay": 10, "by": "update"},
        ),
        ("a2c", {"learn": {"betas": (0.0, 0.99)}}, "learn.optimizer", "adam"),
        ("a2c", {"learn": {"betas": (0.0, 0.99)}}, "learn.adam_betas", (0.0, 0.99)),
        (
            "dt",
            {"learning_rate": 1e-3, "warmup_steps": 10},
            "learn.learning_rate",
            {"type": "linear", "start": 1e-4, "end": 1e-3, "decay": 10, "by": "update"},
        ),
    ],
)
def test_settings_get_the_names_that_they_have_here(name, given, path, value, caplog):
    cfg = create_policy({**config_of(name), **given}).cfg
    for key in path.split("."):
        cfg = cfg[key]
    assert cfg == value
    assert not [record for record in caplog.records if path in record.message]


def test_a_setting_that_has_one_value_here_is_accepted_with_it_alone():
    for learn in ({}, {"nstep_return": False, "nstep": 1}):
        cfg = {**config_of("ppo_offpolicy"), "nstep_return": False, "learn": learn}
        assert create_policy(cfg).cfg.nstep_return is False
    for given in ({"nstep_return": True}, {"learn": {"nstep_return": True}}):
        with pytest.raises(
            ConfigError, match=r"nstep_return=True of DI-engine is not here; .*gae_lambda"
        ):
            create_policy({**config_of("ppo_offpolicy"), **given})


def test_what_off_policy_ppo_never_reads_is_left_out_with_a_warning(caplog):
    given = {"recompute_adv": True, "learn": {"epoch_per_collect": 3}}
    policy = create_policy({**config_of("ppo_offpolicy"), **given})
    assert policy.cfg.learn.epoch_per_collect == 1 and not policy.cfg.learn.recompute_advantage
    assert "epoch_per_collect (learn.update_per_collect" in caplog.text
    assert "recompute_adv (" in caplog.text


def test_a_setting_under_its_own_name_wins():
    cfg = {**config_of("ppo"), "discount_factor": 0.5, "collect": {"discount_factor": 0.9}}
    assert create_policy(cfg).cfg.discount_factor == 0.5


def test_workers_find_what_they_read_in_the_config_of_any_policy():
    for name in ("sac", "td3", "dqn"):
        cfg = {
            **config_of(name),
            "random_collect_size": 7,
            "collect": {"unroll_len": 3, "model_path": "expert.pth.tar"},
            "eval": {"batch_size": 5},  # of the loader of a MetricSerialEvaluator
        }
        found = create_policy(cfg).cfg
        assert found.eval.batch_size == 5
        assert (found.random_collect_size, found.collect.unroll_len) == (7, 3)
        assert found.collect.model_path == "expert.pth.tar"


@pytest.mark.parametrize(
    ("given", "near"),
    [
        ({"load_pth": "x"}, "load_path"),
        ({"learn": {"ignore_don": True}}, "learn"),
        ({"priority_is_weights": True}, "priority"),
        ({"colect": {}}, "collect"),
    ],
)
def test_other_keys_stay_errors(given, near):
    with pytest.raises(ConfigError, match="unknown key"):
        create_policy({**config_of("dqn"), **given})


def test_a_class_that_declares_such_a_key_reads_it_itself(caplog):
    class Own(Policy):
        config = {"load_path": "none", "learn": {"ignore_done": False}}

        def _forward_eval(self, data):
            return {}

    own = Own(
        {"load_path": "x", "learn": {"ignore_done": True}, "priority_IS_weight": True},
        model=torch.nn.Identity(),
        enable_field=["eval"],
    )
    assert (own.cfg.load_path, own.cfg.learn.ignore_done) == ("x", True)
    assert own.cfg.priority_IS_weight
    assert len(caplog.records) == 1


@pytest.mark.parametrize("weighted", [True, False])
def test_importance_weights_can_be_ignored(weighted, transitions):
    def loss(**columns):
        policy = create_policy(
            {**config_of("dqn"), "model": VECTOR, "seed": 0, "priority_IS_weight": weighted}
        )
        return policy.learn_mode.forward(transitions(**columns))["total_loss"]

    plain, halved = loss(), loss(weight=torch.full((32,), 0.5))
    assert halved == pytest.approx(plain * (0.5 if weighted else 1.0))


@pytest.mark.parametrize(
    ("name", "given", "own"),
    [
        (
            "dqn",
            {"encoder_hidden_size_list": [8, 6]},
            {"encoder_hidden_sizes": [8, 6], "head_hidden_sizes": [6]},
        ),
        (
            "c51",
            {"encoder_hidden_size_list": [8, 6], "head_layer_num": 2},
            {"encoder_hidden_sizes": [8, 6], "head_hidden_sizes": [6, 6]},
        ),
        (
            "rainbow",
            {"encoder_hidden_size_list": [8]},
            {"encoder_hidden_sizes": [8], "head_hidden_sizes": [8]},
        ),
        (
            "qrdqn",
            {"encoder_hidden_size_list": [8], "head_hidden_size": 5},
            {"encoder_hidden_sizes": [8], "head_hidden_sizes": [5]},
        ),
        (
            "r2d2",
            {"encoder_hidden_size_list": [8, 6], "res_link": True},
            {"encoder_hidden_sizes": [8, 6], "hidden_size": 6, "head_hidden_sizes": [6],
             "residual": True},
        ),
        ("c51", {"n_atom": 11}, {"n_atoms": 11}),
        (
            "d4pg",
            {"n_atom": 11, "action_space": "regression", "critic_head_hidden_size": 8,
             "critic_head_type": "categorical"},
            {"n_atoms": 11, "action_space": "continuous", "critic_hidden_sizes": [8, 8]},
        ),
        ("qrdqn", {"num_quantiles": 5}, {"n_quantiles": 5}),
        ("fqf", {"num_quantiles": 5, "quantile_embedding_size": 8},
         {"n_quantiles": 5, "n_cosines": 8}),
        (
            "sac",
            {"twin_critic": True, "action_space": "reparameterization",
             "actor_head_hidden_size": 8},
            {"n_critics": 2, "action_space": "continuous", "actor_hidden_sizes": [8, 8]},
        ),
        (
            "td3",
            {"twin_critic": False, "action_space": "regression", "critic_head_hidden_size": 8,
             "critic_head_layer_num": 2},
            {"n_critics": 1, "action_space": "continuous", "critic_hidden_sizes": [8, 8, 8]},
        ),
        (
            "ppo",
            {"encoder_hidden_size_list": [8, 6], "actor_head_hidden_size": 6,
             "critic_head_hidden_size": 6, "activation": torch.nn.ReLU()},
            {"encoder_hidden_sizes": [8, 6], "head_hidden_sizes": [6], "activation": "relu"},
        ),
        (
            "ppg",
            {"encoder_hidden_size_list": [8, 6], "share_encoder": True,
             "actor_head_hidden_size": 6, "critic_head_hidden_size": 5},
            {"encoder_hidden_sizes": [8, 6], "head_hidden_sizes": [6],
             "value_head_hidden_sizes": [5]},
        ),
        (
            "bcq",
            {"actor_head_hidden_size": [8, 6], "critic_head_hidden_size": [8],
             "vae_hidden_dims": [8, 8], "activation": torch.nn.ReLU()},
            {"actor_hidden_sizes": [8, 6], "critic_hidden_sizes": [8],
             "vae_hidden_sizes": [8, 8]},
        ),
        (
            "edac",
            {"ensemble_num": 3, "actor_head_hidden_size": 8, "actor_head_layer_num": 2,
             "critic_head_hidden_size": 8, "critic_head_layer_num": 2},
            {"n_critics": 3, "actor_hidden_sizes": [8, 8, 8], "critic_hidden_sizes": [8, 8]},
        ),
        (
            "a2c",
            {"encoder_hidden_size_list": [8], "actor_head_layer_num": 0,
             "critic_head_layer_num": 0},
            {"encoder_hidden_sizes": [8]},
        ),
    ],
)  # fmt: skip
def test_networks_take_their_arguments_by_the_classic_names(name, given, own):
    theirs = create_policy({"type": name, "seed": 0, "model": {**VECTOR, **given}})
    ours = create_policy({"type": name, "seed": 0, "model": {**VECTOR, **own}})
    assert str(theirs) == str(ours)
    states = (policy.eval_mode.state_dict()["model"] for policy in (theirs, ours))
    torch.testing.assert_close(*states)


def test_hybrid_actions_have_the_parts_of_the_classic_names():
    shape = {"action_type_shape": 3, "action_args_shape": 2}
    model = {"obs_shape": 4, "action_shape": shape, "actor_hidden_sizes": [8]}
    learn = {"learning_rate_dis": 0.01, "learning_rate_cont": 0.02, "update_circle": 10}
    policy = create_policy({"type": "pdqn", "model": model, "learn": learn})
    assert policy.policy.cfg.learning_rate_critic == 0.01
    assert policy.policy.cfg.learning_rate_actor == 0.02
    action = policy.collect_mode.forward(torch.zeros(5, 4), eps=0.5)["action"]
    assert action["action_type"].shape == (5,)
    assert action["action_args"].shape == (5, 2)


def test_images_have_their_convolutions_in_the_same_list():
    shape = {"obs_shape": [4, 84, 84], "action_shape": 3}
    theirs = create_policy(
        {"type": "dqn", "model": {**shape, "encoder_hidden_size_list": [8, 16, 16, 32]}}
    )
    names = {name: tuple(one.shape) for name, one in theirs.eval_mode.state_dict()["model"].items()}
    assert names["encoder.convolutions.0.weight"] == (8, 4, 8, 8)
    assert names["encoder.linear.0.weight"][0] == 32
    assert names["head.0.weight"] == (32, 32)


def test_the_network_of_impala_has_its_sections_in_the_same_list():
    model = {"obs_shape": [3, 64, 64], "action_shape": 15, "impala_cnn_encoder": True}
    model |= {"encoder_hidden_size_list": [4, 8], "actor_head_hidden_size": 24}
    policy = create_policy({"type": "ppg", "model": {**model, "critic_head_hidden_size": 24}})
    encoder = policy._model.actor.encoder
    assert [section.first.out_channels for section in encoder.convolutions[:2]] == [4, 8]
    assert encoder.out_features == 24
    assert policy.eval_mode.forward(torch.zeros(2, 3, 64, 64))["action"].shape == (2,)


@pytest.mark.parametrize("name", ["dqn", "ppo"])
def test_three_sizes_for_an_image_are_convolutions_and_a_linear_layer(name):
    model = {"obs_shape": [4, 84, 84], "action_shape": 3, "encoder_hidden_size_list": [8, 8, 24]}
    policy = create_policy({"type": name, "model": model})
    encoder = policy._model.encoder
    assert [layer.out_channels for layer in encoder.convolutions[::2]] == [8, 8, 24]
    assert encoder.linear.out_features == 24
    assert policy.eval_mode.forward(torch.zeros(2, 4, 84, 84))["action"].shape == (2,)


@pytest.mark.parametrize(
    ("sizes", "word"), [([8, 16, 16, 16, 32], "1 residual"), ([8, 16], "too short")]
)
def test_an_encoder_that_no_network_has_is_refused(sizes, word):
    model = {"obs_shape": [4, 84, 84], "action_shape": 3, "encoder_hidden_size_list": sizes}
    with pytest.raises(ConfigError, match=word):
        create_policy({"type": "dqn", "model": model})


@pytest.mark.parametrize(
    ("name", "given", "word"),
    [
        ("dqn", {"bound_type": "tanh"}, "does not bound the means"),
        ("ppo", {"bound_type": "sigmoid"}, "does not bound the means"),
        ("ppg", {"share_encoder": False}, "reads the actor's features"),
        ("c51", {"n_atomz": 3}, "n_atoms"),
        ("dqn", {"encoder_hidden_size": [8]}, "encoder_hidden_sizes"),
        ("dqn", {"dropout": 0.1}, "network of your own"),
        ("sac", {"share_encoder": True}, "encoders of their own"),
    ],
)
def test_arguments_that_no_network_has_name_what_to_write(name, given, word):
    with pytest.raises(ConfigError, match=word):
        create_policy({"type": name, "model": {**VECTOR, **given}})


@pytest.mark.parametrize(("switch", "weighting"), [(True, "optimistic"), (False, "central")])
def test_weighted_qmix_takes_the_switch_and_the_shapes_of_the_classic_names(switch, weighting):
    model = {"agent_num": 2, "obs_shape": 4, "global_obs_shape": 5, "action_shape": 3}
    model["hidden_size_list"] = [8, 6]
    learn = {"wqmix_ow": switch, "alpha": 0.75}
    policy = create_policy({"type": "wqmix", "model": model, "learn": learn}).policy
    assert (policy.cfg.weighting, policy.cfg.alpha) == (weighting, 0.75)
    for network in (policy.q.module, policy.central.module):
        sizes = [x.out_features for x in network.agent.encoder if isinstance(x, nn.Linear)]
        assert sizes == [8, 6]


def test_qmix_without_its_mixing_network_is_vdn():
    shapes = {"agent_num": 2, "obs_shape": 3, "global_obs_shape": 4, "action_shape": 5}
    summed, vdn = (
        create_policy({"type": name, "seed": 0, "model": {**shapes, **mixer}})
        for name, mixer in (("qmix", {"mixer": False}), ("vdn", {}))
    )
    states = [policy.eval_mode.state_dict()["model"] for policy in (summed, vdn)]
    torch.testing.assert_close(*states)
    assert type(summed.policy.model) is type(vdn.policy.model)


def test_the_heads_of_actor_and_critic_may_have_different_layers():
    sizes = {"actor_head_hidden_size": 8, "critic_head_hidden_size": 9, "critic_head_layer_num": 2}
    model = create_policy({"type": "ppo", "model": {**VECTOR, **sizes}}).policy.model
    widths = [
        [layer.out_features for layer in head.modules() if isinstance(layer, nn.Linear)]
        for head in (model.policy_head, model.value_head)
    ]
    assert widths == [[8, 2], [9, 9, 1]]


@pytest.mark.parametrize(
    ("name", "given"),
    [
        ("ppo", {"action_space": "continuous", "bound_type": "tanh"}),
        ("bc", {"action_space": "regression", "actor_head_hidden_size": 8}),
    ],
)
def test_the_means_of_actions_are_bounded_where_di_engine_bounds_them(name, given):
    model = create_policy({"type": name, "model": {**VECTOR, **given}}).policy.model
    for parameter in model.policy_head.parameters():
        parameter.data.fill_(100.0 if parameter.ndim == 1 else 0.0)
    assert model(torch.ones(3, 4))["mu"].tolist() == [[1.0, 1.0]] * 3


def test_noise_of_policy_and_model_makes_noisy_layers():
    cfg = config_of("dqn")
    noisy = {**cfg, "model": {**cfg["model"], "noise": True}, "noisy_net": True}
    assert create_policy(noisy).policy.explores
    assert not create_policy(cfg).policy.explores


def test_every_stock_policy_accepts_the_keys_of_nearly_all_configs(caplog):
    caplog.set_level(logging.ERROR)
    for name in POLICY_REGISTRY:
        cls = get_policy_cls({"type": name})
        cfg = cls.merged_config({"load_path": "", "priority": False, "priority_IS_weight": False})
        assert cfg.load_path == ""


@pytest.mark.parametrize(
    ("name", "given", "word"),
    [
        ("dqn", {"noisy_net": True}, "rainbow"),
        ("ppo", {"learn": {"pretrained_model_path": "expert.pth.tar"}}, "pretrained"),
        ("dqn", {"learn": {"betas": (0.0, 0.99)}}, "betas"),
        ("bc", {"loss_type": "l1_loss"}, "squared error"),
    ],
)
def test_a_setting_that_would_change_what_is_learned_is_not_dropped(name, given, word):
    with pytest.raises(ConfigError, match=word):
        create_policy({**config_of(name), **given})


@pytest.mark.parametrize(
    ("name", "given"),
    [
        ("dqn", {"noisy_net": False}),
        ("sac", {"model_type": "state"}),
        ("ppo", {"learn": {"pretrained_model_path": None, "kl_beta": 0.05}}),
        ("bc", {"loss_type": "mse_loss"}),
    ],
)
def test_such_a_setting_may_say_that_it_is_off(name, given):
    create_policy({**config_of(name), **given})


@pytest.mark.parametrize("name", ["pd", "happo", "stevesac"])
def test_an_algorithm_of_di_engine_that_is_not_here_says_what_to_use(name):
    with pytest.raises(RegistryError, match=r"of DI-engine is not here; .*use"):
        get_policy_cls({"type": name})


@pytest.mark.parametrize("name", ["r2d2", "qmix"])
def test_a_share_of_a_target_moves_it_in_each_update(name):
    model = {"obs_shape": 4, "action_shape": 2}
    if name == "qmix":
        model = {"agent_num": 2, "obs_shape": 3, "global_obs_shape": 5, "action_shape": 2}
    learn = {"target_update_theta": 0.01}
    policy = create_policy({"type": name, "model": model, "learn": learn}).policy
    assert (policy.cfg.target_update_freq, policy.cfg.target_tau) == (1, 0.01)


def test_an_interval_of_copies_counts_more_than_a_share():
    learn = {"target_update_freq": 100, "target_theta": 0.005}
    policy = create_policy({**config_of("dqn"), "learn": learn}).policy
    assert (policy.cfg.target_update_freq, policy.cfg.target_tau) == (100, 1.0)
    policy = create_policy({**config_of("dqn"), "learn": {"target_theta": 0.01}}).policy
    assert (policy.cfg.target_update_freq, policy.cfg.target_tau) == (1, 0.01)
    policy = create_policy({**config_of("sac"), "learn": {"target_theta": 0.01}}).policy
    assert policy.cfg.target_tau == 0.01


def test_r2d2_has_the_epsilon_of_the_optimizer_there():
    policy = create_policy({**config_of("r2d2"), "burnin_step": 2}).policy
    assert (policy.cfg.adam_eps, policy.cfg.burn_in) == (1e-8, 2)
