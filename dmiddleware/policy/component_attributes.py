"""Components as attributes: those that a class declares by annotations."""

from __future__ import annotations

import inspect
import re
import sys
import types
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from dmiddleware.errors import PolicyError
from dmiddleware.policy.component import Component

__all__ = ["set_components"]


def set_components(owner: object, components: Mapping[str, Component[Any]]) -> None:
    """Make each component that a class declares by an annotation an attribute of its object.

    ``critic: Component[QEnsemble]`` declares one. With ``Component[QEnsemble] | None`` it may be
    missing; then the attribute is None.

    Args:
        owner: the policy, or what else has components.
        components: by name.

    Raises:
        PolicyError: if a declared component is missing, its module has another type, or its name
            is that of another attribute.
    """
    user = type(owner).__name__
    for name, declared in _declared_components(type(owner)).items():
        if hasattr(owner, name):
            raise PolicyError(
                f"{user} declares the component {name}, but has another attribute of this name; "
                "give the component another name"
            )
        component = components.get(name)
        if component is None and not declared.is_optional:
            raise PolicyError(
                f"{user} declares the component {name}, but has only "
                f"{', '.join(components) or 'none'}; add one of this name, or declare it with "
                f"{name}: Component[...] | None"
            )
        if component is not None and not isinstance(component.module, declared.kind):
            raise PolicyError(
                f"{user} declares the component {name} with {declared.hint}, but its module is of "
                f"type {type(component.module).__name__}; build it with a module of the declared "
                "type, or change the annotation"
            )
        setattr(owner, name, component)


@dataclass(frozen=True, slots=True)
class _Declared:
    """What an annotation says of a component: the type of its module, and if it may be missing."""

    hint: str
    kind: Any
    is_optional: bool


def _declared_components(owner: type) -> dict[str, _Declared]:
    """Return the components that a class and its bases declare, by name."""
    return {
        name: declared
        for base in reversed(owner.__mro__)
        for name, hint in _annotations(base)
        if (declared := _declaration(hint)) is not None
    }


def _declaration(hint: Any) -> _Declared | None:
    """Return what an annotation declares; None: no component."""
    is_union = typing.get_origin(hint) in (typing.Union, types.UnionType)
    options = typing.get_args(hint) if is_union else (hint,)
    for option in options:
        if option is Component or typing.get_origin(option) is Component:
            (kind,) = typing.get_args(option) or (object,)
            text = re.sub(r"[\w.]+\.", "", str(hint))
            return _Declared(text, object if kind is Any else kind, type(None) in options)
    return None


def _annotations(base: type) -> Iterator[tuple[str, Any]]:
    """Return the annotations of a class that may declare components, by name."""
    for name, hint in inspect.get_annotations(base).items():
        if not isinstance(hint, str):
            yield name, hint
        elif re.search(r"\bComponent\b", hint):
            try:
                yield name, eval(hint, vars(sys.modules[base.__module__]))
            except NameError as error:
                raise PolicyError(
                    f"{base.__name__} annotates {name} with {hint}, but {error}; define or import "
                    f"the type at the top level of the module {base.__module__}"
                ) from error
