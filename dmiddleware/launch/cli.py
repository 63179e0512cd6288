"""The command line of ``ditask``.

What takes long to import is imported when it is needed, so that ``--help`` answers at once.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import click

__all__ = ["ditask"]

KEY_VARIABLE = "DITASK_KEY"


@click.command(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.option(
    "--main",
    required=True,
    metavar="MODULE.FUNCTION",
    help="The function to run in every process, for example examples.cartpole_dqn.main.",
)
@click.option(
    "--package",
    default=".",
    show_default=True,
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="Folder that is put first on the import path.",
)
@click.option(
    "--roles",
    default="",
    metavar="ROLE=N,…",
    help="Processes by role, for example learner=1,collector=2,evaluator=1.",
)
@click.option(
    "--parallel-workers",
    type=int,
    help="How many processes; without --roles the first learns, the last evaluates and the others "
    "collect.",
)
@click.option(
    "--topology",
    default="mesh",
    show_default=True,
    type=click.Choice(["mesh", "star", "alone"]),
    help="Who dials whom: everyone each other; all the first; nobody (see --attach-to).",
)
@click.option(
    "--protocol",
    default="ipc",
    show_default=True,
    type=click.Choice(["ipc", "tcp", "tls+tcp"]),
    help="ipc on one host; tcp or tls+tcp across hosts.",
)
@click.option(
    "--mq-type",
    default="nng",
    show_default=True,
    type=click.Choice(["nng", "redis"]),
    help="What carries events: sockets between the processes; or a redis server that all can "
    "reach, where hosts cannot reach each other.",
)
@click.option(
    "--redis-url",
    default="redis://127.0.0.1:6379/0",
    show_default=True,
    metavar="URL",
    help="The server and its database, for --mq-type redis; a password goes into "
    "DITASK_REDIS_PASSWORD.",
)
@click.option(
    "--shared-memory",
    default="/dev/shm",
    show_default=True,
    metavar="FOLDER",
    help="Where processes of one host lay large arrays for each other; empty: they are sent.",
)
@click.option("--address", default="127.0.0.1", show_default=True, help="This host, for tcp.")
@click.option(
    "--ports",
    default="",
    metavar="P,…",
    help="Ports to listen on, the last one counted on from; without, free ones from 25515 to "
    "29514.",
)
@click.option(
    "--attach-to",
    default="",
    metavar="ADDRESS,…",
    help="Nodes of a run that goes on already; needs its key and its --run-id. Those who join it "
    "have a run folder of their own, for their logs, and may leave without ending the run.",
)
@click.option(
    "--node-ids",
    default="",
    metavar="N,…",
    help="Numbers of the processes in the run; those that join one take numbers nobody has.",
)
@click.option("--labels", default="", metavar="WORD,…", help="Labels for task.match_labels.")
@click.option("--run-id", default="", help="Name of the run; nodes of other runs are refused.")
@click.option(
    "--key-file",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help=f"File with the run's key; or set {KEY_VARIABLE}. Made anew for runs on one host.",
)
@click.option("--tls-ca", default="", help="PEM file: whom to trust, for tls+tcp.")
@click.option("--tls-cert", default="", help="PEM file: certificate and private key, for tls+tcp.")
@click.option("--tls-name", default="localhost", show_default=True, help="Name in certificates.")
@click.option(
    "--startup-interval",
    default=0.0,
    show_default=True,
    type=click.FloatRange(min=0.0),
    help="Seconds between two starts.",
)
@click.option(
    "--start-timeout",
    default=60.0,
    show_default=True,
    type=click.FloatRange(min=0.0, min_open=True),
    help="Seconds in which all processes must have found each other.",
)
@click.option(
    "--on-failure",
    default="abort",
    show_default=True,
    type=click.Choice(["abort", "continue", "restart"]),
    help="When a process fails: end the run; go on without it; start it again.",
)
@click.option(
    "--max-restarts",
    default=3,
    show_default=True,
    type=click.IntRange(min=0),
    help="Restarts of one process.",
)
@click.option(
    "--platform",
    default="local",
    show_default=True,
    type=click.Choice(["local", "slurm", "k8s"]),
    help="Read this host's place in the run from the platform's variables.",
)
@click.option(
    "--platform-spec",
    default="",
    metavar="JSON",
    help='More about the platform, as {"roles": [...one --roles a host...], "port": 25515}.',
)
def ditask(**options: Any) -> None:
    """Start the processes of a run, watch over them, and end them.

    \b
    On one host:
      ditask --main examples.cartpole_dqn.main --parallel-workers 4
    Over tcp, so that others can join (a key: openssl rand -hex 32 > run.key):
      ditask --main examples.cartpole_dqn.main --parallel-workers 4
             --protocol tcp --ports 25515 --key-file run.key
    Two more collectors, from another terminal, while it runs:
      ditask --main examples.cartpole_dqn.main --roles collector=2 --topology alone
             --attach-to tcp://127.0.0.1:25515 --key-file run.key
    """  # noqa: D301 (click reads the backspace as: do not wrap this paragraph)
    from dmiddleware.errors import DMiddlewareError
    from dmiddleware.launch.launcher import launch

    try:
        code = launch(options, os.environ)
    except DMiddlewareError as error:
        raise click.ClickException(str(error)) from error
    sys.exit(code)
