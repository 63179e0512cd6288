"""Keys of DI-engine's policy configs: which of ours they are, and which mean nothing here."""

from __future__ import annotations

import copy
import logging
from collections.abc import Mapping
from typing import Any, Final

from dmiddleware.classic.config import Option
from dmiddleware.classic.converted_keys import CONVERSIONS, REFUSED_VALUES, UNUSED_BY
from dmiddleware.errors import ConfigError

__all__ = ["CLASSIC_SECTIONS", "merge_classic", "split_classic", "take_sections"]

_log = logging.getLogger(__name__)

_RENAMED: Final[Mapping[str, str]] = {
    "collect.discount_factor": "discount_factor",
    "learn.discount_factor": "discount_factor",
    "collect.gae_lambda": "gae_lambda",
    "collect.traj_len_inf": "traj_len_inf",
    "recompute_adv": "learn.recompute_advantage",
    "learn.value_norm": "value_norm",
    "learn.double_q": "learn.double",
    "learn.normalize_advantage": "learn.adv_norm",
    "learn.target_theta": "learn.target_tau",
    "learn.target_update_theta": "learn.target_tau",
    "learn.grad_norm": "learn.grad_clip_norm",
    "learn.clip_value": "learn.grad_clip_norm",
    "learn.grad_clip_value": "learn.grad_clip_norm",
    "learn.noise_sigma": "learn.target_noise",
    "learn.noise_range.max": "learn.target_noise_clip",
    "learn.lambda_": "learn.trace_decay",
    "learn.rho_clip_ratio": "learn.rho_clip",
    "learn.c_clip_ratio": "learn.c_clip",
    "learn.ce_label_smooth": "learn.label_smoothing",
    "learn.alpha": "learn.bc_alpha",
    "learn.learning_rate_q": "learn.learning_rate_critic",
    "learn.learning_rate_policy": "learn.learning_rate_actor",
    "learn.learning_rate_dis": "learn.learning_rate_critic",
    "learn.learning_rate_cont": "learn.learning_rate_actor",
    "learn.lmbda": "learn.min_weight",
    "model.phi": "learn.max_perturbation",
    "learn.with_q_entropy": "learn.backup_entropy",
    "learn.num_actions": "learn.n_actions",
    "learn.learning_rate_quantile": "learn.learning_rate",
    "learn.ent_coef": "learn.entropy_weight",
    "burnin_step": "burn_in",
    "entropy_tau": "learn.temperature",
    "m_alpha": "learn.munchausen_weight",
    "learn.lambda1": "learn.n_step_weight",
    "learn.lambda2": "learn.margin_weight",
    "learn.lambda3": "learn.l2_weight",
    "learn.margin_function": "learn.margin",
}
"""Settings that an algorithm has here under another name, with the same values."""

_READ_BY_WORKERS: Final = (
    "unroll_len", "learn_unroll_len", "collect.unroll_len", "random_collect_size",
    "learn.update_per_collect", "collect.model_path", "collect.pho", "learn.per_train_iter_k",
    "learn.expert_replay_buffer_size", "eval.batch_size",
)  # fmt: skip
"""Settings that workers and middleware read from the config of any policy."""

_SIZES: Final = (
    ("batch_size", "learn.batch_size"),
    ("n_sample", "collect.n_sample"),
    ("n_episode", "collect.n_episode"),
)
"""Settings that workers read from either place, of a policy that declares them at neither."""

_TRAIN_FROM_DATA: Final = "serial_run plays; learn from data with offline_run, or in a chain"
_ENV_NUM: Final = "env.collector_env_num and env.evaluator_env_num count"

_LOAD: Final = "to start from a checkpoint, set learn.learner.hook.load_ckpt_before_run"
_RECORD: Final = "serial_run trains; record data in a chain, by OfflineDataSaver"
_NO_PRETRAINED: Final = "no algorithm here stays close to a pretrained policy"

_NSTEP: Final = "values learn the returns that collect.gae_lambda makes"

_UNUSED: Final[Mapping[str, str]] = {
    "load_path": _LOAD,
    "expert_random_collect_size": "an expert shows as much as is collected",
    "priority": "this algorithm has no priorities",
    "priority_IS_weight": "this algorithm has no priorities",
    "multi_agent": "the environment says whether it has several agents",
    "action_space": "the model and the environment's space say what actions are",
    "continuous": "the model and the environment's space say what actions are",
    "command": "command modes have no settings",
    "other.eps": "this algorithm explores by itself",
    "other.her": "only a replay buffer of the type episode relabels goals",
    "kappa": "the Huber loss changes at 1",
    "learn.kappa": "the Huber loss changes at 1",
    "learn.multi_gpu": "set multi_gpu",
    "learn.resume_training": "a checkpoint that the learner loads has its counters",
    "learn.ignore_done": "a time limit is not a terminal state here, so nothing has to be ignored",
    "learn.reparameterization": "the algorithm is written with it",
    "learn.value_network": "the algorithm is written without it",
    "learn.update_circle": "every update changes both networks",
    "learn.init_w": "the last layer begins as the others do",
    "learn.learning_rate_alpha": "this algorithm tunes no temperature",
    "learn.learning_rate_value": "this algorithm has no network of state values",
    "learn.noise": "this algorithm has no noise on targets",
    "learn.noise_range": "this algorithm has no noise on targets",
    "learn.noise_sigma": "this algorithm has no noise on targets",
    "learn.grad_clip_type": "gradients are clipped by their norm",
    "learn.rho_pg_clip_ratio": "learn.rho_clip bounds these ratios too",
    "learn.ppo_param_init": "model.init says how weights begin",
    "learn.lr_scheduler": "give learn.learning_rate as a schedule",
    "learn.iqn": "the algorithm does not mix the two",
    "collect.gae_lambda": "this algorithm estimates no advantages by it",
    "nstep": "this algorithm has no n-step targets",
    "learn.nstep": "this algorithm has no n-step targets",
    "transition_with_policy_data": "rows have what the policy returned",
    "nstep_return": _NSTEP,
    "learn.nstep_return": _NSTEP,
    "collect.collector_logit": "an algorithm that needs logits collects them",
    "collect.each_iter_n_sample": "collect.n_sample counts",
    "collect.collector_env_num": _ENV_NUM,
    "collect.env_num": _ENV_NUM,
    "eval.env_num": _ENV_NUM,
    "collect.collect_count": _RECORD,
    "collect.expert_data_path": _RECORD,
    "collect.save_path": _RECORD,
    "collect.state_dict_path": _RECORD,
    "learn.kl_beta": _NO_PRETRAINED,
    "learn.kl_type": _NO_PRETRAINED,
    "learn.pretrained_model_path": _NO_PRETRAINED,
    "loss_type": "behavior cloning minimizes the squared error",
    "noisy_net": "this algorithm has no noisy layers",
    "model_type": "model.type names the network",
    "agent_num": "the environment says how many agents it has",
    "learn.with_lagrange": "learn.lagrange_gap says whether the weight is tuned",
    "learn.train_epoch": _TRAIN_FROM_DATA,
    "learn.data_path": _TRAIN_FROM_DATA,
    "learn.data_type": _TRAIN_FROM_DATA,
    "collect.data_path": _TRAIN_FROM_DATA,
    "collect.data_type": _TRAIN_FROM_DATA,
}
"""Settings that change nothing here, and what does instead."""

CLASSIC_SECTIONS: Final = (
    "learn.learner",
    "collect.collector",
    "collect.env",
    "eval.evaluator",
    "other.replay_buffer",
    "other.commander",
)
"""The sections of a policy's config in which classic programs configure their workers."""

_ABSENT: Final = object()


def split_classic(
    given: Mapping[str, Any], entries: Mapping[str, Any], owner: str
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Divide a config into keys that a class has, and those of DI-engine that it does not have.

    A setting under its name in DI-engine gets the name that it has here. What means nothing here
    is logged once, with what does instead.

    Args:
        given: the config.
        entries: what the class declares.
        owner: the class's name, for the log.

    Returns:
        The config in the names of the class, and what it does not declare.

    Raises:
        ConfigError: for a setting that no algorithm here has, with what to do.
    """
    cfg = _copied(given)
    unread = UNUSED_BY.get(owner, {})
    dropped = _take(cfg, tuple(unread), {})
    _convert(cfg, entries)
    _make_noisy(cfg, entries)
    _refuse_values(cfg, entries, owner)
    _apply_switches(cfg, entries)
    _warm_up(cfg, entries)
    for old, new in _RENAMED.items():
        if _find(entries, old) is _ABSENT and _find(entries, new) is not _ABSENT:
            value = _pop(cfg, old)
            if value is not _ABSENT and _find(cfg, new) is _ABSENT:
                _set(cfg, new, value)
    if _find(entries, "learn.target_noise") is not _ABSENT:
        # What they mean is in learn.target_noise and learn.target_noise_clip now.
        for path in ("learn.noise", "learn.noise_range"):
            _pop(cfg, path)
    sizes = [places for places in _SIZES if all(_find(entries, at) is _ABSENT for at in places)]
    read = (*_READ_BY_WORKERS, *(place for places in sizes for place in places))
    reasons = {**_UNUSED, **unread}
    recorded = _pop(cfg, "other.eps.collect")  # a schedule has no such key
    others = _take(cfg, (*read, *reasons), entries)
    # A class that allows one value declares a setting, and has no use for another value either.
    merge_classic(others, _take(dropped, tuple(unread), entries))
    unused = [
        f"{path} ({why})"
        for path, why in reasons.items()
        if any(_find(section, path) is not _ABSENT for section in (others, dropped))
    ]
    if recorded is not _ABSENT:
        unused.append(f"other.eps.collect ({_RECORD})")
    if unused and "cfg_type" not in given:  # a merged config has been logged before
        _log.warning("%s: these settings change nothing here: %s", owner, "; ".join(unused))
    return cfg, others


def take_sections(cfg: dict[str, Any]) -> dict[str, Any]:
    """Take what only classic workers read out of a config, and return it."""
    return _take(cfg, ("traj_len_inf", *CLASSIC_SECTIONS), {})


def _take(
    cfg: dict[str, Any], paths: tuple[str, ...], entries: Mapping[str, Any]
) -> dict[str, Any]:
    """Take the values at those of the paths that a class does not declare out of a config."""
    taken: dict[str, Any] = {}
    for path in paths:
        value = _pop(cfg, path) if _find(entries, path) is _ABSENT else _ABSENT
        if value is not _ABSENT:
            _set(taken, path, value)
    return taken


def merge_classic(cfg: dict[str, Any], others: Mapping[str, Any]) -> None:
    """Add what :func:`split_classic` has taken out, so that code that reads it finds it."""
    for key, value in others.items():
        if isinstance(value, Mapping) and isinstance(cfg.get(key), Mapping):
            merge_classic(cfg[key], value)
        else:
            cfg[key] = value


def _refuse_values(cfg: dict[str, Any], entries: Mapping[str, Any], owner: str) -> None:
    for path, (harmless, instead) in REFUSED_VALUES.items():
        value = _find(cfg, path)
        if value is _ABSENT or value in harmless or _find(entries, path) is not _ABSENT:
            continue
        raise ConfigError(f"{owner}: {path}={value!r} of DI-engine is not here; {instead}")


def _convert(cfg: dict[str, Any], entries: Mapping[str, Any]) -> None:
    """Replace settings whose values stand for other ones here."""
    done = []
    for old, new, convert, reads, beside in CONVERSIONS:
        value = _find(cfg, old)
        has_all = all(_find(entries, path) is not _ABSENT for path in (new, beside) if path)
        is_here = has_all and _find(entries, old) is _ABSENT
        if value is _ABSENT or not is_here:
            continue
        done += [old, *reads]
        if _find(cfg, new) is _ABSENT:
            _set(cfg, new, convert(value, cfg))
    for old in done:
        _pop(cfg, old)


def _apply_switches(cfg: dict[str, Any], entries: Mapping[str, Any]) -> None:
    """Turn switches into the values that stand for them here."""
    if _find(entries, "learn.target_noise") is not _ABSENT:
        noise = _find(cfg, "learn.noise")
        if noise is False:
            for path in ("learn.noise_sigma", "learn.noise_range"):
                _pop(cfg, path)
            _set(cfg, "learn.target_noise", 0.0)
        elif noise is True and _find(cfg, "learn.noise_sigma") is _ABSENT:
            _set(cfg, "learn.noise_sigma", 0.2)
    weight: Any = _ABSENT
    if _find(entries, "learn.cql_alpha") is not _ABSENT:
        weight = _pop(cfg, "learn.min_q_weight")
    if weight is not _ABSENT and _find(cfg, "learn.cql_alpha") is _ABSENT:
        # Squared errors of critics are halved here; the quantile loss is the same.
        is_halved = _find(entries, "learn.lagrange_gap") is not _ABSENT
        _set(cfg, "learn.cql_alpha", weight / 2 if is_halved else weight)
    if _find(cfg, "learn.grad_clip_type") not in (_ABSENT, "clip_norm"):
        _pop(cfg, "learn.grad_clip_value")
        _pop(cfg, "learn.clip_value")
    if isinstance(_find(cfg, "learn.ce_label_smooth"), bool):
        _set(cfg, "learn.ce_label_smooth", 0.1 if _pop(cfg, "learn.ce_label_smooth") else 0.0)


def _make_noisy(cfg: dict[str, Any], entries: Mapping[str, Any]) -> None:
    """Give a Q-network noisy layers if both the policy and the model ask for them, as there."""
    is_asked_for = _find(cfg, "noisy_net") is True and _find(cfg, "model.noise") is True
    if is_asked_for and _find(entries, "learn.double") is not _ABSENT:
        _pop(cfg, "noisy_net")
        _pop(cfg, "model.noise")
        _set(cfg, "model.noisy", True)


def _warm_up(cfg: dict[str, Any], entries: Mapping[str, Any]) -> None:
    """Let the learning rate of a decision transformer rise over its ``warmup_steps`` updates."""
    rate = _find(entries, "learn.learning_rate")
    if _find(entries, "return_scale") is _ABSENT or rate is _ABSENT:
        return
    n_steps, end = _pop(cfg, "warmup_steps"), _find(cfg, "learn.learning_rate")
    if end is _ABSENT:
        end = rate.default if isinstance(rate, Option) else rate
    if n_steps is _ABSENT or not n_steps or not isinstance(end, int | float):
        return  # a schedule says itself how it begins
    start = end / n_steps
    schedule = {"type": "linear", "start": start, "end": end, "decay": n_steps, "by": "update"}
    _set(cfg, "learn.learning_rate", schedule)


def _copied(given: Mapping[str, Any]) -> dict[str, Any]:
    return {
        key: _copied(value) if isinstance(value, Mapping) else copy.copy(value)
        for key, value in given.items()
    }


def _find(cfg: Any, path: str) -> Any:
    for key in path.split("."):
        if not isinstance(cfg, Mapping) or key not in cfg:
            return _ABSENT
        cfg = cfg[key]
    return cfg


def _pop(cfg: dict[str, Any], path: str) -> Any:
    """Remove the value at a path, and the dictionary around it if that is empty then."""
    section, _, key = path.rpartition(".")
    holder = _find(cfg, section) if section else cfg
    if not isinstance(holder, dict) or key not in holder:
        return _ABSENT
    value = holder.pop(key)
    if section.count(".") and not holder:
        _pop(cfg, section)
    return value


def _set(cfg: dict[str, Any], path: str, value: Any) -> None:
    *sections, key = path.split(".")
    for section in sections:
        cfg = cfg.setdefault(section, {})
    cfg[key] = value
