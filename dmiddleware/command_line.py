"""The command line of a program: a function whose parameters are typed and documented.

tyro reads it. A parameter is a number, a text, or :class:`~dmiddleware.settings.Settings` with the
program's own defaults; the help of an option comes from where it is declared: the ``Args:`` of the
function, or the sentence below the setting::

    def main(seed: Whole = 0, policy: DQNSettings = DQNSettings(n_step=3)) -> None: ...

    arguments_of(main, ["--seed", "3", "--policy.learning-rate", "3e-4"])

:func:`dmiddleware.program.run_program` calls a program in this way, and so does each node of
``ditask``.
"""

from __future__ import annotations

import argparse
import contextlib
import contextvars
import dataclasses
import enum
import inspect
import io
import re
import sys
import types
import typing
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence, ValuesView
from dataclasses import MISSING
from pathlib import Path
from typing import Annotated, Any, Final, Literal, NoReturn

import yaml

from dmiddleware.callable_names import (
    importable_module,
    is_described,
    name_of,
    script_folder,
)
from dmiddleware.errors import ConfigError, RegistryError
from dmiddleware.foreign_names import hint_for, unknown_name
from dmiddleware.schedule import Schedule
from dmiddleware.settings import (
    SettingInfo,
    Settings,
    cleared_by,
    describe,
    from_plain,
    members_of,
    plain_values,
)
from dmiddleware.yaml_text import read_yaml, yaml_text

if typing.TYPE_CHECKING:
    from docstring_parser import Docstring

__all__ = [
    "DefaultsBy",
    "HelpAsked",
    "OfferedOptions",
    "ProgramCall",
    "arguments_of",
    "arguments_with",
    "called_as",
    "check_arguments",
    "offered_options",
    "program_call",
    "unprinted",
]

_CONFIG_HELP: Final = (
    "Take defaults from this YAML file, the config.yaml of a run or options by name, or from the "
    "tuned settings that zoo:ALGO/ENV names."
)
_ZOO: Final = "zoo:"
_ROLE: Final = re.compile(r":\w+:`~?([^`]*)`")
_BOX: Final = "│╭╮╰╯─-"


@dataclasses.dataclass(frozen=True)
class DefaultsBy:
    """The annotation of a parameter whose defaults depend on another option.

    The parameter takes settings, and its own default is None::

        POLICIES = {"dqn": DQNSettings(), "c51": C51Settings()}

        def main(
            algo: Literal["dqn", "c51"] = "dqn",
            policy: Annotated[PolicySettings | None, DefaultsBy("algo", POLICIES)] = None,
        ) -> None:
            policy = policy or POLICIES[algo]

    Args:
        option: the other option, such as ``"algo"`` or ``"env.id"``.
        defaults: the settings for each of its values.
    """

    option: str
    defaults: Mapping[Any, Settings]

    def of(self, values: Mapping[str, Any]) -> Settings:
        """Return the settings for the value that the other option has.

        Raises:
            ConfigError: if there are none for it.
        """
        name, _, field = self.option.partition(".")
        value = getattr(values[name], field) if field else values[name]
        if value not in self.defaults:
            names = ", ".join(map(str, self.defaults))
            raise ConfigError(f"{self.option} must be one of {names}, got {value!r}")
        return self.defaults[value]


@dataclasses.dataclass(frozen=True)
class ProgramCall:
    """How a program was called.

    Attributes:
        program: the function's name, ``package.module.function``.
        folder: the folder of its source; None: unknown.
        arguments: its arguments, by name.
    """

    program: str
    folder: Path | None
    arguments: Mapping[str, Any]

    def plain(self) -> dict[str, Any]:
        """Return the arguments as YAML can write them, without what the program sets itself."""
        return {name: _plain(value) for name, value in self.arguments.items()}


_call: contextvars.ContextVar[ProgramCall | None] = contextvars.ContextVar("call", default=None)


def program_call() -> ProgramCall | None:
    """Return how the program that runs now was called; None: not with a command line."""
    return _call.get()


@contextlib.contextmanager
def called_as(main: Callable[..., Any], arguments: Mapping[str, Any]) -> Iterator[None]:
    """Let :func:`program_call` return these arguments."""
    token = _call.set(ProgramCall(_name_of(main), _folder_of(main), arguments))
    try:
        yield
    finally:
        _call.reset(token)


def arguments_of(
    main: Callable[..., Any], arguments: Sequence[str], *, prog: str = ""
) -> dict[str, Any]:
    """Return the arguments that a command line gives to a function.

    ``--config FILE`` takes the values of an earlier run's ``config.yaml``, or of any YAML file, as
    defaults, and ``--config zoo:dqn/CartPole-v1`` those of :mod:`dmiddleware.zoo`; the other
    options override them. Of several, a later one overrides those before it.

    Args:
        main: the function.
        arguments: the command line, without the name of the program.
        prog: what the help calls the program; empty: how Python runs it.

    Raises:
        SystemExit: with 2, after the message, for an unknown option or a wrong value; with 0, after
            the help.
        ConfigError: if the function has a parameter without a type.
    """
    line = _CommandLine(main, prog)
    try:
        line.take_defaults(_configs_of(arguments), arguments)
    except (ConfigError, RegistryError) as error:
        line.fail(str(error))
    line.refuse_foreign(arguments)
    return line.read(arguments)


def arguments_with(
    main: Callable[..., Any], values: Mapping[str, Any], *, at: str
) -> dict[str, Any]:
    """Return the arguments of a function: its defaults, and options by name as a file has them.

    Args:
        main: the function.
        values: the options; those of settings are dictionaries, of which each setting is replaced.
        at: where the options are, for messages.

    Raises:
        ConfigError: for an unknown option or a wrong value.
    """
    line = _CommandLine(main)
    line.take(values, at)
    return line.values


@dataclasses.dataclass(frozen=True)
class OfferedOptions:
    """The options of a function's command line.

    Attributes:
        flags: their dotted names, and whether each is a flag, such as ``--x`` and ``--no-x``.
        choosing: those that decide which defaults, or which options, others have.
    """

    flags: Mapping[str, bool]
    choosing: Collection[str]


def offered_options(main: Callable[..., Any], arguments: Sequence[str]) -> OfferedOptions:
    """Return the options that a function has on a command line with these arguments.

    Args:
        main: the function.
        arguments: the command line.

    Raises:
        ConfigError: for wrong arguments, or a parameter without a type.
    """
    line = _CommandLine(main)
    with _as_error(main):
        line.take_defaults(_configs_of(arguments), arguments)
    return OfferedOptions(dict(line.flags()), {choice.option for choice in line.chosen.values()})


def check_arguments(main: Callable[..., Any], arguments: Sequence[str]) -> None:
    """Refuse arguments that :func:`arguments_of` would refuse.

    Raises:
        ConfigError: with its message, in one line.
    """
    with _as_error(main):
        arguments_of(main, arguments)


@contextlib.contextmanager
def _as_error(main: Callable[..., Any]) -> Iterator[None]:
    try:
        with unprinted(f"{_name_of(main)} refuses its arguments"):
            yield
    except HelpAsked:
        raise ConfigError(f"{_name_of(main)} refuses its arguments: it prints its help") from None


class HelpAsked(SystemExit):
    """The end of a program that was asked for its help.

    Attributes:
        text: the help.
    """

    def __init__(self, text: str) -> None:
        super().__init__(0)
        self.text = text


@contextlib.contextmanager
def unprinted(told: str) -> Iterator[None]:
    """Raise what a command line prints before it exits.

    Args:
        told: the beginning of the message.

    Raises:
        ConfigError: for wrong arguments, with the message in one line.
        HelpAsked: instead of the help.
    """
    out, err = io.StringIO(), io.StringIO()
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            yield
    except SystemExit as end:
        if not end.code:
            raise HelpAsked(out.getvalue()) from None
        raise ConfigError(f"{told}: {_without_box(err.getvalue())}") from None


def _without_box(text: str) -> str:
    """Return in one line what tyro prints in a box, without its title."""
    words = [word for word in text.partition("\n")[2].split() if word.strip(_BOX)]
    return " ".join(words).partition(" For full helptext")[0]


def _configs_of(arguments: Sequence[str]) -> list[str]:
    """Return what ``--config`` names, in order."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--config", action="append", default=[])
    configs: list[str] = parser.parse_known_args(arguments)[0].config
    return configs


def _without_help(arguments: Sequence[str]) -> list[str]:
    return [argument for argument in arguments if argument not in ("-h", "--help")]


class _CommandLine:
    """The options of a function."""

    def __init__(self, main: Callable[..., Any], prog: str = "") -> None:
        self._prog = prog or _prog_of(main)
        documented = _docstring_of(main)
        self._text = documented.description or ""
        self._class = _settings_of(main)
        self._meanings = {
            info.arg_name: _sentence(info.description or "") for info in documented.params
        }
        self._values: dict[str, Any] = {
            info.name: info.default for info in describe(self._class) if info.default is not MISSING
        }
        self.chosen = {
            info.name: mark
            for info in describe(self._class)
            for mark in getattr(info.hint, "__metadata__", ())
            if isinstance(mark, DefaultsBy)
        }

    @property
    def values(self) -> dict[str, Any]:
        """The arguments of the function as they are without a command line."""
        return dict(self._values)

    def flags(self) -> Iterator[tuple[str, bool]]:
        """Yield the dotted name of each option, and whether it is a flag."""
        for info in describe(self._class):
            yield from _flags(info, self._values.get(info.name, MISSING))

    def _switches(self) -> set[str]:
        """Return the options that are flags and also take texts."""
        return {
            f"--{path.replace('_', '-')}"
            for info in describe(self._class)
            for path, hint in _hints_by_path(info, self._values.get(info.name, MISSING))
            if _texts_of_switch(hint)
        }

    def refuse_foreign(self, arguments: Sequence[str]) -> None:
        """Answer an option under the name that another library gives it with ours, and exit."""
        flags = [f"--{name.replace('_', '-')}" for name, _ in self.flags()]
        for word in arguments:
            option = word.partition("=")[0].replace("_", "-")
            hint = hint_for(option, flags) if option.startswith("--") else None
            if hint and option not in flags:
                self.fail(f"Unrecognized option {option}; {hint}")

    def take_defaults(self, configs: Sequence[str], arguments: Sequence[str]) -> None:
        """Replace the defaults by those of files or of the zoo, and those that options choose.

        Raises:
            ConfigError: if a file has something else than options and their values.
            RegistryError: if the zoo has no such algorithm.
        """
        read = [(_options_in(config), config) for config in configs]
        for values, at in read:
            self._take(values, at, chosen=False)
        if self.chosen:
            names = {info.name for info in describe(self._class)} - self.chosen.keys()
            self._choose(self._parse(_without_help(arguments), only=names))
        for values, at in read:
            self._refuse_unknown(values, at)
            self._take(values, at, chosen=True)

    def take(self, values: Mapping[str, Any], at: str) -> None:
        """Replace the defaults by options as a file has them.

        Raises:
            ConfigError: for an unknown option or a wrong value.
        """
        self._take(values, at, chosen=False)
        self._choose(self._values)
        self._refuse_unknown(values, at)
        self._take(values, at, chosen=True)

    def _choose(self, others: Mapping[str, Any]) -> None:
        """Take the settings that the values of other options choose."""
        self._values |= {name: choice.of(others) for name, choice in self.chosen.items()}

    def _take(self, values: Mapping[str, Any], at: str, *, chosen: bool) -> None:
        fields = {info.name: info for info in describe(self._class)}
        for name, value in values.items():
            if name in fields and (name in self.chosen) is chosen:
                self._values[name] = _from_plain(
                    fields[name].hint, value, self._values.get(name), f"{at}: {name}"
                )

    def _refuse_unknown(self, values: Mapping[str, Any], at: str) -> None:
        infos = {info.name: info for info in describe(self._class)}
        _refuse_unknown(values, infos, at, [name for name, _ in self.flags()])

    def read(self, arguments: Sequence[str]) -> dict[str, Any]:
        """Return the arguments of the function."""
        return self._parse(arguments, only=None)

    def _parse(self, arguments: Sequence[str], *, only: Collection[str] | None) -> dict[str, Any]:
        """Return the arguments.

        Args:
            arguments: the command line.
            only: the parameters to read, from a command line that has others too; None: all.
        """
        import tyro

        cli: Any = tyro.cli
        values = cli(
            self._class,
            args=_with_values(arguments, self._switches()),
            prog=self._prog,
            description=self._text,
            registry=self._registry(only),
            add_help=only is None,
            return_unknown_args=only is not None,
        )
        options: dict[str, Any] = values if only is None else values[0]
        return options

    def fail(self, message: str) -> NoReturn:
        """Print a message as tyro does, and exit."""
        from rich.console import Console
        from rich.panel import Panel

        Console(stderr=True).print(Panel(message, title="Value error", border_style="red"))
        raise SystemExit(2)

    def _registry(self, only: Collection[str] | None) -> Any:
        from tyro.constructors import ConstructorRegistry, StructTypeInfo

        registry = ConstructorRegistry()
        for rule in (_whole_numbers, _schedules, _mappings, _texts_of_functions, _switches):
            registry.primitive_rule(rule)

        @registry.struct_rule
        def settings(info: StructTypeInfo) -> Any:
            if info.type is self._class:
                return self._whole_line(only)
            if not (isinstance(info.type, type) and issubclass(info.type, Settings)):
                return None
            default = info.default if isinstance(info.default, info.type) else None
            return _spec_of(info.type, default)

        return registry

    def _whole_line(self, only: Collection[str] | None) -> Any:
        from tyro.conf import UseAppendAction
        from tyro.constructors import StructConstructorSpec

        offered = [
            _Offered.of(self._described(info))
            for info in describe(self._class)
            if only is None or info.name in only
        ]
        config = _Offered("config", UseAppendAction[tuple[str, ...]], (), _CONFIG_HELP)

        def make(config: tuple[str, ...] = (), **given: Any) -> dict[str, Any]:
            options = _merged({info.name: given.pop(info.name) for info in offered}, self._values)
            return _checked(self._class, options)

        specs = tuple(info.spec() for info in (config, *offered))
        return StructConstructorSpec(make, specs)

    def _described(self, info: SettingInfo) -> SettingInfo:
        """Return a parameter with its meaning, and the default that holds now."""
        default = self._values.get(info.name, MISSING)
        hint = type(default) if info.name in self.chosen else info.hint
        meaning = self._meanings.get(info.name, "")
        return dataclasses.replace(info, hint=hint, meaning=meaning, default=default)


@dataclasses.dataclass(frozen=True)
class _Offered:
    """An option that a command line offers."""

    name: str
    hint: Any
    default: Any
    meaning: str

    @classmethod
    def of(cls, info: SettingInfo) -> _Offered:
        hint = info.hint
        text = info.explanation
        if Schedule in members_of(hint):
            text = text.replace(
                ", or a schedule.", ", or a schedule, such as linear(1e-3, 0, 1e6)."
            )
        return cls(info.name, hint, info.default, text)

    def spec(self) -> Any:
        from tyro.conf import arg
        from tyro.constructors import MISSING as REQUIRED
        from tyro.constructors import StructFieldSpec

        hint: Any = self.hint
        if isinstance(hint, type) and issubclass(hint, Settings):
            help_text = self.meaning or (hint.__doc__ or "").partition("\n")[0]
        else:
            help_text = _ROLE.sub(r"\1", self.meaning).replace("`", "")
            hint = Annotated[hint, arg(help=help_text)]
        default = REQUIRED if self.default is MISSING else self.default
        return StructFieldSpec(self.name, hint, default, help_text)


def _spec_of(cls: type[Settings], default: Settings | None) -> Any:
    """Return how tyro makes settings from options, with the defaults of an object."""
    from tyro.constructors import StructConstructorSpec

    infos = describe(cls)
    if default is not None:
        infos = [dataclasses.replace(info, default=getattr(default, info.name)) for info in infos]
    hidden = {info.name: info.default for info in infos if info.by_program}
    hidden = {name: value for name, value in hidden.items() if value is not MISSING}

    defaults = {info.name: info.default for info in infos}

    def make(**options: Any) -> Settings:
        changed = {name: options[name] for name in cls.exclusive if options[name] != defaults[name]}
        options |= cleared_by(cls, changed) | changed
        return cls(**hidden, **_merged(options, defaults))

    return StructConstructorSpec(
        make, tuple(_Offered.of(info).spec() for info in infos if not info.by_program)
    )


def _merged(given: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Let options by name keep the defaults that they do not name."""
    merged = dict(given)
    for name, value in given.items():
        default = defaults.get(name)
        if isinstance(value, Mapping) and isinstance(default, Mapping):
            merged[name] = {**default, **value}
    return merged


def _checked(cls: type[Settings], given: Mapping[str, Any]) -> dict[str, Any]:
    settings = cls(**given)
    return {name: getattr(settings, name) for name in given}


def _flags(info: SettingInfo, default: Any) -> Iterator[tuple[str, bool]]:
    for path, hint in _hints_by_path(info, default):
        yield path, members_of(hint) == [bool] and default is not MISSING


def _hints_by_path(info: SettingInfo, default: Any, before: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the dotted names of options with their types."""
    path = f"{before}{info.name}"
    if not isinstance(default, Settings):
        yield path, info.hint
        return
    for field in describe(type(default)):
        if not field.by_program:
            yield from _hints_by_path(field, getattr(default, field.name), f"{path}.")


def _texts_of_switch(hint: Any) -> list[str]:
    """Return the texts that a flag takes in addition to no value; none: it is not such a flag."""
    members = members_of(hint)
    literals = [member for member in members if typing.get_origin(member) is Literal]
    texts = [text for member in literals for text in typing.get_args(member)]
    return texts if bool in members and len(literals) == len(members) - 1 else []


def _with_values(arguments: Sequence[str], switches: Collection[str]) -> list[str]:
    """Write the flags that also take texts with values: ``--x`` as ``--x True``."""
    words: list[str] = []
    for at, word in enumerate(arguments):
        option = word.replace("_", "-")
        positive = option.replace("no-", "", 1) if "no-" in option else option
        if option in switches:
            is_last = at + 1 == len(arguments) or arguments[at + 1].startswith("-")
            words += [word, "True"] if is_last else [word]
        elif positive in switches:
            words += [positive, "False"]
        else:
            words.append(word)
    return words


def _parameters(main: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    skipped = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    parameters = inspect.signature(main).parameters
    return {
        name: parameter for name, parameter in parameters.items() if parameter.kind not in skipped
    }


def _settings_of(main: Callable[..., Any]) -> type[Settings]:
    """Return a class of settings whose fields are the parameters of a function."""
    hints = typing.get_type_hints(main, include_extras=True)
    parameters = _parameters(main)
    for name in parameters:
        if name not in hints:
            raise ConfigError(
                f"{main.__qualname__} is called with arguments, but its parameter {name} has no "
                "type; annotate it, such as seed: int = 0"
            )
    defaults = {
        name: _field(parameter.default)
        for name, parameter in parameters.items()
        if parameter.default is not inspect.Parameter.empty
    }
    annotations = {name: _checkable(hints[name]) for name in parameters}
    namespace = {"__annotations__": annotations, "__module__": main.__module__, **defaults}
    return types.new_class("arguments", (Settings,), exec_body=lambda body: body.update(namespace))


def _field(default: Any) -> Any:
    if type(default).__hash__ is None:
        return dataclasses.field(default_factory=lambda: default)
    return default


def _checkable(hint: Any) -> Any:
    """Return a hint by which settings that were made already are only checked for their type."""
    if isinstance(hint, type) and issubclass(hint, Settings):
        from pydantic import InstanceOf

        return typing.cast(Any, InstanceOf)[hint]
    chosen = [mark for mark in getattr(hint, "__metadata__", ()) if isinstance(mark, DefaultsBy)]
    return Annotated[Any, chosen[0]] if chosen else hint


def _docstring_of(main: Callable[..., Any]) -> Docstring:
    from docstring_parser import DocstringStyle, parse

    return parse(inspect.cleandoc(main.__doc__ or ""), DocstringStyle.GOOGLE)


def _sentence(text: str) -> str:
    text = " ".join(text.split())
    return text[:1].upper() + text[1:]


def _name_of(main: Callable[..., Any]) -> str:
    """Return the name by which ``--main`` finds a function, if it can be imported."""
    return f"{importable_module(main.__module__)}.{main.__qualname__}"


def _folder_of(main: Callable[..., Any]) -> Path | None:
    try:
        file = inspect.getsourcefile(main)
    except TypeError:
        return None
    return None if file is None else Path(file).resolve().parent


def _prog_of(main: Callable[..., Any]) -> str:
    is_script = main.__module__ == "__main__" and script_folder() is not None
    module = importable_module(main.__module__)
    return Path(sys.argv[0]).name if is_script or module == "__main__" else f"python -m {module}"


def _options_in(config: str) -> dict[str, Any]:
    """Return the options that a YAML file, or an entry of the zoo, has by name.

    Raises:
        ConfigError: if it cannot be read, or has something else.
        RegistryError: if the zoo has no such algorithm.
    """
    if config.startswith(_ZOO):
        from dmiddleware.zoo import tuned_options

        algo, _, env = config.removeprefix(_ZOO).partition("/")
        return tuned_options(algo, env)
    path = Path(config)
    try:
        loaded = read_yaml(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"cannot read {path}: {error}") from error
    values = loaded.get("arguments", loaded) if isinstance(loaded, dict) else loaded
    if not isinstance(values, dict):
        raise ConfigError(f"{path} must have options by name, got {values!r:.100}")
    return values


def _refuse_unknown(
    values: Mapping[Any, Any],
    known: Mapping[str, SettingInfo],
    at: str,
    elsewhere: Iterable[str] = (),
) -> None:
    """Refuse names that are not known, with the one that was meant, maybe that of a group.

    Raises:
        ConfigError: for the first one.
    """
    names = [name for name, field in known.items() if not field.by_program]
    for name in values:
        if name not in names:
            everywhere = dict.fromkeys((*names, *elsewhere))
            hint = hint_for(str(name), everywhere) or unknown_name(str(name), names)
            raise ConfigError(f"{at}: unknown option {name}; {hint}")


def _plain(value: Any) -> Any:
    """Return a value as YAML can write it, without the settings that programs set themselves."""
    if isinstance(value, Settings):
        return {
            info.name: _plain(getattr(value, info.name))
            for info in describe(type(value))
            if not info.by_program
        }
    if isinstance(value, list | tuple):
        return [_plain(info) for info in value]
    if callable(value) and not isinstance(value, enum.Enum | Schedule):
        return name_of(value)
    return plain_values(value)


def _from_plain(hint: Any, value: Any, default: Any, at: str) -> Any:
    """Return a value that a file has as a parameter takes it."""
    kinds = [type(default)] if isinstance(default, Settings) else []
    kinds += [
        member
        for member in members_of(hint)
        if isinstance(member, type) and issubclass(member, Settings)
    ]
    if kinds and not (value is None and type(None) in members_of(hint)):
        return _group_from_plain(kinds, value, default, at)
    is_schedule = isinstance(value, Mapping) or (isinstance(value, str) and "(" in value)
    if is_schedule and Schedule in members_of(hint):
        try:
            return Schedule.parse(value) if isinstance(value, str) else Schedule.of(value)
        except ConfigError as error:
            raise ConfigError(f"{at}: {error}") from error
    _refuse_described(value, at)
    return from_plain(hint, value)


def _refuse_described(value: Any, at: str) -> None:
    """Refuse an object that the run which wrote a file had, and that no file can hold."""
    if is_described(value):
        raise ConfigError(
            f"{at} was {value} in that run, which no file can hold; start the program"
        )
    parts = value.values() if isinstance(value, Mapping) else value
    for part in parts if isinstance(parts, list | ValuesView) else ():
        _refuse_described(part, at)


def _group_from_plain(
    kinds: Sequence[type[Settings]], value: Any, default: Any, at: str
) -> Settings:
    """Return settings of the first class that has all options which a file has.

    Raises:
        ConfigError: for something else than options by name, an unknown option or a wrong value.
    """
    if not isinstance(value, Mapping):
        raise ConfigError(f"{at} must have options by name, got {value!r:.100}")
    offered = {kind: {item.name: item for item in describe(kind)} for kind in kinds}
    kind = next((item for item in kinds if value.keys() <= offered[item].keys()), kinds[0])
    fields = offered[kind]
    _refuse_unknown(value, fields, at)
    base = default if type(default) is kind else None
    changes = {
        name: _from_plain(fields[name].hint, item, getattr(base, name, None), f"{at}.{name}")
        for name, item in value.items()
    }
    try:
        if base is None:
            return kind(**changes)
        return dataclasses.replace(base, **(cleared_by(kind, changes) | changes))
    except ConfigError as error:
        raise ConfigError(f"{at}: {error}") from error


def _whole_numbers(info: Any) -> Any:
    """Read 1e6 as 1000000."""
    if info.type is not int:
        return None
    return _text_spec("INT", _as_whole, lambda value: isinstance(value, int), str)


def _as_whole(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        number = float(text)
        if not number.is_integer():
            raise ValueError(f"{text} is not an integer") from None
        return int(number)


def _schedules(info: Any) -> Any:
    """Read a schedule that is written like a call, or a number."""
    if Schedule not in members_of(info.type):
        return None
    takes_none = type(None) in members_of(info.type)

    def read(text: str) -> Any:
        if takes_none and text == "None":
            return None
        try:
            return float(text)
        except ValueError:
            return Schedule.parse(text)

    kinds = (int, float, Schedule, *((type(None),) if takes_none else ()))
    metavar = "FLOAT|SCHEDULE|None" if takes_none else "FLOAT|SCHEDULE"
    return _text_spec(metavar, read, lambda value: isinstance(value, kinds), str)


def _texts_of_functions(info: Any) -> Any:
    """Read only text where a function is possible too, which no text can be."""
    kinds = members_of(info.type)
    if not any(typing.get_origin(kind) is Callable or kind is Callable for kind in kinds):
        return None

    def write(value: Any) -> str:
        return value if isinstance(value, str) else name_of(value)

    return _text_spec("STR", str, lambda value: isinstance(value, str) or callable(value), write)


def _switches(info: Any) -> Any:
    """Read a flag that also takes texts; ``--x`` and ``--no-x`` have got values before."""
    texts = _texts_of_switch(info.type)
    if not texts:
        return None

    def read(text: str) -> Any:
        if text in texts:
            return text
        if text.lower() not in ("true", "false"):
            raise ValueError(f"must be true, false or {', '.join(texts)}, got {text!r}")
        return text.lower() == "true"

    return _text_spec(
        "|".join(("True", "False", *texts)),
        read,
        lambda value: isinstance(value, bool) or value in texts,
        str,
    )


def _mappings(info: Any) -> Any:
    """Read options as ``name=value``, where a value is written as in a file."""
    from tyro.constructors import PrimitiveConstructorSpec

    if typing.get_origin(info.type) is not Mapping:
        return None
    return PrimitiveConstructorSpec(
        nargs="*",
        metavar="NAME=VALUE",
        instance_from_str=lambda texts: dict(map(_pair, texts)),
        is_instance=lambda value: isinstance(value, Mapping),
        str_from_instance=lambda value: [f"{name}={_flow(item)}" for name, item in value.items()],
    )


def _pair(text: str) -> tuple[str, Any]:
    name, equals, value = text.partition("=")
    if not (name and equals):
        raise ValueError(f"write name=value, got {text!r}")
    try:
        return name, read_yaml(value)
    except yaml.YAMLError as error:
        raise ValueError(f"{name} has a value that YAML cannot read: {value!r}") from error


def _flow(value: Any) -> str:
    text = yaml_text(plain_values(value), default_flow_style=True, width=10_000)
    return text.removesuffix("\n").removesuffix("\n...").replace(", ", ",")


def _text_spec(
    metavar: str,
    read: Callable[[str], Any],
    is_instance: Callable[[Any], bool],
    write: Callable[[Any], str],
) -> Any:
    from tyro.constructors import PrimitiveConstructorSpec

    return PrimitiveConstructorSpec(
        nargs=1,
        metavar=metavar,
        instance_from_str=lambda texts: read(texts[0]),
        is_instance=is_instance,
        str_from_instance=lambda value: [write(value)],
    )
