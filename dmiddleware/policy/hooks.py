"""The methods that an algorithm writes for each mode, and the keywords that they declare."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from typing import Final, NamedTuple

from dmiddleware.errors import ConfigError
from dmiddleware.foreign_names import unknown_name
from dmiddleware.policy.modes import Mode

__all__ = ["Hook", "check_keywords"]

_NAMED: Final = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


class Hook(NamedTuple):
    """The method that the forward of a mode calls.

    Attributes:
        name: of the method.
        keywords: what the forward takes after its data; None: anything.
    """

    name: str
    keywords: frozenset[str] | None

    @classmethod
    def of(cls, owner: type, name: str, *, n_given: int) -> Hook:
        """Return a method of a class, whose parameters are the keywords.

        A method that takes others too (``**kwargs``) passes them on, so those of the base class's
        method count as well.

        Args:
            owner: the class.
            name: of the method.
            n_given: its parameters that are always given, with ``self``.
        """
        return cls(name, frozenset(_parameters_of(owner, name, n_given)))


def _parameters_of(owner: type, method: str, n_given: int) -> Iterator[str]:
    for base in owner.__mro__:
        if method not in vars(base):
            continue
        parameters = list(inspect.signature(vars(base)[method]).parameters.values())
        yield from (
            parameter.name for parameter in parameters[n_given:] if parameter.kind in _NAMED
        )
        if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
            return


def check_keywords(
    kwargs: Mapping[str, object],
    mode: Mode,
    hooks: Mapping[Mode, Hook],
    *,
    inputs: frozenset[str],
    user: str,
) -> None:
    """Refuse keyword arguments of a mode's forward that its hook does not declare.

    Args:
        kwargs: what was passed.
        mode: the mode.
        hooks: those of all modes.
        inputs: the keywords that a stepper passes.
        user: the policy's name, for the message.

    Raises:
        ConfigError: naming the first such argument, and where it belongs.
    """
    names = inputs | (hooks[mode].keywords or frozenset())
    for name in kwargs:
        if name in names:
            continue
        modes = [other_mode for other_mode, hook in hooks.items() if name in (hook.keywords or ())]
        hint = unknown_name(name, names, only_here=True)
        if modes:
            hint = f"it is one of {modes[0]}_mode.forward"
        raise ConfigError(
            f"{user}: forward in {mode} mode has no keyword {name}; {hint}. An algorithm declares "
            f"its own as parameters of {hooks[mode].name}"
        )
