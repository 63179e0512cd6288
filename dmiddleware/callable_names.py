"""Callables by name: ``module:name``, with the arguments of a ``functools.partial``.

A run records the functions and classes of its envs by such names, by which they are imported again.
The names of a lambda, of other callables that no module has, and of arguments that are not plain
data contain angle brackets, and are refused.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import importlib
import math
import operator
import re
import sys
import types
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

from dmiddleware.errors import ConfigError

__all__ = [
    "callable_named",
    "described",
    "importable_module",
    "is_callable_name",
    "is_described",
    "is_recordable",
    "name_of",
    "recorded",
    "script_folder",
    "short_name",
    "without_addresses",
]

_PLAIN: Final = (types.NoneType, bool, int, float, complex, str, bytes)
_NUMBERS: Final = {"inf": math.inf, "nan": math.nan}
_ADDRESS: Final = re.compile(r" at 0x[0-9a-fA-F]+")
_LONGEST: Final = 200
_UNSAVED: Final = "<unsaved: "


def name_of(function: Callable[..., Any]) -> str:
    """Return the name of a callable; whatever it is, this raises nothing.

    Example:
        >>> name_of(functools.partial(round, ndigits=2))
        'builtins:round(ndigits=2)'
        >>> name_of(lambda: 0)
        'dmiddleware.callable_names:<lambda>'
    """
    if isinstance(function, functools.partial):
        arguments = [
            *map(_argument, function.args),
            *(f"{name}={_argument(value)}" for name, value in function.keywords.items()),
        ]
        return f"{name_of(function.func)}({', '.join(arguments)})"
    module, name = _attribute(function, "__module__"), _attribute(function, "__qualname__")
    if not module or not name:
        kind = type(function)
        return f"{importable_module(kind.__module__)}:<{kind.__qualname__} object>"
    path, home = _path_in(sys.modules.get(module), function, name), importable_module(module)
    if path and home != "__main__":
        return f"{home}:{path}"
    return f"{home}:{name if '<' in name else f'<{name}>'}"


def callable_named(name: str) -> Callable[..., Any]:
    """Import a callable by its name, as :func:`name_of` writes it.

    Raises:
        ConfigError: if the name is not one of an importable callable.

    Example:
        >>> callable_named("builtins:round(ndigits=2)")(2.345)
        2.35
    """
    parsed = _parsed(name)
    if parsed is None:
        raise ConfigError(
            f"{name} cannot be imported: it must be module:name of a function or class at the top "
            "level of a module, or module:name(argument=value) with arguments of plain data"
        )
    try:
        member: Any = operator.attrgetter(parsed.path)(importlib.import_module(parsed.module))
    except Exception as error:  # whatever the module does when it is imported
        raise ConfigError(
            f"{name} cannot be imported ({type(error).__name__}: {error}); start the command in "
            "the folder of the program, or install the module"
        ) from error
    if not callable(member):
        raise ConfigError(f"{name} is {member!r:.100}; it must be a function or a class")
    if parsed.args or parsed.kwargs:
        return functools.partial(member, *parsed.args, **parsed.kwargs)
    return member  # type: ignore[no-any-return]


def is_callable_name(text: str) -> bool:
    """Return whether a text has the form of a name that can be imported."""
    return _parsed(text) is not None


def short_name(name: str) -> str:
    """Return a name without its module and its arguments.

    Example:
        >>> short_name("gymnasium.wrappers:TimeLimit(max_episode_steps=50)")
        'TimeLimit'
    """
    return name.partition(":")[2].partition("(")[0].rpartition(".")[2].strip("<>")


def importable_module(module: str) -> str:
    """Return the name by which other programs can import a module.

    Returns:
        For ``__main__`` the name of its file; ``__main__`` itself, if importing the file would run
        the program, or there is none.
    """
    if module != "__main__":
        return module
    main = sys.modules.get("__main__")
    file = getattr(main, "__file__", None)
    if not isinstance(file, str) or not _is_guarded(file):
        return module
    spec = getattr(main, "__spec__", None)
    name = Path(file).stem if spec is None else spec.name
    return name if all(part.isidentifier() for part in name.split(".")) else module


def script_folder() -> Path | None:
    """Return the folder of the script that Python runs; None: it runs a module, or no file."""
    main = sys.modules.get("__main__")
    file = getattr(main, "__file__", None)
    if not isinstance(file, str) or getattr(main, "__spec__", None) is not None:
        return None
    return Path(file).resolve().parent


def described(value: Any) -> str:
    """Say in angle brackets what an object is, in the same way in every process.

    Whatever the object is, this raises nothing.
    """
    text = f"{type(value).__module__}.{type(value).__qualname__}"
    with contextlib.suppress(Exception):  # of its __repr__
        text = " ".join(without_addresses(repr(value)).split())
    text = text.removeprefix("<").removesuffix(">")
    return f"{_UNSAVED}{text if len(text) <= _LONGEST else f'{text[:_LONGEST]}…'}>"


def is_described(value: Any) -> bool:
    """Return whether a value is what :func:`described` made of an object."""
    return isinstance(value, str) and value.startswith(_UNSAVED)


def without_addresses(text: str) -> str:
    """Return text about objects without their addresses, which differ from process to process."""
    return _ADDRESS.sub("", text)


class _Parsed(NamedTuple):
    """The parts of a name."""

    module: str
    path: str
    args: list[Any]
    kwargs: dict[str, Any]


class _Numbers(ast.NodeTransformer):
    """Lets literals contain the numbers that Python writes as names."""

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return ast.Constant(_NUMBERS[node.id]) if node.id in _NUMBERS else node


def _parsed(name: str) -> _Parsed | None:
    """Return the parts of a name; None: it has another form."""
    module, _, rest = name.partition(":")
    try:
        call: ast.expr = ast.parse(rest, mode="eval").body
        args: list[ast.expr] = []
        keywords: list[ast.keyword] = []
        if isinstance(call, ast.Call):
            args, keywords, call = call.args, call.keywords, call.func
        path = ast.unparse(call)
        parsed = _Parsed(
            module,
            path,
            [*map(_literal, args)],
            {str(keyword.arg): _literal(keyword.value) for keyword in keywords},
        )
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        return None
    names = (*module.split("."), *path.split("."))
    return parsed if all(keyword.isidentifier() for keyword in names) else None


def _literal(node: ast.expr) -> Any:
    return ast.literal_eval(_Numbers().visit(node))


def _argument(value: Any) -> str:
    """Return text that :func:`_parsed` reads as the value, or else what it is."""
    with contextlib.suppress(Exception):  # it is not plain data, or contains itself
        return repr(_as_plain(value))
    return f"<{name_of(value)}>" if isinstance(value, _CALLABLES) else described(value)


_CALLABLES: Final = (type, functools.partial, types.FunctionType, types.BuiltinFunctionType)


def recorded(value: Any) -> Any:
    """Return an argument as YAML can hold it; an object that is not plain data is described.

    Tuples and sets become lists. Whatever the value is, this raises nothing.
    """
    with contextlib.suppress(Exception):  # it is not plain data, or contains itself
        if isinstance(value, Mapping):
            return {recorded(key): recorded(item) for key, item in value.items()}
        if isinstance(value, list | tuple | set):
            return [recorded(item) for item in value]
        plain = _as_plain(value)
        if is_recordable(plain):
            return plain
    return described(value)


def is_recordable(value: Any) -> bool:
    """Return whether YAML reads a value back as it is."""
    if type(value) is dict:
        return all(is_recordable(key) and is_recordable(item) for key, item in value.items())
    if type(value) is list:
        return all(map(is_recordable, value))
    return value is None or type(value) in (bool, int, float, str)


def _as_plain(value: Any) -> Any:
    """Return plain data as it is, and numbers of numpy as those of Python.

    Raises:
        TypeError: for other objects.
    """
    if type(value) in _PLAIN:
        return value
    if type(value) in (list, tuple, set):
        return type(value)(map(_as_plain, value))
    if type(value) is dict:
        return {_as_plain(key): _as_plain(item) for key, item in value.items()}
    if getattr(value, "shape", None) == () and hasattr(value, "item"):
        return _as_plain(value.item())
    raise TypeError(f"{type(value)} is not plain data")


def _attribute(value: Any, name: str) -> str:
    """Return an attribute that is text; empty: it has none."""
    with contextlib.suppress(Exception):  # of a property
        text = getattr(value, name, "")
        return text if isinstance(text, str) else ""
    return ""


def _path_in(module: Any, function: Any, name: str) -> str:
    """Return by which name a module has this very function; empty: by none."""
    with contextlib.suppress(Exception):  # a module may have properties too
        member = operator.attrgetter(name)(module)
        if member is function or (isinstance(member, types.MethodType) and member == function):
            return name
    names = vars(module) if isinstance(function, _CALLABLES) and module is not None else {}
    return next((variable for variable, item in names.items() if item is function), "")


@functools.cache
def _is_guarded(file: str) -> bool:
    """Return whether a program starts only where it is the main one, by its ``__name__``."""
    try:
        statements = ast.parse(Path(file).read_bytes()).body
    except (OSError, SyntaxError, ValueError):
        return False
    return any(
        isinstance(node, ast.Name) and node.id == "__name__"
        for statement in statements
        if isinstance(statement, ast.If)
        for node in ast.walk(statement.test)
    )
