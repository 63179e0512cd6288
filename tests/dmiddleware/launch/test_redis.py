"""ditask with --mq-type redis: nodes that connect through a redis server."""

from __future__ import annotations

import contextlib
import subprocess
import textwrap
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from tests.dmiddleware.launch import ditask_process
from tests.dmiddleware.router.redis_server import RedisServer

pytestmark = [pytest.mark.process, pytest.mark.timeout(180)]

PROGRAM = """
    import threading
    from dmiddleware import Context, Task, middleware

    def main():
        taken = {}
        with Task(Context()) as task:

            @middleware(roles=["collector"])
            def collect(ctx):
                ctx.task.emit("number", task.router.node_id, ctx.total_step, only_remote=True)

            @middleware(roles=["learner"])
            def learn(ctx):
                threading.Event().wait(0.01)
                if len(taken) == 2 and all(len(numbers) >= 50 for numbers in taken.values()):
                    ctx.task.stop("got fifty of each")

            if task.has_role("learner"):
                task.on("number", lambda node, number: taken.setdefault(node, []).append(number))
            task.use(collect).use(learn).run()
            assert all(numbers == list(range(len(numbers))) for numbers in taken.values())
            print("ended:", task.stop_reason, flush=True)
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    folder = tmp_path_factory.mktemp("redis")
    with RedisServer(folder, password="open-sesame") as server:
        yield server


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "program.py").write_text(textwrap.dedent(PROGRAM))
    ditask_process.write_key(tmp_path / "key")
    return tmp_path


def start(
    folder: Path,
    *options: str,
    password: str = "open-sesame",
    env: Mapping[str, str] | None = None,
) -> subprocess.Popen[str]:
    variables = {"DITASK_REDIS_PASSWORD": password, **(env or {})}
    return ditask_process.start(folder, "--main", "program.main", *options, env=variables)


def run(folder: Path, *options: str, password: str = "open-sesame") -> tuple[int, str]:
    with start(folder, *options, password=password) as launcher:
        text, _ = launcher.communicate(timeout=80)
        return launcher.returncode, text


def test_nodes_connect_through_redis_and_end_together(folder: Path, server: RedisServer) -> None:
    code, text = run(
        folder, "--roles", "learner=1,collector=2", "--mq-type", "redis", "--redis-url", server.url
    )
    assert code == 0, text
    assert text.count("got fifty of each") == 3
    assert f"node 0 listens on {server.url}/run-" in text


def test_a_collector_joins_through_redis(folder: Path, server: RedisServer) -> None:
    options = ("--mq-type", "redis", "--redis-url", server.url, "--key-file", "key")
    with (
        start(folder, "--roles", "learner=1,collector=1", "--run-id", "mine", *options) as first,
        start(
            folder, "--roles", "collector=1", "--topology", "alone", "--run-id", "mine",
            "--attach-to", f"{server.url}/mine/0", *options,
        ) as second,
    ):  # fmt: skip
        for launcher in (first, second):
            text, _ = launcher.communicate(timeout=80)
            assert launcher.returncode == 0, text
            assert "got fifty of each" in text


def test_hosts_of_a_slurm_job_find_each_other_in_redis(folder: Path, server: RedisServer) -> None:
    options = (
        "--platform", "slurm", "--platform-spec", '{"roles": ["learner=1", "collector=2"]}',
        "--mq-type", "redis", "--redis-url", server.url, "--key-file", "key",
    )  # fmt: skip
    job = {"SLURM_JOB_ID": "4711", "SLURM_JOB_NODELIST": "gpu[01-02]", "SLURM_NTASKS": "2"}
    with contextlib.ExitStack() as stack:
        launchers = [
            stack.enter_context(
                start(folder, "--run-id", "job", *options, env=job | {"SLURM_PROCID": place})
            )
            for place in ("0", "1")
        ]
        for launcher in launchers:
            text, _ = launcher.communicate(timeout=80)
            assert launcher.returncode == 0, text
            assert "got fifty of each" in text
    with start(folder, *options, env=job | {"SLURM_PROCID": "0"}) as launcher:
        text, _ = launcher.communicate(timeout=80)
        assert launcher.returncode == 1
        assert "same --run-id" in text.replace("\n", " ")


def test_a_wrong_password_is_reported(folder: Path, server: RedisServer) -> None:
    code, text = run(
        folder, "--mq-type", "redis", "--redis-url", server.url, password="open-barley"
    )
    assert code == 1
    assert "set DITASK_REDIS_PASSWORD" in text


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            ("--mq-type", "redis", "--protocol", "tcp"),
            "--protocol tcp has no effect with --mq-type redis",
        ),
        (("--mq-type", "redis", "--ports", "5000"), "has no effect with --mq-type redis"),
        (("--mq-type", "redis", "--redis-url", "http://x"), "http://x"),
        (("--attach-to", "redis://127.0.0.1:6379/0/run/0"), "does not fit --mq-type"),
        (("--mq-type", "redis", "--attach-to", "tcp://127.0.0.1:5000"), "does not fit --mq-type"),
    ],
)
def test_options_that_contradict_redis_start_nothing(
    folder: Path, options: tuple[str, ...], message: str
) -> None:
    code, text = run(folder, *options)
    assert code == 1
    assert message in text.replace("\n", " ")
