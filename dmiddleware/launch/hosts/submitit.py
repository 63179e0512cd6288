"""Nodes as the tasks of a job of submitit."""

from __future__ import annotations

import signal
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from dmiddleware.errors import LaunchError
from dmiddleware.launch.node import Program, join_run
from dmiddleware.launch.plan import RunPlan, plan_run
from dmiddleware.launch.ports import port_of_run
from dmiddleware.process.signals import ignore_signal
from dmiddleware.run_key import make_key, read_key, write_key

if TYPE_CHECKING:
    from submitit import JobEnvironment
    from submitit.helpers import DelayedSubmission

__all__ = ["SubmititRun"]


class SubmititRun:
    """A run to pass to ``executor.submit`` of submitit: each task of the job is one of its nodes.

    The job needs as many tasks as the run has nodes. They have the roles in the given order. When
    submitit's job is preempted or reaches its time limit, all nodes stop in order, and submitit
    requeues the job; the program continues if it resumes a snapshot. Needs the extra ``submitit``.

    Args:
        program: a function without arguments, or its name, ``package.module.function``.
        roles: number of nodes per role.
        key_file: the file with the run's key, which all hosts can read; made if it is missing.
        package: the folder to put first on the import path, if ``program`` is a name.
        port: the port of the first task; the others that listen use those that follow. None: it
            follows from the number of the job, so that jobs on the same hosts have different ones.
        **settings: of :func:`~dmiddleware.launch.plan_run`, such as ``start_timeout_s``.
    """

    def __init__(
        self,
        program: Program,
        roles: Mapping[str, int],
        *,
        key_file: Path | str,
        package: str = "",
        port: int | None = None,
        **settings: Any,
    ) -> None:
        self._program = program
        self._roles = dict(roles)
        self._key_file = Path(key_file).absolute()
        self._package = package
        self._port = port
        self._settings = settings
        if not self._key_file.exists():
            self._key_file.parent.mkdir(parents=True, exist_ok=True)
            write_key(self._key_file, make_key())

    def __call__(self) -> Any:
        """Run this task's node, and return what the program returns.

        Raises:
            LaunchError: if the job has another number of tasks than the run has nodes.
            BaseException: what :func:`~dmiddleware.launch.join_run` raises.
        """
        from submitit import JobEnvironment

        job = JobEnvironment()
        # Slurm sends it together with the signal for a requeue, and submitit ignores it, too.
        ignore_signal(signal.SIGTERM)
        try:
            return join_run(self._plan(job), job.global_rank, self._program, package=self._package)
        except SystemExit as end:
            if not isinstance(end.code, int) or end.code <= 128:
                raise
            number = end.code - 128
        # The node has stopped. Now submitit's handler receives the signal, and task 0 requeues.
        signal.raise_signal(number)
        raise SystemExit(0)

    def checkpoint(self) -> DelayedSubmission:
        """Return what submitit runs after a requeue: the same."""
        from submitit.helpers import DelayedSubmission

        return DelayedSubmission(self)

    def _plan(self, job: JobEnvironment) -> RunPlan:
        """Return the plan of the run, which is the same in all tasks."""
        n_nodes = sum(self._roles.values())
        if job.num_tasks != n_nodes:
            raise LaunchError(
                f"the run has {n_nodes} nodes, but the job {job.num_tasks} tasks; submit it with "
                f"as many: executor.update_parameters(nodes=1, tasks_per_node={n_nodes})"
            )
        hosts = ["127.0.0.1"] if job.num_nodes == 1 else job.hostnames
        # Of a job array, it has the number of the task too.
        name = f"submitit-{job.job_id}"
        port = port_of_run(name) if self._port is None else self._port
        run_id = self._settings.get("run_id")
        plan = plan_run(
            self._roles,
            addresses=[
                f"tcp://{hosts[task * job.num_nodes // job.num_tasks]}:{port + task}"
                for task in range(job.num_tasks)
            ],
            key=read_key(self._key_file, option="key_file"),
            **{**self._settings, "run_id": f"{run_id}-{name}" if run_id else name},
        )
        return msgspec.structs.replace(plan, run_token=name)
