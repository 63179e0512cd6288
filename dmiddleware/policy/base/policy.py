"""The base class of all policies: one model, used through three modes."""

from __future__ import annotations

import inspect
import logging
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, ClassVar, Final, Literal, Self, TypedDict, TypeVar

import gymnasium as gym
import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from easydict import EasyDict
from torch import nn

from dmiddleware.config import (
    Configurable,
    NamedValues,
    Option,
    at_least,
    check_value,
    mapping,
    optional,
    switch,
)
from dmiddleware.data.batch import (
    Batch,
    Nested,
    Value,
    as_tree,
    from_numpy,
    leaves,
    map_leaves,
    map_nested,
    to_device,
)
from dmiddleware.data.minibatches import MinibatchUnit
from dmiddleware.env import BatchedTimestep, EnvTimestep, n_agent_of
from dmiddleware.errors import (
    ConfigError,
    DMiddlewareError,
    NonFiniteLoss,
    PolicyError,
    PolicyOutputError,
    SpaceError,
    StructureError,
)
from dmiddleware.foreign_names import unknown_name
from dmiddleware.memory import keep_freed_memory
from dmiddleware.model import action_shape_of, create_model, obs_shape_of
from dmiddleware.model.layers import check_default_dtype
from dmiddleware.model.spaces import HasSpaces, check_spaces, spaces_of
from dmiddleware.policy.base.act_inputs import (
    ACT_KEYWORDS,
    STATE,
    check_act_inputs,
    probe_inputs,
)
from dmiddleware.policy.base.allowed_actions import allows_choice, check_allowed
from dmiddleware.policy.base.classic_keys import merge_classic, split_classic
from dmiddleware.policy.base.classic_state import is_partial
from dmiddleware.policy.base.collate import (
    collate_samples,
    is_per_env,
    join_outputs,
    join_transitions,
    row,
    sample_by_trajectory,
    split_inputs,
    to_rows,
)
from dmiddleware.policy.base.data_parallel import (
    GradientReducer,
    all_agree,
    broadcast_model,
    rank_and_world_size,
    require_process_group,
)
from dmiddleware.policy.base.finite_obs import check_finite
from dmiddleware.policy.base.modes import CollectMode, EvalMode, LearnMode
from dmiddleware.policy.base.state_dict import (
    load_model_state,
    load_optimizer_state,
    model_state,
    optimizer_state,
    part_of,
)
from dmiddleware.registry import nearest
from dmiddleware.schedule import Counters, Schedule, is_scheduled
from dmiddleware.seeding import derive_seed

__all__ = ["Policy", "PolicyOptions", "to_be_written"]

_log = logging.getLogger(__name__)

F = TypeVar("F", bound=Callable[..., Any])
T = TypeVar("T")


def to_be_written(method: F) -> F:
    """Mark a method that a subclass must define if it enables the mode that calls it."""
    method.__isabstractmethod__ = True  # type: ignore[attr-defined]
    return method


class PolicyOptions(TypedDict, total=False):
    """The options that all policies have in ``for_env``."""

    cuda: bool
    multi_gpu: bool
    bp_update_sync: bool
    seed: int | None


class Policy(Configurable):
    """An algorithm: how to act, what to store, how to learn.

    A direct subclass is written per environment, as in DI-engine; derive from
    :class:`BatchedPolicy` to write it for all environments at once, which is faster. A subclass
    writes

    - ``_forward_learn(batch, **kwargs)``, which updates the model and returns what to log
      (:attr:`learn_from` says whether ``batch`` is a treetensor or a list of samples);
    - ``_forward_collect(data, **kwargs)`` and ``_forward_eval(data, **kwargs)``, where ``data``
      maps env ids to observations and the result maps them to dictionaries with at least
      ``action``;
    - if the defaults do not suit it, ``_process_transition(obs, policy_output, timestep)`` and
      ``_get_train_sample(transitions)``.

    The parameters of these methods after ``data`` or ``batch`` are the keyword arguments that the
    mode's forward takes, such as ``eps`` in ``_forward_collect(self, data, *, eps=0.0)``; any other
    one is refused. With ``**kwargs`` it takes them all, but that of a BatchedPolicy does not.

    The batched methods are derived from these, so every collector runs every policy. Workers use a
    policy through :attr:`learn_mode`, :attr:`collect_mode` and :attr:`eval_mode`.

    Args:
        cfg: what differs from ``default_config()``.
        model: None builds the one that ``cfg.model`` and :meth:`default_model` describe; a module
            is used as it is.
        enable_field: the parts to build, of ``"learn"``, ``"collect"``, ``"eval"``; None: all.

    Raises:
        ConfigError: for an unusable config, an unknown field, ``cuda=True`` without CUDA, or if
            torch's default dtype is not float32.
        PolicyError: if an enabled part is not written, or ``model`` is not a module.

    Example:
        >>> class Upright(Policy):
        ...     def _forward_eval(self, data):
        ...         return {env_id: {"action": int(obs[2] > 0)} for env_id, obs in data.items()}
        >>> policy = Upright(model=torch.nn.Identity(), enable_field=["eval"])
        >>> policy.eval_mode.forward({7: torch.ones(4)})
        {7: {'action': 1}}
        >>> policy.eval_mode.forward(torch.ones(2, 4))
        {'action': tensor([1, 1])}
    """

    config: ClassVar[dict[str, Any]] = {
        "on_policy": Option(
            False,
            switch,
            "whether the algorithm learns only from its latest data; fixed by the class",
            keyword=None,
        ),
        "cuda": Option(False, switch, "whether to put the model on the GPU"),
        "multi_gpu": Option(
            False, switch, "whether to average gradients over the ranks of torch.distributed"
        ),
        "bp_update_sync": Option(
            True,
            switch,
            "with multi_gpu: False overlaps the averaging of gradients with backward",
        ),
        "traj_len_inf": Option(
            False,
            switch,
            "whether SampleSerialCollector uses whole episodes only",
            keyword=None,
        ),
        "seed": Option(
            None,
            optional(at_least(0, whole=True)),
            "seed of the initial weights and of acting; None uses torch's seed",
        ),
        "model": Option(
            {},
            mapping,
            "the network: `type` (a registered name) and the arguments of its class",
            keyword=None,
        ),
    }
    config_open: ClassVar[tuple[str, ...]] = (
        "model",
        "learn.learner",
        "collect.collector",
        "collect.env",
        "eval.evaluator",
        "other.replay_buffer",
        "other.commander",
    )
    total_field: ClassVar[Collection[str]] = ("learn", "collect", "eval")
    """The parts that a policy can have; ``fields`` in order of their building."""
    fields: ClassVar[tuple[str, ...]] = ("learn", "collect", "eval")
    learn_function: ClassVar[type[LearnMode]] = LearnMode
    collect_function: ClassVar[type[CollectMode]] = CollectMode
    eval_function: ClassVar[type[EvalMode]] = EvalMode
    learn_columns: ClassVar[tuple[str, ...]] = ()
    """The columns that a batch needs for learning."""
    optional_columns: ClassVar[tuple[str, ...] | None] = None
    """Further columns that learning uses where a batch has them; None: any of them.

    A learner that divides collected data into minibatches leaves out all others, except for
    :attr:`act_inputs` and a recurrent ``state``.
    """
    minibatch_unit: ClassVar[MinibatchUnit] = "rows"
    """What such minibatches consist of.

    ``"rows"`` gives ``[B, …]``; ``"lanes"``, for recurrent networks and V-trace, whole columns of
    envs, time first: ``[T, B, …]``.
    """
    learns_from_trajectories: ClassVar[bool] = False
    """Whether it learns from collected trajectories as they are, because it computes its targets.

    Otherwise an on-policy algorithm learns from what an estimator of advantages returns.
    """
    batched: ClassVar[bool] = False
    """Whether the class is written for batches; see :class:`BatchedPolicy`."""
    learn_from: ClassVar[Literal["batch", "samples"]] = "batch"
    """What ``_forward_learn`` takes: a batch ``[B, …]``, or a list of ``B`` dictionaries.

    A class that writes ``_forward_learn`` and acts per env (it writes ``_forward_collect`` or
    ``_process_transition``) learns from samples, as in DI-engine, unless it sets this to
    ``"batch"``.
    """
    _required: ClassVar[dict[str, str]] = {
        "learn": "_forward_learn",
        "collect": "_forward_collect",
        "eval": "_forward_eval",
    }
    act_inputs: ClassVar[tuple[str, ...]] = ()
    """What the policy sees when it acts, in addition to observations and env ids.

    The names are keyword arguments of its forward, with one row per env, and columns of what is
    collected; only these are collected:

    - ``prev_action``: the action before, as the env took it; zeros at the start of an episode (the
      first choice of a Discrete space that does not start at zero);
    - ``prev_reward``: ``[E] float32``, the reward before; 0 at the start of an episode;
    - ``is_first``: ``[E] bool``, whether it is the first step of an episode;
    - ``action_mask``: ``[E, A] bool``, true where an action is allowed, from the key
      ``action_mask`` of a Dict observation or of the env's info. In envs without masks it is
      not passed, so give it the default None. The column ``next_action_mask`` has the mask of each
      ``next_obs``, also at the end of an episode;
    - ``info.<name>``: the keyword ``info``, a treetensor with ``info[name]`` ``[E, …]``, from the
      info that came with the observation; zeros where an env did not return it.
    """
    explores: ClassVar[bool] = True
    """Whether collecting explores without keyword arguments such as ``eps``."""
    is_stochastic: ClassVar[bool] = False
    """Whether evaluating takes the keyword ``deterministic``, and draws actions if it is False."""
    several_agents: ClassVar[bool] = False
    """Whether the policy acts for all agents of an env; others refuse envs with several agents."""
    collect_data: bool = True
    """Whether battle collectors store what the policy does; False for a frozen opponent.

    ``mode.set_attribute("collect_data", False)`` changes it for one policy.
    """

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "total_field" in vars(cls) and "fields" not in vars(cls):
            further = sorted(set(cls.total_field) - set(cls.fields))
            cls.fields = (*(one for one in cls.fields if one in cls.total_field), *further)
        cls.total_field = cls.fields
        if "_forward_learn" in vars(cls) and "learn_from" not in vars(cls):
            acts_per_env = not cls.batched and (
                cls._forward_collect is not Policy._forward_collect
                or cls._process_transition is not Policy._process_transition
            )
            cls.learn_from = "samples" if acts_per_env else "batch"

    def __init__(
        self,
        cfg: Mapping[str, Any] | None = None,
        model: nn.Module | None = None,
        enable_field: Iterable[str] | None = None,
    ) -> None:
        check_default_dtype(type(self).__name__)
        self._cfg: EasyDict = self.merged_config(cfg)
        check_act_inputs(self.act_inputs, owner=type(self).__name__)
        self._enabled = self._check_fields(enable_field)
        self._enable_field = [field for field in self.fields if field in self._enabled]
        self._on_policy: bool = self._cfg.on_policy
        self._bp_update_sync: bool = self._cfg.bp_update_sync
        self._rank = dist.get_rank() if self._cfg.multi_gpu and dist.is_initialized() else 0
        has_model = not self._enabled.isdisjoint(("learn", "collect", "eval"))
        self._device = str(self._choose_device()) if has_model else "cpu"
        self._cuda = self._on_gpu = self._device != "cpu"
        seed = torch.initial_seed() if self._cfg.seed is None else self._cfg.seed
        self._generator = torch.Generator().manual_seed(derive_seed(seed, "policy", "act"))
        # Of its own, so that the number of evaluations does not change what is collected.
        self._eval_generator = torch.Generator().manual_seed(derive_seed(seed, "policy", "eval"))
        if has_model:
            self._model = self._create_model(self._cfg, model).to(self._device)
            self._submodules = tuple(self._model.modules())
        self._optimizer: torch.optim.Optimizer | None = None
        self._train_iter = 0
        self._counters = Counters()
        self._schedules = {
            path: Schedule.of(self._setting(path))
            for path, option in self.options().items()
            if is_scheduled(option.range)
        }
        self._keywords = _keywords_of(type(self))
        self._reducer: GradientReducer | None = None
        if "learn" in self._enabled:
            keep_freed_memory()
        if self._cfg.multi_gpu and "learn" in self._enabled:
            # Before _init_learn, so that target networks copy the common parameters.
            self._init_multi_gpu_setting(self._model, self._bp_update_sync)
        self._init_common()
        if has_model:
            self._init_parts()
        for field in self.fields:
            if field in self._enabled:
                getattr(self, f"_init_{field}")()

    @classmethod
    def for_env(
        cls,
        env: HasSpaces,
        *,
        model: nn.Module | Mapping[str, Any] | None = None,
        enable_field: Iterable[str] | None = None,
        **options: Any,
    ) -> Self:
        """Build the policy for an environment.

        Args:
            env: an env manager, a Gymnasium env or a Gymnasium vector env.
            model: a module, or arguments of the algorithm's network that differ from the defaults.
                The shapes of observations and actions are taken from ``env``.
            enable_field: see the class.
            **options: the options of the algorithm by their flat names, such as ``learning_rate``
                for ``learn.learning_rate``; see :doc:`/reference/configuration`.

        Raises:
            ConfigError: for an unknown option, with the nearest known one, or an invalid value.
            SpaceError: if the algorithm does not support the environment's spaces.
        """
        observation_space, action_space = spaces_of(env)
        cls._check_number_of_agents(observation_space)
        given = cls.config_from_keywords(options)
        if isinstance(model, nn.Module):
            if cls.merged_config(given).get("obs_norm", False):
                # A module of the user's own does not have to know the shape of observations.
                given["model"] = {"obs_shape": obs_shape_of(observation_space)}
            policy = cls(given, model, enable_field)
        else:
            shapes = cls._model_options_of(observation_space, action_space)
            policy = cls({**given, "model": {**shapes, **(model or {})}}, None, enable_field)
        policy._check_spaces(observation_space, action_space)
        return policy

    @classmethod
    def default_config(cls) -> EasyDict:
        """Return a fresh copy of the defaults, merged from the base classes down.

        Raises:
            ConfigError: on ``Policy`` itself, which is not an algorithm.
        """
        if cls is Policy:
            raise ConfigError(
                "Policy is the base class of all policies and has no options; "
                "use a subclass, for example DQNPolicy.default_config()"
            )
        return super().default_config()

    @classmethod
    def merged_config(cls, cfg: Mapping[str, Any] | None = None) -> EasyDict:
        """Return the defaults with ``cfg`` merged in, checked; see :class:`Configurable`.

        Settings of DI-engine's configs are accepted: under the name that they have here, or, if
        they mean nothing here, with one warning.

        Args:
            cfg: the values that differ from the defaults.

        Raises:
            ConfigError: for any other unknown key (with the nearest known one), a wrong type, or a
                value out of range.
        """
        if not isinstance(cfg, Mapping):
            return super().merged_config(cfg)
        own: Mapping[str, Any] = cfg
        others: dict[str, Any] = {}
        if cls.config_strict:
            own, others = split_classic(cfg, cls._merged_entries(), cls.__name__)
        if isinstance(own.get("model"), Mapping):
            model = {
                key: _by_name(value) if key in _NAMED_BY_SPACES else value
                for key, value in own["model"].items()
            }
            own = {**own, "model": model}
        merged = super().merged_config(own)
        merge_classic(merged, others)
        return EasyDict(merged)

    @classmethod
    def check_config(cls, cfg: EasyDict) -> None:
        """Refuse impossible combinations."""
        is_on_policy = cls.options()["on_policy"].default
        check_value(
            cfg.on_policy == is_on_policy,
            "on_policy",
            cfg.on_policy,
            f"{is_on_policy}, which is how {cls.__name__} learns; leave it out",
        )

    def default_model(self) -> tuple[str, list[str]]:
        """Return the registered name of the model to build and the modules to import for it."""
        raise PolicyError(
            f"{type(self).__name__} has no default model; pass model=, set cfg.model.type, or "
            "override default_model() to return (registered name, [modules to import])"
        )

    @classmethod
    def _model_options_of(
        cls, observation_space: gym.Space[Any], action_space: gym.Space[Any]
    ) -> dict[str, Any]:
        """Return the keys of ``cfg.model`` that follow from an environment's spaces."""
        return {
            "obs_shape": obs_shape_of(observation_space),
            "action_shape": action_shape_of(action_space),
        }

    def _init_common(self) -> None:
        """Build what all parts share, before any of them."""

    def _init_parts(self) -> None:
        """Build the parts that a :class:`PartsPolicy` declares, after ``_init_common``."""

    def _init_learn(self) -> None:
        """Build what learning needs: the optimiser, target networks."""

    def _init_collect(self) -> None:
        """Build what collecting needs."""

    def _init_eval(self) -> None:
        """Build what evaluating needs."""

    @to_be_written
    def _forward_learn(self, batch: Any, **kwargs: Any) -> dict[str, Any] | list[dict[str, Any]]:
        """Update the parameters from a batch ``[B, …]`` or a list of samples (``learn_from``).

        Returns:
            A dictionary of Python numbers, maybe with ``priority`` ``[B]``; or a list of such
            dictionaries, one per minibatch. See :class:`LearnMode`.
        """
        raise NotImplementedError

    @to_be_written
    def _forward_collect(self, data: dict[int, Any], **kwargs: Any) -> dict[int, dict[str, Any]]:
        """Act while collecting: env id → observation in, env id → ``{"action": …, …}`` out."""
        raise NotImplementedError

    @to_be_written
    def _forward_eval(self, data: dict[int, Any], **kwargs: Any) -> dict[int, dict[str, Any]]:
        """Act greedily: env id → observation in, env id → ``{"action": …}`` out."""
        raise NotImplementedError

    def _process_transition(
        self, obs: Value, policy_output: Mapping[str, Any], timestep: EnvTimestep | BatchedTimestep
    ) -> dict[str, Any]:
        """Return one transition; by default the standard columns and what forward returned."""
        return {
            "obs": obs,
            "next_obs": timestep.next_obs,
            **policy_output,
            "reward": timestep.reward,
            "done": timestep.done,
            "terminated": timestep.terminated,
            "truncated": timestep.truncated,
        }

    def _get_train_sample(self, transitions: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Turn one trajectory into training samples; by default the transitions themselves."""
        return transitions

    def initial_state(self, n: int) -> Nested | None:
        """Return the recurrent state at the start of ``n`` episodes; None: not recurrent.

        A recurrent policy overrides it. Its forward takes the keyword ``state`` and returns the
        next state under the key ``"state"``. The component that steps the envs holds the state, and
        starts again from the initial one at each episode. Collected rows have the column ``state``,
        the state before the row.

        Returns:
            A tensor ``[n, …]``, or nested dictionaries or tuples of such tensors (which forward
            receives as a treetensor). It must not depend on earlier calls.
        """
        return None

    def _forward_collect_batch(
        self, obs: Value, env_id: np.ndarray, **kwargs: Any
    ) -> dict[str, Any]:
        return self._joined("_forward_collect", obs, env_id, kwargs)

    def _forward_eval_batch(self, obs: Value, env_id: np.ndarray, **kwargs: Any) -> dict[str, Any]:
        return self._joined("_forward_eval", obs, env_id, kwargs)

    def _get_train_batch(self, batch: Batch) -> Batch:
        return sample_by_trajectory(batch, self._get_train_sample)

    def _joined(
        self, name: str, obs: Value, env_id: np.ndarray, kwargs: dict[str, Any]
    ) -> dict[str, Any]:
        env_ids = env_id.tolist()
        data = {one: row(obs, index) for index, one in enumerate(env_ids)}
        answers = getattr(self, name)(data, **split_inputs(kwargs, env_ids))
        self._check_answers(answers, name)
        return join_outputs(answers, env_ids)

    def _reset_learn(self, data_id: Iterable[int] | None = None) -> None:
        """Clear what learning keeps between forwards."""

    def _reset_collect(self, data_id: Iterable[int] | None = None) -> None:
        """Clear the collecting state (hidden states) of the given env ids; None: of all."""

    def _reset_eval(self, data_id: Iterable[int] | None = None) -> None:
        """Clear the evaluating state of the given env ids; None: of all."""

    def _monitor_vars_learn(self) -> list[str]:
        """Return the keys of ``_forward_learn``'s output that are logged."""
        return ["cur_lr", "total_loss"]

    def _state_dict_learn(self) -> dict[str, Any]:
        """Return everything needed to resume: model, optimiser, update count, generator."""
        whole = {
            **self._state_dict_collect(),
            **self._generator_states(),
            "train_iter": self._train_iter,
        }
        if self._optimizer is not None:
            whole["optimizer"] = optimizer_state(self._optimizer)
        return whole

    def _load_state_dict_learn(self, state_dict: dict[str, Any]) -> None:
        """Restore what :meth:`_state_dict_learn` returned.

        Of a state that has the model, and maybe its optimizer only, these are loaded, with a
        warning.
        """
        if is_partial(state_dict):
            self._load_state_dict_collect(state_dict)
            if self._optimizer is not None and "optimizer" in state_dict:
                load_optimizer_state(self._optimizer, state_dict["optimizer"])
            self._train_iter = 0
            _log.warning(
                "%s: the state to load has only %s; updates count from 0, and the random "
                "generators stay",
                type(self).__name__, ", ".join(map(str, state_dict)),
            )  # fmt: skip
            return
        part_of(state_dict, "generator")
        train_iter = part_of(state_dict, "train_iter")
        self._load_state_dict_collect(state_dict)
        self._set_generator_states(state_dict)
        self._train_iter = int(train_iter)
        if self._optimizer is not None:
            load_optimizer_state(self._optimizer, part_of(state_dict, "optimizer"))

    def _generator_states(self) -> dict[str, torch.Tensor]:
        """Return the states of the generators for acting."""
        return {
            "generator": self._generator.get_state(),
            "eval_generator": self._eval_generator.get_state(),
        }

    def _set_generator_states(self, state_dict: Mapping[str, Any]) -> None:
        """Restore what :meth:`_generator_states` returned, as part of a learner's state."""
        self._generator.set_state(state_dict["generator"].cpu())
        if "eval_generator" in state_dict:  # older states have none
            self._eval_generator.set_state(state_dict["eval_generator"].cpu())

    def _state_dict_collect(self) -> dict[str, Any]:
        """Return what acting needs: the model."""
        return {"model": model_state(self._model)}

    def _load_state_dict_collect(self, state_dict: dict[str, Any]) -> None:
        """Load the model, strictly; a learner's state serves as well."""
        load_model_state(self._model, part_of(state_dict, "model"))

    def _state_dict_eval(self) -> dict[str, Any]:
        return self._state_dict_collect()

    def _load_state_dict_eval(self, state_dict: dict[str, Any]) -> None:
        self._load_state_dict_collect(state_dict)

    def _check_spaces(
        self, observation_space: gym.Space[Any], action_space: gym.Space[Any]
    ) -> None:
        """Reject spaces that the model does not fit.

        Raises:
            SpaceError: with both shapes.
        """
        self._check_number_of_agents(observation_space)

        def act(obs: Value) -> torch.Tensor | None:
            return self._probe(obs, action_space)

        check_spaces(self._model, act, observation_space, action_space)

    @classmethod
    def _check_number_of_agents(cls, observation_space: gym.Space[Any]) -> None:
        n_agent = n_agent_of(observation_space)
        if n_agent is not None and not cls.several_agents:
            raise SpaceError(
                f"{cls.__name__} acts for a single agent, but the environment has {n_agent}; use "
                "MAPPO, IPPO, QMIX or VDN, or wrap the environment so that its reward is a number "
                "and its observations do not have the key agent_mask"
            )

    def _probe(self, obs: Value, action_space: gym.Space[Any]) -> torch.Tensor | None:
        """Return the action for one observation, leaving the policy as it was."""
        field = next((one for one in ("eval", "collect") if one in self._enabled), None)
        names = self.get_attribute("act_inputs")
        inputs = probe_inputs(names, self.initial_state, action_space)
        if field is None or inputs is None:
            return None
        generators, acting = self._generator_states(), self._state_dict_collect()
        try:
            action: torch.Tensor = self._act(field, obs, None, inputs)["action"]
        finally:
            self._set_generator_states(generators)
            self._load_state_dict_collect(acting)
            getattr(self, f"_reset_{field}")()
        return action

    def _after_loading_weights(self) -> None:
        """Update what learning derives from the weights, such as a target network.

        Called after ``collect_mode`` or ``eval_mode`` has loaded weights into a policy that also
        learns.
        """

    def _get_n_sample(self) -> int | dict[str, int] | None:
        return self._read("n_sample", "collect")

    def _get_n_episode(self) -> int | dict[str, int] | None:
        return self._read("n_episode", "collect")

    def _get_batch_size(self) -> int | dict[str, int] | None:
        return self._read("batch_size", "learn")

    @property
    def learn_mode(self) -> LearnMode:
        """The methods that a learner may call."""
        return _make_mode(
            self.learn_function,
            forward=self._public_learn,
            reset=self._reset_learn,
            info=self.__repr__,
            monitor_vars=self._monitor_vars_learn,
            get_attribute=self.get_attribute,
            set_attribute=self.set_attribute,
            state_dict=self._state_dict_learn,
            load_state_dict=self._load_state_dict_learn,
        )

    @property
    def collect_mode(self) -> CollectMode:
        """The methods that a collector may call."""
        return _make_mode(
            self.collect_function,
            forward=self._public_collect,
            process_transition=self._public_transition,
            get_train_sample=self._public_train_sample,
            reset=self._reset_collect,
            get_attribute=self.get_attribute,
            set_attribute=self.set_attribute,
            state_dict=self._state_dict_collect,
            load_state_dict=self._public_load_collect,
            seed=self._seed_collect,
        )

    @property
    def eval_mode(self) -> EvalMode:
        """The methods that an evaluator may call."""
        return _make_mode(
            self.eval_function,
            forward=self._public_eval,
            reset=self._reset_eval,
            get_attribute=self.get_attribute,
            set_attribute=self.set_attribute,
            state_dict=self._state_dict_eval,
            load_state_dict=self._public_load_eval,
            seed=self._seed_eval,
        )

    @property
    def cfg(self) -> EasyDict:
        """The merged config."""
        return self._cfg

    @property
    def on_policy(self) -> bool:
        """Whether the algorithm learns only from actions that its own distribution drew."""
        return bool(self._cfg.on_policy)

    @property
    def discount_factor(self) -> float | None:
        """The discount γ of future rewards; None for an algorithm that has none."""
        value = self._cfg.get("discount_factor")
        return None if value is None else float(value)

    @property
    def nstep(self) -> int:
        """Number of steps that a bootstrapped target sums before it bootstraps."""
        return int(self._cfg.get("nstep", 1))

    @property
    def schedules(self) -> dict[str, Schedule]:
        """The settings that may be schedules, by their paths in the config."""
        return dict(self._schedules)

    def scheduled(self, path: str) -> float:
        """Return the current value of a setting that may be a schedule.

        The policy counts its updates itself. Middleware that learn set the other counters, the
        attribute ``counters``, before each update.

        Args:
            path: the setting, such as ``"learn.learning_rate"``.

        Raises:
            ConfigError: if its schedule reads a counter that nothing has set.
        """
        return self._schedules[path].at(self._counters._replace(update=self._train_iter))

    def seed(self, seed: int) -> None:
        """Seed the randomness of acting: exploration and sampled actions."""
        self._seed_collect(seed)
        self._seed_eval(derive_seed(seed, "eval"))

    def _seed_collect(self, seed: int) -> None:
        self._generator.manual_seed(seed)

    def _seed_eval(self, seed: int) -> None:
        self._eval_generator.manual_seed(seed)

    def get_attribute(self, name: str) -> Any:
        """Return ``_get_<name>()``, ``_<name>`` or the property ``<name>``, whichever exists first.

        Raises:
            AttributeError: if there is none of them; the nearest names are listed.
        """
        try:
            return self._get_attribute(name)
        except NotImplementedError:  # what an override in DI-engine's style raises
            return Policy._get_attribute(self, name)

    def set_attribute(self, name: str, value: Any) -> None:
        """Set ``_<name>``."""
        self._set_attribute(name, value)

    def _get_attribute(self, name: str) -> Any:
        getter = getattr(self, f"_get_{name}", None)
        if getter is not None:
            return getter()
        for attribute in (f"_{name}", name):
            if hasattr(self, attribute):
                return getattr(self, attribute)
        known = {own.removeprefix("_get_").removeprefix("_") for own in (*dir(self), *vars(self))}
        near = nearest(name, (own for own in known if not own.startswith("_")))
        raise AttributeError(
            f"{type(self).__name__} has no attribute {name!r} (neither _get_{name}() nor _{name}); "
            f"did you mean: {', '.join(near) or 'nothing similar'}"
        )

    def _set_attribute(self, name: str, value: Any) -> None:
        setattr(self, f"_{name}", value)

    def __repr__(self) -> str:
        model = getattr(self, "_model", None)
        return f"{type(self).__name__}(device={self._device}, model={model})"

    def as_mode(self, kind: Callable[..., T], functions: Mapping[str, Any]) -> T:
        """Build a mode from functions; methods that a policy overrides are called through checks.

        A policy whose ``collect_mode`` is written as in DI-engine returns ``_forward_collect``
        itself. Workers also pass batches, so they need the method that converts them.

        Args:
            kind: the class of the mode.
            functions: the functions by their names in the mode.
        """
        public: dict[str, Any] = {}
        for name, function in functions.items():
            is_own = getattr(function, "__self__", None) is self and function.__name__ in _PUBLIC
            public[name] = getattr(self, _PUBLIC[function.__name__]) if is_own else function
        seeds = {self._public_collect: self._seed_collect, self._public_eval: self._seed_eval}
        if public["forward"] in seeds:
            public.setdefault("seed", seeds[public["forward"]])
        return kind(**public)

    def scale_rewards(self, batch: Batch) -> torch.Tensor:
        """Return the rewards from which a batch's returns and advantages are computed.

        Called once per batch, in the learner's process; by default returns ``batch["reward"]``.
        """
        reward: torch.Tensor = batch["reward"]
        return reward

    def observe(self, obs: Nested) -> None:
        """Take observations that another process or a data set supplied, once.

        A policy with ``obs_norm`` adds them to its statistics; by default does nothing.

        Args:
            obs: ``[…, *obs_shape]``, what another process acted on with one version of the policy,
                or the observations of a data set.
        """

    def observe_returns(self, ret: torch.Tensor, obs: Nested | None = None) -> None:
        """Take the returns of a collected batch, once, before learning from it.

        Called in the learner's process; by default does nothing.

        Args:
            ret: ``[…]`` float32.
            obs: ``[…, *obs_shape]``, the observations of the same rows; None: not known.
        """

    def sync_gradients(self, model: nn.Module) -> None:
        """Average the model's gradients over all ranks; call it between backward and the step.

        Each rank's gradients are weighted by the rows of its batch, as if all rows were one batch.
        With ``bp_update_sync=False`` the reductions of the policy's model started during
        backward, and this waits for them. In a single process it does nothing.
        """
        if self._reducer is None:
            return
        if model is self._model:
            self._reducer.reduce()
        else:
            GradientReducer(model, share=self._reducer.share()).reduce()

    def _public_learn(
        self, data: Batch | list[dict[str, Any]], **kwargs: Any
    ) -> dict[str, Any] | list[dict[str, Any]]:
        self._check_call("learn", kwargs)
        learned = self._samples(data) if self.learn_from == "samples" else self._batch(data)
        if not self._model.training:
            self._model.train()
        if self._reducer is not None:
            n_rows = len(learned) if isinstance(learned, list) else self._n_learned_rows(learned)
            self._reducer.begin(n_rows)
        output = self._forward_learn(learned, **kwargs)
        outputs = output if isinstance(output, list) else [output]
        if not all(isinstance(one, Mapping) for one in outputs):
            raise PolicyOutputError(
                f"{type(self).__name__}._forward_learn returned {output!r:.100}; it must return a "
                'dictionary of numbers to log, such as {"total_loss": 0.1}, or a list of them'
            )
        return output

    def _n_learned_rows(self, batch: Batch | Mapping[str, Any]) -> int:
        """Return over how many rows the loss of a batch is a mean: its weight among the ranks."""
        lead = 1 if self.minibatch_unit == "rows" else 2
        shape: torch.Size = next(iter(leaves(batch)))[1].shape[:lead]
        return shape.numel()

    def _samples(self, data: Batch | list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return the samples to learn from; a list is returned as it is."""
        if isinstance(data, list):
            if data:
                self._check_columns(data[0])
            return data
        self._check_columns(data)
        return to_rows(to_device(data, self._device) if self._on_gpu else data)

    def _batch(self, data: Batch | list[dict[str, Any]]) -> Batch:
        """Return the batch to learn from, on the policy's device."""
        if isinstance(data, list):
            batch = collate_samples(data)
        else:
            batch = data if isinstance(data, Batch) else as_tree(data)
        self._check_columns(batch)
        return to_device(batch, self._device) if self._on_gpu else batch

    def _check_columns(self, columns: Batch | Mapping[str, Any]) -> None:
        missing = [column for column in self.learn_columns if column not in columns]
        if missing:
            raise StructureError(
                f"{type(self).__name__} learns from the columns {', '.join(self.learn_columns)}, "
                f"but the batch lacks {', '.join(missing)}; it has {', '.join(map(str, columns))}"
            )

    def _public_collect(
        self, data: Nested, *, env_id: npt.ArrayLike | None = None, **kwargs: Any
    ) -> dict[Any, Any]:
        return self._act("collect", data, env_id, kwargs)

    def _public_eval(
        self, data: Nested, *, env_id: npt.ArrayLike | None = None, **kwargs: Any
    ) -> dict[Any, Any]:
        return self._act("eval", data, env_id, kwargs)

    def _act(
        self, field: str, data: Nested, env_id: npt.ArrayLike | None, kwargs: dict[str, Any]
    ) -> dict[Any, Any]:
        self._check_call(field, kwargs)
        if env_id is None:  # else, an env manager has checked them
            check_finite(data, user=type(self).__name__)
        if self._model.training:
            self._model.eval()
        with torch.set_grad_enabled(False):  # no_grad() does the same in twice the time
            if isinstance(data, dict) and is_per_env(data):
                if not data:
                    return {}
                name = f"_forward_{field}"
                outputs = getattr(self, name)(data, **kwargs)
                self._check_answers(outputs, name)
            else:
                obs = data
                if self._on_gpu or type(data) is not torch.Tensor:
                    obs = self._as_obs(data)
                if env_id is None:
                    env_id = np.arange(len(next(iter(leaves(obs)))[1]))
                if not ACT_KEYWORDS.isdisjoint(kwargs):
                    kwargs = self._as_inputs(kwargs)
                name = _BATCHED_FORWARD[field]
                seen = self._as_seen(obs, collecting=field == "collect")
                outputs = getattr(self, name)(seen, np.asarray(env_id), **kwargs)
                if not isinstance(outputs, dict | Mapping) or "action" not in outputs:
                    raise PolicyOutputError(
                        f"{type(self).__name__}.{name} returned {outputs!r:.100}; it must return a "
                        'dictionary of tensors [E, …] with the key "action"'
                    )
        acted: dict[Any, Any] = _to_cpu(outputs) if self._on_gpu else outputs
        if type(data) is not torch.Tensor or "action_mask" in kwargs:
            mask, user = kwargs.get("action_mask"), f"{type(self).__name__}.{name}"
            check_allowed(data, acted, mask=mask, allows=self._allows, user=user)
        return acted

    def _allows(self, mask: torch.Tensor, action: Any) -> torch.Tensor | None:
        """Return ``[…]`` bool, whether a mask allows actions; None where that is unknown."""
        return allows_choice(mask, action)

    def _check_call(self, field: str, kwargs: Mapping[str, Any]) -> None:
        """Check what can be wrong with a call of a mode's forward, whatever its data."""
        if field not in self._enabled:
            raise self._not_enabled(field)
        if torch.get_default_dtype() is not torch.float32:
            check_default_dtype(type(self).__name__)
        known = self._keywords[field]
        if kwargs and known is not None and not kwargs.keys() <= known:
            self._check_keywords(field, kwargs, set(known))

    def _check_keywords(self, field: str, kwargs: Mapping[str, Any], known: set[str]) -> None:
        """Refuse keyword arguments of a mode's forward that the algorithm does not take."""
        if field != "learn":
            known.update(name.partition(".")[0] for name in self.get_attribute("act_inputs"))
            if STATE in kwargs and self.initial_state(1) is not None:
                known |= ACT_KEYWORDS  # the caller that holds its state may pass them all
        for name in kwargs:
            if name not in known:
                raise ConfigError(self._unknown_keyword(field, name, known))

    def _unknown_keyword(self, field: str, name: str, known: Collection[str]) -> str:
        """Return the message for a keyword argument of a mode's forward that nothing declares."""
        modes = [mode for mode, keywords in self._keywords.items() if name in (keywords or ())]
        hint = unknown_name(name, known, only_here=True)
        if modes:
            hint = f"it is one of {modes[0]}_mode.forward"
        return (
            f"{type(self).__name__}: forward in {field} mode has no keyword {name}; {hint}. An "
            f"algorithm declares its own as parameters of {_forward_of(self, field)}"
        )

    def _as_seen(self, obs: Value, *, collecting: bool = False) -> Value:
        """Return observations as the algorithm sees them; by default as they are.

        Args:
            obs: ``[…, *obs_shape]``, on the policy's device.
            collecting: whether the policy is about to act on them while collecting.
        """
        return obs

    def _as_inputs(self, kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Convert what the policy asked for in ``act_inputs`` as observations are converted."""
        return {
            name: self._as_obs(value) if name in ACT_KEYWORDS and value is not None else value
            for name, value in kwargs.items()
        }

    def _check_answers(self, answers: object, name: str) -> None:
        if not isinstance(answers, Mapping):
            raise PolicyOutputError(
                f"{type(self).__name__}.{name} returned {answers!r:.100}; it must return a "
                'dictionary from env ids to dictionaries with the key "action"'
            )
        for env_id, answer in answers.items():
            if not isinstance(answer, Mapping) or "action" not in answer:
                raise PolicyOutputError(
                    f"{type(self).__name__}.{name} returned {answer!r:.100} for env {env_id}; it "
                    'must return a dictionary with the key "action" for every env id'
                )

    def _public_transition(
        self,
        obs: Nested,
        policy_output: Mapping[str, Any],
        timestep: EnvTimestep | BatchedTimestep,
    ) -> dict[str, Any] | Batch:
        """Make one transition, or, of batched data, the columns of one step of all envs."""
        if not isinstance(timestep, BatchedTimestep):
            transition = self._process_transition(obs, policy_output, timestep)
            if not isinstance(transition, Mapping):
                raise PolicyOutputError(
                    f"{type(self).__name__}._process_transition returned {transition!r:.100}; it "
                    'must return a dictionary with the keys "obs", "action", "reward", "done"'
                )
            return transition
        if self.batched:
            return as_tree(self._process_transition(obs, policy_output, timestep))
        return join_transitions(self._process_transition, obs, policy_output, timestep)

    def _public_train_sample(
        self, data: Batch | list[dict[str, Any]]
    ) -> Batch | list[dict[str, Any]]:
        """Turn a list of transitions, or a batch, into training samples of the same kind."""
        if not isinstance(data, list):
            return self._get_train_batch(data)
        samples = self._get_train_sample(data)
        if not isinstance(samples, list) or not all(isinstance(one, Mapping) for one in samples):
            raise PolicyOutputError(
                f"{type(self).__name__}._get_train_sample returned {samples!r:.100}; it must "
                "return a list of dictionaries, one per training sample"
            )
        return samples

    def _public_load_collect(self, state_dict: dict[str, Any]) -> None:
        self._load_state_dict_collect(state_dict)
        if "learn" in self._enabled:
            self._after_loading_weights()

    def _public_load_eval(self, state_dict: dict[str, Any]) -> None:
        self._load_state_dict_eval(state_dict)
        if "learn" in self._enabled:
            self._after_loading_weights()

    def _not_enabled(self, field: str) -> PolicyError:
        return PolicyError(
            f"this {type(self).__name__} was built with enable_field={sorted(self._enabled)} and "
            f"cannot {field}; add {field!r}, or build it with enable_field=None"
        )

    def _as_obs(self, data: Nested) -> Value:
        """Convert observations to a tensor or treetensor on the policy's device."""
        if type(data) not in (torch.Tensor, Batch) and isinstance(
            data, np.ndarray | Mapping | tuple
        ):
            data = from_numpy(data)
        obs: Value = to_device(data, self._device) if self._on_gpu else data
        return obs

    @contextmanager
    def _evaluating(self) -> Iterator[None]:
        """Put the model into eval mode within the block, so it updates no batch statistics.

        Sets the flags directly: ``model.eval()`` costs as much as a small network's forward.
        """
        flags = [module.training for module in self._submodules]
        for module in self._submodules:
            object.__setattr__(module, "training", False)
        try:
            yield
        finally:
            for module, flag in zip(self._submodules, flags, strict=True):
                object.__setattr__(module, "training", flag)

    def _compute_gradients(self, loss: torch.Tensor) -> None:
        """Run backward from a loss, known to be finite, and average gradients over all ranks."""
        assert self._optimizer is not None
        self._optimizer.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        self.sync_gradients(self._model)

    def _clip_gradients(self, max_norm: float, batch: Batch) -> float:
        """Scale the gradient so that its norm is at most ``max_norm``.

        Source: Pascanu et al., "On the difficulty of training recurrent neural networks", 2013.

        Returns:
            The norm before.

        Raises:
            NonFiniteLoss: if that norm is NaN or infinite; the message describes the batch.
        """
        norm = nn.utils.clip_grad_norm_(self._model.parameters(), max_norm).item()
        self._check_finite(norm, batch, "the norm of the gradient")
        return norm

    def _step_optimizer(self) -> float:
        """Take an optimiser step, count the update, and return the learning rate."""
        assert self._optimizer is not None
        learning_rate = self._anneal()
        self._optimizer.step()
        self._train_iter += 1
        return learning_rate

    def _anneal(self) -> float:
        """Set the optimiser's learning rate to its schedule's current value, and return it."""
        assert self._optimizer is not None
        group, path = self._optimizer.param_groups[0], "learn.learning_rate"
        if path in self._schedules and not self._schedules[path].is_constant:
            group["lr"] = self.scheduled(path)
        return float(group["lr"])

    def _check_finite(self, value: float, batch: Batch, what: str = "the loss") -> None:
        """Raise if a loss (or gradient norm) is NaN or infinite.

        Called before the step, so the parameters are unchanged. With several ranks, all of them
        raise, because otherwise some would wait for the others' gradients.

        Raises:
            NonFiniteLoss: naming the policy iterations that collected the batch.
            StructureError: if the batch has no rows, so that the loss is undefined.
        """
        finite = math.isfinite(value)
        if self._reducer is not None:
            finite = all_agree(finite, self._device)
        if not finite:
            raise self._non_finite_error(f"{what} is {value}", batch)

    def _non_finite_error(self, what: str, batch: Batch) -> DMiddlewareError:
        """Return the error for a batch whose loss or gradient is not finite."""
        if any(len(leaf) == 0 for _, leaf in leaves(batch)):
            return StructureError(
                f"{what}, since the batch has no rows; {type(self).__name__} needs at least one"
            )
        source = "a batch without a column collect_iter"
        if "collect_iter" in batch:
            column = batch["collect_iter"]
            source = f"a batch collected at train_iter {int(column.min())} to {int(column.max())}"
        odd = _first_odd_value(batch)
        if odd is not None:
            source = f"{source}, {odd}"
        return NonFiniteLoss(
            f"{what} on {source}; {self._what_was_kept()}. "
            "Check observations and rewards for NaN, lower the learning rate or clip gradients"
        )

    def _what_was_kept(self) -> str:
        """Say what a batch whose loss is not finite left as it was."""
        return "the parameters were not changed"

    def _check_fields(self, enable_field: Iterable[str] | None) -> frozenset[str]:
        if isinstance(enable_field, str):
            enable_field = (enable_field,)
        enabled = frozenset(self.fields if enable_field is None else enable_field)
        unknown = enabled - set(self.fields)
        if unknown or not enabled:
            raise ConfigError(
                f"enable_field must be a non-empty subset of {', '.join(self.fields)}, "
                f"got {sorted(enabled)}"
            )
        for field in (one for one in self._required if one in enabled):
            name = self._required[field]
            if getattr(getattr(self, name), "__isabstractmethod__", False):
                raise PolicyError(
                    f"{type(self).__name__} cannot {field}: write {name}({_SIGNATURES[name]}, or "
                    f"leave {field!r} out of enable_field"
                )
        return enabled

    def _choose_device(self) -> torch.device:
        if not self._cfg.cuda:
            return torch.device("cpu")
        if not torch.cuda.is_available():
            raise ConfigError(
                f"cuda is True, but torch {torch.__version__} finds no CUDA device here; "
                "set cuda=False, or install a CUDA build of torch on a machine with a GPU"
            )
        if self._cfg.multi_gpu:
            require_process_group()
            return torch.device("cuda", rank_and_world_size()[0] % torch.cuda.device_count())
        return torch.device("cuda", torch.cuda.current_device())

    def _create_model(self, cfg: EasyDict, model: nn.Module | None = None) -> nn.Module:
        """Return the given model, or build the one that ``cfg.model`` describes."""
        if isinstance(model, nn.Module):
            return model
        if model is not None:
            raise PolicyError(
                f"model must be None or a torch.nn.Module, got {model!r:.100} of type "
                f"{type(model).__name__}"
            )
        options = dict(cfg.model)
        if "type" not in options:
            options["type"], options["import_names"] = self.default_model()
        if cfg.seed is None:
            return create_model(options)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(derive_seed(cfg.seed, "policy", "model"))
            return create_model(options)

    def _init_multi_gpu_setting(self, model: nn.Module, bp_update_sync: bool) -> None:
        """Give all ranks the same parameters, and average the gradients of the updates."""
        require_process_group()
        if rank_and_world_size()[1] == 1:
            return
        broadcast_model(model)
        self._reducer = GradientReducer(model, overlap=not bp_update_sync)

    def _setting(self, path: str) -> Any:
        value: Any = self._cfg
        for key in path.split("."):
            value = value[key]
        return value

    def _read(self, key: str, section: str) -> int | dict[str, int] | None:
        """Return a number, or a dictionary of them for a policy with several kinds of data."""
        value = self._cfg[key] if key in self._cfg else self._cfg.get(section, {}).get(key)
        return dict(value) if isinstance(value, Mapping) else None if value is None else int(value)


_FORWARDS = {
    "learn": "_forward_learn",
    "collect": "_forward_collect",
    "eval": "_forward_eval",
}


def _forward_of(policy: Policy | type[Policy], field: str) -> str:
    """Return the method that an algorithm writes for a mode."""
    is_batched = policy.batched and field != "learn"
    return f"{_FORWARDS[field]}_batch" if is_batched else _FORWARDS[field]


def _keywords_of(cls: type[Policy]) -> dict[str, frozenset[str] | None]:
    """Return the keyword arguments that a class declares, by mode; None: it takes any.

    They are the parameters of the method that an algorithm writes, after the data. Where it takes
    others too (``**kwargs``), it passes them on, so those of the base class's method count as well.
    A class that is written per environment, as in DI-engine, may read all of them itself.
    """
    methods = {field: _forward_of(cls, field) for field in _FORWARDS}
    return {
        field: None
        if not cls.batched and _takes_others(getattr(cls, method))
        else frozenset(_declared(cls, method))
        for field, method in methods.items()
    }


def _takes_others(method: Callable[..., Any]) -> bool:
    parameters = inspect.signature(method).parameters.values()
    return any(one.kind is one.VAR_KEYWORD for one in parameters)


def _declared(cls: type[Policy], method: str) -> Iterator[str]:
    n_given = 3 if method.endswith("_batch") else 2  # self, obs and env_id; self and the data
    for base in cls.__mro__:
        if method not in vars(base):
            continue
        parameters = inspect.signature(getattr(base, method)).parameters.values()
        for place, parameter in enumerate(parameters):
            if place >= n_given and parameter.kind in _NAMED:
                yield parameter.name
        if not _takes_others(getattr(base, method)):
            return


_NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)

_NAMED_BY_SPACES = ("obs_shape", "action_shape", "action_space")
"""The options of models whose keys are the names in an environment's spaces."""


_PUBLIC: Final = {
    "_forward_learn": "_public_learn",
    "_forward_collect": "_public_collect",
    "_forward_eval": "_public_eval",
    "_process_transition": "_public_transition",
    "_get_train_sample": "_public_train_sample",
    "_load_state_dict_collect": "_public_load_collect",
    "_load_state_dict_eval": "_public_load_eval",
    "_get_attribute": "get_attribute",
    "_set_attribute": "set_attribute",
}
"""The methods that subclasses override, and those that call them with checks and conversions."""

_BATCHED_FORWARD = {"collect": "_forward_collect_batch", "eval": "_forward_eval_batch"}

_SIGNATURES = {
    "_forward_learn": "self, batch), which takes a treetensor [B, …] and returns numbers to log",
    **dict.fromkeys(
        ("_forward_collect", "_forward_eval"),
        "self, data, **kwargs), which maps env ids to observations and returns the actions by env "
        "id (to write it for all envs at once, derive from BatchedPolicy)",
    ),
    **dict.fromkeys(
        ("_forward_collect_batch", "_forward_eval_batch"),
        "self, obs, env_id, **kwargs), which takes and returns tensors [E, …] (to write it per "
        "env, derive from Policy)",
    ),
}


def _by_name(value: Any) -> Any:
    """Return a mapping so that its keys, which an environment chose, hide no methods."""
    if not isinstance(value, Mapping):
        return value
    return NamedValues({key: _by_name(value[key]) for key in value})


def _make_mode(kind: Callable[..., T], **functions: Any) -> T:
    """Build a mode; a named tuple without some of the fields does without them."""
    fields = getattr(kind, "_fields", functions)
    return kind(**{name: function for name, function in functions.items() if name in fields})


def _to_cpu(outputs: Mapping[Any, Any]) -> dict[Any, Any]:
    def moved(value: Any) -> Any:
        if isinstance(value, Batch):
            return map_leaves(lambda leaf: leaf.cpu(), value)  # to_device would not wait
        if isinstance(value, dict):
            return _to_cpu(value)
        return map_nested(lambda leaf: leaf.cpu() if hasattr(leaf, "cpu") else leaf, value)

    return {key: moved(value) for key, value in outputs.items()}


def _first_odd_value(batch: Batch) -> str | None:
    """Name the first value of a batch that is NaN or infinite; None: there is none."""
    for path, leaf in leaves(batch):
        if isinstance(leaf, torch.Tensor) and leaf.is_floating_point():
            bad = (~leaf.isfinite()).nonzero()
            if len(bad):
                place = bad[0].tolist()
                return f"whose column {path!r} has {leaf[tuple(place)].item()} at {place}"
    return None
