"""Access to the methods and attributes of envs, and what a program has set on them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, Literal, NamedTuple, Self

from dmiddleware.errors import ConfigError, EnvCallError
from dmiddleware.registry import nearest

__all__ = [
    "Access",
    "EnvOverrides",
    "GameAttributes",
    "InnerAttributes",
    "options_per_env",
    "unknown_attribute",
]

_MANAGER_METHODS: Final = ("reset", "step", "close")


class Access(NamedTuple):
    """A method of an env to call, or an attribute to read or set.

    Attributes:
        kind: what to do; ``"call"`` returns the value of an attribute that cannot be called.
        name: of the method or attribute, which a wrapper or the env inside has.
        args: positional arguments of a call; the value to set.
        kwargs: keyword arguments of a call.
    """

    kind: Literal["call", "get_attr", "set_attr"]
    name: str
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = {}

    @classmethod
    def setting(cls, name: str, values: Any, env_num: int) -> list[Self]:
        """Return what sets an attribute: one access per env.

        Raises:
            ConfigError: if a list or tuple has another number of values, or the name is not a
                string.
        """
        per_env = _one_per_env(values, env_num, what=f"set_attr({name!r})")
        accesses = [cls("set_attr", name, (value,)) for value in per_env]
        accesses[0].check()
        return accesses

    def __str__(self) -> str:
        return f"{self.kind}({self.name!r})"

    def check(self) -> None:
        """Refuse a call that would bypass the manager.

        Raises:
            ConfigError: if it does the manager's work, or the name is not a string.
        """
        if not isinstance(self.name, str):
            raise ConfigError(f"{self.kind} takes the name of an attribute, got {self.name!r}")
        if self.kind == "call" and self.name in _MANAGER_METHODS:
            raise ConfigError(
                f"{self} would bypass the env manager, which counts steps and episodes; use the "
                f"manager's own {self.name}()"
            )

    def of(self, env: Any, env_id: int) -> Any:
        """Do this with one env.

        Returns:
            The result of the call, or the attribute; None if it was set.

        Raises:
            EnvCallError: if the env has no such attribute, or raises.
        """
        try:
            if not env.has_wrapper_attr(self.name):
                raise unknown_attribute(f"env {env_id}", self.name, env)
            if self.kind == "set_attr":
                env.set_wrapper_attr(self.name, *self.args)
                return None
            attribute = env.get_wrapper_attr(self.name)
            return _called(attribute, self) if self.kind == "call" else attribute
        except EnvCallError:
            raise
        except Exception as error:
            raise EnvCallError(
                f"env {env_id} raised {type(error).__name__}: {error}, in {self}"
            ) from error


def unknown_attribute(owner: str, name: str, env: object) -> EnvCallError:
    """Return the error for an attribute that an env does not have."""
    inner = getattr(env, "unwrapped", env)
    near = nearest(name, [candidate for candidate in dir(inner) if not candidate.startswith("_")])
    hint = f"did you mean {', '.join(near)}? " if near else ""
    return EnvCallError(
        f"{owner} ({type(inner).__name__}) has no attribute {name!r}; {hint}An attribute that a "
        "program sets must exist when the env is made: define it in __init__"
    )


def _called(found: Any, access: Access) -> Any:
    """Call a method; return the value of an attribute that cannot be called."""
    takes_none = not access.args and not access.kwargs
    if takes_none and not callable(found):
        return found
    return found(*access.args, **access.kwargs)


class EnvOverrides:
    """What a program has set on the envs of a manager, for envs that are made again.

    Args:
        env_num: the number of envs, ``E``.

    Attributes:
        attributes: the values of each attribute, one per env.
        reset_options: the options of each env's resets; None: none.
    """

    def __init__(self, env_num: int) -> None:
        self.attributes: dict[str, list[Any]] = {}
        self.reset_options: list[dict[str, Any] | None] = [None] * env_num

    def accesses(self) -> list[list[Access]]:
        """Return what sets the attributes again: for each of them, one access per env."""
        return [
            [Access("set_attr", name, (value,)) for value in values]
            for name, values in self.attributes.items()
        ]

    def apply(self, env_id: int, env: Any) -> None:
        """Set the attributes of a new env.

        Raises:
            EnvCallError: if it does not have one of them, or raises.
        """
        for accesses in self.accesses():
            accesses[env_id].of(env, env_id)

    def state_dict(self) -> dict[str, Any]:
        """Return the values and options."""
        return {"attributes": dict(self.attributes), "reset_options": list(self.reset_options)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned."""
        self.attributes = {name: list(values) for name, values in state["attributes"].items()}
        self.reset_options = list(state["reset_options"])


def options_per_env(options: Any, env_num: int) -> list[dict[str, Any] | None]:
    """Return the reset options of each env.

    Args:
        options: a dictionary or None for all envs, or a list of them with one per env.
        env_num: the number of envs.

    Raises:
        ConfigError: if these are not dictionaries, or a list has another number of them.
    """
    per_env = _one_per_env(options, env_num, what="set_reset_options")
    for env_options in per_env:
        if not isinstance(env_options, Mapping | None):
            raise ConfigError(
                f"set_reset_options takes a dictionary, or one per env, got {env_options!r:.100}"
            )
    return [None if env_options is None else dict(env_options) for env_options in per_env]


def _one_per_env(values: Any, env_num: int, *, what: str) -> list[Any]:
    if not isinstance(values, list | tuple):
        return [values] * env_num
    if len(values) != env_num:
        raise ConfigError(
            f"{what} was given {len(values)} values for {env_num} envs; a list or tuple has one "
            "value per env. To give all envs the same list, repeat it: [[1, 2]] * env_num"
        )
    return list(values)


class InnerAttributes:
    """Gymnasium's access to attributes, for an adapter around an env that is not Gymnasium's.

    Names that the adapter does not have are those of the env inside.
    """

    def _inner_env(self) -> Any:
        """Return the env inside."""
        raise NotImplementedError

    def has_wrapper_attr(self, name: str) -> bool:
        """Return whether the adapter or the env inside has an attribute."""
        return self.owner_of(name) is not None

    def get_wrapper_attr(self, name: str) -> Any:
        """Return an attribute of the adapter, or of the env inside."""
        owner = self.owner_of(name)
        return getattr(self if owner is None else owner, name)

    def set_wrapper_attr(self, name: str, value: Any, *, force: bool = True) -> bool:
        """Set an attribute where it exists; with ``force``, on the adapter if it does not."""
        owner = self.owner_of(name)
        if owner is None and not force:
            return False
        setattr(self if owner is None else owner, name, value)
        return True

    def owner_of(self, name: str) -> Any:
        """Return what has an attribute itself, from the outside in; None: nothing does."""
        if hasattr(self, name):
            return self
        inner = self._inner_env()
        if isinstance(inner, InnerAttributes):
            return inner.owner_of(name)
        return _own_layer(inner, name)


class GameAttributes(InnerAttributes):
    """Access to the attributes of a game, which is not a Gymnasium env.

    Args:
        game: the game.
    """

    def __init__(self, game: Any) -> None:
        self.unwrapped = game

    def _inner_env(self) -> Any:
        return self.unwrapped


def _own_layer(env: Any, name: str) -> Any:
    """Return the layer of a PettingZoo env that has an attribute itself.

    Its wrappers pass on what they lack when it is read, but not when it is set.
    """
    unwrapped = getattr(env, "unwrapped", env)
    while env is not unwrapped:
        if name in vars(env) or hasattr(type(env), name):
            return env
        inner = vars(env).get("env")
        if inner is None:
            break
        env = inner
    return unwrapped if hasattr(unwrapped, name) else None
