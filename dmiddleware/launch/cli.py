"""The command line of ``ditask``, made from :class:`~dmiddleware.launch.options.LaunchOptions`.

Slow imports happen inside the command, so that ``--help`` answers at once.
"""

from __future__ import annotations

import os
import sys
from dataclasses import MISSING
from pathlib import Path
from typing import Any

import click

from dmiddleware.errors import DMiddlewareError
from dmiddleware.launch.options import LaunchOptions, OptionInfo, option_infos

__all__ = ["ditask"]


class _Command(click.Command):
    """A command whose program gets the arguments that follow ``--``."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        at = args.index("--") if "--" in args else len(args)
        own, ctx.params["arguments"] = args[:at], tuple(args[at + 1 :])
        try:
            return super().parse_args(ctx, own)
        except click.UsageError as error:
            if not isinstance(error, click.NoSuchOption) and "extra arg" not in error.message:
                raise
            text = f"{error.format_message()} (arguments of the program follow --)"
            raise click.UsageError(text, ctx) from error

    def collect_usage_pieces(self, ctx: click.Context) -> list[str]:
        return [*super().collect_usage_pieces(ctx), "[-- ARGUMENTS]"]


def _make_option(info: OptionInfo) -> click.Option:
    is_required = info.default is MISSING
    # No text can be typed for an empty default, so the help describes it.
    default = None if is_required or info.default == () or info.read is not None else info.default
    shown = bool(info.default) and info.default is not MISSING and info.read is None
    help_text = f"{info.help}  [default: {info.shown}]" if info.shown else info.help
    return click.Option(
        [*filter(None, (info.short,)), info.flag],
        help=help_text,
        metavar=info.metavar or None,
        type=_click_type(info),
        required=is_required,
        default=default,
        show_default=not info.shown and (shown or (info.type is float and default is not None)),
        multiple=info.multiple,
    )


def _click_type(info: OptionInfo) -> click.ParamType[Any] | type[str] | type[int]:
    if info.choices:
        return click.Choice(info.choices)
    if info.type is int and info.low is None:
        return int
    if info.type is int:
        return click.IntRange(min=int(info.low or 0))
    if info.type is float:
        return click.FloatRange(min=info.low, min_open=not info.may_be_low)
    if info.type is Path:
        return click.Path(
            exists=info.is_file or info.is_folder,
            file_okay=info.is_file,
            dir_okay=not info.is_file,
            path_type=Path,
        )
    return str


def _run(arguments: tuple[str, ...] = (), **given: Any) -> None:
    """Run a program in several processes: start them, watch them, and stop them together.

    All arguments after -- are for the program, in sys.argv of every process.

    \b
    On one host:
      ditask --main examples.cartpole_dqn.main --parallel-workers 4
    With arguments for the program:
      ditask --main train.main --roles learner=1,collector=2 -- --seed 3
    Over tcp, with a key, so that others can join:
      openssl rand -hex 32 > run.key; chmod 600 run.key
      ditask --main examples.cartpole_dqn.main --parallel-workers 4
             --protocol tcp --ports 25515 --key-file run.key
    Add two collectors from another terminal while it runs:
      ditask --main examples.cartpole_dqn.main --roles collector=2
             --attach-to tcp://127.0.0.1:25515 --key-file run.key
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
        params=[_make_option(info) for info in option_infos()],
        help=_run.__doc__,
        context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    )
)
