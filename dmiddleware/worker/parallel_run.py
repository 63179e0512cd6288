"""Training in several processes, from a config in the classic shape."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any, Final, Protocol, runtime_checkable

from dmiddleware.classic.config import (
    Option,
    count,
    merge_config,
    one_of,
    optional,
    positive,
    text,
)
from dmiddleware.errors import ConfigError
from dmiddleware.process.signals import HeldSignals
from dmiddleware.registry import Registry
from dmiddleware.worker.comm import (
    create_comm_collector,
    create_comm_learner,
    create_coordinator_link,
)
from dmiddleware.worker.comm.link import import_worker_entry_point
from dmiddleware.worker.comm.received import named_modules
from dmiddleware.worker.coordinator.coordinator import Coordinator
from dmiddleware.worker.entry import compile_config
from dmiddleware.worker.env_config import drop_missing_modules
from dmiddleware.worker.parallel_config import parallel_configs
from dmiddleware.worker.worker_process import WorkerProcess

__all__ = ["PROCESS_ROLE_REGISTRY", "classic_run"]

PROCESS_ROLE_REGISTRY: Registry[Callable[[], str | None]] = Registry("communication")
"""Functions that return the role of this process in a run of several processes, by the name of the
communication; None where there is no such run."""

_SYSTEM: Final = {
    "communication": Option(
        None,
        optional(one_of("router", "flask_fs")),
        "how the processes communicate; None: over the router if ditask has started them",
    ),
    "communication_mode": Option("auto", one_of("auto"), "no effect: see `communication`"),
    "path_data": Option("./data", text, "folder of the step data (flask_fs)"),
    "path_policy": Option("./policy", text, "folder of the policies (flask_fs)"),
    "key_file": Option("", text, "file with the run's secret key (flask_fs); empty: none"),
    "learner_gpu_num": Option(1, count, "GPUs of the learner"),
    "collector_num": Option(2, count, "number of collectors (flask_fs)"),
    "learner_num": Option(1, one_of(1), "number of learners"),
    "start_timeout_s": Option(60.0, positive, "how long workers may take to start"),
    "coordinator": {},
    "collector": {},
    "learner": {},
}
_CHECK_S: Final = 0.2
_ROLES: Final = ("coordinator", "learner", "collector")


@runtime_checkable
class _StoppableLink(Protocol):
    """A link of a process that others can stop."""

    def wait_until_stopped(self, timeout_s: float) -> bool:
        """Wait until the process is asked to stop; return whether it is."""
        ...


def classic_run(
    main: Mapping[str, Any],
    system: Mapping[str, Any] | None = None,
    seed: int = 0,
    *,
    create: Mapping[str, Any] | None = None,
) -> bool | None:
    """Train in several processes: a coordinator, a learner, and collectors.

    Over the router, start the program with ``ditask --roles coordinator=1,learner=1,collector=2``;
    each process calls this function and does what its role says. Over HTTP (``flask_fs``), start it
    as a single process, which starts the workers on this host and coordinates them.

    The configs may be those of a parallel pipeline of DI-engine, which have the numbers of workers
    in ``policy.learn.learner`` and ``policy.collect.collector``.

    Args:
        main: ``exp_name``, ``env`` and ``policy``; see :func:`compile_config`. The commander is
            ``policy.other.commander``, with ``solo`` for example.
        system: ``communication`` (``"router"``, ``"flask_fs"``, or None: how the program was
            started decides), ``path_data``, ``path_policy``, ``key_file``, ``learner_gpu_num``,
            ``collector_num``, ``learner_num``, and further options of the processes in
            ``coordinator``, ``collector`` and ``learner``.
        seed: the seed of envs, policies and buffers. Two runs differ all the same, because the
            processes run at their own pace.
        create: what to create; see :func:`compile_config`. None: ``main`` has it.

    Returns:
        Whether the commander has ended the training because it has reached its goal; None in the
        processes of the workers.

    Raises:
        ConfigError: for an unusable config, or in a process whose role is none of the three.
    """
    main, create, system = parallel_configs(main, create, system)
    cfg = merge_config(_SYSTEM, system, owner="system", open_paths=_ROLES)
    role = _role(cfg.communication)
    cfg.communication = "flask_fs" if role is None else "router"
    if role == "coordinator":
        return _coordinate(main, create, cfg, seed, {})
    if role is None:
        return _run_on_this_host(main, create, cfg, seed)
    new_worker: Callable[..., Any] = (
        create_comm_learner if role == "learner" else create_comm_collector
    )
    with new_worker(_worker_cfg(_modules(main, create), cfg, role)) as worker:
        worker.join()
    return None


def _role(communication: str | None) -> str | None:
    """Return what this process does; None: it starts the others."""
    import_worker_entry_point("router")
    found = PROCESS_ROLE_REGISTRY.get("router")()
    if communication == "router" and found is None:
        raise ConfigError(
            "with communication='router' the program runs in several processes; start it with "
            "ditask --roles coordinator=1,learner=1,collector=2 --main package.module.main"
        )
    if communication == "flask_fs" and found is not None:
        raise ConfigError(
            "with communication='flask_fs' the program starts its workers itself; start it with "
            "python, or set communication='router'"
        )
    if found is not None and found not in _ROLES:
        raise ConfigError(
            f"this process has the role {found!r}, which has no part in a classic run; the roles "
            f"are {', '.join(_ROLES)}"
        )
    return found


def _run_on_this_host(
    main: Mapping[str, Any], create: Mapping[str, Any], cfg: Any, seed: int
) -> bool:
    """Start the workers as processes, and coordinate them."""
    modules = _modules(main, create)
    run_id = f"run_{secrets.token_hex(4)}"
    addresses: dict[str, dict[str, list[Any]]] = {"collector": {}, "learner": {}}
    with ExitStack() as stack:
        workers = []
        for role, n_workers in (("learner", cfg.learner_num), ("collector", cfg.collector_num)):
            for number in range(n_workers):
                worker_cfg = {**_worker_cfg(modules, cfg, role), "port": 0, "run_id": run_id}
                worker = WorkerProcess(role, worker_cfg)
                stack.callback(worker.close)
                workers.append((role, f"{role}{number}", worker))
        for role, name, worker in workers:
            addresses[role][name] = [name, "127.0.0.1", worker.read_port(cfg.start_timeout_s)]
        return _coordinate(main, create, cfg, seed, {"port": 0, "run_id": run_id, **addresses})


def _coordinate(
    main: Mapping[str, Any],
    create: Mapping[str, Any],
    cfg: Any,
    seed: int,
    addresses: Mapping[str, Any],
) -> bool:
    """Run the coordinator until the commander ends the training, or the run is stopped."""
    own = {"type": cfg.communication, "key_file": cfg.key_file, **addresses, **cfg.coordinator}
    whole = {"main": compile_config(main, create, seed=seed), "system": {**cfg, "coordinator": own}}
    link, store = create_coordinator_link(whole)
    with Coordinator(whole, link=link, store=store) as coordinator:
        if isinstance(link, _StoppableLink):
            while not coordinator.wait(0.0) and not link.wait_until_stopped(_CHECK_S):
                pass
        else:
            with HeldSignals() as signals, signals.interruptible():
                coordinator.wait()
        return bool(coordinator.system_shutdown_flag)


def _modules(*configs: Mapping[str, Any]) -> list[str]:
    """Return the modules that configs name, without those of DI-engine that are not installed."""
    section = {"import_names": sorted({*filter(None, named_modules(configs))})}
    drop_missing_modules(section, "import_names")
    return section["import_names"]


def _worker_cfg(modules: list[str], cfg: Any, role: str) -> dict[str, Any]:
    """Return the config of a communicating worker, which may import some modules."""
    common: dict[str, Any] = {"import_names": modules}
    if role == "learner":
        common["gpu_num"] = cfg.learner_gpu_num
    if cfg.communication == "router":
        return {"type": "router", **common, **cfg[role]}
    return {
        "type": "flask_fs",
        **common,
        "path_data": cfg.path_data,
        "path_policy": cfg.path_policy,
        "key_file": cfg.key_file,
        **cfg[role],
    }
