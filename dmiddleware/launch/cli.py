"""The command line of ``ditask``, made from :class:`~dmiddleware.launch.options.LaunchOptions`.

Slow imports happen inside the command, so that ``--help`` answers at once.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Mapping
from dataclasses import MISSING
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, Final, Literal, get_args, get_origin

import click
from annotated_types import Ge, Gt

from dmiddleware.errors import DMiddlewareError
from dmiddleware.foreign_names import hint_for
from dmiddleware.launch.options import Flag, LaunchOptions, options_and_flags
from dmiddleware.process.ctrl_c import exit_after_ctrl_c, exit_at_ctrl_c
from dmiddleware.process.terminal import print_any_text
from dmiddleware.settings import SettingInfo

__all__ = ["ditask"]


_COMMANDS: Final[Mapping[str, str]] = {
    **{
        name: f"dmiddleware.runs.commands.{name}_command"
        for name in ("compare", "export", "inspect", "play", "report", "resume", "watch")
    },
    "sweep": "middleware.programs.sweep_command.sweep_command",
    "train": "middleware.programs.commands.train_command",
    "examples": "dmiddleware.example_programs.examples_command",
    "classic": "dmiddleware.worker.commands.classic_command",
    "ding": "dmiddleware.ding.command.ding_command",
}
"""The commands beside that which starts a run, by their names."""


class _Command(click.Command):
    """Starts a run; its program gets the arguments that follow ``--``. Or calls another command."""

    def make_context(
        self,
        info_name: str | None,
        args: list[str],
        parent: click.Context | None = None,
        **extra: Any,
    ) -> click.Context:
        if not args or args[0] not in _COMMANDS:
            return super().make_context(info_name, args, parent, **extra)
        module, _, name = _COMMANDS[args[0]].rpartition(".")
        with exit_at_ctrl_c():
            command: click.Command = getattr(importlib.import_module(module), name)
        return command.make_context(f"{info_name} {args[0]}", args[1:], parent, **extra)

    def invoke(self, ctx: click.Context) -> Any:
        print_any_text()
        with exit_after_ctrl_c():
            return super().invoke(ctx) if ctx.command is self else ctx.command.invoke(ctx)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        at = args.index("--") if "--" in args else len(args)
        ours, arguments = args[:at], args[at + 1 :]
        try:
            _, rest, _ = self.make_parser(ctx).parse_args(list(ours))
            if rest[:1] in (["train"], ["classic"]):
                words_of = _words_of_zoo if rest[0] == "train" else _words_of_config
                ours, words = ours[: -len(rest)], words_of(rest[1:], ctx)
                ours, arguments = [*ours, *words[:2]], [*words[2:], *arguments]
            ctx.params["arguments"] = tuple(arguments)
            return super().parse_args(ctx, ours)
        except click.UsageError as error:
            if not isinstance(error, click.NoSuchOption) and "extra arg" not in error.message:
                raise
            text = error.format_message()
            if isinstance(error, click.NoSuchOption):
                name = error.option_name.lstrip("-").replace("-", "_")
                hint = hint_for(name, [str(parameter.name) for parameter in self.params])
                text = f"{text}; {hint}" if hint else text
            text = f"{text} (arguments of the program follow --)"
            raise click.UsageError(text, ctx) from error

    def collect_usage_pieces(self, ctx: click.Context) -> list[str]:
        return [*super().collect_usage_pieces(ctx), "[-- ARGUMENTS]"]


def _words_of_zoo(words: list[str], ctx: click.Context) -> list[str]:
    """Return ``--main``, the program that trains an algorithm, and its arguments.

    Raises:
        UsageError: if the words name no algorithm and env.
    """
    from dmiddleware.zoo.tuned import train_arguments, tuned

    if len(words) < 2 or words[0].startswith("-") or words[1].startswith("-"):
        raise click.UsageError(
            "name an algorithm and an env after train, and their options after them, such as: "
            "ditask --parallel-workers 4 train dqn CartPole-v1 --seed 1",
            ctx,
        )
    algo, env, *options = words
    try:
        return ["--main", tuned(algo).main, *train_arguments(algo, env, options)]
    except DMiddlewareError as error:
        raise click.UsageError(str(error), ctx) from error


def _words_of_config(words: list[str], ctx: click.Context) -> list[str]:
    """Return ``--main``, the program that runs a config file, and its arguments.

    Raises:
        UsageError: if the words name no file.
    """
    long_names = {"-c": "--file", "--config": "--file", "-s": "--seed"}
    parts = [word.partition("=") for word in words]
    arguments = [long_names.get(name, name) + equals + value for name, equals, value in parts]
    if not any(word.partition("=")[0] == "--file" for word in arguments):
        raise click.UsageError(
            "name a config file after classic, such as: ditask --roles "
            "coordinator=1,learner=1,collector=2 classic -c cartpole_dqn_config.py",
            ctx,
        )
    return ["--main", "dmiddleware.worker.commands.run_config", *arguments]


def _make_option(info: SettingInfo, flag: Flag) -> click.Option:
    is_required = info.default is MISSING
    kind, limits = _text_type(info.hint)
    # No text can be typed for an empty default, so the help describes it.
    default = None if is_required or info.default == () or flag.read is not None else info.default
    shown = bool(info.default) and not is_required and flag.read is None
    return click.Option(
        [*filter(None, (flag.short,)), "--" + info.name.replace("_", "-")],
        help=f"{info.meaning}  [default: {flag.shown}]" if flag.shown else info.meaning,
        metavar=flag.metavar or None,
        type=_click_type(kind, limits, flag),
        is_flag=kind is bool,
        required=is_required,
        default=default,
        show_default=not flag.shown and (shown or (kind is float and default is not None)),
        multiple=flag.multiple,
    )


def _text_type(hint: Any) -> tuple[Any, list[Any]]:
    """Return ``X`` of ``Annotated[X | None, …]``, and what its annotations add."""
    if get_origin(hint) is Annotated:
        inner, *items = get_args(hint)
        kind, more = _text_type(inner)
        return kind, [*more, *items]
    kinds = [member for member in get_args(hint) if member is not NoneType]
    return (hint, []) if kinds == list(get_args(hint)) else _text_type(kinds[0])


def _click_type(kind: Any, limits: list[Any], flag: Flag) -> click.ParamType[Any] | type[Any]:
    low: Any = next((limit.ge for limit in limits if isinstance(limit, Ge)), None)
    above: Any = next((limit.gt for limit in limits if isinstance(limit, Gt)), None)
    if get_origin(kind) is Literal:
        return click.Choice(get_args(kind))
    if kind is bool:
        return bool
    if kind is int:
        return int if low is None else click.IntRange(min=low)
    if kind is float:
        return click.FloatRange(min=low if above is None else above, min_open=above is not None)
    if kind is Path:
        return click.Path(
            exists=flag.is_file or flag.is_folder,
            file_okay=flag.is_file,
            dir_okay=not flag.is_file,
            path_type=Path,
        )
    return str


def _run(arguments: tuple[str, ...] = (), **given: Any) -> None:
    """Run a program in several processes: start them, watch them, and stop them together.

    All arguments after -- are for the program, in sys.argv of every process. If the parameters of
    the function have types, they are its options.

    \b
    On one host, an example:
      ditask examples .
      ditask --main examples.cartpole_dqn.main --parallel-workers 4
    With arguments for the program:
      ditask --main examples.cartpole_dqn.main --roles learner=1,collector=2
             -- --seed 3 --policy.learning-rate 3e-4
    A program of DI-engine, as it is:
      ditask --ding --package . --main ding.example.dqn.main --parallel-workers 4
    With tuned settings for an algorithm and an env:
      ditask --parallel-workers 4 train dqn CartPole-v1 --seed 3
    A parallel config of DI-engine, as it is:
      ditask --roles coordinator=1,learner=1,collector=2 classic -c cartpole_dqn_config.py
    Over tcp, with a key, so that others can join:
      openssl rand -hex 32 > run.key; chmod 600 run.key
      ditask --main examples.cartpole_dqn.main --parallel-workers 4
             --protocol tcp --ports 25515 --key-file run.key
    Add two collectors from another terminal while it runs:
      ditask --main examples.cartpole_dqn.main --roles collector=2
             --attach-to tcp://127.0.0.1:25515 --key-file run.key

    \b
    Other commands; each has its own --help:
      ditask train ALGO ENV     train with tuned settings; --list shows what there is
      ditask examples FOLDER    copy the example programs, to run and change them
      ditask sweep --set ...    many runs with different settings, or a search with Optuna
      ditask ding FILE          run a program of DI-engine as it is
      ditask classic -c FILE    run a config file of DI-engine
      ditask compare RUNS...    which settings learn better, and how sure that is
      ditask report RUNS...     an HTML page with curves, settings and videos
      ditask watch RUN          a running or finished run in the terminal
      ditask inspect FILE       what a checkpoint or a snapshot holds
      ditask resume RUN         continue a run that was stopped or killed
      ditask play RUN           the returns of a saved policy, and a video
      ditask export RUN         a policy for onnxruntime or torch, with a model card
    """  # noqa: D301 (\b keeps click from rewrapping the paragraph)
    _open_standard_streams()
    try:
        texts = {name: value for name, value in given.items() if value is not None}
        options = LaunchOptions.from_texts(texts, arguments)
        from dmiddleware.launch.launcher import execute

        code = execute(options, os.environ)
    except DMiddlewareError as error:
        raise click.ClickException(str(error)) from error
    sys.exit(code)


def _open_standard_streams() -> None:
    """Open standard streams that are closed, so that no other file gets their descriptors."""
    for descriptor in (0, 1, 2):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)


ditask = click.version_option(None, "-v", "--version", package_name="dmiddleware")(
    _Command(
        "ditask",
        callback=_run,
        params=[_make_option(info, flag) for info, flag in options_and_flags()],
        help=_run.__doc__,
        context_settings={
            "help_option_names": ["-h", "--help"],
            "max_content_width": 100,
            "allow_interspersed_args": False,
        },
    )
)
