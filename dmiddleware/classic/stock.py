"""Stock policies with the interface of DI-engine's: nested configs, hooks, modes by name."""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping
from functools import cached_property
from typing import Any, ClassVar, Final, Literal, NamedTuple

import gymnasium as gym
import numpy.typing as npt
import torch
from easydict import EasyDict
from torch import nn

from dmiddleware.classic.collate import split_outputs
from dmiddleware.classic.config import entries_of, update_entries
from dmiddleware.classic.config_keys import merge_classic, split_classic
from dmiddleware.classic.di_engine_state import is_partial
from dmiddleware.classic.import_names import import_named, without_di_engine
from dmiddleware.classic.model_options import in_own_names
from dmiddleware.classic.model_wrappers import ArgmaxModel, TargetModel, WrappedModel
from dmiddleware.classic.modes import (
    CollectMode,
    EvalMode,
    LearnMode,
    as_collect_mode,
    as_eval_mode,
    as_learn_mode,
    command_mode_of,
)
from dmiddleware.classic.nstep_samples import nstep_samples
from dmiddleware.classic.policy import CommandModePolicy, Policy, attribute_name
from dmiddleware.classic.policy_config import ClassicSettings, config_entries, settings_from
from dmiddleware.env import BatchedTimestep, EnvTimestep
from dmiddleware.errors import PolicyError, RegistryError
from dmiddleware.policy import POLICY_REGISTRY, PolicySettings, QLearningPolicy
from dmiddleware.policy import Policy as CorePolicy
from dmiddleware.policy import get_policy_cls as get_core_cls
from dmiddleware.policy.component import load_optimizer_state, optimizer_state
from dmiddleware.policy.modes import Mode, PolicySpec
from dmiddleware.policy.obs_norm import ObsNorm
from dmiddleware.policy.state import entry_of, load_model_state, model_state
from dmiddleware.tree import Batch, Nested, Value, stack, to_device

__all__ = ["StockPolicy", "create_policy", "get_policy_cls"]

_COMMAND: Final = "_command"
_ALIASES: Final = {
    "cql_discrete": "discrete_cql", "dt": "decision_transformer", "sac_discrete": "discrete_sac",
    "sqil_sac": "sac",
}  # fmt: skip
"""Names of DI-engine's configs for algorithms that have another name here."""
_ABSENT: Final[Mapping[str, str]] = {
    "acer": "use impala or ppo_offpolicy, which learn from older data too",
    "atoc": "no algorithm here learns to communicate; use mappo",
    "bdq": "use sac for continuous actions",
    "collaq": "use qmix",
    "coma": "use mappo",
    "dqn_stdim": "no contrastive loss of observations is here; use dqn",
    "happo": "use mappo",
    "ibc": "use bc",
    "madqn": "use qmix",
    "mbsac": "world models are not here; use sac",
    "ngu": "use r2d2, and explore by middleware.RewardLearner with RND",
    "pc_bfs": "use bc",
    "pd": "diffusion models are not here; use decision_transformer",
    "ppo_stdim": "no contrastive loss of observations is here; use ppo",
    "prompt_awr": "language models are not here",
    "prompt_pg": "language models are not here",
    "qgpo": "diffusion models are not here; use iql",
    "qtran": "use qmix",
    "r2d2_gtrxl": "no gated transformer is here; use r2d2",
    "r2d3": "use r2d2",
    "sqn": "use discrete_sac",
    "stevesac": "world models are not here; use sac",
    "td3_vae": "no autoencoder of actions is here; use td3",
}
"""DI-engine's algorithms that are not here, and what to use instead."""
_FOR_SEVERAL: Final[Mapping[str, str]] = {"ppo": "mappo"}
"""What DI-engine's ``multi_agent=True`` makes of an algorithm for one agent."""
_ATTRIBUTES: Final = "attributes"
_HOOKS: Final[Mapping[str, str]] = {
    "learn": "_forward_learn",
    "collect": "_forward_collect",
    "eval": "_forward_eval",
}
_MODELS: Final = {"_forward_collect": "_collect_model", "_forward_eval": "_eval_model"}
"""The wrapped models with which these hooks act."""
_LIVE: Final = ("counters", "train_iter")
"""Attributes whose home is the policy behind the interface."""
_OF_CLASS: Final = (
    "on_policy", "learn_columns", "optional_columns", "minibatch_unit", "learns_from_trajectories",
    "several_agents", "action_kinds", "act_inputs", "explores", "reports", "model_type",
    "model_defaults",
)  # fmt: skip
_READ_BY: Final[Mapping[str, tuple[str, ...]]] = {
    "_forward_learn": (
        "_learn_model", "_target_model", "_gamma", "_nstep", "_priority", "_priority_IS_weight",
        "model",
    ),
    "_forward_collect": ("model",),
    "_forward_eval": ("model",),
    "_get_train_sample": ("_gamma", "_nstep"),
}  # fmt: skip
"""Attributes that these hooks read in DI-engine, and do not read here."""
_OPTIMIZERS: Final[Mapping[str, str]] = {
    "_optimizer": "",
    "_optimizer_actor": "actor",
    "_optimizer_critic": "critic",
    "_optimizer_policy": "actor",
    "_optimizer_q": "critic",
    "_optimizer_value": "value",
    "_alpha_optim": "temperature",
}
"""Optimizers of DI-engine's policies, and the components here; empty: the only one."""
_READ_IN_LEARNING: Final[Mapping[str, Any]] = {
    "priority": False,
    "learn": {"ignore_done": False},
    "collect": {"unroll_len": 1},
}
"""Settings that DI-engine's policies read when they learn, and their defaults there.

So does ``priority_IS_weight``, whose default there is False.
"""
_NEVER_CALLED: Final[Mapping[str, str]] = {
    "update": "_forward_learn(self, data)",
    "learn": "_forward_learn(self, data)",
    "draw": "_forward_learn(self, data)",
    "act_collect": "_forward_collect(self, data, **kwargs)",
    "act_eval": "_forward_eval(self, data, **kwargs)",
    "train_batch": "_get_train_sample(self, transitions)",
    "make_components": "_init_learn(self)",
    "make_model": "default_model(self)",
}
"""What a policy for batches writes, and what a subclass of a stock policy writes instead."""


class _Modes(NamedTuple):
    """The modes of the policy behind the interface."""

    learn: LearnMode
    collect: CollectMode
    eval: EvalMode


class StockPolicy(CommandModePolicy):
    """A policy of :mod:`dmiddleware.policy` with the interface of DI-engine's policies.

    It has all hooks of the classic interface, which do what the algorithm does. A subclass
    overrides some of them, and may call ``super()``::

        class CautiousDQN(get_policy_cls({"type": "dqn"})):
            def _forward_collect(self, data, eps):
                return super()._forward_collect(data, eps=min(eps, 0.5))

    A ``_forward_learn`` gets a list of samples, as in DI-engine, unless the class says
    ``learn_from = "batch"``. What DI-engine's policies have is there: ``_model``, ``_cfg``,
    ``_device``, and, of the first algorithms, ``_optimizer``, ``_learn_model``, ``_target_model``,
    ``_collect_model``, ``_eval_model``, ``_gamma``, ``_nstep``. Attributes of the subclass that
    have a ``state_dict``, such as an optimizer, are saved too. ``config`` has the defaults that
    differ, and settings of its own.

    Args:
        cfg: a nested config, also with the keys that DI-engine's configs have, and with the
            sections of workers.
        model: as in :class:`dmiddleware.policy.Policy`.
        enable_field: the fields to build, of ``"learn"``, ``"collect"``, ``"eval"``, ``"command"``;
            None: all.

    Attributes:
        cfg: the merged config.
        policy: the policy behind the interface; None: only the command mode was enabled.

    Raises:
        ConfigError: for an unusable config.
        PolicyError: by a subclass that writes a method, or sets an attribute, that nothing reads.
    """

    core: ClassVar[type[CorePolicy]]
    learn_from: ClassVar[Literal["batch", "samples"]] = "batch"
    policy: CorePolicy | None = None

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        given = vars(cls).get("config", {})
        is_written = "_forward_learn" in vars(cls)
        cls.config = {}
        if "core" in vars(cls):
            for name in _OF_CLASS:
                setattr(cls, name, getattr(cls.core, name))
            cls.config = config_entries(cls.core)
        _check_methods(cls)
        if is_written:
            update_entries(cls.config, _missing(_READ_IN_LEARNING, entries_of(cls)))
            cls.config["priority_IS_weight"] = False
            cls.learn_columns = vars(cls).get("learn_columns", ())
            cls.optional_columns = vars(cls).get("optional_columns")
        update_entries(cls.config, _in_names_of(cls, given))

    def __init__(
        self,
        cfg: Mapping[str, Any] | None = None,
        model: nn.Module | None = None,
        enable_field: Iterable[str] | None = None,
    ) -> None:
        super().__init__(cfg, model, enable_field)
        if self.policy is not None:
            self._take_optimizers()
            self._check_attributes(self.policy)

    def _build(self, cfg: Mapping[str, Any] | None, model: nn.Module | None) -> None:
        modes: Any = [field for field in _HOOKS if field in self._enabled]
        if not modes:
            self._build_without_model(cfg)
            return
        self.cfg = self._checked_settings(cfg)
        settings = settings_from(self.core, self.cfg)
        network: nn.Module | None = self._create_model(self.cfg, model)
        if network is None:
            options = self._model_options(settings.model)
            settings = dataclasses.replace(settings, model=options)
        self.policy = self.core(settings, network, modes)
        self._hooks = self._declared_hooks()
        self.batched = not self._writes("_forward_learn")
        # Hooks get observations as the env has them; the stock ones normalize them.
        self.obs_norm = ObsNorm(None)
        self._take_inputs_of_hooks()
        self.setup()

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            core = vars(self).get("policy")
            if core is None or name.startswith("__"):
                raise
            if hasattr(core, attribute_name(name)):
                return getattr(core, attribute_name(name))
            if name in self._stand_ins:
                return self._stand_ins[name]
            raise

    def __setattr__(self, name: str, value: Any) -> None:
        core = vars(self).get("policy")
        if core is not None and attribute_name(name) in _LIVE:
            setattr(core, attribute_name(name), value)
        else:
            super().__setattr__(name, value)

    @classmethod
    def settings_class(cls) -> type[PolicySettings]:
        """Return the class of the algorithm's settings."""
        return cls.core.settings_class()

    @classmethod
    def check_config(cls, cfg: EasyDict) -> None:
        """Refuse what the algorithm's settings refuse."""
        settings_from(cls.core, cfg)

    # The hooks, which do what the algorithm does.

    def default_model(self) -> tuple[str, list[str]]:
        """Return the registered name of the model to build and the modules to import for it."""
        return self.core.model_type, []

    def _create_model(self, cfg: EasyDict, model: nn.Module | None = None) -> Any:
        """Return the model to use; None: the one that ``cfg.model`` and the algorithm describe."""
        return model

    def _forward_learn(self, batch: Any, **kwargs: Any) -> Any:
        """Make the algorithm's updates from a batch ``[B, …]`` or a list of samples."""
        return self._stock.learn.forward(batch, **kwargs)

    def _forward_collect(self, data: dict[int, Any], **kwargs: Any) -> dict[int, dict[str, Any]]:
        """Explore as the algorithm does, or with the ``_collect_model`` that a subclass has."""
        if "_collect_model" in vars(self):
            return self._forward_model(self._collect_model, data, kwargs)
        answers: dict[Any, Any] = self._stock.collect.forward(data, **kwargs)
        return answers

    def _forward_eval(self, data: dict[int, Any], **kwargs: Any) -> dict[int, dict[str, Any]]:
        """Act greedily as the algorithm does, or with the ``_eval_model`` that a subclass has."""
        if "_eval_model" in vars(self):
            return self._forward_model(self._eval_model, data, kwargs)
        answers: dict[Any, Any] = self._stock.eval.forward(data, **kwargs)
        return answers

    def _get_train_sample(self, transitions: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Turn one trajectory into samples, with n-step returns or advantages.

        For a ``_forward_learn`` of a subclass that learns from samples, the rewards of n steps
        stay side by side, ``[n]``, as in DI-engine.
        """
        spec = self._stock.collect.spec
        n, discount = spec.n_step, spec.discount
        if self.learn_from == "samples" and n > 1 and discount is not None:
            return nstep_samples(transitions, n, discount)
        samples: list[dict[str, Any]] = self._stock.collect.get_train_sample(transitions)
        return samples

    def _reset_collect(self, data_id: Iterable[int] | None = None) -> None:
        self._stock.collect.reset(data_id)

    def _reset_eval(self, data_id: Iterable[int] | None = None) -> None:
        self._stock.eval.reset(data_id)

    def _monitor_vars_learn(self) -> list[str]:
        """Return which outputs of the algorithm's updates are logged."""
        return self._stock.learn.monitor_vars()

    def _state_dict_learn(self) -> dict[str, Any]:
        """Return everything needed to resume, also of the attributes of a subclass."""
        state = dict(self._stock.learn.state_dict())
        own = {name: _state_of(value) for name, value in self._own_states().items()}
        return {**state, _ATTRIBUTES: own} if own else state

    def _load_state_dict_learn(self, state_dict: dict[str, Any]) -> None:
        """Restore what :meth:`_state_dict_learn` returned, or a state of DI-engine's."""
        own = self._own_states()
        if own and not is_partial(state_dict):
            saved = entry_of(state_dict, _ATTRIBUTES)
            for name in own:
                entry_of(saved, name)
        rest = {name: value for name, value in state_dict.items() if name != _ATTRIBUTES}
        self._stock.learn.load_state_dict(rest)
        for name, value in state_dict.get(_ATTRIBUTES, {}).items():
            _load_state_of(own[name], value)

    def _state_dict_collect(self) -> dict[str, Any]:
        return self._acting_mode().state_dict()

    def _load_state_dict_collect(self, state_dict: dict[str, Any]) -> None:
        self._acting_mode().load_state_dict(state_dict)

    def _get_setting_collect(self, command_info: dict[str, Any]) -> dict[str, Any]:
        """Return the ε of the algorithm's schedule, if it has one."""
        eps = self.cfg.other.eps if self._declares_eps() else None
        return command_mode_of(eps).get_setting_collect(command_info)

    # What others call.

    def __repr__(self) -> str:
        return super().__repr__() if self.policy is None else repr(self.policy)

    @cached_property
    def spec(self) -> PolicySpec:
        """What others read of the policy."""
        stock = self._core().spec
        counts = {
            name: self.get_attribute(name) for name in ("batch_size", "n_sample", "n_episode")
        }
        if not self._declares_eps():
            counts["eps"] = None  # one in the config is not passed on
        return dataclasses.replace(
            stock,
            kind=type(self) if any(map(self._writes, _HOOKS.values())) else stock.kind,
            settings=ClassicSettings(self.cfg, counts),
            learn_columns=self.learn_columns,
            optional_columns=self.optional_columns,
            act_inputs=self.act_inputs,
            explores=self.explores,
            is_stochastic=self.is_stochastic,
            check_spaces=self.check_spaces,
            acting_state=self._state_dict_collect,
        )

    @property
    def is_stochastic(self) -> bool:
        """Whether evaluating takes the keyword ``deterministic``."""
        if self._writes("_forward_eval"):
            return super().is_stochastic
        return self._core().is_stochastic

    def check_spaces(self, observation_space: gym.Space[Any], action_space: gym.Space[Any]) -> None:
        """Refuse spaces that the model does not fit; see :meth:`dmiddleware.policy.Policy`."""
        acting = [_HOOKS[mode] for mode in ("collect", "eval") if mode in self._enabled]
        if acting and all(map(self._writes, acting)):
            super().check_spaces(observation_space, action_space)
        else:
            self._core().check_spaces(observation_space, action_space)

    def initial_state(self, n: int) -> Nested | None:
        """Return the recurrent state at the start of ``n`` episodes; None: not recurrent."""
        return self._core().initial_state(n)

    def observe(self, obs: Nested) -> None:
        """Take observations of a data set; see :meth:`dmiddleware.policy.Policy.observe`."""
        self._core().observe(obs)

    def train_batch(self, batch: Batch) -> Batch:
        """Turn a collected batch into training data."""
        if self._writes("_get_train_sample"):
            return super().train_batch(batch)
        return self._stock.collect.train_batch(batch)

    # Batches do not go through hooks that no subclass overrides.

    def _act(
        self, mode: Mode, /, obs: Nested, *, env_id: npt.ArrayLike | None = None, **kwargs: Any
    ) -> dict[Any, Any]:
        if self._writes(_HOOKS[mode]):
            return super()._act(mode, obs, env_id=env_id, **kwargs)
        stock: CollectMode | EvalMode = getattr(self._stock, mode)
        return stock.forward(obs, env_id=env_id, **kwargs)

    def _learn(self, data: Any, **kwargs: Any) -> Any:
        if not self._writes("_forward_learn"):
            return self._stock.learn.forward(data, **kwargs)
        n_before = self.train_iter
        output = super()._learn(data, **kwargs)
        if self.train_iter == n_before:  # else, the hook has called the stock one
            self.train_iter += len(output) if isinstance(output, list) else 1
        return output

    def _transitions(self) -> Callable[..., Batch] | None:
        if self._writes("_process_transition"):
            return super()._transitions()
        return self._stock.collect.transitions

    def _public_transition(
        self,
        obs: Nested,
        policy_output: Mapping[str, Any],
        timestep: EnvTimestep | BatchedTimestep,
    ) -> dict[str, Any] | Batch:
        if self._writes("_process_transition"):
            return super()._public_transition(obs, policy_output, timestep)
        transition: dict[str, Any] | Batch = self._stock.collect.process_transition(
            obs, policy_output, timestep
        )
        return transition

    def _writes(self, hook: str) -> bool:
        """Return whether a subclass overrides a hook, or sets the model with which it acts."""
        stock = Policy if hook == "_process_transition" else StockPolicy
        is_overridden = getattr(type(self), hook) is not getattr(stock, hook)
        return is_overridden or _MODELS.get(hook) in vars(self)

    def _forward_model(
        self, model: Any, data: dict[int, Any], kwargs: dict[str, Any]
    ) -> dict[int, dict[str, Any]]:
        """Act with a model that chooses actions, as the hooks of DI-engine do."""
        obs: Value = stack(list(data.values()), path="obs")
        model.eval()
        with torch.no_grad():
            output = model.forward(to_device(obs, self.device), **kwargs)
        return split_outputs(
            {name: to_device(value, "cpu") for name, value in output.items()}, list(data)
        )

    @cached_property
    def _stock(self) -> _Modes:
        core, user = self._core(), type(self).__name__
        return _Modes(
            as_learn_mode(core, user=user),
            as_collect_mode(core, user=user),
            as_eval_mode(core, user=user),
        )

    def _acting_mode(self) -> CollectMode | EvalMode:
        return self._stock.collect if "collect" in self._enabled else self._stock.eval

    def _core(self) -> CorePolicy:
        if self.policy is None:
            raise PolicyError(
                f"this {type(self).__name__} was built with enable_field={sorted(self._enabled)}; "
                "add 'learn', 'collect' or 'eval', or build it with enable_field=None"
            )
        return self.policy

    def _model_options(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """Return the options of the network to build, in the names that it has here."""
        name, imports = self.default_model()
        if name != self.core.model_type or imports:
            options = {"type": name, "import_names": imports, **options}
        if "import_names" in options:
            options = {**options, "import_names": without_di_engine(options["import_names"])}
            import_named(options["import_names"])
        return in_own_names(options, name)

    def _take_inputs_of_hooks(self) -> None:
        """Set what those who act pass: what the algorithm, and each hook of a subclass, takes."""
        core = self._core()
        inputs, explores = core.act_inputs, core.explores
        for mode in ("collect", "eval"):
            keywords = self._hooks[mode].keywords
            if mode in self._enabled and self._writes(_HOOKS[mode]) and keywords is not None:
                inputs = tuple(name for name in inputs if name.partition(".")[0] in keywords)
                explores = explores or (mode == "collect" and "eps" not in keywords)
        self.act_inputs, self.explores = inputs, explores

    @cached_property
    def _stand_ins(self) -> dict[str, Any]:
        """What DI-engine's policies have under names of their own."""
        core = self._core()
        attributes: dict[str, Any] = {
            "_gamma": self.discount_factor,
            "_nstep": self.nstep,
            "_priority": self.cfg.get("priority", False),
            "_priority_IS_weight": self.cfg.get("priority_IS_weight", False),
            "_unroll_len": self.cfg.get("collect", {}).get("unroll_len", 1),
        }
        acts = ArgmaxModel if isinstance(core, QLearningPolicy) else WrappedModel
        for name in ("_learn_model", "_collect_model", "_eval_model"):
            attributes[name] = acts(core.model)
        trained = {k: c for k, c in core.components.items() if c.optimizer is not None}
        for name, component in trained.items():
            alone = component.module is core.model
            attributes["_optimizer" if alone else f"_optimizer_{name}"] = component.optimizer
            if alone and component.has_target and component.target_rule is not None:
                rule = component.target_rule
                attributes["_target_model"] = TargetModel(
                    component.target,
                    "assign" if rule.tau == 1 else "momentum",
                    {"freq": rule.every} if rule.tau == 1 else {"theta": rule.tau},
                )
        return attributes

    def _take_optimizers(self) -> None:
        """Let the stock update use the optimizers that a subclass has set.

        Raises:
            ConfigError: if one has other parameters than its network.
            PolicyError: if the algorithm has no such optimizer.
        """
        if self._writes("_forward_learn") or "learn" not in self._enabled:
            return
        trained = {k: c for k, c in self._core().components.items() if c.optimizer is not None}
        for name in [name for name in vars(self) if name in _OPTIMIZERS]:
            component = trained.get(_OPTIMIZERS[name])
            if not _OPTIMIZERS[name] and len(trained) == 1:
                (component,) = trained.values()
            if component is None:
                raise PolicyError(
                    f"{type(self).__name__} sets {name}, but {self.core.__name__} trains "
                    f"{', '.join(trained)}; write _forward_learn too, or leave the optimizer out"
                )
            component.use_optimizer(vars(self).pop(name))
        vars(self).pop("_stand_ins", None)

    def _check_attributes(self, core: CorePolicy) -> None:
        """Refuse an attribute that a subclass sets for a stock hook, which would not read it.

        Raises:
            PolicyError: naming the attribute and the hook.
        """
        for hook in (hook for hook in _READ_BY if not self._writes(hook)):
            for name in (name for name in _READ_BY[hook] if name in vars(self)):
                value = vars(self)[name]
                stock = getattr(core, name, self._stand_ins.get(name))
                if value is not stock and (not isinstance(value, int | float) or value != stock):
                    raise PolicyError(
                        f"{type(self).__name__} sets {name}={value!r:.100}, which the stock "
                        f"{hook} does not read; write {hook} too, or set it in the config"
                    )

    @classmethod
    def _declares_eps(cls) -> bool:
        return "eps" in entries_of(cls).get("other", {})

    def _own_states(self) -> dict[str, Any]:
        """Return the attributes that a subclass has set and that have a state, by name."""
        return {
            name: value
            for name, value in vars(self).items()
            if name not in ("policy", "model", "obs_norm")
            and callable(getattr(value, "state_dict", None))
            and callable(getattr(value, "load_state_dict", None))
            and _unwrapped(value) is not self.model
        }


@functools.cache
def _stock_class(core: type[CorePolicy]) -> type[StockPolicy]:
    """Return the class of a stock policy behind the classic interface."""
    return type(core.__name__, (StockPolicy,), {"core": core, "__doc__": core.__doc__})


def get_policy_cls(cfg: Mapping[str, Any]) -> type[Policy]:
    """Return the class that ``cfg.type`` names, after importing ``cfg.import_names``.

    Names that end in ``_command`` are those of the same policies.

    Raises:
        ConfigError: if ``cfg`` has no ``type``.
        RegistryError: if the name is not registered; the nearest names are listed.
    """
    import_named(cfg.get("import_names"))
    cfg = {key: value for key, value in cfg.items() if key != "import_names"}
    name = cfg.get("type")
    if isinstance(name, str) and name.endswith(_COMMAND) and name not in POLICY_REGISTRY:
        cfg = {**cfg, "type": name.removesuffix(_COMMAND)}
    if cfg.get("type") in _ALIASES:
        cfg = {**cfg, "type": _ALIASES[cfg["type"]]}
    if cfg.get("type") == "qmix" and (cfg.get("model") or {}).get("mixer") is False:
        cfg = {**cfg, "type": "vdn"}  # without its mixing network, QMIX is VDN
    _check_present(cfg.get("type"))
    if cfg.get("multi_agent"):
        cfg = {**cfg, "type": _for_several(cfg.get("type"))}
    cls = get_core_cls(cfg)
    return cls if issubclass(cls, Policy) else _stock_class(cls)  # type: ignore[arg-type]  # a class is hashable


def _check_present(name: object) -> None:
    """Refuse an algorithm of DI-engine that is not here, unless a program has registered it.

    Raises:
        RegistryError: saying what to use instead.
    """
    if name in _ABSENT and name not in POLICY_REGISTRY:
        raise RegistryError(
            f"the algorithm {name!r} of DI-engine is not here; {_ABSENT[str(name)]}"
        )


def _for_several(name: Any) -> Any:
    """Return the registered name of an algorithm in its form for several agents.

    Raises:
        RegistryError: if there is none.
    """
    name = _FOR_SEVERAL.get(name, name)
    if name in POLICY_REGISTRY:
        cls = POLICY_REGISTRY.get(name)
        if issubclass(cls, CorePolicy) and not cls.several_agents:
            raise RegistryError(
                f"the algorithm {name!r} for several agents (multi_agent=True) is not here; "
                "use mappo or qmix"
            )
    return name


def create_policy(cfg: Mapping[str, Any], **kwargs: Any) -> Policy:
    """Build the policy that ``cfg.type`` names.

    Args:
        cfg: the policy's config, with ``type`` and, for classes that live elsewhere,
            ``import_names``.
        kwargs: passed to the class's constructor (``model``, ``enable_field``).

    Raises:
        ConfigError: if ``cfg`` has no ``type``, or if the class rejects the config.
        RegistryError: if the name is not registered; the nearest names are listed.
    """
    return get_policy_cls(cfg)(cfg, **kwargs)


def _check_methods(cls: type[StockPolicy]) -> None:
    """Refuse methods of a policy for batches, which nothing would call.

    Raises:
        PolicyError: naming what to write.
    """
    for name, remedy in _NEVER_CALLED.items():
        if name in vars(cls):
            raise PolicyError(
                f"{cls.__name__} defines {name}, which the classic interface never calls; write "
                f"{remedy}, or derive from dmiddleware.policy.{cls.core.__name__}"
            )


def _in_names_of(cls: type[StockPolicy], config: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a subclass declares; the settings of its bases under the names they have here."""
    own, others = split_classic({**config, "cfg_type": ""}, entries_of(cls), cls.__name__)
    merge_classic(own, others)
    return {name: entry for name, entry in own.items() if name != "cfg_type"}


def _missing(defaults: Mapping[str, Any], entries: Mapping[str, Any]) -> dict[str, Any]:
    """Return the defaults of what a class does not declare."""
    missing: dict[str, Any] = {}
    for name, default in defaults.items():
        if isinstance(default, Mapping):
            missing[name] = _missing(default, entries.get(name, {}))
        elif name not in entries:
            missing[name] = default
    return missing


def _unwrapped(value: Any) -> Any:
    return value.unwrapped if isinstance(value, WrappedModel) else value


def _state_of(value: Any) -> Any:
    """Return a copy of an object's state, with text keys."""
    value = _unwrapped(value)
    if isinstance(value, torch.optim.Optimizer):
        return optimizer_state(value)
    return model_state(value) if isinstance(value, nn.Module) else copy.deepcopy(value.state_dict())


def _load_state_of(value: Any, state: Any) -> None:
    """Restore what :func:`_state_of` returned."""
    value = _unwrapped(value)
    if isinstance(value, torch.optim.Optimizer):
        load_optimizer_state(value, state)
    elif isinstance(value, nn.Module):
        load_model_state(value, state)
    else:
        value.load_state_dict(state)
