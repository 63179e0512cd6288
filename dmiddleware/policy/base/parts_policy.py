"""Policies whose update is a function of declared parts."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from functools import partial
from typing import Any, ClassVar, Final

import torch
from torch import nn
from torch.torch_version import TorchVersion

from dmiddleware.config import Option, check_value, switch
from dmiddleware.data.batch import Batch, Value, as_tree, leaves, map_leaves, to_dict
from dmiddleware.errors import CheckpointMismatch, DMiddlewareError, NonFiniteLoss, PolicyError
from dmiddleware.policy.base.batched_policy import BatchedPolicy
from dmiddleware.policy.base.classic_state import in_own_names, is_partial, optimizer_slots
from dmiddleware.policy.base.data_parallel import broadcast_model, largest_over_ranks
from dmiddleware.policy.base.parts import Part, broken_weights, take_flag
from dmiddleware.policy.base.policy import PolicyOptions, to_be_written
from dmiddleware.policy.base.state_dict import (
    check_model_state,
    load_model_state,
    model_state,
    optimizer_state,
    part_of,
    plain_name,
)
from dmiddleware.seeding import derive_seed
from dmiddleware.torch_private import compiler_traces_gradients

__all__ = ["PartsOptions", "PartsPolicy", "UpdateOutput"]

_log = logging.getLogger(__name__)

_CHECK_EVERY = 100
"""Updates between two looks at whether steps on a GPU were skipped."""
_FLAGS = frozenset(("done", "terminated", "truncated", "is_first", "mask"))
_SEEN = frozenset(("obs", "next_obs"))
_COMPILES_FROM: Final = TorchVersion("2.13")
"""The first version whose compiler traces ``torch.autograd.grad`` and isolates recompilations."""


class PartsOptions(PolicyOptions, total=False):
    """The options that all policies with parts have in ``for_env``."""

    compile: bool


class UpdateOutput(MutableMapping[str, Any]):
    """The output of an update on a GPU, whose scalars are read when one of them is asked for.

    Reading waits for the GPU, so loggers that look at every hundredth output let the updates
    between them run without a pause.

    Args:
        output: scalars and other tensors, and Python numbers.
        look: called once after the scalars have been read.
    """

    def __init__(self, output: Mapping[str, Any], look: Callable[[], None]) -> None:
        self._scalars = [key for key, value in output.items() if _is_scalar(value)]
        self._packed = torch.stack([output[key].detach().float() for key in self._scalars])
        self._values = dict(output)
        self._look: Callable[[], None] | None = look

    def __getitem__(self, key: str) -> Any:
        value = self._values[key]
        if not _is_scalar(value):
            return value
        self._read()
        return self._values[key]

    def __setitem__(self, key: str, value: Any) -> None:
        self._values[key] = value

    def __delitem__(self, key: str) -> None:
        del self._values[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __contains__(self, key: object) -> bool:
        return key in self._values

    def _read(self) -> None:
        numbers = zip(self._scalars, self._packed.tolist(), strict=True)
        self._values |= {key: number for key, number in numbers if key in self._values}
        if self._look is not None:
            look, self._look = self._look, None
            look()


class PartsPolicy(BatchedPolicy):
    """A policy that declares its parts, and updates them by a function of parts and batch.

    A subclass writes

    - ``_make_parts()``, which returns its :class:`Part` objects by name: modules with optimiser,
      target network and clipping, and other objects with a state. The policy's model may be one
      part, or its submodules several;
    - ``_update(batch, **drawn)``, which makes one update with :meth:`Part.step` and returns what to
      log as tensors. It reads no value back and branches on none, so it can be compiled;
    - if the update is random, ``_draw(batch)``, which returns the random tensors that it takes;
    - if updates differ, such as a policy that is updated every second time, ``_variant()``.

    Placing on the device, checkpoints, what collectors receive, target updates, averaging over
    ranks and the check for values that are not finite follow from the declaration.

    Args:
        cfg: what differs from ``default_config()``.
        model: None builds the one that ``cfg.model`` and :meth:`default_model` describe; a module
            is used as it is.
        enable_field: the parts to build, of ``"learn"``, ``"collect"``, ``"eval"``; None: all.

    Example:
        >>> from dmiddleware.policy import Part, adam
        >>> class Regression(PartsPolicy):
        ...     def _make_parts(self):
        ...         return {"model": Part(self._model, adam(0.1), acts=True)}
        ...     def _update(self, batch):
        ...         loss = (self._model(batch["obs"]) - batch["action"]).square().mean()
        ...         self._parts["model"].step(loss)
        ...         return {"total_loss": loss}
        >>> _ = torch.manual_seed(0)
        >>> _ = torch.manual_seed(0)
        >>> policy = Regression(model=torch.nn.Linear(2, 1), enable_field=["learn"])
        >>> batch = {"obs": torch.ones(4, 2), "action": torch.ones(4, 1)}
        >>> losses = [policy.learn_mode.forward(batch)["total_loss"] for _ in range(50)]
        >>> losses[0] > 100 * losses[-1]
        True
    """

    config: ClassVar[dict[str, Any]] = {
        "compile": Option(
            False,
            switch,
            "whether to compile the update with torch.compile, which takes a minute at the start",
        ),
    }
    _required: ClassVar[dict[str, str]] = {**BatchedPolicy._required, "learn": "_update"}

    @classmethod
    def check_config(cls, cfg: Any) -> None:
        """Refuse impossible combinations."""
        super().check_config(cfg)
        check_value(
            not (cfg.compile and cfg.multi_gpu),
            "compile",
            cfg.compile,
            "False with multi_gpu, because ranks exchange gradients within the update",
        )
        check_value(
            not cfg.compile or torch.__version__ >= _COMPILES_FROM,
            "compile",
            cfg.compile,
            f"False with torch {torch.__version__}; compiled updates need torch "
            f"{_COMPILES_FROM} or newer",
        )

    @to_be_written
    def _make_parts(self) -> dict[str, Part]:
        """Return the parts by name; called once, after ``_init_common``."""
        raise NotImplementedError

    @to_be_written
    def _update(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Make one update: ``_update(batch, **drawn)``.

        Args:
            *args: the batch, ``[B, …]`` columns by name; nested observations are nested
                dictionaries. With ``obs_norm``, observations are normalised already.
            **kwargs: what ``_draw`` and ``_variant`` returned.

        Returns:
            What to log: scalars; maybe ``priority`` ``[B]``; maybe ``kl_stop``, a bool scalar: True
            if the update was skipped, or False.
        """
        raise NotImplementedError

    def _draw(self, batch: Mapping[str, Any]) -> dict[str, torch.Tensor]:
        """Return the random tensors of an update, drawn from ``self._learn_generator``."""
        return {}

    def _variant(self) -> dict[str, bool]:
        """Return flags of the next update; a compiled update is compiled once for each variant."""
        return {}

    def _submodule(self, name: str) -> nn.Module:
        """Return a part of the model.

        Raises:
            PolicyError: if the model has no such submodule.
        """
        children = dict(self._model.named_children())
        if name not in children:
            raise PolicyError(
                f"{type(self).__name__} needs a model with the submodule {name}, but "
                f"{type(self._model).__name__} has {', '.join(children) or 'none'}; see "
                "docs/howto/custom-model.md"
            )
        return children[name]

    def _init_parts(self) -> None:
        self._parts = self._make_parts()
        paths = {id(module): path for path, module in self._model.named_modules()}
        # The path of each part within the model; the others are saved under their own names.
        self._paths = {
            name: paths[id(part.module)]
            for name, part in self._parts.items()
            if id(part.module) in paths
        }
        for part in self._parts.values():
            if isinstance(part.module, nn.Module):
                part.module.to(self._device)
        if "learn" in self._enabled:
            self._prepare_to_learn()

    def _prepare_to_learn(self) -> None:
        self._not_finite = torch.zeros((), device=self._device)
        self._n_outputs = 0
        # Scalars on the device, where they change: a compiled update would not see a number change.
        self._values: dict[str, Any] = {
            path: schedule.start
            if schedule.type == "constant"
            else torch.tensor(schedule.start, device=self._device)
            for path, schedule in self._schedules.items()
        }
        self._compiled: Callable[..., dict[str, torch.Tensor]] | None = None
        self._learn_generator = torch.Generator().manual_seed(
            derive_seed(self._generator.initial_seed(), "learn")
        )
        if self._reducer is not None and "" not in self._paths.values():
            self._reducer.close()  # its hooks expect that backward reaches the whole model
        for name, part in self._parts.items():
            if self._reducer is None or not part.is_module:
                part.prepare(not_finite=self._not_finite)
                continue
            if name not in self._paths:
                broadcast_model(part.module)
            reduce = partial(self.sync_gradients, part.module)
            part.prepare(not_finite=self._not_finite, reduce=reduce, agree=largest_over_ranks)
        self._has_schedules = any(
            part.schedule is not None for part in self._parts.values()
        ) or any(isinstance(value, torch.Tensor) for value in self._values.values())

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_compiled": None}

    def _batch(self, data: Batch | list[dict[str, Any]]) -> Batch:
        return _standard_columns(super()._batch(data))

    def _run_update(self, batch: Mapping[str, Any], **drawn: Any) -> dict[str, torch.Tensor]:
        if not self._cfg.compile:
            return self._update_as_seen(batch, **drawn)
        if self._compiled is None:
            compiler_traces_gradients()
            self._compiled = torch.compile(  # type: ignore[call-overload]  # stubs of torch 2.13
                self._update_as_seen,
                fullgraph=True,
                isolate_recompiles=True,
                options={"guard_filter_fn": _guards_to_keep},
            )
        return self._compiled(batch, **drawn)

    def _update_as_seen(self, batch: Mapping[str, Any], **drawn: Any) -> dict[str, torch.Tensor]:
        return self._update(self._rows_as_seen(batch), **drawn)

    def _rows_as_seen(self, batch: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the columns as the update sees them; by default as they are."""
        return batch

    def _forward_learn(self, batch: Batch, **kwargs: Any) -> Any:
        columns = to_dict(batch)
        self._follow_schedules()
        output = self._run_update(columns, **self._draw(columns), **self._variant())
        if not self._on_gpu and take_flag(self._not_finite):
            raise self._non_finite_error(_what_is_bad(output), batch)
        if not output.get("kl_stop", False):
            self._train_iter += 1
            for part in self._parts.values():
                rule = part.target_rule
                if rule is not None and self._train_iter % rule.every == 0:
                    # On a GPU also while steps are skipped, towards weights that do not change.
                    part.move_target()
        return self._reported(output)

    def _follow_schedules(self) -> None:
        if not self._has_schedules:
            return
        counters = self._counters._replace(update=self._train_iter)
        for part in self._parts.values():
            if part.schedule is not None:
                part.learning_rate = part.schedule.at(counters)
        for path, value in self._values.items():
            if isinstance(value, torch.Tensor):
                value.fill_(self._schedules[path].at(counters))

    def _reported(self, output: dict[str, Any]) -> Mapping[str, Any]:
        """Return the output in Python numbers; on a GPU, they are read when they are asked for."""
        first = next(part for part in self._parts.values() if part.optimizer is not None)
        output["cur_lr"] = first.learning_rate
        if self._on_gpu:
            self._n_outputs += 1
            if self._n_outputs % _CHECK_EVERY == 0:
                self._look()
            return UpdateOutput(output, self._look)
        return {key: value.item() if _is_scalar(value) else value for key, value in output.items()}

    def _look(self) -> None:
        """Raise if a step was skipped since the last look."""
        if take_flag(self._not_finite):
            raise NonFiniteLoss(
                broken_weights(self._parts)
                or "a loss or the norm of a gradient was NaN or infinite in one of the last "
                f"{_CHECK_EVERY} updates; its step and all later ones were skipped. Check "
                "observations and rewards for NaN, lower the learning rate or clip gradients"
            )

    def _non_finite_error(self, what: str, batch: Batch) -> DMiddlewareError:
        broken = broken_weights(self._parts)
        return super()._non_finite_error(what, batch) if broken is None else NonFiniteLoss(broken)

    def _what_was_kept(self) -> str:
        n_trained = sum(part.optimizer is not None for part in self._parts.values())
        if n_trained == 1:
            return super()._what_was_kept()
        return "its step and those of the parts that step later in this update were skipped"

    def _after_loading_weights(self) -> None:
        for part in self._parts.values():
            if part.target is not None:
                part.target.load_state_dict(part.module.state_dict())

    def _state_dict_collect(self) -> dict[str, Any]:
        """Return the parts that acting needs."""
        model: dict[str, Any] = {}
        for name, path in self._paths.items():
            if self._parts[name].acts:
                state = model_state(self._parts[name].module)
                model |= {f"{path}.{key}" if path else key: one for key, one in state.items()}
        return {"model": model, "acting_parts": self._others(acting=True)}

    def _load_state_dict_collect(self, state_dict: dict[str, Any]) -> None:
        """Load the parts that acting needs; a learner's state serves as well.

        Raises:
            CheckpointMismatch: if a part is missing, or belongs to another model; nothing was
                loaded.
        """
        state_dict = self._in_own_names(state_dict)
        self._check_acting(state_dict)
        for name, path in self._paths.items():
            if self._parts[name].acts:
                load_model_state(self._parts[name].module, _below(state_dict["model"], path))
        self._load_others(state_dict.get("acting_parts", {}))

    def _state_dict_learn(self) -> dict[str, Any]:
        """Return everything needed to resume.

        Raises:
            NonFiniteLoss: if a step was skipped since the last look.
        """
        self._look()
        return {
            "model": model_state(self._model),
            "acting_parts": self._others(acting=True),
            "learning_parts": self._others(acting=False),
            "target": {
                name: model_state(part.target)
                for name, part in self._parts.items()
                if part.target is not None
            },
            "optimizer": {
                name: optimizer_state(part.optimizer)
                for name, part in self._parts.items()
                if part.optimizer is not None
            },
            **self._generator_states(),
            "learn_generator": self._learn_generator.get_state(),
            "train_iter": self._train_iter,
        }

    def _load_state_dict_learn(self, state_dict: dict[str, Any]) -> None:
        """Restore what :meth:`_state_dict_learn` returned.

        A state that has only the model, and maybe its optimizer and target network, as DI-engine
        saves it, is loaded as far as it goes; the rest begins again, with a warning.

        Raises:
            CheckpointMismatch: if a part is missing, or belongs to another model; nothing was
                loaded.
        """
        if is_partial(state_dict):
            self._load_partial(state_dict)
            return
        targets, optimizers, others, learning, train_iter = (
            part_of(state_dict, name)
            for name in (
                "target",
                "optimizer",
                "learning_parts",
                "learn_generator",
                "train_iter",
            )
        )
        part_of(state_dict, "generator")
        for name, part in self._parts.items():
            if part.target is not None:
                check_model_state(part.target, part_of(targets, name), f"target network of {name}")
            if part.optimizer is not None:
                part_of(optimizers, name)
        self._check_acting(state_dict)
        self._check_others(others, acting=False)
        load_model_state(self._model, part_of(state_dict, "model"))
        self._load_others({**state_dict.get("acting_parts", {}), **others})
        for name, part in self._parts.items():
            if part.target is not None:
                load_model_state(part.target, targets[name])
            if part.optimizer is not None:
                part.load_optimizer(optimizers[name])
        self._set_generator_states(state_dict)
        self._learn_generator.set_state(learning.cpu())
        self._train_iter = int(train_iter)

    def _in_own_names(self, state_dict: Mapping[str, Any]) -> dict[str, Any]:
        """Return a state whose model has the names of this one, if it is one of DI-engine's."""
        model = state_dict.get("model")
        if not isinstance(model, Mapping):
            return dict(state_dict)
        return {**state_dict, "model": in_own_names(model, self._model.state_dict())}

    def _load_partial(self, state_dict: Mapping[str, Any]) -> None:
        """Load the model, and of its optimizer and its target network what there is."""
        own = self._model.state_dict()
        model = in_own_names(state_dict["model"], own)
        missing = [*self._others(acting=True), "random generators"]
        targets = [part.target for part in self._parts.values() if part.target is not None]
        is_whole = len(targets) == 1 and "" in self._paths.values()
        target = state_dict.get("target_model") if is_whole else None
        if target is not None:
            target = in_own_names(target, own)
            check_model_state(targets[0], target, "target network")
        load_model_state(self._model, model)
        self._after_loading_weights()
        if target is not None:
            load_model_state(targets[0], target)
        elif targets:
            missing.append("target network (now a copy of the network)")
        if list(model) != list(own) or not self._load_slots(state_dict.get("optimizer") or {}):
            missing.append("optimizer")
        self._train_iter = 0
        _log.warning(
            "%s: the state to load has no usable %s; they begin again, and updates count from 0",
            type(self).__name__,
            ", ".join(missing),
        )

    def _load_slots(self, state: Mapping[str, Any]) -> bool:
        """Load what the only optimizer has learned, if it fits; return whether it did."""
        trained = [
            (one, one.optimizer) for one in self._parts.values() if one.optimizer is not None
        ]
        if len(trained) != 1:
            return False
        (part, optimizer), *_ = trained
        saved = optimizer_state(optimizer)
        slots = optimizer_slots(state, saved)
        if slots is not None:
            part.load_optimizer({**saved, "state": slots})
        return slots is not None

    def _others(self, *, acting: bool) -> dict[str, Any]:
        """Return the states of the parts that do not belong to the model."""
        return {
            name: model_state(part.module) if part.is_module else part.module.state_dict()
            for name, part in self._parts.items()
            if name not in self._paths and part.acts is acting
        }

    def _load_others(self, states: Mapping[str, Any]) -> None:
        for name, state in states.items():
            module = self._parts[name].module
            if isinstance(module, nn.Module):
                load_model_state(module, state, name)
            else:
                module.load_state_dict(state)

    def _check_acting(self, state_dict: Mapping[str, Any]) -> None:
        model = part_of(state_dict, "model")
        for name, path in self._paths.items():
            if self._parts[name].acts:
                check_model_state(self._parts[name].module, _below(model, path))
        self._check_others(state_dict.get("acting_parts", {}), acting=True)

    def _check_others(self, states: Mapping[str, Any], *, acting: bool) -> None:
        """Reject a state that was saved with other options: a network must see what it learned."""
        own = {
            name: part
            for name, part in self._parts.items()
            if name not in self._paths and part.acts is acting
        }
        left_out = {name for name, part in own.items() if part.optional and name not in states}
        if different := sorted((own.keys() - left_out) ^ set(states)):
            name = different[0]
            raise CheckpointMismatch(
                f"the checkpoint has {'no' if name in own else 'a'} part {name}, but this "
                f"{type(self).__name__} has {'one' if name in own else 'none'}; build the policy "
                "with the options that it was trained with"
            )
        for name, part in own.items():
            if part.is_module and name in states:
                check_model_state(part.module, states[name], name)


def _standard_columns(batch: Batch) -> Batch:
    """Return the columns of a batch in the types that updates have; those that fit as they are.

    Numbers are float32, and flags are bool, also in data that was made by hand or stored in other
    types. Observations are left to the networks, which convert them, and integers stay integers.
    """
    columns: dict[str, Any] = dict(batch.items())
    changed = {}
    for name, column in columns.items():
        if name in _SEEN or isinstance(column, list):
            continue
        standard = _standard(name, column)
        if standard is not column:
            changed[name] = standard
    if not changed:
        return batch
    lists = {name: column for name, column in columns.items() if isinstance(column, list)}
    tensors = {name: column for name, column in columns.items() if name not in lists}
    return as_tree({**tensors, **changed}, lists=lists)


def _standard(name: str, column: Value) -> Value:
    if isinstance(column, Batch):
        if all(_standard(name, leaf) is leaf for _, leaf in leaves(column)):
            return column
        return map_leaves(lambda leaf: _standard(name, leaf), column)
    if name in _FLAGS:
        return column if column.dtype == torch.bool else column != 0
    if column.dtype != torch.float32 and (column.is_floating_point() or name == "reward"):
        return column.float()
    return column


def _below(state: Mapping[str, Any], path: str) -> dict[str, Any]:
    """Return the tensors of a submodule, by their names within it."""
    state = {plain_name(name): value for name, value in state.items()}
    if not path:
        return state
    prefix = f"{plain_name(path)}."
    return {
        name.removeprefix(prefix): value for name, value in state.items() if name.startswith(prefix)
    }


def _what_is_bad(output: Mapping[str, Any]) -> str:
    for key, value in output.items():
        if _is_scalar(value) and not value.isfinite():
            return f"{key} is {value.item()}"
    return "a loss or gradient is not finite"


def _guards_to_keep(guards: Sequence[Any]) -> list[bool]:
    """Return which of the compiler's guards to check before each call: those that may fail.

    Most guards are about modules and about the code of the update, which stay what they are.
    Checking all of them takes longer than some updates. Guards of the batch, and of what else the
    policy holds, are kept.
    """
    filters: list[Callable[..., list[bool]]] = [
        torch.compiler.skip_guard_on_all_nn_modules_unsafe,
        torch.compiler.skip_guard_on_globals_unsafe,
    ]
    return [all(kept) for kept in zip(*(keep(guards) for keep in filters), strict=True)]


def _is_scalar(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.dim() == 0
