"""Where the ranks of a process group listen, and what strangers can make of it."""

from __future__ import annotations

import os
import subprocess
import textwrap
from pathlib import Path

import psutil
import pytest
import torch.distributed as dist

from dmiddleware.distributed import data_parallel, rank_and_world_size, sum_over_ranks
from dmiddleware.policy import DQNPolicy
from tests.dmiddleware.distributed.rank_processes import run_ranks
from tests.dmiddleware.launch.ditask_process import DITASK
from tests.variants import mostly_slow


def listening() -> list[str]:
    """Return the addresses that this process listens on."""
    found = psutil.Process().net_connections("inet")
    return [one.laddr.ip for one in found if one.status == psutil.CONN_LISTEN]


def listen_and_learn(rank: int) -> list[str]:
    assert sum_over_ranks([1.0]) == [2.0]
    return listening()


@pytest.mark.process
def test_ranks_of_one_host_listen_on_loopback_only() -> None:
    for addresses in run_ranks(listen_and_learn):
        assert set(addresses) <= {"127.0.0.1", "::1", "::ffff:127.0.0.1"}


def test_a_single_rank_joins_no_group_and_learns(monkeypatch: pytest.MonkeyPatch) -> None:
    values = {"WORLD_SIZE": "1", "RANK": "0", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "1"}
    for name, value in values.items():
        monkeypatch.setenv(name, value)
    before = listening()
    with data_parallel() as rank:
        assert (rank, dist.is_initialized(), rank_and_world_size()) == (0, False, (0, 1))
        assert listening() == before
        DQNPolicy({"model": {"obs_shape": 4, "action_shape": 2}, "multi_gpu": True})


PROGRAM = """
    import psutil, os
    from dmiddleware import Context, Task, middleware

    def main():
        from dmiddleware.distributed import data_parallel, sum_over_ranks
        with data_parallel() as rank, Task(Context(), rank=rank) as task:
            if task.has_role("learner"):
                print("sum", sum_over_ranks([1.0]), flush=True)
                for one in psutil.Process().net_connections("inet"):
                    if one.status == psutil.CONN_LISTEN:
                        print("listens on", one.laddr.ip, flush=True)
                store = os.environ["DITASK_RANK_STORE"]
                if os.path.isdir(store):
                    print("mode", oct(os.stat(store).st_mode & 0o777), flush=True)
            task.use(lambda ctx: None).run(1)
"""


@pytest.mark.process
@pytest.mark.parametrize(
    ("protocol", "n", "total"),
    mostly_slow(
        [("tcp", 2, "[2.0]"), ("ipc", 1, "[1.0]"), ("tcp", 1, "[1.0]"), ("ipc", 2, "[2.0]")],
        keep=1,
    ),
)
def test_learners_of_one_launcher_meet_in_the_folder_of_the_run(
    tmp_path: Path, n: int, total: str, protocol: str
) -> None:
    (tmp_path / "program.py").write_text(textwrap.dedent(PROGRAM))
    done = subprocess.run(
        [*DITASK, "--main", "program.main", "--roles", f"learner={n}", "--protocol", protocol],
        cwd=tmp_path,
        env={**os.environ, "TMPDIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    text = done.stdout + done.stderr
    assert done.returncode == 0, text
    assert text.count(f"sum {total}") == n
    addresses = {line.split()[-1] for line in text.splitlines() if "] listens on" in line}
    assert addresses <= {"127.0.0.1"}, text
    assert text.count("mode 0o700") == (n if n > 1 else 0)


@pytest.mark.parametrize("host", ["10.0.0.1", "learner-0.cluster", "127.0.0.1"])
@pytest.mark.parametrize(
    "forged",
    ["pay 3 coins", "has failed: \n\x1b[31mgive up\nTraceback", "x" * 100_000, "has ended", "7"],
)
def test_a_text_from_a_store_cannot_forge_an_error(
    monkeypatch: pytest.MonkeyPatch, host: str, forged: str
) -> None:
    from dmiddleware.distributed import ranks as module

    monkeypatch.setenv("MASTER_ADDR", host)
    store = dist.HashStore()
    life = module._HeartbeatStore(store)
    dist.PrefixStore("life", store).set("end-1", forged)
    shown = module._one_line(life.read("end-1"))
    assert len(shown) <= 300 and shown.isprintable()
    if not host.startswith("127."):
        assert shown in ("has ended", "is said to have ended", "7")
