"""What settings of stable-baselines3, CleanRL, Tianshou and Spinning Up are called here."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Final, NamedTuple, ParamSpec, TypeVar

from dmiddleware.errors import ConfigError
from dmiddleware.registry import nearest

__all__ = ["checks_options", "hint_for", "unknown_name", "unknown_option"]

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
    "learning_rate",
    "learning_rate_q",
    "learning_rate_critic",
    "learning_rate_policy",
    "learning_rate_actor",
)
_POLICY: Final = "an option of the policies that have it"
_SIZES: Final = ("encoder_hidden_sizes", "actor_hidden_sizes", "hidden_sizes")
_NETWORK: Final = "a key of the policy's model: for_env(env, model={'encoder_hidden_sizes': [64]})"
_LIMIT: Final = "the limit of the chain: termination_checker(max_env_step=...)"
_N_SAMPLE: Final = (
    "n_sample of the collector, counted over all envs: StepCollector(..., n_sample=...)"
)
_START: Final = "learn_start of the learner: OffPolicyLearner(policy, buffer, learn_start=...)"
_UPDATES: Final = "update_per_collect of OffPolicyLearner(policy, buffer, update_per_collect=...)"
_SIZE: Final = "the size of the buffer: TensorBuffer(size)"
_ENVS: Final = "env_num of make_env_manager(env, env_num=...)"
_EPS: Final = (
    "the schedule of ε: eps of the policy, such as Schedule.linear(1.0, 0.05, decay=10_000)"
)
_DI_ENGINE: Final = frozenset(("discount_factor", "nstep"))
"""Names in the configs of DI-engine, which policies with sections accept."""
_LOG: Final = "left to Experiment(name, policy), which logs, saves and shows the progress"
_PRIORITY: Final = "an argument of the buffer's sampler: PrioritySampler(alpha=..., beta=...)"
_EVALUATOR: Final = "an argument of interaction_evaluator(policy, envs, n_episode=...)"


def _of(where: str, **names: str) -> dict[str, _Home]:
    return {foreign: _Home(tuple(ours.split()), where) for foreign, ours in names.items()}


_ALPHA: Final = "learning_rate_alpha"
_HOMES: Final[dict[str, _Home]] = {
    **_of(
        _POLICY,
        gamma="discount discount_factor",
        discount="discount discount_factor",
        discount_factor="discount",
        reward_decay="discount discount_factor",
        batch_size="batch_size",
        gae_lambda="gae_lambda",
        tau="target_tau",
        polyak="target_tau",
        polyak_tau="target_tau",
        soft_update_tau="target_tau",
        ent_coef="entropy_weight alpha",
        entropy_coef="entropy_weight alpha",
        entropy_coefficient="entropy_weight alpha",
        entropy_cost="entropy_weight",
        vf_coef="value_weight",
        value_coef="value_weight",
        value_loss_coef="value_weight",
        max_grad_norm="grad_clip_norm",
        grad_clip="grad_clip_norm",
        clip_range="clip_ratio",
        clip_coef="clip_ratio",
        clip_param="clip_ratio",
        eps_clip="clip_ratio",
        clip_epsilon="clip_ratio",
        clip_range_vf="value_clip",
        clip_vloss="value_clip",
        vf_clip="value_clip",
        dual_clip_ratio="dual_clip",
        lam="gae_lambda",
        lambda_="gae_lambda",
        gae_lam="gae_lambda",
        epochs="epoch_per_collect",
        n_epochs="epoch_per_collect",
        num_epochs="epoch_per_collect",
        update_epochs="epoch_per_collect",
        repeat_per_collect="epoch_per_collect",
        repeat="epoch_per_collect",
        minibatch_size="batch_size",
        mini_batch_size="batch_size",
        num_minibatches="batch_size",
        n_minibatches="batch_size",
        nminibatches="batch_size",
        normalize_advantage="adv_norm",
        norm_adv="adv_norm",
        advantage_normalization="adv_norm",
        recompute_adv="recompute_advantage",
        norm_obs="obs_norm",
        normalize_observations="obs_norm",
        normalize_obs="obs_norm",
        norm_reward="reward_norm",
        rew_norm="reward_norm",
        reward_normalization="reward_norm",
        return_scaling="value_norm",
        target_update_interval="target_update_freq",
        target_network_frequency="target_update_freq",
        target_network_update_freq="target_update_freq",
        is_double="double",
        double_q="double",
        double_dqn="double",
        estimation_step="n_step nstep",
        n_step="n_step nstep",
        nstep="n_step",
        priority_is_weight="importance_weights",
        n_step_return_horizon="n_step nstep",
        multi_step="n_step nstep",
        policy_delay="actor_update_freq",
        policy_frequency="actor_update_freq",
        policy_freq="actor_update_freq",
        update_actor_freq="actor_update_freq",
        target_policy_noise="target_noise",
        policy_noise="target_noise",
        noise_clip="target_noise_clip",
        action_noise="noise_sigma",
        exploration_noise="noise_sigma",
        act_noise="noise_sigma",
        autotune="auto_alpha",
        auto_entropy_tuning="auto_alpha",
        automatic_entropy_tuning="auto_alpha",
        init_alpha="alpha",
        temperature="alpha",
        target_entropy_scale="target_entropy_ratio",
        top_quantiles_to_drop_per_net="n_dropped_quantiles",
        min_q_weight="cql_alpha",
        cql_weight="cql_alpha",
        conservative_weight="cql_alpha",
        lagrange_threshold="lagrange_gap",
        lr=" ".join(_RATES),
        learning_rate=" ".join(_RATES),
        optim_lr=" ".join(_RATES),
        lr_schedule=" ".join(_RATES),
        anneal_lr=" ".join(_RATES),
        actor_lr="learning_rate_policy learning_rate_actor learning_rate",
        policy_lr="learning_rate_policy learning_rate_actor learning_rate",
        pi_lr="learning_rate_policy learning_rate_actor learning_rate",
        critic_lr="learning_rate_q learning_rate_critic learning_rate",
        q_lr="learning_rate_q learning_rate_critic learning_rate",
        qf_lr="learning_rate_q learning_rate_critic learning_rate",
        vf_lr="learning_rate_value learning_rate",
        alpha_lr=_ALPHA,
        ent_coef_lr=_ALPHA,
        use_rms_prop="optimizer",
        rms_prop_eps="optimizer_eps",
        device="cuda",
        kl_target="target_kl",
        use_gpu="cuda",
        torch_compile="compile",
        jit="compile",
    ),
    **_of(
        _EPS,
        epsilon="eps start",
        exploration_rate="eps start",
        eps_train="eps start",
        eps_training="eps start",
        eps_greedy="eps start",
        start_e="eps start",
        epsilon_start="eps start",
        initial_epsilon="eps start",
        exploration_initial_eps="eps start",
        end_e="eps end",
        epsilon_end="eps end",
        final_epsilon="eps end",
        eps_start="eps start",
        eps_end="eps end",
        eps_decay="eps decay",
        eps="eps start",
        decay_steps="eps decay",
        min_epsilon="eps end",
        eps_train_final="eps end",
        exploration_final_eps="eps end",
        exploration_fraction="eps decay",
        epsilon_decay="eps decay",
        eps_decay_steps="eps decay",
    ),
    "eps_test": _Home((), "not used: evaluating is greedy, and collecting has the schedule of ε"),
    "eps_inference": _Home((), "not used: evaluating is greedy"),
    **_of(
        _SIZE,
        buffer_size="size",
        replay_size="size",
        replay_buffer_size="size",
        memory_size="size",
        capacity="size",
        maxlen="size",
        max_size="size",
        total_size="size",
    ),
    **{
        section: _Home((), "given by names without sections, such as DQNSettings(batch_size=32)")
        for section in ("learn", "collect", "other")
    },
    "buffer_num": _Home((), "not used: a TensorBuffer takes the rows of any number of envs"),
    "optimize_memory_usage": _Home(("store_next_obs",), "TensorBuffer(size, store_next_obs=False)"),
    "ignore_obs_next": _Home(("store_next_obs",), "TensorBuffer(size, store_next_obs=False)"),
    "stack_num": _Home(("frame_stacks",), "frame_stacks of TensorBuffer(size, frame_stacks=...)"),
    "replay_buffer_class": _Home((), "the buffer that the chain pushes to: TensorBuffer(size)"),
    "replay_buffer_kwargs": _Home((), "the arguments of the buffer: TensorBuffer(size, ...)"),
    **_of(_PRIORITY, prioritized_replay_alpha="alpha", prioritized_replay_beta0="beta"),
    "prioritized_replay": _Home(("priority",), "priority of the policy, and a PrioritySampler"),
    **_of(
        _START,
        learning_starts="learn_start",
        learn_start="learn_start",
        replay_start_size="learn_start",
        min_replay_size="learn_start",
        update_after="learn_start",
        start_timesteps="learn_start random_steps",
        warmup_steps="learn_start random_steps",
        learning_start="learn_start",
    ),
    "start_steps": _Home(("random_steps",), "random_steps of StepCollector(..., random_steps=...)"),
    "random_steps": _Home((), "an argument of StepCollector(policy, envs, random_steps=...)"),
    **_of(
        _N_SAMPLE,
        n_steps="n_step nstep n_sample",
        num_steps="n_sample",
        train_freq="n_sample",
        train_frequency="n_sample",
        step_per_collect="n_sample",
        update_every="n_sample",
        rollout_length="n_sample",
        horizon="n_sample",
        n_rollout_steps="n_sample",
        n_sample="n_sample",
    ),
    "episode_per_collect": _Home(("n_episode",), "n_episode of EpisodeCollector(policy, envs)"),
    **_of(
        _UPDATES,
        gradient_steps="update_per_collect",
        n_updates="update_per_collect",
        update_per_step="update_per_collect",
        updates_per_step="update_per_collect",
        utd="update_per_collect",
        utd_ratio="update_per_collect",
    ),
    **_of(
        _NETWORK,
        net_arch=" ".join(_SIZES),
        hidden_sizes=" ".join(_SIZES),
        hidden_dim=" ".join(_SIZES),
        hidden_size=" ".join(_SIZES),
        hidden_dims=" ".join(_SIZES),
        hidden_layers=" ".join(_SIZES),
        activation_fn="activation",
        policy_kwargs="",
        features_extractor_class="",
        features_extractor_kwargs="",
        num_atoms="n_atoms",
        dueling_dqn="dueling",
        vmin="v_min",
        vmax="v_max",
        num_quantiles="n_quantiles",
        ortho_init="init",
    ),
    **_of(
        _LIMIT,
        total_timesteps="max_env_step",
        total_steps="max_env_step",
        max_steps="max_env_step",
        num_timesteps="max_env_step",
        n_timesteps="max_env_step",
        max_timesteps="max_env_step",
        max_epoch="max_env_step",
        max_epochs="max_env_step",
        step_per_epoch="max_env_step",
        max_env_step="max_env_step",
        max_train_iter="max_train_iter",
    ),
    **_of(
        _ENVS,
        n_envs="env_num",
        num_envs="env_num",
        n_env="env_num",
        num_env="env_num",
        training_num="env_num",
        train_num="env_num",
        test_num="env_num",
        env_num="env_num",
        n_workers="env_num",
        num_workers="env_num",
    ),
    "vec_env_cls": _Home(("mode",), "mode of make_env_manager(env, mode='async')"),
    "vec_env_kwargs": _Home(("mode",), "mode of make_env_manager(env, mode='async')"),
    "asynchronous": _Home(("mode",), "mode of make_env_manager(env, mode='async')"),
    **_of(
        _EVALUATOR,
        n_eval_episodes="n_episode",
        episode_per_test="n_episode",
        eval_freq="every_train_iter",
        eval_frequency="every_train_iter",
    ),
    **{
        name: _Home((), _LOG)
        for name in ("verbose", "tensorboard_log", "track", "wandb_project_name", "log_interval")
    },
}


def hint_for(name: str, known: Iterable[str]) -> str | None:
    """Say what a setting of another library is called here, or where it lives.

    Args:
        name: the unknown name; of a dotted one, the last part counts.
        known: the names that are accepted in its place.

    Returns:
        The end of an error message; None if no library of the table has such a setting.
    """
    home = _HOMES.get(name.rpartition(".")[2].lower())
    if home is None:
        return None
    accepted = {one.rpartition(".")[2]: one for one in known}
    meant = [accepted[ours] for ours in home.ours if ours in accepted]
    if meant:
        return f"did you mean {' or '.join(meant)}?"
    if home.where is _POLICY:
        ours = [name for name in home.ours if name not in _DI_ENGINE]
        return f"here it is {' or '.join(ours)}, {_POLICY}"
    return f"here it is {home.where}"


def checks_options(function: Callable[P, R]) -> Callable[P, R]:
    """Let a function, or a class's ``__init__``, refuse unknown keyword arguments in words.

    The message names the argument that was meant, or what has the setting. Without it, Python would
    raise a TypeError that says only that the argument is unexpected.

    Raises:
        ConfigError: by the function, for an unknown keyword argument.
    """
    parameters = inspect.signature(function).parameters
    names = [name for name in parameters if name != "self"]
    owner = function.__qualname__.removesuffix(".__init__")

    @functools.wraps(function)
    def checked(*args: P.args, **kwargs: P.kwargs) -> R:
        for name in kwargs:
            if name not in parameters:
                raise ConfigError(unknown_option(owner, name, names))
        return function(*args, **kwargs)

    return checked


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
    hint, near = hint_for(name, names), nearest(name, names, n=1)
    if hint and not (only_here and hint.startswith("here it is")):
        return hint
    return f"did you mean {near[0]}?" if near else f"known are: {', '.join(names) or 'none'}"
