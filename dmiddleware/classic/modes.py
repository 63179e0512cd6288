"""The modes of the classic interface: data by env, lists of samples, attributes by name."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar, Final, NamedTuple, Self, TypeVar

import numpy as np
import numpy.typing as npt

from dmiddleware.classic.collate import (
    collate,
    collate_samples,
    is_per_env,
    join_inputs,
    join_outputs,
    join_transitions,
    sample_by_trajectory,
    split_inputs,
    split_outputs,
    to_rows,
)
from dmiddleware.classic.di_engine_state import load_acting_state, load_learner_state
from dmiddleware.classic.errors import UnknownAttribute
from dmiddleware.classic.monitored import monitored_of
from dmiddleware.classic.nstep_samples import with_summed_rewards
from dmiddleware.classic.policy_config import ClassicSettings, as_classic
from dmiddleware.distributed import rank_and_world_size
from dmiddleware.env import BatchedTimestep, EnvTimestep
from dmiddleware.errors import ConfigError, PolicyError
from dmiddleware.policy import Policy as CorePolicy
from dmiddleware.policy import modes as core
from dmiddleware.policy.acting import check_finite
from dmiddleware.policy.modes import PolicySpec
from dmiddleware.registry import nearest
from dmiddleware.rl import discounted_return, with_advantages, with_nstep_returns
from dmiddleware.schedule import Counters, Schedule
from dmiddleware.tree import (
    Batch,
    Nested,
    as_tree,
    flatten_lead,
    index_rows,
    leaves,
    map_leaves,
    stack,
    with_columns,
)

__all__ = [
    "CONFIG_ATTRIBUTES",
    "CollectMode",
    "CommandMode",
    "EvalMode",
    "LearnMode",
    "as_collect_mode",
    "as_command_mode",
    "as_eval_mode",
    "as_learn_mode",
    "collects_data",
    "command_mode_of",
    "spec_attribute",
    "spec_from_attributes",
    "standard_transition",
    "transitions_by",
]

_DI_ENGINE_NAMES: Final = {"discount_factor": "discount", "nstep": "n_step"}
"""Attributes that have another name in a :class:`PolicySpec`."""
CONFIG_ATTRIBUTES: Final = ("cfg", "batch_size", "n_sample", "n_episode")
"""Attributes that are settings."""
_COLLECT_DATA: Final = "collect_data"
_LEARN_FROM: Final = "learn_from"


def _nothing() -> None:
    """Do nothing."""


def _seed_nothing(seed: int) -> None:
    """Ignore the seed: the mode has no randomness of its own."""


def _as_it_is(batch: Batch) -> Batch:
    return batch


def _spec_of(get_attribute: object) -> PolicySpec:
    """Return the spec of the policy whose attributes a function returns."""
    owner = getattr(get_attribute, "__self__", None)
    if isinstance(owner, CorePolicy):
        return owner.spec
    kind = object if owner is None else type(owner)
    return spec_from_attributes(get_attribute, kind) if callable(get_attribute) else PolicySpec()


class _Replaceable:
    """What a named tuple of DI-engine offers."""

    _fields: ClassVar[tuple[str, ...]]
    _field_defaults: ClassVar[Mapping[str, Any]] = {}

    def _set(self, given: Mapping[str, Any]) -> None:
        """Set the fields from the arguments of a constructor, in DI-engine's order."""
        for one in dataclasses.fields(self):  # type: ignore[arg-type]
            value = given[one.name]
            if one.name == "spec" and value is None:
                value = _spec_of(given["get_attribute"])
            object.__setattr__(self, one.name, value)

    def _replace(self, **changes: Any) -> Self:
        """Return a mode in which some functions are others."""
        return dataclasses.replace(self, **changes)  # type: ignore[type-var]


@dataclass(frozen=True, init=False)
class LearnMode(core.LearnMode, _Replaceable):
    """What a classic learner may use of a policy: ``forward`` also takes a list of samples.

    Args:
        forward: makes updates.
        reset: forgets what learning keeps between forwards.
        info: describes the policy.
        monitor_vars: returns the keys of forward's output that are logged.
        get_attribute: returns an attribute of the policy by its name.
        set_attribute: sets one.
        state_dict: returns everything that is needed to resume.
        load_state_dict: restores it.
        spec: what the policy is; None: as ``get_attribute`` says.
    """

    _fields = (
        "forward", "reset", "info", "monitor_vars", "get_attribute", "set_attribute",
        "state_dict", "load_state_dict",
    )  # fmt: skip
    reset: Callable[..., None]
    info: Callable[[], str]
    monitor_vars: Callable[[], list[str]]
    get_attribute: Callable[[str], Any]
    set_attribute: Callable[[str, Any], None]

    def __init__(
        self,
        forward: Callable[..., Any],
        reset: Callable[..., None],
        info: Callable[[], str],
        monitor_vars: Callable[[], list[str]],
        get_attribute: Callable[[str], Any],
        set_attribute: Callable[[str, Any], None],
        state_dict: Callable[[], dict[str, Any]],
        load_state_dict: Callable[[dict[str, Any]], None],
        spec: PolicySpec | None = None,
    ) -> None:
        self._set(locals())


@dataclass(frozen=True, init=False)
class CollectMode(core.CollectMode, _Replaceable):
    """What a classic collector may use of a policy.

    ``forward``, ``process_transition`` and ``get_train_sample`` take per-env data (a dict keyed by
    env id, a list of transitions) and batched data (tensors, treetensors), and return the same
    kind.

    Args:
        forward: acts while collecting.
        process_transition: makes a transition.
        get_train_sample: turns transitions into samples.
        reset: forgets what the policy keeps of these envs; None: of all.
        get_attribute: returns an attribute of the policy by its name.
        set_attribute: sets one.
        state_dict: returns what acting needs.
        load_state_dict: restores it.
        seed: seeds the randomness of collecting.
        spec: what the policy is; None: as ``get_attribute`` says.
        train_batch: as in :class:`dmiddleware.policy.CollectMode`.
        transitions: likewise.
        step_together: likewise.
    """

    _fields = (
        "forward", "process_transition", "get_train_sample", "reset", "get_attribute",
        "set_attribute", "state_dict", "load_state_dict", "seed",
    )  # fmt: skip
    _field_defaults = {"seed": _seed_nothing}
    process_transition: Callable[..., Any] = field(kw_only=True)
    get_train_sample: Callable[[Any], Any] = field(kw_only=True)
    get_attribute: Callable[[str], Any] = field(kw_only=True)
    set_attribute: Callable[[str, Any], None] = field(kw_only=True)

    def __init__(
        self,
        forward: Callable[..., Any],
        process_transition: Callable[..., Any],
        get_train_sample: Callable[[Any], Any],
        reset: Callable[..., None],
        get_attribute: Callable[[str], Any],
        set_attribute: Callable[[str, Any], None],
        state_dict: Callable[[], dict[str, Any]],
        load_state_dict: Callable[[dict[str, Any]], None],
        seed: Callable[[int], object] = _seed_nothing,
        spec: PolicySpec | None = None,
        train_batch: Callable[[Batch], Batch] = _as_it_is,
        transitions: Callable[..., Batch] | None = None,
        step_together: Callable[[], None] = _nothing,
    ) -> None:
        self._set(locals())


@dataclass(frozen=True, init=False)
class EvalMode(core.EvalMode, _Replaceable):
    """What a classic evaluator may use of a policy: ``forward`` also takes per-env data.

    Args:
        forward: acts greedily.
        reset: forgets what the policy keeps of these envs; None: of all.
        get_attribute: returns an attribute of the policy by its name.
        set_attribute: sets one.
        state_dict: returns what acting needs.
        load_state_dict: restores it.
        seed: seeds the randomness of evaluating.
        spec: what the policy is; None: as ``get_attribute`` says.
    """

    _fields = (
        "forward", "reset", "get_attribute", "set_attribute", "state_dict", "load_state_dict",
        "seed",
    )  # fmt: skip
    _field_defaults = {"seed": _seed_nothing}
    get_attribute: Callable[[str], Any] = field(kw_only=True)
    set_attribute: Callable[[str, Any], None] = field(kw_only=True)

    def __init__(
        self,
        forward: Callable[..., Any],
        reset: Callable[..., None],
        get_attribute: Callable[[str], Any],
        set_attribute: Callable[[str, Any], None],
        state_dict: Callable[[], dict[str, Any]],
        load_state_dict: Callable[[dict[str, Any]], None],
        seed: Callable[[int], object] = _seed_nothing,
        spec: PolicySpec | None = None,
    ) -> None:
        self._set(locals())


class CommandMode(NamedTuple):
    """What a commander may use of a policy: each turns progress into arguments of a forward."""

    get_setting_learn: Callable[[dict[str, Any]], dict[str, Any]]
    get_setting_collect: Callable[[dict[str, Any]], dict[str, Any]]
    get_setting_eval: Callable[[dict[str, Any]], dict[str, Any]]


M = TypeVar("M")

_NEEDED: Final[Mapping[type, tuple[str, ...]]] = {
    LearnMode: ("forward", "info", "monitor_vars", "get_attribute"),
    CollectMode: ("forward", "process_transition", "get_train_sample", "reset"),
    EvalMode: ("forward", "reset"),
    CommandMode: CommandMode._fields,
}
"""The functions by which a foreign mode is known."""


def as_learn_mode(policy: Any, *, user: str) -> LearnMode:
    """Return the classic learn mode of a policy; a learn mode is adapted, or returned as it is.

    Another named tuple with the functions of a learn mode is accepted too. Its forward gets a list
    of samples, as in DI-engine, or a batch if its attribute ``learn_from`` is ``"batch"``.

    Args:
        policy: a policy or its learn mode.
        user: the name of the caller, for the error message.

    Raises:
        ConfigError: if ``policy`` is neither.
    """
    return _as_mode(policy, LearnMode, core.LearnMode, "learn_mode", user)


def as_collect_mode(policy: Any, *, user: str) -> CollectMode:
    """Return the classic collect mode of a policy; see :func:`as_learn_mode`.

    Another named tuple with the functions of a collect mode, written per env, is accepted too.
    """
    return _as_mode(policy, CollectMode, core.CollectMode, "collect_mode", user)


def as_eval_mode(policy: Any, *, user: str) -> EvalMode:
    """Return the classic eval mode of a policy; see :func:`as_collect_mode`."""
    return _as_mode(policy, EvalMode, core.EvalMode, "eval_mode", user)


def as_command_mode(policy: Any, *, user: str) -> CommandMode:
    """Return the command mode of a policy; another named tuple with its methods is accepted too.

    That of a stock policy follows from its settings.

    Raises:
        ConfigError: if ``policy`` has no command mode.
    """
    if isinstance(policy, CorePolicy) and not hasattr(policy, "as_mode"):
        return command_mode_of(getattr(policy.cfg, "eps", None))
    return _as_mode(policy, CommandMode, CommandMode, "command_mode", user)


def _as_mode(policy: Any, kind: type[M], core_kind: type, name: str, user: str) -> M:
    mode = getattr(policy, name, policy)
    owner: Any = getattr(getattr(mode, "forward", None), "__self__", None)
    is_ours = isinstance(mode, core_kind) and not isinstance(mode, kind)
    if not isinstance(mode, core_kind) and not _is_foreign(mode, kind):
        raise ConfigError(
            f"{user} takes a policy or its {name}, got {type(policy).__name__}; "
            f"pass the policy itself, for example {user}(policy, ...)"
        )
    if hasattr(owner, "as_mode") and kind is not CommandMode:
        functions = {name: getattr(mode, name, None) for name in getattr(kind, "_fields", ())}
        defaults = (None, *getattr(kind, "_field_defaults", {}).values())
        given = {name: one for name, one in functions.items() if one not in defaults}
        if given.keys() >= set(kind._fields) - {"seed"}:  # type: ignore[attr-defined]
            built: M = owner.as_mode(kind, given)
            return mode if isinstance(mode, kind) and mode == built else built
    if isinstance(mode, kind):
        return mode
    adapt = _ADAPT[kind] if is_ours else _ADOPT[kind]
    adapted: M = adapt(mode)
    return adapted


def command_mode_of(
    eps: float | Mapping[str, Any] | Schedule | None, check: Callable[[], None] = lambda: None
) -> CommandMode:
    """Return the command mode of a stock policy: collecting gets the ε of its schedule.

    Args:
        eps: the schedule; None: the policy has none.
        check: called before each answer.
    """
    schedule = None if eps is None else Schedule.of(eps)

    def nothing(command_info: dict[str, Any]) -> dict[str, Any]:
        check()
        return {}

    def for_collecting(command_info: dict[str, Any]) -> dict[str, Any]:
        check()
        if schedule is None:
            return {}
        if "envstep" not in command_info:
            raise ConfigError(
                "get_setting_collect needs the key envstep, the env steps collected so far; "
                f"command_info has {', '.join(map(str, command_info)) or 'no keys'}"
            )
        counters = Counters(command_info["envstep"], command_info.get("train_iter"))
        return {"eps": schedule.at(counters)}

    return CommandMode(nothing, for_collecting, nothing)


def collects_data(mode: CollectMode) -> bool:
    """Return whether battle collectors store what the policy does; False for a frozen opponent."""
    return bool(mode.get_attribute(_COLLECT_DATA))


def spec_attribute(spec: PolicySpec, name: str) -> Any:
    """Return what DI-engine calls an attribute of a policy.

    Raises:
        UnknownAttribute: if there is none; the nearest names are listed.
    """
    own = _DI_ENGINE_NAMES.get(name, name)
    if hasattr(spec, own):
        return getattr(spec, own)
    if name in CONFIG_ATTRIBUTES:
        return getattr(as_classic(spec.settings), name, None)
    known = [one.name for one in dataclasses.fields(spec)]
    known += [*_DI_ENGINE_NAMES, *CONFIG_ATTRIBUTES]
    raise UnknownAttribute(
        f"{spec.kind.__name__} has no attribute {name!r} here; "
        f"did you mean: {', '.join(nearest(name, known)) or 'nothing similar'}"
    )


def standard_transition(
    obs: Nested, policy_output: Mapping[str, Any], timestep: EnvTimestep | BatchedTimestep
) -> dict[str, Any]:
    """Return the standard columns of a transition, and what forward returned."""
    return {
        "obs": obs,
        "next_obs": timestep.next_obs,
        **policy_output,
        "reward": timestep.reward,
        "done": timestep.done,
        "terminated": timestep.terminated,
        "truncated": timestep.truncated,
    }


# Modes of stock policies, which act on batches.


class _Attributes:
    """The attributes of an adapted mode, by their names."""

    def __init__(self, spec: PolicySpec) -> None:
        _check_batched(spec.kind)
        self._spec = spec
        self._set: dict[str, Any] = {
            _COLLECT_DATA: True,
            "batched": True,
            "learn_from": "batch",
            "counters": Counters(),
            "state_dict_collect": spec.acting_state,
        }

    def get(self, name: str) -> Any:
        return self._set[name] if name in self._set else spec_attribute(self._spec, name)

    def set(self, name: str, value: Any) -> None:
        self._set[name] = value
        if name == "counters":
            self._spec.set_counters(value)


_INSTEAD: Final = {
    "_forward_collect": "write act_collect(self, obs, env_id, **kwargs)",
    "_forward_eval": "write act_eval(self, obs, env_id, **kwargs)",
    "_forward_learn": "write update(self, batch)",
    "_process_transition": "return what is to be stored from act_collect",
    "_get_train_sample": "write train_batch(self, batch)",
}


def _check_batched(kind: type) -> None:
    """Refuse a policy for batches with a method that would never be called.

    Raises:
        PolicyError: saying what to write.
    """
    for per_env, remedy in _INSTEAD.items():
        if hasattr(kind, per_env):
            raise PolicyError(
                f"{kind.__name__} defines {per_env}, which a policy for batches never calls; "
                f"{remedy}, or derive from dmiddleware.classic.Policy"
            )


def _adapted_learn_mode(mode: core.LearnMode) -> LearnMode:
    spec, attributes = mode.spec, _Attributes(mode.spec)

    def forward(data: Batch | list[Any], **kwargs: Any) -> Any:
        if not isinstance(data, list):
            return mode.forward(data, **kwargs)
        batch = collate_samples(data)
        if spec.discount is not None:
            batch = with_summed_rewards(batch, spec.discount)
        return mode.forward(batch, **kwargs)

    return LearnMode(
        forward=forward,
        state_dict=mode.state_dict,
        load_state_dict=partial(load_learner_state, mode),
        spec=spec,
        reset=lambda data_id=None: None,
        info=lambda: f"{spec.kind.__name__}(device={spec.device}, model={spec.model})",
        monitor_vars=lambda: monitored_of(spec.kind),
        get_attribute=attributes.get,
        set_attribute=attributes.set,
    )


def _adapted_collect_mode(mode: core.CollectMode) -> CollectMode:
    def process_transition(obs: Any, policy_output: Any, timestep: Any) -> Any:
        transition = standard_transition(obs, policy_output, timestep)
        return as_tree(transition) if isinstance(timestep, BatchedTimestep) else transition

    def get_train_sample(data: Batch | list[Any]) -> Any:
        if not isinstance(data, list):
            return mode.train_batch(data)
        columns = map_leaves(lambda leaf: leaf.unsqueeze(1), collate(data))
        batch = _with_targets(mode.spec, mode.train_batch(columns))
        if batch is columns:
            return data
        return to_rows(flatten_lead(batch))

    if rank_and_world_size()[1] > 1 and getattr(mode.spec.settings, "reward_norm", False):
        raise ConfigError(
            "reward_norm must be False: this collector scales each trajectory by itself, while "
            "several ranks sum their statistics once for each collected batch; collect in a chain, "
            "or set value_norm=True instead"
        )
    attributes = _Attributes(mode.spec)
    return CollectMode(
        forward=_acting_on_both(mode),
        state_dict=mode.state_dict,
        load_state_dict=partial(load_acting_state, mode),
        spec=mode.spec,
        reset=mode.reset,
        seed=mode.seed,
        train_batch=mode.train_batch,
        transitions=mode.transitions,
        step_together=mode.step_together,
        process_transition=process_transition,
        get_train_sample=get_train_sample,
        get_attribute=attributes.get,
        set_attribute=attributes.set,
    )


def _adapted_eval_mode(mode: core.EvalMode) -> EvalMode:
    attributes = _Attributes(mode.spec)
    return EvalMode(
        forward=_acting_on_both(mode),
        state_dict=mode.state_dict,
        load_state_dict=partial(load_acting_state, mode),
        spec=mode.spec,
        reset=mode.reset,
        seed=mode.seed,
        get_attribute=attributes.get,
        set_attribute=attributes.set,
    )


def _acting_on_both(mode: core.CollectMode | core.EvalMode) -> Callable[..., dict[Any, Any]]:
    """Return a mode's forward for batches, and for dictionaries from env ids to observations."""

    def forward(data: Any, *, env_id: npt.ArrayLike | None = None, **kwargs: Any) -> Any:
        if not (isinstance(data, dict) and is_per_env(data)):
            return mode.forward(data, env_id=env_id, **kwargs)
        if not data:
            return {}
        check_finite(data, user=mode.spec.kind.__name__)
        env_ids = list(data)
        obs = stack(list(data.values()), path="obs")
        inputs = join_inputs(kwargs, env_ids)
        return split_outputs(mode.forward(obs, env_id=np.array(env_ids), **inputs), env_ids)

    return forward


def _with_targets(spec: PolicySpec, batch: Batch) -> Batch:
    """Return a trajectory ``[T, 1, …]`` with n-step returns, advantages or whole returns.

    Workers that learn from lists do no more than this with it, while in a chain the buffer or an
    estimator computes them.
    """
    if spec.learns_from_trajectories:
        return spec.add_targets(batch)
    if spec.gae_lambda is not None and spec.value_fn is not None and spec.discount is not None:
        estimated = with_advantages(
            batch,
            reward=spec.scale_rewards(batch),
            value_fn=spec.value_fn,
            discount=spec.discount,
            gae_lambda=spec.gae_lambda,
        )
        spec.observe_returns(estimated["ret"], estimated["obs"])
        return estimated
    if "ret" in spec.learn_columns and spec.discount is not None:
        columns = (batch["reward"], batch["terminated"], batch["done"])
        return with_columns(batch, ret=discounted_return(*columns, discount=spec.discount))
    if spec.n_step > 1 and spec.discount is not None:
        return with_nstep_returns(batch, n=spec.n_step, discount=spec.discount)
    return batch


_ADAPT: Final[Mapping[type, Callable[[Any], Any]]] = {
    LearnMode: _adapted_learn_mode,
    CollectMode: _adapted_collect_mode,
    EvalMode: _adapted_eval_mode,
}

# Modes of other classes, as programs for DI-engine define them.


def _is_foreign(mode: object, kind: type) -> bool:
    """Return whether an object of another class has the functions of a mode."""
    ours = (core.LearnMode, core.CollectMode, core.EvalMode, CommandMode)
    if isinstance(mode, (*ours, type)) or hasattr(mode, "learn_mode"):
        return False
    if kind is not LearnMode and _has(mode, _NEEDED[LearnMode]):
        return False  # its forward would learn from what is to be acted on
    return _has(mode, _NEEDED[kind])


def _has(mode: object, functions: tuple[str, ...]) -> bool:
    return all(callable(getattr(mode, function, None)) for function in functions)


_CFG: Final = {"traj_len_inf": False, "multi_gpu": False, "seed": None}
_ALWAYS: Final[Mapping[str, Any]] = {
    _COLLECT_DATA: True,
    "batched": False,
    "counters": Counters(),
    "learn_from": "samples",
}
"""What workers ask a policy for, where a foreign mode does not have it."""


def spec_from_attributes(get_attribute: Callable[[str], Any], kind: type) -> PolicySpec:
    """Return the spec of a policy that has attributes by name; what it lacks has its default.

    Args:
        get_attribute: returns an attribute by its name in DI-engine.
        kind: the class of the policy.
    """
    names = {own: name for name, own in _DI_ENGINE_NAMES.items()}
    found: dict[str, Any] = {"kind": kind}
    for one in dataclasses.fields(PolicySpec):
        try:
            value = get_attribute(names.get(one.name, one.name))
        except (AttributeError, KeyError, NotImplementedError):
            continue
        if value is not None and one.name != "kind":
            found[one.name] = value
    own = {}
    for name in CONFIG_ATTRIBUTES:
        with suppress(AttributeError, KeyError, NotImplementedError):
            own[name] = get_attribute(name)
    cfg = {**_CFG, **(own.pop("cfg", None) or {})}
    found["settings"] = ClassicSettings(cfg, own)
    return PolicySpec(**found)


def _adopted(mode: Any) -> tuple[dict[str, Any], Callable[[str], Any]]:
    """Return the functions that all adopted modes have, and how attributes are read."""

    def own(name: str) -> Any:
        return mode.get_attribute(name)

    spec = dataclasses.replace(
        spec_from_attributes(own, type(mode)), acting_state=lambda: _acting_state(mode)
    )

    def get_attribute(name: str) -> Any:
        known = name in (*_ALWAYS, *CONFIG_ATTRIBUTES) or hasattr(
            spec, _DI_ENGINE_NAMES.get(name, name)
        )
        try:
            value = own(name)
        except (AttributeError, KeyError, NotImplementedError):
            if not known:
                raise
            value = None
        if not known or (value is not None and name != "cfg"):
            return value
        return _ALWAYS[name] if name in _ALWAYS else spec_attribute(spec, name)

    functions = {
        "spec": spec,
        "reset": getattr(mode, "reset", None) or (lambda data_id=None: None),
        "get_attribute": get_attribute,
        "set_attribute": getattr(mode, "set_attribute", lambda name, value: None),
        "state_dict": getattr(mode, "state_dict", dict),
        "load_state_dict": getattr(mode, "load_state_dict", lambda state: None),
    }
    return functions, get_attribute


def _adopted_learn_mode(mode: Any) -> LearnMode:
    functions, get_attribute = _adopted(mode)

    def forward(data: Batch | list[Any], **kwargs: Any) -> Any:
        if get_attribute(_LEARN_FROM) == "batch":  # of this project; others learn from lists
            return mode.forward(collate_samples(data) if isinstance(data, list) else data, **kwargs)
        return mode.forward(to_rows(data) if isinstance(data, Batch) else data, **kwargs)

    return LearnMode(forward=forward, info=mode.info, monitor_vars=mode.monitor_vars, **functions)


def _adopted_collect_mode(mode: Any) -> CollectMode:
    def process_transition(obs: Nested, policy_output: Any, timestep: Any) -> Any:
        if isinstance(timestep, BatchedTimestep):
            return join_transitions(mode.process_transition, obs, policy_output, timestep)
        return mode.process_transition(obs, policy_output, timestep)

    def train_batch(batch: Batch) -> Batch:
        return sample_by_trajectory(batch, mode.get_train_sample)

    def get_train_sample(data: Batch | list[Any]) -> Any:
        return mode.get_train_sample(data) if isinstance(data, list) else train_batch(data)

    functions, _ = _adopted(mode)
    return CollectMode(
        forward=_per_env_forward(mode),
        seed=getattr(mode, "seed", lambda seed: None),
        train_batch=train_batch,
        transitions=transitions_by(mode.process_transition),
        process_transition=process_transition,
        get_train_sample=get_train_sample,
        **functions,
    )


def _adopted_eval_mode(mode: Any) -> EvalMode:
    functions, _ = _adopted(mode)
    seed = getattr(mode, "seed", lambda seed: None)
    return EvalMode(forward=_per_env_forward(mode), seed=seed, **functions)


def _per_env_forward(mode: Any) -> Callable[..., Any]:
    """Return a forward for batches too of a mode whose forward takes dictionaries by env id."""

    def forward(data: Any, *, env_id: npt.ArrayLike | None = None, **kwargs: Any) -> Any:
        if isinstance(data, dict) and is_per_env(data):
            return mode.forward(data, **kwargs)
        n_envs = len(next(iter(leaves(data)))[1])
        ids = (np.arange(n_envs) if env_id is None else np.asarray(env_id)).tolist()
        per_env = {one: index_rows(data, index) for index, one in enumerate(ids)}
        return join_outputs(mode.forward(per_env, **split_inputs(kwargs, ids)), ids)

    return forward


def transitions_by(process: Callable[..., Any]) -> Callable[..., Batch]:
    """Return what makes the columns of a step with a function that makes single transitions."""

    def transitions(
        obs: Any, output: Mapping[str, Any], timestep: BatchedTimestep, rows: npt.NDArray[np.int64]
    ) -> Batch:
        shown = np.flatnonzero(timestep.valid | timestep.abnormal).tolist()
        timesteps = dict(zip(shown, timestep, strict=True))
        return collate(
            [
                process(
                    index_rows(obs, index),
                    {name: index_rows(column, index) for name, column in output.items()},
                    timesteps[index],
                )
                for index in rows.tolist()
            ]
        )

    return transitions


def _acting_state(mode: Any) -> dict[str, Any]:
    """Return the entries of a foreign mode's state that acting needs."""
    state: dict[str, Any] = mode.state_dict()
    return {"model": state["model"]} if "model" in state else state


_ADOPT: Final[Mapping[type, Callable[[Any], Any]]] = {
    LearnMode: _adopted_learn_mode,
    CollectMode: _adopted_collect_mode,
    EvalMode: _adopted_eval_mode,
    CommandMode: lambda mode: mode,
}
