"""Settings of DI-engine's algorithms whose values stand for other ones here."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple

__all__ = ["CONVERSIONS", "REFUSED_VALUES", "UNUSED_BY", "Conversion"]


class Conversion(NamedTuple):
    """How a setting becomes one that an algorithm has here.

    Attributes:
        old: its path in DI-engine.
        new: the path here; an algorithm that does not have it is not concerned.
        convert: returns the value here, from the value there and the config.
        reads: what else of the config becomes part of the value.
        beside: a path that only the algorithms concerned declare; empty: all are.
    """

    old: str
    new: str
    convert: Callable[[Any, Mapping[str, Any]], Any] = lambda value, cfg: value
    reads: tuple[str, ...] = ()
    beside: str = ""


def _gap(threshold: float, cfg: Mapping[str, Any]) -> float | None:
    """Return what the tuned weight of CQL's penalty aims at; None: it is not tuned."""
    learn = cfg.get("learn", {})
    if not learn.get("with_lagrange", False) or threshold <= 0:
        return None
    n_actions = int(learn.get("num_actions", 10))
    return float(threshold / learn.get("min_q_weight", 1.0) - math.log(3 * n_actions))


CONVERSIONS: Final = (
    # IQL divides an advantage by β, and one optimizer is for critics and state value.
    Conversion("learn.beta", "learn.inverse_temperature", lambda value, cfg: 1.0 / value),
    Conversion("learn.beta", "learn.max_advantage_weight", lambda value, cfg: 20.0),
    Conversion("learn.tau", "learn.expectile"),
    Conversion("learn.learning_rate_q", "learn.learning_rate_value"),
    Conversion("learn.learning_rate_q", "learn.learning_rate_critic"),
    Conversion("learn.learning_rate_policy", "learn.learning_rate_actor"),
    # Betas are Adam's, which is not the default here.
    Conversion("learn.betas", "learn.optimizer", lambda value, cfg: "adam"),
    Conversion("learn.betas", "learn.adam_betas"),
    Conversion("learn.lagrange_thresh", "learn.lagrange_gap", _gap, ("learn.with_lagrange",)),
    Conversion(
        "learn.wqmix_ow",
        "learn.weighting",
        lambda value, cfg: "optimistic" if value else "central",
    ),
    # R2D2's Adam has torch's ε there, and here the paper's, with which it takes smaller steps.
    Conversion("burnin_step", "learn.adam_eps", lambda value, cfg: 1e-8),
    Conversion("burnin_step", "burn_in"),
    # A share moves a target in each update there, unless copies have an interval, which counts.
    Conversion("learn.target_update_theta", "learn.target_update_freq", lambda value, cfg: 1),
    Conversion("learn.target_update_theta", "learn.target_tau"),
    Conversion(
        "learn.target_theta",
        "learn.target_tau",
        lambda value, cfg: 1.0 if "target_update_freq" in cfg["learn"] else value,
        beside="learn.target_update_freq",
    ),
    Conversion(
        "learn.target_theta",
        "learn.target_update_freq",
        lambda value, cfg: 1,
        beside="learn.target_update_freq",
    ),
    # A decision transformer has its settings outside of the sections.
    Conversion("rtg_scale", "return_scale"),
    Conversion("rtg_target", "target_return"),
    Conversion("batch_size", "learn.batch_size"),
    Conversion("learning_rate", "learn.learning_rate"),
    Conversion("lr", "learn.learning_rate", beside="return_scale"),
    Conversion("wt_decay", "learn.weight_decay"),
    Conversion("clip_grad_norm_p", "learn.grad_clip_norm"),
)
"""Settings with other values here, those that need others of the config first."""

_USE_RAINBOW: Final = (
    "it needs model.noise=True and an algorithm with a Q-network, such as dqn; rainbow has noisy "
    "layers by itself"
)

_USE_GAE: Final = "values learn the returns that collect.gae_lambda makes; leave it out"

REFUSED_VALUES: Final[Mapping[str, tuple[tuple[Any, ...], str]]] = {
    "nstep_return": ((False,), _USE_GAE),
    "learn.nstep_return": ((False,), _USE_GAE),
    "noisy_net": ((False, None), _USE_RAINBOW),
    "learn.pretrained_model_path": (
        (None, ""),
        "no algorithm here stays close to a pretrained policy; leave it out, with kl_beta",
    ),
    "loss_type": (("mse_loss",), "behavior cloning minimizes the squared error; leave it out"),
    "learn.betas": ((), "Adam has its standard betas here; leave it out"),
}
"""Settings that no algorithm here has: the values that change nothing, and what to do otherwise."""

_MODEL_SAYS: Final = "the model's option of this kind counts"
_DATA_SAY: Final = "the data say it"
_EVALUATOR: Final = "the evaluator's options count"
_NOT_IN_DT: Final = "a decision transformer has no such thing"

UNUSED_BY: Final[Mapping[str, Mapping[str, str]]] = {
    "DQNPolicy": {"learn.alpha": "this algorithm has no temperature; sql has one"},
    "OffPolicyPPGPolicy": {
        "learn.beta_weight": "learn.aux_bc_weight counts",
        "learn.epochs_aux": "learn.aux_train_epoch counts",
    },
    "OffPolicyPPOPolicy": {
        "learn.epoch_per_collect": "learn.update_per_collect says how often it learns",
        "recompute_adv": "a row keeps the advantage that it was stored with",
    },
    "DecisionTransformerPolicy": {
        "context_len": _MODEL_SAYS,
        "dataset": _DATA_SAY,
        "device": "set cuda",
        "discount_factor": _NOT_IN_DT,
        "dropout_p": _MODEL_SAYS,
        "embed_dim": _MODEL_SAYS,
        "env_name": "the section env says it",
        "evaluator_env_num": _EVALUATOR,
        "kappa": _NOT_IN_DT,
        "learn.dataset_path": "pass the data",
        "learn.min_q_weight": _NOT_IN_DT,
        "learn.target_update_freq": _NOT_IN_DT,
        "log_dir": "exp_name says where",
        "max_eval_ep_len": _EVALUATOR,
        "max_test_ep_len": _EVALUATOR,
        "max_timestep": _MODEL_SAYS,
        "min_q_weight": _NOT_IN_DT,
        "n_blocks": _MODEL_SAYS,
        "n_heads": _MODEL_SAYS,
        "nstep": _NOT_IN_DT,
        "num_eval_ep": _EVALUATOR,
        "num_updates_per_iter": _EVALUATOR,
        "state_mean": _DATA_SAY,
        "state_std": _DATA_SAY,
        "stop_value": "env.stop_value counts",
        "target_update_freq": _NOT_IN_DT,
        "weight_decay": "wt_decay counts",
    },
}
"""By class: settings that nothing reads in DI-engine either, or that are part of others here."""
