"""The launcher.

`ditask` starts 50 real processes, a learner and 49 collectors, with its default options, and then
200. Their program imports no torch and does nothing. They have formed when the last of them is in
its first step, for which each waits until its peers are ready. Sixteen more do the same with torch.
The CPU time of idle processes is that of all of them and the launcher together, and so is their
memory, without what processes share counted twice (the proportional set size).

With the variable ``BENCH_BEFORE`` set to another checkout of the repository, the same program also
measures that one in the same run, with the smaller number of processes, and their rows are repeated
against it. ``BENCH_SMALL=1`` starts eight processes, then sixteen, and four with torch.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import psutil

from tests.benchmarks.report import Row

ROOT = Path(__file__).resolve().parents[2]
_SMALL = bool(os.environ.get("BENCH_SMALL"))
FORM_BARS_S = {8: 5.0, 16: 5.0} if _SMALL else {50: 5.0, 200: 20.0}
"""In how many seconds these numbers of processes should form."""

N_WITH_TORCH = 4 if _SMALL else 16
SETTLE_S = 3.0
IDLE_S = 4.0 if _SMALL else 15.0
_DEADLINE_S = 180.0


@dataclass(frozen=True, slots=True)
class Measured:
    """The figures of one checkout.

    Attributes:
        form_s: from the start of `ditask` to the first step of the last process.
        form_cpu_s: the CPU time of all processes until then.
        idle: the share of a core that all processes use while they do nothing.
        memory_mb: their memory.
    """

    form_s: float
    form_cpu_s: float
    idle: float
    memory_mb: float


def rows() -> list[Row]:
    """Measure the start of a run and its cost while it is idle."""
    before = os.environ.get("BENCH_BEFORE")
    measured = {n: measure(ROOT, n) for n in FORM_BARS_S}
    found = [
        _bar(f"{n} processes form", one.form_s, FORM_BARS_S[n], "s") for n, one in measured.items()
    ]
    found += [
        Row(f"{n} processes form", "no bar", ours=one.form_cpu_s, unit="s of CPU")
        for n, one in measured.items()
    ]
    fewest, ours = next(iter(measured.items()))
    found.append(_bar(f"{fewest} idle processes", ours.idle * 100, 20, "% of a core"))
    with_torch = measure(ROOT, N_WITH_TORCH, program="launch_torch_program")
    name = f"{N_WITH_TORCH} processes with torch form"
    found += [
        Row(name, "no bar", ours=with_torch.form_s, unit="s"),
        Row(name, "no bar", ours=with_torch.form_cpu_s, unit="s of CPU"),
        Row(name, "no bar", ours=with_torch.memory_mb, unit="MB"),
    ]
    if before is None:
        return found
    try:
        found += _compared("", ours, measure(Path(before), fewest))
        other = measure(Path(before), N_WITH_TORCH, program="launch_torch_program")
        return found + _compared(" with torch", with_torch, other)
    except RuntimeError:
        note = f"its processes did not all connect within {_DEADLINE_S:g} s"
        return [*found, Row.missing("forming", against="the version before", note=note)]


def measure(checkout: Path, n_processes: int, *, program: str = "launch_program") -> Measured:
    """Run a program with the code of a checkout, and return its figures."""
    # As after an installation, Python may keep what it has compiled.
    env = {name: text for name, text in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    env |= {"PYTHONPATH": f"{checkout}{os.pathsep}{ROOT}", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-W", "ignore", "-m", "dmiddleware.launch"]
    command += ["--package", str(Path(__file__).parent), "--main", f"{program}.main"]
    command += ["--roles", f"learner=1,collector={n_processes - 1}"]
    command += ["--start-timeout", str(_DEADLINE_S)]
    compiled = [sys.executable, "-c", "import dmiddleware.launch.node_process"]
    subprocess.run(compiled, cwd=checkout, env=env, check=True)
    start = time.perf_counter()
    launcher = subprocess.Popen(
        command,
        cwd=checkout,
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    watchdog = threading.Timer(_DEADLINE_S, launcher.kill)
    watchdog.start()
    try:
        _await_first_steps(launcher, n_processes)
        form_s = time.perf_counter() - start
        parent = psutil.Process(launcher.pid)
        processes = [parent, *parent.children(recursive=True)]
        form_cpu_s = _cpu_s(processes)
        time.sleep(SETTLE_S)
        before_s, since = _cpu_s(processes), time.perf_counter()
        time.sleep(IDLE_S)
        idle = (_cpu_s(processes) - before_s) / (time.perf_counter() - since)
        memory_mb = sum(one.memory_full_info().pss for one in processes) / 1e6
        launcher.send_signal(signal.SIGTERM)
        launcher.communicate()
    finally:
        watchdog.cancel()
        launcher.kill()
        launcher.wait()
    return Measured(form_s, form_cpu_s, idle, memory_mb)


def _await_first_steps(launcher: subprocess.Popen[str], n_processes: int) -> None:
    assert launcher.stdout is not None
    lines, n_formed = [], 0
    for line in launcher.stdout:
        lines.append(line)
        n_formed += line.endswith("formed\n")
        if n_formed == n_processes:
            return
    raise RuntimeError("not all processes connected:\n" + "".join(lines[-5:]))


def _cpu_s(processes: list[psutil.Process]) -> float:
    return sum(times.user + times.system for times in (one.cpu_times() for one in processes))


def _compared(kind: str, ours: Measured, before: Measured) -> list[Row]:
    pairs = [
        (f"forming{kind}", "s", ours.form_s, before.form_s),
        (f"forming{kind}", "s of CPU", ours.form_cpu_s, before.form_cpu_s),
        (f"idle{kind}", "% of a core", ours.idle * 100, before.idle * 100),
        (f"memory{kind}", "MB", ours.memory_mb, before.memory_mb),
    ]
    return [
        Row(name, "the version before", ours=one, reference=other, ratio=one / other, unit=unit)
        for name, unit, one, other in pairs
    ]


def _bar(name: str, ours: float, limit: float, unit: str) -> Row:
    return Row(
        name, "absolute bar", ours=ours, reference=limit, ratio=ours / limit, unit=unit, at_most=1.0
    )
