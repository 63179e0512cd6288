"""The function of ``--main``: check it without importing it, import it, and call it."""

from __future__ import annotations

import ast
import importlib
import inspect
import pkgutil
import sys
import tokenize
from collections.abc import Callable, Iterable, Iterator, Sequence
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from typing import Any, NamedTuple

from dmiddleware.errors import ConfigError, LaunchError
from dmiddleware.foreign_names import hint_for
from dmiddleware.registry import nearest

__all__ = [
    "call_main",
    "check_main",
    "find_source",
    "import_main",
    "parse",
    "reads_arguments",
    "with_arguments",
]

_ASYNC = (
    "--main {main} is an async function{where}, and calling it runs nothing; name a function that "
    "runs it, such as: def run(): asyncio.run({name}())"
)
_PARAMETERS = (
    "--main {main} has parameters without a default ({names}){where}; give them defaults and "
    "types, such as seed: int = 0, and arguments that follow -- replace the defaults, or read "
    "these arguments from sys.argv"
)
_UNKNOWN = "--main {main} has no option {option}{where}{hint}"
_GENERATOR = (
    "--main {main} is a generator function, because it contains yield{where}, and calling it runs "
    "nothing; name a function without yield"
)


def check_main(main: str, package: Path, arguments: Sequence[str] = ()) -> None:
    """Refuse a function that does not exist or would run nothing, without importing its module.

    What the source does not show, for example because the function is decorated or comes from
    another module, is checked by :func:`import_main`, and what the classes of its parameters
    declare by :func:`with_arguments`.

    Args:
        main: ``package.module.function``.
        package: the folder to put first on the import path.
        arguments: those of the function.

    Raises:
        LaunchError: if it does not exist, is an async function or a generator function, needs
            arguments, or has no parameter for an option among its arguments.
    """
    module_name, _, name = main.rpartition(".")
    path = [str(package.resolve()), *sys.path]
    _check_module(main, path, package)
    file = find_source(module_name, path)
    tree = parse(file)
    if file is None or tree is None:
        return
    if not _may_have(tree, name):
        functions = [
            statement.name for statement in tree.body if isinstance(statement, ast.FunctionDef)
        ]
        raise LaunchError(_no_function(main, module_name, name, functions))
    function = _find_function(tree, name)
    if isinstance(function, ast.AsyncFunctionDef):
        where = f" ({file.name}:{function.lineno})"
        raise LaunchError(_ASYNC.format(main=main, name=name, where=where))
    if function is not None:
        if names := _required(function.args):
            where = f" ({file.name}:{function.lineno})"
            raise LaunchError(_PARAMETERS.format(main=main, names=", ".join(names), where=where))
        _check_options(function, main, arguments, where=f" ({file.name}:{function.lineno})")
        for node in _own_nodes(function):
            if isinstance(node, ast.Yield | ast.YieldFrom):
                where = f" ({file.name}:{node.lineno})"
                raise LaunchError(_GENERATOR.format(main=main, where=where))


def import_main(main: str, package: str) -> Callable[..., object]:
    """Import the function; ``sys.argv`` then begins with the file of its module.

    Args:
        main: ``package.module.function``.
        package: the folder to put first on the import path.

    Raises:
        LaunchError: if it does not exist, cannot be called, or would run nothing when it is called.
    """
    module_name, _, name = main.rpartition(".")
    sys.path.insert(0, str(Path(package).resolve()))
    sys.argv[0] = str(find_source(module_name, sys.path) or module_name)
    _check_module(main, sys.path, Path(package))
    module = importlib.import_module(module_name)
    function: Any = getattr(module, name, None)
    if not callable(function):
        functions = [key for key, member in vars(module).items() if inspect.isfunction(member)]
        raise LaunchError(_no_function(main, module_name, name, functions))
    if inspect.iscoroutinefunction(function):
        raise LaunchError(_ASYNC.format(main=main, name=name, where=""))
    if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        raise LaunchError(_GENERATOR.format(main=main, where=""))
    if names := _missing(function):
        raise LaunchError(_PARAMETERS.format(main=main, names=", ".join(names), where=""))
    return function  # type: ignore[no-any-return]


def _check_options(
    function: ast.FunctionDef, main: str, arguments: Sequence[str], *, where: str
) -> None:
    """Refuse options that belong to no parameter of a function that takes its arguments so.

    Raises:
        LaunchError: naming the first one, and the nearest right one.
    """
    parts = function.args
    parameters = [*parts.posonlyargs, *parts.args, *parts.kwonlyargs]
    if any(parameter.annotation is None or parameter.arg == "argv" for parameter in parameters):
        return  # it reads the command line itself
    options = [parameter.arg.replace("_", "-") for parameter in parameters]
    for word in arguments:
        option = word.removeprefix("--").partition("=")[0]
        name = option.partition(".")[0].replace("_", "-")
        right = (*options, *(f"no-{parameter}" for parameter in options), "help", "config")
        if parameters and word.startswith("--") and name and name not in right:
            flags = [f"--{parameter}" for parameter in options]
            near = [
                f"--{parameter}{option[len(name) :]}" for parameter in nearest(name, options, n=1)
            ]
            foreign = hint_for(f"--{option}", flags)
            hint = (
                f"; {foreign}" if foreign else _did_you_mean(near) or f"; it has {', '.join(flags)}"
            )
            raise LaunchError(
                _UNKNOWN.format(main=main, option=f"--{option}", where=where, hint=hint)
            )


def reads_arguments(main: Callable[..., Any]) -> bool:
    """Return whether a function takes its arguments from a command line.

    It has parameters, all of them have types, and none is ``argv``, with which a function reads the
    command line itself.
    """
    try:
        parameters = inspect.signature(main).parameters.values()
    except (TypeError, ValueError):
        return False  # it is not written in Python
    by_name = [
        parameter
        for parameter in parameters
        if parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
    ]
    typed = all(
        parameter.annotation is not parameter.empty and parameter.name != "argv"
        for parameter in by_name
    )
    return bool(by_name) and typed


def with_arguments(function: Callable[..., Any], main: str, *, prints: bool) -> Callable[[], Any]:
    """Return the function with the arguments of ``sys.argv``, if it reads some.

    Args:
        function: the function.
        main: its name, for the message.
        prints: whether to print the help if it is asked for; one node of a run does so.

    Raises:
        LaunchError: by the function that is returned, for wrong arguments.
    """
    if not reads_arguments(function):
        return function
    from dmiddleware.command_line import (  # imports YAML's parser
        HelpAsked,
        arguments_of,
        called_as,
        unprinted,
    )

    def call() -> Any:
        try:
            with unprinted(f"--main {main} refused the arguments that follow --"):
                arguments = arguments_of(function, sys.argv[1:])
        except HelpAsked as end:
            if prints:
                sys.stdout.write(end.text)
            raise
        except ConfigError as error:
            raise LaunchError(str(error)) from None
        with called_as(function, arguments):
            return function(**arguments)

    return call


def call_main(function: Callable[[], Any], main: str) -> Any:
    """Call the function, and return what it returns.

    Raises:
        LaunchError: if it returns something that still has to be run.
        BaseException: what it raises.
    """
    result = function()
    if inspect.isawaitable(result) or inspect.isgenerator(result) or inspect.isasyncgen(result):
        if inspect.iscoroutine(result):
            result.close()
        raise LaunchError(
            f"--main {main} returned a {type(result).__name__}, which nothing runs; name a "
            "function that does its work when it is called"
        )
    return result


def _check_module(main: str, path: Sequence[str], package: Path) -> None:
    """Refuse a module that does not exist, without importing the packages that contain it.

    Raises:
        LaunchError: if there is no such module.
    """
    module_name = main.rpartition(".")[0]
    *_, last = _specs(module_name, path)
    if last.spec is not None:
        return
    parent, _, part = last.name.rpartition(".")
    siblings = [near.name for near in pkgutil.iter_modules(last.searched)]
    raise LaunchError(
        f"--main {main}: found no module {last.name} in --package {package} or on the import path"
        f"{_did_you_mean(f'{parent}.{near}'.strip('.') for near in nearest(part, siblings, n=1))}"
    )


def _no_function(main: str, module: str, name: str, functions: Iterable[str]) -> str:
    public = [function for function in functions if not function.startswith("_")]
    near = nearest(name, public, n=1) or (["main"] if "main" in public else [])
    return (
        f"--main {main}: module {module} has no function {name!r}"
        f"{_did_you_mean(f'{module}.{function}' for function in near)}"
    )


def _did_you_mean(names: Iterable[str]) -> str:
    return "".join(f"; did you mean {name}?" for name in names)


class _Part(NamedTuple):
    """A module, or a package that contains it: its name, where it is searched, what was found."""

    name: str
    searched: list[str]
    spec: ModuleSpec | None


def _specs(module_name: str, path: Sequence[str]) -> Iterator[_Part]:
    """Yield the parts of a module's name up to the first that does not exist."""
    searched, name = list(path), ""
    for part in module_name.split("."):
        name = f"{name}.{part}".strip(".")
        # By its last name only: a package without __init__.py is looked up among imported ones.
        spec = PathFinder.find_spec(part, searched)
        if spec is None and name == part:
            # Such as the finder of a package that is installed in editable mode.
            spec = next(
                filter(None, (finder.find_spec(part, None) for finder in sys.meta_path)), None
            )
        yield _Part(name, searched, spec)
        if spec is None:
            return
        searched = list(spec.submodule_search_locations or ())


def find_source(module_name: str, path: Sequence[str]) -> Path | None:
    """Return the file of a module, without importing the packages that contain it."""
    *_, last = _specs(module_name, path)
    if last.spec is None or last.spec.origin is None or not last.spec.origin.endswith(".py"):
        return None
    return Path(last.spec.origin)


def parse(file: Path | None) -> ast.Module | None:
    """Return the syntax tree of a file; None: it has none, which the nodes report."""
    try:
        with tokenize.open(file or "") as source:
            return ast.parse(source.read())
    except (OSError, SyntaxError, ValueError):
        return None


def _may_have(tree: ast.Module, name: str) -> bool:
    """Return whether a module may have a name; one that makes names as it runs may have any."""
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                binds = node.name in (name, "__getattr__")
            case ast.Name():
                binds = node.id in (name, "globals", "exec")
            case ast.alias():
                binds = name in (node.asname, node.name) or node.name == "*"
            case _:
                binds = False
        if binds:
            return True
    return False


def _find_function(tree: ast.Module, name: str) -> ast.FunctionDef | ast.AsyncFunctionDef | None:
    """Return the function of this name, unless something may have replaced it."""
    definition: ast.FunctionDef | ast.AsyncFunctionDef | None = None
    for statement in tree.body:
        if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef):
            if statement.name == name:
                definition = None if statement.decorator_list else statement
        elif any(
            (isinstance(node, ast.Name) and node.id == name and isinstance(node.ctx, ast.Store))
            or (isinstance(node, ast.alias) and name in (node.asname, node.name))
            for node in ast.walk(statement)
        ):
            definition = None
    return definition


def _required(arguments: ast.arguments) -> list[str]:
    """Return the parameters without a default."""
    positional = [*arguments.posonlyargs, *arguments.args]
    n_without = len(positional) - len(arguments.defaults)
    by_name = zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
    return [
        *(argument.arg for argument in positional[:n_without]),
        *(argument.arg for argument, default in by_name if default is None),
    ]


def _missing(function: Callable[..., object]) -> list[str]:
    """Return the parameters without a default, of a function that was imported."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return []  # it is not written in Python
    optional = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [
        parameter.name
        for parameter in parameters
        if parameter.default is parameter.empty and parameter.kind not in optional
    ]


def _own_nodes(function: ast.FunctionDef) -> Iterator[ast.AST]:
    """Return the nodes of a function, without those of functions and classes inside it."""
    waiting: list[ast.AST] = list(function.body)
    while waiting:
        node = waiting.pop()
        yield node
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Lambda):
            waiting += ast.iter_child_nodes(node)
