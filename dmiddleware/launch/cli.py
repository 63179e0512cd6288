"""The command line of ``ditask``.

Slow imports happen inside the command, so that ``--help`` answers at once.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import click

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


@click.command(
    cls=_Command, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100}
)
@click.version_option(None, "-v", "--version", package_name="dmiddleware")
@click.option(
    "-m",
    "--main",
    required=True,
    metavar="MODULE.FUNCTION",
    help="The function to run in every process, for example examples.cartpole_dqn.main.",
)
@click.option(
    "-p",
    "--package",
    default=".",
    show_default=True,
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="The folder to put first on the import path.",
)
@click.option(
    "--roles",
    default="",
    metavar="ROLE=N,...",
    help="Number of processes per role, for example learner=1,collector=2,evaluator=1. A run has "
    "one learner.",
)
@click.option(
    "--env",
    multiple=True,
    metavar="[ROLE:]NAME=VALUE",
    help="An environment variable for all processes, for those of a role, or for one node id; may "
    "be given several times. For example, collector:CUDA_VISIBLE_DEVICES= hides the GPUs from the "
    "collectors.",
)
@click.option(
    "--parallel-workers",
    type=int,
    metavar="N",
    help="Number of processes. Without --roles, the first one learns, the last one evaluates and "
    "the others collect.",
)
@click.option(
    "--topology",
    show_default="star, or mesh in a run with a coordinator",
    type=click.Choice(["star", "mesh", "alone"]),
    help="How processes connect: star, all to the learner (or to the first process if none "
    "learns); mesh, each to all others; alone, only to the addresses in --attach-to.",
)
@click.option(
    "--protocol",
    default="ipc",
    show_default=True,
    type=click.Choice(["ipc", "tcp", "tls+tcp"]),
    help="ipc on one host; tcp or tls+tcp between hosts.",
)
@click.option(
    "--mq-type",
    default="socket" if sys.platform == "linux" else "nng",
    show_default=True,
    type=click.Choice(["socket", "nng", "redis"]),
    help="How events travel: socket, over plain sockets between the processes (on Linux); nng, "
    "over the sockets of the nng library; redis, through a redis server, for hosts that cannot "
    "reach each other.",
)
@click.option(
    "--redis-url",
    default="redis://127.0.0.1:6379/0",
    show_default=True,
    metavar="URL",
    help="The redis server and database, for --mq-type redis. Set DITASK_REDIS_PASSWORD if the "
    "server needs a password.",
)
@click.option(
    "--shared-memory",
    default="/dev/shm",
    show_default=True,
    metavar="FOLDER",
    help="Where processes of one host exchange large arrays. Pass an empty string to send arrays "
    "over sockets instead.",
)
@click.option(
    "--max-event-bytes",
    metavar="BYTES",
    type=click.IntRange(min=8192),
    help="How much memory each process grants for large events of the others; a larger event is "
    "refused where it is emitted.  [default: half of the memory of the machine or container]",
)
@click.option(
    "--address",
    default="",
    metavar="HOST",
    help="The address of this host, as other hosts reach it, for tcp and tls+tcp.  "
    "[default: 127.0.0.1]",
)
@click.option(
    "--bind",
    default="",
    metavar="HOST",
    help="The local address to listen on, for example 0.0.0.0 for all. Needed only if other hosts "
    "reach this one by another address, as with NAT or in containers.  [default: --address]",
)
@click.option(
    "--ports",
    default="",
    metavar="P,...",
    help="The ports to listen on, first the learner's. With fewer ports than listening processes, "
    "the rest count up from the last one.  [default: free ports from 25515 to 29514]",
)
@click.option(
    "--attach-to",
    default="",
    metavar="ADDRESS,...",
    help="Join a run that was started before: the addresses of its nodes. Needs its key and "
    "--run-id. Processes that join write to their own run folder, and the run continues when they "
    "leave.",
)
@click.option(
    "--node-ids",
    default="",
    metavar="N,...",
    help="Node ids of the processes, or only the first one.  [default: count up from 0]",
)
@click.option(
    "--labels",
    default="",
    metavar="LABEL,...",
    help="Labels of the processes, for task.match_labels.",
)
@click.option(
    "--run-id", default="", help="The name of the run. Nodes of runs with other names are refused."
)
@click.option(
    "--key-file",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="File with the run's key, at least 32 characters, that no other user can read; DITASK_KEY "
    "can hold the key instead. A run on one host generates one.",
)
@click.option(
    "--tls-ca",
    default="",
    metavar="FILE",
    help="PEM file with the trusted certificate authority, for tls+tcp.",
)
@click.option(
    "--tls-cert",
    default="",
    metavar="FILE",
    help="PEM file with this host's certificate and private key, for tls+tcp.",
)
@click.option(
    "--tls-name",
    default="localhost",
    show_default=True,
    help="The server name in the certificates, for tls+tcp.",
)
@click.option(
    "--startup-interval",
    default=0.0,
    show_default=True,
    metavar="SECONDS",
    type=click.FloatRange(min=0.0),
    help="Pause between two process starts.",
)
@click.option(
    "--start-timeout",
    default=60.0,
    show_default=True,
    metavar="SECONDS",
    type=click.FloatRange(min=0.0, min_open=True),
    help="How long a process waits for peers that are not connected before its first step.",
)
@click.option(
    "--on-failure",
    default="abort",
    show_default=True,
    type=click.Choice(["abort", "continue", "restart"]),
    help="When a process fails: abort the run, continue without the process, or restart the "
    "process.",
)
@click.option(
    "--max-restarts",
    default=3,
    show_default=True,
    metavar="N",
    type=click.IntRange(min=0),
    help="How often each process may be restarted within --restart-window.",
)
@click.option(
    "--restart-window",
    default=3600.0,
    show_default=True,
    metavar="SECONDS",
    type=click.FloatRange(min=0.0, min_open=True),
    help="How long a restart counts.",
)
@click.option(
    "--hang-timeout",
    metavar="SECONDS",
    type=click.FloatRange(min=0.0, min_open=True),
    help="Kill a process that makes no progress for this long, as a failed one. Waiting for other "
    "processes does not count. It must be longer than the longest step, and than the program's "
    "start.  [default: never]",
)
@click.option(
    "--kill-after",
    default=20.0,
    show_default=True,
    metavar="SECONDS",
    type=click.FloatRange(min=0.0),
    help="How long processes may take to end when the run is stopped; then they are killed.",
)
@click.option(
    "--log-dir",
    metavar="FOLDER",
    type=click.Path(file_okay=False, path_type=Path),
    help="Where to write the whole output of each process.  [default: logs/DATE_TIME]",
)
@click.option(
    "--platform",
    default="local",
    show_default=True,
    type=click.Choice(["local", "slurm", "k8s"]),
    help="Where the run is started. On slurm and k8s, hosts find each other through the platform's "
    "environment variables.",
)
@click.option(
    "--platform-spec",
    default="",
    metavar="JSON",
    help='Roles per host and the learner\'s port, for slurm and k8s: {"roles": ["learner=1", '
    '"collector=8"], "port": 25515}.',
)
def ditask(**options: Any) -> None:
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
    from dmiddleware.errors import DMiddlewareError
    from dmiddleware.launch.launcher import launch

    try:
        code = launch(options, os.environ)
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
