"""What settings of other libraries are called here, and which class has a setting.

The libraries are stable-baselines3, CleanRL, Tianshou, Spinning Up, and the launcher of DI-engine.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Final, NamedTuple, ParamSpec, TypeVar

from dmiddleware.registry import nearest

__all__ = ["POLICIES", "declare", "hint_for", "unknown_name", "unknown_option"]

P = ParamSpec("P")
R = TypeVar("R")


class _Home(NamedTuple):
    """Where a setting lives here.

    Attributes:
        ours: its names here, the likeliest first.
        where: what has it, for those who look elsewhere.
    """

    ours: tuple[str, ...]
    where: str


_RATES: Final = (
    "learning_rate learning_rate_q learning_rate_critic learning_rate_policy learning_rate_actor"
)
_SIZES: Final = "encoder_hidden_sizes actor_hidden_sizes hidden_sizes"
_POLICY: Final = "an option of the policies that have it"
_SET: Final = f"{_POLICY}, set where the policy is built: for_env(env, {{name}}=...)"
POLICIES: Final = "policies"
"""The owner of the options of all policies; see :func:`declare`."""
_MANY: Final = 3
_DI_ENGINE: Final = frozenset(("discount_factor", "nstep"))
"""Names in the configs of DI-engine, which policies with sections accept."""

_NAMES: Final[Mapping[str, Mapping[str, str]]] = {
    _POLICY: {
        "discount discount_factor": "gamma discount reward_decay",
        "discount": "discount_factor",
        "batch_size": (
            "batch_size minibatch_size mini_batch_size num_minibatches n_minibatches nminibatches"
        ),
        "gae_lambda": "gae_lambda lam lambda_ gae_lam",
        "target_tau": "tau polyak polyak_tau soft_update_tau",
        "entropy_weight alpha": "ent_coef entropy_coef entropy_coefficient",
        "entropy_weight": "entropy_cost",
        "value_weight": "vf_coef value_coef value_loss_coef",
        "grad_clip_norm": "max_grad_norm grad_clip",
        "clip_ratio": "clip_range clip_coef clip_param eps_clip clip_epsilon",
        "value_clip": "clip_range_vf clip_vloss vf_clip",
        "dual_clip": "dual_clip_ratio",
        "epoch_per_collect": "epochs n_epochs num_epochs update_epochs repeat_per_collect repeat",
        "adv_norm": "normalize_advantage norm_adv advantage_normalization",
        "recompute_advantage": "recompute_adv",
        "obs_norm": "norm_obs normalize_observations normalize_obs",
        "reward_norm": "norm_reward rew_norm reward_normalization",
        "value_norm": "return_scaling",
        "norm_clip": "clip_obs clip_reward",
        "target_update_freq": (
            "target_update_interval target_network_frequency target_network_update_freq"
        ),
        "double": "is_double double_q double_dqn",
        "n_step nstep": "estimation_step n_step n_step_return_horizon multi_step",
        "n_step": "nstep",
        "importance_weights": "priority_is_weight",
        "actor_update_freq": "policy_delay policy_frequency policy_freq update_actor_freq",
        "target_noise": "target_policy_noise policy_noise",
        "target_noise_clip": "noise_clip",
        "noise_sigma": "action_noise exploration_noise act_noise",
        "auto_alpha": "autotune auto_entropy_tuning automatic_entropy_tuning",
        "alpha": "init_alpha temperature",
        "target_entropy_ratio": "target_entropy_scale",
        "n_dropped_quantiles": "top_quantiles_to_drop_per_net",
        "cql_alpha": "min_q_weight cql_weight conservative_weight",
        "lagrange_gap": "lagrange_threshold",
        _RATES: "lr learning_rate optim_lr lr_schedule anneal_lr",
        "learning_rate_policy learning_rate_actor learning_rate": "actor_lr policy_lr pi_lr",
        "learning_rate_q learning_rate_critic learning_rate": "critic_lr q_lr qf_lr",
        "learning_rate_value learning_rate": "vf_lr",
        "learning_rate_alpha": "alpha_lr ent_coef_lr",
        "optimizer": "use_rms_prop",
        "optimizer_eps": "rms_prop_eps",
        "cuda": "device use_gpu",
        "target_kl": "kl_target",
        "compile": "torch_compile jit",
    },
    "the schedule of ε: eps of the policy, such as Schedule.linear(1.0, 0.05, decay=10_000)": {
        "eps start": (
            "epsilon exploration_rate eps_train eps_training eps_greedy start_e epsilon_start "
            "initial_epsilon exploration_initial_eps eps_start eps"
        ),
        "eps end": (
            "end_e epsilon_end final_epsilon eps_end min_epsilon eps_train_final "
            "exploration_final_eps"
        ),
        "eps decay": "eps_decay decay_steps exploration_fraction epsilon_decay eps_decay_steps",
    },
    "not used: evaluating is greedy, and collecting has the schedule of ε": {"": "eps_test"},
    "not used: evaluating is greedy": {"": "eps_inference"},
    "the size of the buffer: TensorBuffer(size)": {
        "size": (
            "buffer_size replay_size replay_buffer_size memory_size capacity maxlen max_size "
            "total_size"
        ),
    },
    "given by names without sections, such as DQNSettings(batch_size=32)": {
        "": "learn collect other"
    },
    "not used: a TensorBuffer takes the rows of any number of envs": {"": "buffer_num"},
    "TensorBuffer(size, store_next_obs=False)": {
        "store_next_obs": "optimize_memory_usage ignore_obs_next"
    },
    "frame_stacks of TensorBuffer(size, frame_stacks=...)": {"frame_stacks": "stack_num"},
    "the buffer that the chain pushes to: TensorBuffer(size)": {"": "replay_buffer_class"},
    "the arguments of the buffer: TensorBuffer(size, ...)": {"": "replay_buffer_kwargs"},
    "an argument of the buffer's sampler: PrioritySampler(alpha=..., beta=...)": {
        "alpha": "prioritized_replay_alpha",
        "beta": "prioritized_replay_beta0",
    },
    "priority of the policy, and a PrioritySampler": {"priority": "prioritized_replay"},
    "learn_start of the learner: OffPolicyLearner(policy, buffer, learn_start=...)": {
        "learn_start": (
            "learning_starts learn_start replay_start_size min_replay_size update_after "
            "learning_start"
        ),
        "learn_start random_steps": "start_timesteps warmup_steps",
    },
    "random_steps of StepCollector(..., random_steps=...)": {"random_steps": "start_steps"},
    "an argument of StepCollector(policy, envs, random_steps=...)": {"": "random_steps"},
    "n_sample of the collector, counted over all envs: StepCollector(..., n_sample=...)": {
        "n_step nstep n_sample": "n_steps",
        "n_sample": (
            "num_steps train_freq train_frequency step_per_collect update_every rollout_length "
            "horizon n_rollout_steps n_sample"
        ),
    },
    "n_episode of EpisodeCollector(policy, envs)": {"n_episode": "episode_per_collect"},
    "update_per_collect of OffPolicyLearner(policy, buffer, update_per_collect=...)": {
        "update_per_collect": (
            "gradient_steps n_updates update_per_step updates_per_step utd utd_ratio"
        ),
    },
    "a key of the policy's model: for_env(env, model={'encoder_hidden_sizes': [64]})": {
        _SIZES: "net_arch hidden_sizes hidden_dim hidden_size hidden_dims hidden_layers",
        "activation": "activation_fn",
        "": "policy_kwargs features_extractor_class features_extractor_kwargs",
        "n_atoms": "num_atoms",
        "dueling": "dueling_dqn",
        "v_min": "vmin",
        "v_max": "vmax",
        "n_quantiles": "num_quantiles",
        "init": "ortho_init",
    },
    "the limit of the chain: TerminationChecker(max_env_step=...)": {
        "max_env_step": (
            "total_timesteps total_steps max_steps num_timesteps n_timesteps max_timesteps "
            "max_epoch max_epochs step_per_epoch max_env_step"
        ),
        "max_train_iter": "max_train_iter",
    },
    "env_num of make_env_manager(env, env_num=...)": {
        "id": "env_id",
        "wrappers": "wrapper_class",
        "env_num": (
            "n_envs num_envs n_env num_env training_num train_num test_num env_num n_workers "
            "num_workers"
        ),
    },
    "mode of make_env_manager(env, mode='async')": {
        "mode": "vec_env_cls vec_env_kwargs asynchronous"
    },
    "an argument of InteractionEvaluator(policy, envs, n_episode=...)": {
        "n_episode": "n_eval_episodes episode_per_test",
        "every_train_iter": "eval_freq eval_frequency",
        "video_every": "capture_video",
    },
    "left to Experiment(name, policy), which logs, saves and shows the progress": {
        "": (
            "verbose tensorboard_log track wandb_project_name log_interval progress_bar save_model "
            "stats_window_size best_model_save_path"
        ),
        "exp_name": "tb_log_name exp_name",
    },
    "a middleware of the chain: task.use(function), which gets the context of each step": {
        "": "callback callbacks"
    },
    "left out, because events travel over connections between the processes": {
        "": "redis_host redis_port redis_url"
    },
}
"""By what has a setting, then by its names here: its names elsewhere."""

_HOMES: Final = {
    name: _Home(tuple(ours.split()), where)
    for where, settings in _NAMES.items()
    for ours, theirs in settings.items()
    for name in theirs.split()
}


_OWNERS: Final[dict[str, set[str]]] = {}
"""By the name of an option: the classes and functions that take it."""


def declare(owner: str, names: Iterable[str]) -> None:
    """Note which options a class or function takes, for the errors of others.

    Args:
        owner: its name, or :data:`POLICIES`.
        names: the options.
    """
    for name in names:
        _OWNERS.setdefault(name, set()).add(owner)


def hint_for(name: str, known: Iterable[str]) -> str | None:
    """Say what a setting of another library is called here, or where it lives.

    Args:
        name: the unknown name; of a dotted one, the last part counts. It may be an option of a
            command line, as the known names then are.
        known: the names that are accepted in its place.

    Returns:
        The end of an error message; None if no library of the table has such a setting.
    """
    home = _HOMES.get(_last(name).lower())
    if home is None:
        return None
    meant = _accepted(home.ours, name, list(known))
    if meant:
        return f"did you mean {' or '.join(meant)}?"
    if home.where is _POLICY:
        ours = [name for name in home.ours if name not in _DI_ENGINE]
        if name in ours or POLICIES in _OWNERS.get(name, ()):
            return f"here it is {_SET.format(name=name)}"
        return f"here it is {' or '.join(ours)}, {_SET.format(name=ours[0])}"
    return f"here it is {home.where}"


def _accepted(ours: Iterable[str], name: str, known: Sequence[str]) -> list[str]:
    """Return the accepted names that end in one of ours; those of the name's group, if it has any.

    The group of ``policy.lr`` is ``policy``. Names may be options, such as ``--policy.lr``.
    """
    accepted = [option for end in ours for option in known if _last(option) == end]
    group = name.rpartition(".")[0]
    in_group = [option for option in accepted if option.rpartition(".")[0] == group]
    return in_group or accepted


def _last(name: str) -> str:
    """Return the last part of a name, as Python writes it."""
    return name.rpartition(".")[2].lstrip("-").replace("-", "_")


def unknown_option(owner: str, name: str, known: Iterable[str]) -> str:
    """Return the message for an unknown keyword argument."""
    return f"{owner}: unknown keyword {name}; {unknown_name(name, known)}"


def unknown_name(name: str, known: Iterable[str], *, only_here: bool = False) -> str:
    """Return the end of a message about an unknown name.

    Args:
        name: the unknown name.
        known: the names that are accepted in its place.
        only_here: whether to leave out what has the setting elsewhere.
    """
    names = sorted(known)
    hint, near = hint_for(name, names) or _owners_of(name), nearest(name, names, n=1)
    if hint and not (only_here and hint.startswith("here it is")):
        return hint
    if near:
        return f"did you mean {near[0]}?"
    known_names = f"known are: {', '.join(names) or 'none'}"
    elsewhere = None if only_here else next(iter(nearest(name, _OWNERS, n=1)), None)
    if elsewhere is None:
        return known_names
    return f"{known_names}; if {elsewhere} was meant, {_owners_of(elsewhere)}"


def _owners_of(name: str) -> str | None:
    """Say which classes take an option; None: none does, or too many to name."""
    owners = _OWNERS.get(name, set())
    if POLICIES in owners:
        return f"here it is {_SET.format(name=name)}"
    if not 0 < len(owners) <= _MANY:
        return None
    *first, last = sorted(owners)
    of = f"{', '.join(first)} and {last}" if first else last
    return f"here it is an option of {of}: {last}(..., {name}=...)"
