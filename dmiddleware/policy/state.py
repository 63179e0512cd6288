"""States of policies, models and optimizers, in a form that checkpoints store without pickle."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from dmiddleware.errors import CheckpointMismatch
from dmiddleware.policy.component import Component, optimizer_state
from dmiddleware.policy.generators import PolicyGenerators

__all__ = [
    "PolicyState",
    "check_model_state",
    "component_state",
    "load_component_state",
    "load_model_state",
    "model_state",
    "optimizer_states",
    "entry_of",
    "plain_name",
]


class PolicyState:
    """The state of a policy's model, of its components and of its random generators.

    Args:
        model: the policy's model.
        components: its components, by name.
        generators: its random generators.
        owner: the name of the policy's class, for messages.

    Attributes:
        paths: the path of each component within the model; the others are saved under their own
            names.
    """

    def __init__(
        self,
        model: nn.Module,
        components: Mapping[str, Component[Any]],
        generators: PolicyGenerators,
        owner: str,
    ) -> None:
        self._model = model
        self._components = components
        self._generators = generators
        self._owner = owner
        paths = {id(module): path for path, module in model.named_modules()}
        self.paths = {
            name: paths[id(component.module)]
            for name, component in components.items()
            if id(component.module) in paths
        }

    def acting(self) -> dict[str, Any]:
        """Return the components that acting needs."""
        model: dict[str, Any] = {}
        for name, path in self.paths.items():
            if self._components[name].acts:
                state = model_state(self._components[name].module)
                model |= {f"{path}.{key}" if path else key: value for key, value in state.items()}
        return {"model": model, "acting": self._others(acting=True)}

    def load_acting(self, state: Mapping[str, Any]) -> None:
        """Load the components that acting needs; a learner's state serves as well.

        Raises:
            CheckpointMismatch: if a component is missing, or belongs to another model; nothing was
                loaded.
        """
        self._check_acting(state)
        for name, path in self.paths.items():
            if self._components[name].acts:
                load_model_state(self._components[name].module, _below(state["model"], path))
        self._load_others(state.get("acting", {}))

    def learning(self) -> dict[str, Any]:
        """Return everything that learning continues from."""
        return {
            "model": model_state(self._model),
            "acting": self._others(acting=True),
            "learning": self._others(acting=False),
            "target": {
                name: model_state(component.target)
                for name, component in self._components.items()
                if component.has_target
            },
            "optimizer": optimizer_states(self._components),
            **self.generators(),
        }

    def load_learning(self, state: Mapping[str, Any]) -> None:
        """Load what :meth:`learning` returned.

        Raises:
            CheckpointMismatch: if a component is missing, or belongs to another model; nothing was
                loaded.
        """
        targets, optimizers, others = (
            entry_of(state, name) for name in ("target", "optimizer", "learning")
        )
        for name in self._generators.on_cpu._fields:
            entry_of(state, name)
        for name, component in self._components.items():
            if component.has_target:
                check_model_state(
                    component.target, entry_of(targets, name), f"target network of {name}"
                )
            if component.optimizer is not None:
                entry_of(optimizers, name)
        self._check_acting(state)
        self._check_others(others, acting=False)
        load_model_state(self._model, entry_of(state, "model"))
        self._load_others({**state.get("acting", {}), **others})
        for name, component in self._components.items():
            if component.has_target:
                load_model_state(component.target, targets[name])
            if component.optimizer is not None:
                component.load_optimizer(optimizers[name])
        self.load_generators(state)

    def copy_targets(self) -> None:
        """Make the target networks copies of their modules, as after a load of their weights."""
        for component in self._components.values():
            if component.has_target:
                component.target.load_state_dict(component.module.state_dict())

    def generators(self) -> dict[str, Any]:
        """Return the states of the random generators."""
        return self._generators.state_dict()

    def load_generators(self, states: Mapping[str, Any]) -> None:
        """Restore what :meth:`generators` returned."""
        self._generators.load_state_dict(states)

    def _others(self, *, acting: bool) -> dict[str, Any]:
        """Return the states of the components that do not belong to the model."""
        return {
            name: component_state(component)
            for name, component in self._components.items()
            if name not in self.paths and component.acts is acting
        }

    def _load_others(self, states: Mapping[str, Any]) -> None:
        for name, state in states.items():
            load_component_state(self._components[name], state, name)

    def _check_acting(self, state: Mapping[str, Any]) -> None:
        model = entry_of(state, "model")
        for name, path in self.paths.items():
            if self._components[name].acts:
                check_model_state(self._components[name].module, _below(model, path))
        self._check_others(state.get("acting", {}), acting=True)

    def _check_others(self, states: Mapping[str, Any], *, acting: bool) -> None:
        """Reject a state that was saved with other options: a network must see what it learned."""
        components = {
            name: component
            for name, component in self._components.items()
            if name not in self.paths and component.acts is acting
        }
        left_out = {
            name
            for name, component in components.items()
            if component.optional and name not in states
        }
        if different := sorted((components.keys() - left_out) ^ set(states)):
            name = different[0]
            raise CheckpointMismatch(
                f"the checkpoint has {'no' if name in components else 'a'} component {name}, but "
                f"this {self._owner} has {'one' if name in components else 'none'}; build the "
                "policy with the options that it was trained with"
            )
        for name, component in components.items():
            if component.is_module and name in states:
                check_model_state(component.module, states[name], name)


def component_state(component: Component[Any]) -> Any:
    """Return a copy of the state of a component's module, or of its other object."""
    if component.is_module:
        return model_state(component.module)
    return component.module.state_dict()


def load_component_state(component: Component[Any], state: Mapping[str, Any], name: str) -> None:
    """Restore what :func:`component_state` returned.

    Raises:
        CheckpointMismatch: if it belongs to another model.
    """
    if component.is_module:
        load_model_state(component.module, state, name)
    else:
        component.module.load_state_dict(state)


def optimizer_states(components: Mapping[str, Component[Any]]) -> dict[str, Any]:
    """Return a copy of the states of the optimizers, by the names of their components."""
    return {
        name: optimizer_state(component.optimizer)
        for name, component in components.items()
        if component.optimizer is not None
    }


def model_state(model: nn.Module) -> dict[str, Any]:
    """Return a copy of the model's parameters and buffers, which later updates do not change.

    The names are those of the plain model, whether or not it is compiled.
    """
    return {
        plain_name(name): value.detach().clone() if isinstance(value, torch.Tensor) else value
        for name, value in model.state_dict().items()
    }


def entry_of(state: Mapping[str, Any], name: str) -> Any:
    """Return one entry of a policy's state.

    Raises:
        CheckpointMismatch: if the state lacks it, naming what it has.
    """
    if name not in state:
        raise CheckpointMismatch(
            f"the state to load has no {name}, only {', '.join(map(str, state)) or 'nothing'}; "
            "load a state of the same kind of policy; learn_mode needs one that learn_mode saved"
        )
    return state[name]


def check_model_state(model: nn.Module, state: Mapping[str, Any], what: str = "model") -> None:
    """Reject a state that belongs to another model.

    Raises:
        CheckpointMismatch: naming the first parameter that differs, and both shapes.
    """
    expected = {plain_name(name): value for name, value in model.state_dict().items()}
    state = {plain_name(name): value for name, value in state.items()}
    for name, value in expected.items():
        if name not in state:
            raise CheckpointMismatch(
                f"the checkpoint's {what} has no {name}, which this policy's {what} has with shape "
                f"{_shape(value)}; it belongs to another model: check cfg.model"
            )
        if _shape(value) != _shape(state[name]):
            raise CheckpointMismatch(
                f"{name} of the checkpoint's {what} has shape {_shape(state[name])}, this policy's "
                f"has {_shape(value)}; it belongs to another model: check cfg.model"
            )
    for name, value in state.items():
        if name not in expected:
            raise CheckpointMismatch(
                f"the checkpoint's {what} has {name} of shape {_shape(value)}, which this policy's "
                f"{what} lacks; it belongs to another model: check cfg.model"
            )


def load_model_state(model: nn.Module, state: Mapping[str, Any], what: str = "model") -> None:
    """Load a state strictly; a state that does not fit leaves the model as it was.

    Raises:
        CheckpointMismatch: naming the first parameter that differs, and both shapes.
    """
    check_model_state(model, state, what)
    names = {plain_name(name): name for name in model.state_dict()}
    model.load_state_dict({names[plain_name(name)]: value for name, value in state.items()})


def plain_name(name: str) -> str:
    """Return the name that a parameter has without ``torch.compile``."""
    return name.replace("_orig_mod.", "")


def _below(state: Mapping[str, Any], path: str) -> dict[str, Any]:
    """Return the tensors of a submodule, by their names within it."""
    state = {plain_name(name): value for name, value in state.items()}
    if not path:
        return state
    prefix = f"{plain_name(path)}."
    return {
        name.removeprefix(prefix): value for name, value in state.items() if name.startswith(prefix)
    }


def _shape(value: Any) -> tuple[int, ...] | str:
    return tuple(value.shape) if isinstance(value, torch.Tensor) else type(value).__name__
