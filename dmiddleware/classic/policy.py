"""Policies written per environment, as in DI-engine, and the command mode."""

from __future__ import annotations

import inspect
import logging
import math
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace
from functools import cached_property
from typing import Any, ClassVar, Final, Literal, Self, TypeVar

import gymnasium as gym
import numpy as np
import numpy.typing as npt
import torch
from easydict import EasyDict
from torch import nn

from dmiddleware.classic.collate import (
    collate_samples,
    is_per_env,
    join_outputs,
    join_transitions,
    sample_by_trajectory,
    split_inputs,
    to_rows,
)
from dmiddleware.classic.config import (
    Configurable,
    Option,
    check_value,
    entries_of,
    is_scheduled,
    switch,
)
from dmiddleware.classic.config_keys import CLASSIC_SECTIONS, merge_classic, split_classic
from dmiddleware.classic.di_engine_state import is_partial
from dmiddleware.classic.errors import UnknownAttribute
from dmiddleware.classic.import_names import import_named
from dmiddleware.classic.model_options import in_own_names
from dmiddleware.classic.modes import (
    CollectMode,
    CommandMode,
    EvalMode,
    LearnMode,
    standard_transition,
    transitions_by,
)
from dmiddleware.classic.policy_config import (
    ClassicSettings,
    setting_entries,
    with_names_of_spaces,
)
from dmiddleware.distributed import sum_over_ranks
from dmiddleware.env import BatchedTimestep, EnvTimestep
from dmiddleware.errors import ConfigError, PolicyError, PolicyOutputError
from dmiddleware.model import create_model
from dmiddleware.model.spaces import HasSpaces, check_spaces, spaces_of
from dmiddleware.policy.acting import check_finite
from dmiddleware.policy.action_codec import ActorSettings
from dmiddleware.policy.component import Component, load_optimizer_state, optimizer_state
from dmiddleware.policy.env_spaces import check_number_of_agents, network_shapes
from dmiddleware.policy.hooks import Hook
from dmiddleware.policy.modes import Mode, PolicySpec
from dmiddleware.policy.policy import Policy as CorePolicy
from dmiddleware.policy.policy_settings import PolicySettings
from dmiddleware.policy.state import entry_of, load_model_state, model_state
from dmiddleware.policy.update import check_columns, non_finite_error
from dmiddleware.registry import nearest
from dmiddleware.schedule import Schedule
from dmiddleware.tree import Batch, Nested, Value, as_tree, index_rows, to_device

__all__ = ["CommandModePolicy", "Policy", "attribute_name"]

_log = logging.getLogger(__name__)

F = TypeVar("F", bound=Callable[..., Any])
T = TypeVar("T")

_ALIASES: Final = {
    "_cfg": "cfg",
    "_model": "model",
    "_device": "device",
    "_generator": "generator",
    "_eval_generator": "eval_generator",
    "_train_iter": "train_iter",
    "_counters": "counters",
    "_schedules": "schedules",
    "_reducer": "reducer",
}
"""Attributes that have an underscore in DI-engine's policies."""
_REQUIRED: Final = {
    "learn": "_forward_learn",
    "collect": "_forward_collect",
    "eval": "_forward_eval",
}
_SIGNATURES: Final = {
    "_forward_learn": "self, batch), which takes a treetensor [B, …] and returns numbers to log",
    **dict.fromkeys(
        ("_forward_collect", "_forward_eval"),
        "self, data, **kwargs), which maps env ids to observations and returns the actions by env "
        "id (to write it for all envs at once, derive from dmiddleware.policy.Policy)",
    ),
}
_PUBLIC: Final = {
    "_forward_learn": "_learn",
    "_forward_collect": "_collect",
    "_forward_eval": "_eval",
    "_process_transition": "_public_transition",
    "_get_train_sample": "_public_train_sample",
    "_load_state_dict_collect": "_public_load_collect",
    "_load_state_dict_eval": "_public_load_eval",
    "_get_attribute": "get_attribute",
    "_set_attribute": "set_attribute",
}
"""The methods that subclasses override, and those that call them with checks and conversions."""


def attribute_name(name: str) -> str:
    """Return the name here of an attribute of DI-engine's policies."""
    return _ALIASES.get(name, name)


def to_be_written(method: F) -> F:
    """Mark a method that a subclass must define if it enables the mode that calls it."""
    method.__isabstractmethod__ = True  # type: ignore[attr-defined]
    return method


class Policy(CorePolicy, Configurable):
    """An algorithm that is written per environment, as in DI-engine.

    A subclass writes

    - ``_forward_learn(batch, **kwargs)``, which updates the model and returns what to log
      (:attr:`learn_from` says whether ``batch`` is a treetensor or a list of samples);
    - ``_forward_collect(data, **kwargs)`` and ``_forward_eval(data, **kwargs)``, where ``data``
      maps env ids to observations and the result maps them to dictionaries with at least
      ``action``;
    - if the defaults do not suit it, ``_process_transition(obs, policy_output, timestep)`` and
      ``_get_train_sample(transitions)``.

    The parameters of these methods after ``data`` or ``batch`` are the keyword arguments that the
    mode's forward takes, such as ``eps`` in ``_forward_collect(self, data, *, eps=0.0)``; any other
    one is refused. With ``**kwargs`` it takes them all.

    The batched methods are derived from these, so every collector runs every policy.

    Args:
        cfg: what differs from ``default_config()``.
        model: None builds the one that ``cfg.model`` and :meth:`default_model` describe; a module
            is used as it is.
        enable_field: the fields to build, of ``"learn"``, ``"collect"``, ``"eval"``; None: all.

    Raises:
        ConfigError: as :class:`dmiddleware.policy.Policy`.
        PolicyError: if an enabled field is not written, or ``model`` is not a module.

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

    cfg: Any
    config: ClassVar[dict[str, Any]] = {
        "on_policy": Option(
            False,
            switch,
            "whether the algorithm learns only from its latest data; fixed by the class",
        ),
        **{
            name: option
            for name, option in setting_entries(PolicySettings).items()
            if isinstance(option, Option)
        },
        "traj_len_inf": Option(
            False, switch, "whether SampleSerialCollector uses whole episodes only"
        ),
    }
    config_open: ClassVar[tuple[str, ...]] = ("model", *CLASSIC_SECTIONS)
    config_strict: ClassVar[bool] = True
    """False keeps unknown keys of the config, with one warning."""
    act_inputs: tuple[str, ...] = ()
    total_field: ClassVar[Collection[str]] = ("learn", "collect", "eval")
    """The fields that a policy can have; ``fields`` in order of their building."""
    fields: ClassVar[tuple[str, ...]] = ("learn", "collect", "eval")
    learn_function: ClassVar[Any] = LearnMode
    collect_function: ClassVar[Any] = CollectMode
    eval_function: ClassVar[Any] = EvalMode
    batched: bool = False
    learn_from: ClassVar[Literal["batch", "samples"]] = "batch"
    """What ``_forward_learn`` takes: a batch ``[B, …]``, or a list of ``B`` dictionaries.

    A class that writes ``_forward_learn`` and acts per env (it writes ``_forward_collect`` or
    ``_process_transition``) learns from samples, as in DI-engine, unless it sets this to
    ``"batch"``.
    """
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
            acts_per_env = (
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
        self._enabled = self._check_fields(enable_field)
        self._enable_field = [field for field in self.fields if field in self._enabled]
        self._build(cfg, model)
        for field in self._enable_field:
            getattr(self, f"_init_{field}")()

    def _build(self, cfg: Mapping[str, Any] | None, model: nn.Module | None) -> None:
        """Build what all fields share."""
        self._optimizer: torch.optim.Optimizer | None = None
        if self._enabled.isdisjoint(("learn", "collect", "eval")):
            self._build_without_model(cfg)
        else:
            super().__init__(cfg, model, self._enabled)  # type: ignore[arg-type]

    def _build_without_model(self, cfg: Mapping[str, Any] | None) -> None:
        self.cfg = self.merged_config(cfg)
        self.device, self.modes, self.on_gpu = "cpu", frozenset(), False
        self.setup()

    def __getattr__(self, name: str) -> Any:
        if attribute_name(name) in vars(self):
            return vars(self)[attribute_name(name)]
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(attribute_name(name), value)

    @classmethod
    def for_env(
        cls,
        env: HasSpaces,
        cfg: Any = None,
        *,
        model: nn.Module | Mapping[str, Any] | None = None,
        enable_field: Iterable[str] | None = None,
        **options: Any,
    ) -> Self:
        """Build the policy for an environment; see :meth:`dmiddleware.policy.Policy.for_env`.

        Args:
            env: as there.
            cfg: as in the class.
            model: as there.
            enable_field: as in the class.
            **options: what differs from ``cfg`` at the top of the config, such as ``seed``.
        """
        observation_space, action_space = spaces_of(env)
        several = cls.several_agents
        check_number_of_agents(observation_space, several_agents=several, user=cls.__name__)
        given = {**(cfg or {}), **options}
        network = model if isinstance(model, nn.Module) else None
        if network is None:
            shapes = network_shapes(observation_space, action_space, several_agents=several)
            if not issubclass(cls.settings_class(), ActorSettings):
                del shapes["action_space"]  # its networks have one kind of actions
            given["model"] = {**shapes, **given.get("model", {}), **(model or {})}  # type: ignore[dict-item]
        policy = cls(given, network, enable_field)
        policy.check_spaces(observation_space, action_space)
        return policy

    @classmethod
    def settings_class(cls) -> type[PolicySettings]:
        """Return the class of the settings that the base class reads."""
        return PolicySettings

    @classmethod
    def default_config(cls) -> EasyDict:
        """Return a fresh copy of the defaults, merged from the base classes down.

        Raises:
            ConfigError: on ``Policy`` itself, which is not an algorithm.
        """
        if cls is Policy:
            raise ConfigError(
                "Policy is the base class of policies and has no config of its own; use a "
                "subclass, or the default_config() of get_policy_cls({'type': 'dqn'})"
            )
        return super().default_config()

    @classmethod
    def merged_config(cls, cfg: Mapping[str, Any] | None = None) -> EasyDict:
        """Return the defaults with ``cfg`` merged in, checked.

        Settings of DI-engine's configs are accepted: under the name that they have here, or, if
        they mean nothing here, with one warning.

        Raises:
            ConfigError: for any other unknown key (with the nearest known one), a wrong type, or a
                value out of range.
        """
        if not isinstance(cfg, Mapping) or not cls.config_strict:
            cfg = with_names_of_spaces(cfg) if isinstance(cfg, Mapping) else cfg
            return super().merged_config(cfg)
        own, others = split_classic(cfg, entries_of(cls), cls.__name__)
        merged = super().merged_config(with_names_of_spaces(own))
        merge_classic(merged, others)
        return EasyDict(merged)

    @classmethod
    def check_config(cls, cfg: EasyDict) -> None:
        """Refuse impossible combinations; subclasses extend it with :func:`check_value`."""
        is_on_policy = cls.options()["on_policy"].default
        check_value(
            cfg.on_policy == is_on_policy,
            "on_policy",
            cfg.on_policy,
            f"{is_on_policy}, which is how {cls.__name__} learns; leave it out",
        )
        PolicySettings(compile=cfg.compile, multi_gpu=cfg.multi_gpu)

    @classmethod
    def _checked_settings(cls, cfg: Any) -> Any:
        """Return the merged config, without CUDA where there is none, as in DI-engine."""
        merged = cls.merged_config(cfg)
        if merged.cuda and not torch.cuda.is_available():
            _log.warning("%s: cuda=True has no effect, because torch finds no CUDA", cls.__name__)
            merged.cuda = False
        return merged

    def _schedules(self) -> dict[str, Schedule]:
        found = {}
        for path, option in self.options().items():
            if is_scheduled(option.range):
                value: Any = self.cfg
                for key in path.split("."):
                    value = value[key]
                found[path] = Schedule.of(value)
        return found

    @property
    def discount_factor(self) -> float | None:
        """The discount γ of future rewards; None for an algorithm that has none."""
        value = self.cfg.get("discount_factor")
        return None if value is None else float(value)

    @property
    def nstep(self) -> int:
        """Number of rewards that a buffer sums before a target bootstraps."""
        return int(self.cfg.get("nstep", 1))

    @property
    def discount(self) -> float | None:
        """The same as :attr:`discount_factor`."""
        return self.discount_factor

    @property
    def n_step(self) -> int:
        """The same as :attr:`nstep`."""
        return self.nstep

    def _init_attributes(self) -> None:
        """Set what DI-engine's policies have under other names."""
        self.on_policy = self._on_policy = bool(self.cfg.on_policy)
        self._bp_update_sync: bool = self.cfg.bp_update_sync
        self._cuda = self.device != "cpu"
        is_ranked = self.cfg.multi_gpu and torch.distributed.is_initialized()
        self._rank = torch.distributed.get_rank() if is_ranked else 0

    def setup(self) -> None:
        """Build what all fields share, before any of them."""
        self._init_attributes()
        self._init_common()

    def make_components(self) -> dict[str, Component[Any]]:
        """Return the model, which acting needs."""
        return {"model": Component(self.model, acts=True)}

    def _common_components(self) -> dict[str, Component[Any]]:
        return {}

    def _init_common(self) -> None:
        """Build what all fields share, before any of them."""

    def _init_learn(self) -> None:
        """Build what learning needs: the optimizer, target networks."""

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
        return standard_transition(obs, policy_output, timestep)

    def _get_train_sample(self, transitions: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Turn one trajectory into training samples; by default the transitions themselves."""
        return transitions

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
        """Return everything needed to resume: model, optimizer, update count, generator."""
        whole = {
            **self._state_dict_collect(),
            "generator": self.generator.get_state(),
            "eval_generator": self.eval_generator.get_state(),
            "train_iter": self.train_iter,
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
            self.train_iter = 0
            _log.warning(
                "%s: the state to load has only %s; updates count from 0, and the random "
                "generators stay",
                type(self).__name__, ", ".join(map(str, state_dict)),
            )  # fmt: skip
            return
        entry_of(state_dict, "generator")
        train_iter = entry_of(state_dict, "train_iter")
        self._load_state_dict_collect(state_dict)
        self.generator.set_state(state_dict["generator"].cpu())
        self.eval_generator.set_state(state_dict["eval_generator"].cpu())
        self.train_iter = int(train_iter)
        if self._optimizer is not None:
            load_optimizer_state(self._optimizer, entry_of(state_dict, "optimizer"))

    def _state_dict_collect(self) -> dict[str, Any]:
        """Return what acting needs: the model."""
        return {"model": model_state(self.model)}

    def _load_state_dict_collect(self, state_dict: dict[str, Any]) -> None:
        """Load the model, strictly; a learner's state serves as well."""
        load_model_state(self.model, entry_of(state_dict, "model"))

    def _state_dict_eval(self) -> dict[str, Any]:
        return self._state_dict_collect()

    def _load_state_dict_eval(self, state_dict: dict[str, Any]) -> None:
        self._load_state_dict_collect(state_dict)

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
        mode: LearnMode = _make_mode(
            self.learn_function,
            forward=self._learn,
            reset=self._reset_learn,
            info=self.__repr__,
            monitor_vars=self._monitor_vars_learn,
            state_dict=self._state_dict_learn,
            load_state_dict=self._load_state_dict_learn,
            **self._common_functions(),
        )
        return mode

    @property
    def collect_mode(self) -> CollectMode:
        """The methods that a collector may call."""
        mode: CollectMode = _make_mode(
            self.collect_function,
            forward=self._collect,
            process_transition=self._public_transition,
            get_train_sample=self._public_train_sample,
            reset=self._reset_collect,
            state_dict=self._state_dict_collect,
            load_state_dict=self._public_load_collect,
            seed=self._seed_collect,
            train_batch=self.train_batch,
            transitions=self._transitions(),
            **self._common_functions(),
        )
        return mode

    @property
    def eval_mode(self) -> EvalMode:
        """The methods that an evaluator may call."""
        mode: EvalMode = _make_mode(
            self.eval_function,
            forward=self._eval,
            reset=self._reset_eval,
            state_dict=self._state_dict_eval,
            load_state_dict=self._public_load_eval,
            seed=self._seed_eval,
            **self._common_functions(),
        )
        return mode

    def _common_functions(self) -> dict[str, Any]:
        return {
            "get_attribute": self.get_attribute,
            "set_attribute": self.set_attribute,
            "spec": self.spec,
        }

    def as_mode(self, kind: Callable[..., T], functions: Mapping[str, Any]) -> T:
        """Build a mode from functions; methods that a policy overrides are called through checks.

        A policy whose ``collect_mode`` is written as in DI-engine returns ``_forward_collect``
        itself. Workers also pass batches, so they need the method that converts them.

        Args:
            kind: the class of the mode.
            functions: the functions by their names in the mode.
        """
        public: dict[str, Any] = {"spec": self.spec}
        for name, function in functions.items():
            is_own = getattr(function, "__self__", None) is self and function.__name__ in _PUBLIC
            public[name] = getattr(self, _PUBLIC[function.__name__]) if is_own else function
        seeds = {self._collect: self._seed_collect, self._eval: self._seed_eval}
        if public["forward"] in seeds:
            public.setdefault("seed", seeds[public["forward"]])
        if public["forward"] == self._collect:
            public["train_batch"] = self.train_batch
            is_own = public["process_transition"] == self._public_transition
            public["transitions"] = (
                self._transitions() if is_own else transitions_by(functions["process_transition"])
            )
        return kind(**public)

    @cached_property
    def spec(self) -> PolicySpec:
        """What others read of the policy."""
        names = ("act_inputs", "explores", "on_policy")
        own = {name: self.get_attribute(name) for name in names}
        further = ("value_fn", "scale_rewards", "observe_returns")
        own |= {name: getattr(self, name) for name in further if hasattr(self, name)}
        own["gae_lambda"] = self.cfg.get("gae_lambda")
        counts = {
            name: self.get_attribute(name) for name in ("batch_size", "n_sample", "n_episode")
        }
        settings = ClassicSettings(self.cfg, counts)
        return replace(
            super().spec, **own, settings=settings, acting_state=self._state_dict_collect
        )

    def predict(self, inputs: Any, **kwargs: Any) -> Any:
        """Call ``_forward_eval`` with inputs as they are, such as a batch of a data set.

        Args:
            inputs: whatever ``_forward_eval`` takes.
            **kwargs: its other arguments.

        Returns:
            What ``_forward_eval`` returns; no gradients are computed.

        Raises:
            PolicyError: if the field ``eval`` is not enabled.
        """
        self._check_call("eval", kwargs)
        if self.model.training:
            self.model.eval()
        with torch.no_grad():
            return self._forward_eval(inputs, **kwargs)

    def get_attribute(self, name: str) -> Any:
        """Return ``_get_<name>()``, ``_<name>`` or the property ``<name>``, whichever exists first.

        Raises:
            UnknownAttribute: if there is none of them; the nearest names are listed.
        """
        try:
            return self._get_attribute(name)
        except NotImplementedError:  # what an override in DI-engine's style raises
            pass
        return Policy._get_attribute(self, name)

    def set_attribute(self, name: str, value: Any) -> None:
        """Set ``_<name>``."""
        self._set_attribute(name, value)
        vars(self).pop("spec", None)

    def _get_attribute(self, name: str) -> Any:
        getter = getattr(self, f"_get_{name}", None)
        if getter is not None:
            return getter()
        for attribute in (f"_{name}", name):
            if hasattr(self, attribute):
                return getattr(self, attribute)
        known = {own.removeprefix("_get_").removeprefix("_") for own in (*dir(self), *vars(self))}
        near = nearest(name, (own for own in known if not own.startswith("_")))
        raise UnknownAttribute(
            f"{type(self).__name__} has no attribute {name!r} (neither _get_{name}() nor _{name}); "
            f"did you mean: {', '.join(near) or 'nothing similar'}"
        )

    def _set_attribute(self, name: str, value: Any) -> None:
        setattr(self, f"_{name}", value)

    def _seed_collect(self, seed: int) -> None:
        self.generator.manual_seed(seed)

    def _seed_eval(self, seed: int) -> None:
        self.eval_generator.manual_seed(seed)

    def __repr__(self) -> str:
        return f"{type(self).__name__}(device={self.device}, model={getattr(self, 'model', None)})"

    # The batched interface, derived from the methods above.

    def check_spaces(self, observation_space: gym.Space[Any], action_space: gym.Space[Any]) -> None:
        """Refuse spaces that the model does not fit.

        Raises:
            SpaceError: with both shapes.
        """
        user = type(self).__name__
        check_number_of_agents(observation_space, several_agents=self.several_agents, user=user)

        def act(obs: Value) -> Value | None:
            return self._probe(obs, action_space)

        check_spaces(self.model, act, observation_space, action_space)

    def reset(self, env_ids: Iterable[int] | None = None) -> None:
        """Clear what acting keeps of these envs."""
        for field in ("collect", "eval"):
            if field in self._enabled:
                getattr(self, f"_reset_{field}")(env_ids)

    def act_collect(
        self, obs: Value, env_id: npt.NDArray[np.int64], **kwargs: Any
    ) -> dict[str, Any]:
        """Act env by env; see :meth:`dmiddleware.policy.Policy.act_collect`."""
        return self._joined("_forward_collect", obs, env_id, kwargs)

    def act_eval(self, obs: Value, env_id: npt.NDArray[np.int64], **kwargs: Any) -> dict[str, Any]:
        """Act env by env; see :meth:`dmiddleware.policy.Policy.act_eval`."""
        return self._joined("_forward_eval", obs, env_id, kwargs)

    def train_batch(self, batch: Batch) -> Batch:
        """Turn collected trajectories into training samples, one after the other."""
        return sample_by_trajectory(batch, self._get_train_sample)

    def _transitions(self) -> Callable[..., Batch] | None:
        """Return what makes the columns of a step; None: they are the standard ones."""
        return transitions_by(self._public_transition)

    def _joined(
        self, name: str, obs: Value, env_id: npt.NDArray[np.int64], kwargs: dict[str, Any]
    ) -> dict[str, Any]:
        env_ids = env_id.tolist()
        data = {one: index_rows(obs, index) for index, one in enumerate(env_ids)}
        answers = getattr(self, name)(data, **split_inputs(kwargs, env_ids))
        self._check_answers(answers, name)
        return join_outputs(answers, env_ids)

    def _collect(
        self, obs: Nested, *, env_id: npt.ArrayLike | None = None, **kwargs: Any
    ) -> dict[Any, Any]:
        return self._act("collect", obs, env_id=env_id, **kwargs)

    def _eval(
        self, obs: Nested, *, env_id: npt.ArrayLike | None = None, **kwargs: Any
    ) -> dict[Any, Any]:
        return self._act("eval", obs, env_id=env_id, **kwargs)

    def _act(
        self, mode: Mode, /, obs: Nested, *, env_id: npt.ArrayLike | None = None, **kwargs: Any
    ) -> dict[Any, Any]:
        if isinstance(obs, dict) and is_per_env(obs):
            return self._act_per_env(mode, obs, kwargs)
        return super()._act(mode, obs, env_id=env_id, **kwargs)

    def _act_per_env(
        self, field: Mode, data: dict[int, Any], kwargs: dict[str, Any]
    ) -> dict[int, dict[str, Any]]:
        self._check_call(field, kwargs)
        check_finite(data, user=type(self).__name__)
        if self.model.training:
            self.model.eval()
        if not data:
            return {}
        name = _REQUIRED[field]
        with torch.no_grad():
            outputs: dict[int, dict[str, Any]] = getattr(self, name)(data, **kwargs)
        self._check_answers(outputs, name)
        masks, user = kwargs.get("action_mask"), f"{type(self).__name__}.{name}"
        for env_id, one in data.items():
            own = None if masks is None else masks[env_id]
            self.codec.check_allowed(one, outputs[env_id], mask=own, user=user)
        return outputs

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
        if isinstance(timestep, BatchedTimestep):
            return join_transitions(self._process_transition, obs, policy_output, timestep)
        transition = self._process_transition(obs, policy_output, timestep)
        if not isinstance(transition, Mapping):
            raise PolicyOutputError(
                f"{type(self).__name__}._process_transition returned {transition!r:.100}; it "
                'must return a dictionary with the keys "obs", "action", "reward", "done"'
            )
        return transition

    def _public_train_sample(
        self, data: Batch | list[dict[str, Any]]
    ) -> Batch | list[dict[str, Any]]:
        """Turn a list of transitions, or a batch, into training samples of the same kind."""
        if not isinstance(data, list):
            return self.train_batch(data)
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

    # Learning.

    def _learn(self, data: Any, **kwargs: Any) -> Any:
        self._check_call("learn", kwargs)
        learned = self._samples(data) if self.learn_from == "samples" else self._batch(data)
        if not self.model.training:
            self.model.train()
        if self.reducer is not None:
            n_rows = len(learned) if isinstance(learned, list) else self.n_learned_rows(learned)
            self.reducer.begin(n_rows)
        output = self._forward_learn(learned, **kwargs)
        outputs = output if isinstance(output, list) else [output]
        if not all(isinstance(one, Mapping) for one in outputs):
            raise PolicyOutputError(
                f"{type(self).__name__}._forward_learn returned {output!r:.100}; it must return a "
                'dictionary of numbers to log, such as {"total_loss": 0.1}, or a list of them'
            )
        return output

    def _samples(self, data: Batch | list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return the samples to learn from; a list is returned as it is."""
        if isinstance(data, list):
            if data:
                self._check_columns(data[0])
            return data
        self._check_columns(data)
        return to_rows(to_device(data, self.device) if self.on_gpu else data)

    def _batch(self, data: Batch | list[dict[str, Any]]) -> Batch:
        """Return the batch to learn from, on the policy's device."""
        if isinstance(data, list):
            batch = collate_samples(data)
        else:
            batch = data if isinstance(data, Batch) else as_tree(data)
        self._check_columns(batch)
        return to_device(batch, self.device) if self.on_gpu else batch

    def _compute_gradients(self, loss: torch.Tensor) -> None:
        """Run backward from a loss, known to be finite, and average gradients over all ranks."""
        assert self._optimizer is not None
        self._optimizer.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        self.sync_gradients(self.model)

    def sync_gradients(self, model: nn.Module) -> None:
        """Average the model's gradients over all ranks; call it between backward and the step.

        Each rank's gradients are weighted by the rows of its batch, as if all rows were one batch.
        With ``bp_update_sync=False`` the reductions of the policy's model started during
        backward, and this waits for them. In a single process it does nothing.
        """
        if self.reducer is not None:
            self.reducer.reduce(model)

    def _clip_gradients(self, max_norm: float, batch: Batch) -> float:
        """Scale the gradient so that its norm is at most ``max_norm``.

        Source: Pascanu et al., "On the difficulty of training recurrent neural networks", 2013.

        Returns:
            The norm before.

        Raises:
            NonFiniteLoss: if that norm is NaN or infinite; the message describes the batch.
        """
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), max_norm).item()
        self._check_finite(norm, batch, "the norm of the gradient")
        return norm

    def _step_optimizer(self) -> float:
        """Take an optimizer step, count the update, and return the learning rate."""
        assert self._optimizer is not None
        learning_rate = self._anneal()
        self._optimizer.step()
        self.train_iter += 1
        return learning_rate

    def _anneal(self) -> float:
        """Set the optimizer's learning rate to its schedule's current value, and return it."""
        assert self._optimizer is not None
        group, path = self._optimizer.param_groups[0], "learn.learning_rate"
        if path in self.schedules and not self.schedules[path].is_constant:
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
        if self.reducer is not None:
            finite = sum_over_ranks([0.0 if finite else 1.0]) == [0.0]
        if not finite:
            raise non_finite_error({what: torch.tensor(value)}, batch, {}, user=type(self).__name__)

    # Building.

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
        for field in (one for one in _REQUIRED if one in enabled):
            name = _REQUIRED[field]
            if getattr(getattr(self, name), "__isabstractmethod__", False):
                raise PolicyError(
                    f"{type(self).__name__} cannot {field}: write {name}({_SIGNATURES[name]}, or "
                    f"leave {field!r} out of enable_field"
                )
        return enabled

    def _checked_modes(self, modes: Iterable[Any]) -> frozenset[Any]:
        return frozenset(modes) & {"learn", "collect", "eval"}

    def _check_call(self, mode: Mode, kwargs: Mapping[str, Any]) -> None:
        self._require(mode)
        super()._check_call(mode, kwargs)

    def _require(self, field: str) -> None:
        if field not in self._enabled:
            raise PolicyError(
                f"this {type(self).__name__} was built with enable_field={sorted(self._enabled)} "
                f"and cannot {field}; add {field!r}, or build it with enable_field=None"
            )

    @classmethod
    def _declared_hooks(cls) -> dict[Mode, Hook]:
        hooks: dict[Mode, Hook] = {}
        for mode, name in _REQUIRED.items():
            parameters = list(inspect.signature(getattr(cls, name)).parameters.values())
            takes_all = any(one.kind is one.VAR_KEYWORD for one in parameters)
            keywords = frozenset(one.name for one in parameters[2:])
            hooks[mode] = Hook(name, None if takes_all else keywords)  # type: ignore[index]
        return hooks

    def default_model(self) -> tuple[str, list[str]]:
        """Return the registered name of the model to build and the modules to import for it."""
        raise PolicyError(
            f"{type(self).__name__} has no default model; pass model=, set cfg.model.type, or "
            "override default_model() to return (registered name, [modules to import])"
        )

    def make_model(self) -> nn.Module:
        """Return the network to build if none is given."""
        options = dict(self.cfg.model)
        if "type" not in options:
            name, imports = self.default_model()
            options |= {"type": name, "import_names": imports}
        import_named(options.pop("import_names", ()))
        return create_model(in_own_names(options, options["type"]))

    def _build_model(self, model: nn.Module | None) -> nn.Module:
        return self._create_model(self.cfg, model)

    def _create_model(self, cfg: EasyDict, model: nn.Module | None = None) -> nn.Module:
        """Return the given model, or build the one that ``cfg.model`` describes."""
        return super()._build_model(model)

    def _join_ranks(self) -> None:
        self._init_multi_gpu_setting(self.model, self.cfg.bp_update_sync)

    def _init_multi_gpu_setting(self, model: nn.Module, bp_update_sync: bool) -> None:
        """Give all ranks the same parameters, and average the gradients of the updates."""
        super()._join_ranks()

    def _check_columns(self, columns: Batch | Mapping[str, Any]) -> None:
        check_columns(self.learn_columns, columns, user=type(self).__name__)

    def _read(self, key: str, section: str) -> int | dict[str, int] | None:
        """Return a number, or a dictionary of them for a policy with several kinds of data."""
        value = self.cfg[key] if key in self.cfg else self.cfg.get(section, {}).get(key)
        return dict(value) if isinstance(value, Mapping) else None if value is None else int(value)


class CommandModePolicy(Policy):
    """A policy with a fourth mode, for commanders.

    ``_get_setting_learn``, ``_get_setting_collect`` and ``_get_setting_eval`` take the training's
    progress (``train_iter``, ``envstep``, evaluation results) and return keyword arguments for the
    mode's next forward, such as ``eps``.
    """

    config: ClassVar[dict[str, Any]] = {}
    fields: ClassVar[tuple[str, ...]] = ("learn", "collect", "eval", "command")
    command_function: ClassVar[type[CommandMode]] = CommandMode

    @property
    def command_mode(self) -> CommandMode:
        """The methods that a commander may call."""
        return self.command_function(
            get_setting_learn=self._public_setting_learn,
            get_setting_collect=self._public_setting_collect,
            get_setting_eval=self._public_setting_eval,
        )

    def _init_command(self) -> None:
        """Build what the command mode needs."""

    def _get_setting_learn(self, command_info: dict[str, Any]) -> dict[str, Any]:
        """Return keyword arguments for the next learn forward."""
        return {}

    def _get_setting_collect(self, command_info: dict[str, Any]) -> dict[str, Any]:
        """Return keyword arguments for the next collect forward."""
        return {}

    def _get_setting_eval(self, command_info: dict[str, Any]) -> dict[str, Any]:
        """Return keyword arguments for the next eval forward."""
        return {}

    def _public_setting_learn(self, command_info: dict[str, Any]) -> dict[str, Any]:
        self._require("command")
        return self._get_setting_learn(command_info)

    def _public_setting_collect(self, command_info: dict[str, Any]) -> dict[str, Any]:
        self._require("command")
        return self._get_setting_collect(command_info)

    def _public_setting_eval(self, command_info: dict[str, Any]) -> dict[str, Any]:
        self._require("command")
        return self._get_setting_eval(command_info)


def _make_mode(kind: Callable[..., T], **functions: Any) -> T:
    """Build a mode; a named tuple without some of the fields does without them."""
    names = getattr(kind, "__dataclass_fields__", None) or getattr(kind, "_fields", functions)
    return kind(**{name: function for name, function in functions.items() if name in names})
