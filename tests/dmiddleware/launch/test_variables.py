"""Environment variables for all nodes, for a role, or for one node."""

from __future__ import annotations

import json
import textwrap
from pathlib import Path

import pytest
from click.testing import CliRunner

from dmiddleware.errors import LaunchError
from dmiddleware.launch.cli import ditask
from dmiddleware.launch.plan import NodePlan
from dmiddleware.launch.variables import node_variables
from tests.dmiddleware.launch.ditask_process import start

PLANS = [
    NodePlan(0, ("learner",)),
    NodePlan(1, ("collector",)),
    NodePlan(2, ("collector", "evaluator")),
    NodePlan(7, ("judge",)),
]


@pytest.mark.parametrize(
    ("texts", "expected"),
    [
        (["A=1"], [{"A": "1"}] * 4),
        (["collector:DEVICES="], [{}, {"DEVICES": ""}, {"DEVICES": ""}, {}]),
        (["judge:A=1"], [{}, {}, {}, {"A": "1"}]),
        (["7:A=1", "2:A=2"], [{}, {}, {"A": "2"}, {"A": "1"}]),
        (["A=b:c=d,e f\ng"], [{"A": "b:c=d,e f\ng"}] * 4),
        (["learner:PATH=/a:/b"], [{"PATH": "/a:/b"}, {}, {}, {}]),
        (["A=1", "A=2"], [{"A": "2"}] * 4),
        # The variable for fewer nodes counts, whatever the order.
        (["1:A=3", "collector:A=2", "A=1"], [{"A": "1"}, {"A": "3"}, {"A": "2"}, {"A": "1"}]),
        (["evaluator:A=2", "collector:A=1"], [{}, {"A": "1"}, {"A": "1"}, {}]),
    ],
)
def test_variables_reach_the_nodes_that_they_are_for(
    texts: list[str], expected: list[dict[str, str]]
) -> None:
    assert node_variables(texts, PLANS) == expected


def test_a_node_without_roles_has_all_roles() -> None:
    assert node_variables(["collector:A=1", "0:B=2"], [NodePlan(0)]) == [{"A": "1", "B": "2"}]


def test_variables_may_be_for_nodes_of_other_hosts() -> None:
    texts = ["evaluator:A=1", "1000:B=2", "0:C=3"]
    elsewhere = {1000: ("evaluator",)}
    assert node_variables(texts, PLANS[:1], elsewhere=elsewhere) == [{"C": "3"}]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("colector:A=1", ["'colector'", "learner, collector, evaluator, judge", "collector?"]),
        ("coordinator:A=1", ["'coordinator'", "learner, collector, evaluator, judge"]),
        ("3:A=1", ["node 3", "0, 1, 2, 7"]),
        ("1001:A=1", ["node 1001"]),
        ("A", ["'A'", "NAME=value"]),
        ("collector:A", ["role:NAME=value"]),
        ("=1", ["NAME=value"]),
        (":A=1", ["NAME=value"]),
        ("collector:=1", ["NAME=value"]),
        ("collector:1:A=1", ["NAME=value"]),
        ("collector: A=1", ["NAME=value"]),
        ("1A=1", ["NAME=value"]),
        ("", ["NAME=value"]),
        ("DITASK_KEY=1", ["ditask sets DITASK_KEY itself"]),
        ("learner:DITASK_MARKS=", ["ditask sets DITASK_MARKS itself"]),
        ("0:RANK=1", ["ditask sets RANK itself"]),
        ("MASTER_ADDR=x", ["ditask sets MASTER_ADDR itself"]),
    ],
)
def test_what_cannot_be_set_is_refused(text: str, words: list[str]) -> None:
    with pytest.raises(LaunchError) as caught:
        node_variables([text], PLANS)
    assert all(word in str(caught.value) for word in words), caught.value


SLURM = {"SLURM_PROCID": "1", "SLURM_NTASKS": "2", "SLURM_JOB_NODELIST": "a[1-2]"}
K8S = {
    "JOB_COMPLETION_INDEX": "1",
    "HOSTNAME": "train-1",
    "DITASK_REPLICAS": "2",
    "DITASK_SERVICE": "train",
}


@pytest.mark.parametrize(("platform", "variables"), [("slurm", SLURM), ("k8s", K8S)])
@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("1002:A=1", "the run has the nodes 0, 1, 1000, 1001"),
        ("evaluator:A=1", "'evaluator', but the run has the roles"),
        # Refused for another reason: the run has no key.
        ("learner:A=1", "needs a key"),
        ("0:A=1", "needs a key"),
        ("1001:A=1", "needs a key"),
    ],
)
def test_all_hosts_of_a_platform_know_the_nodes(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    platform: str,
    variables: dict[str, str],
    text: str,
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("program.py").write_text("def main(): pass")
    spec = '{"roles": ["learner=1,collector=1", "collector=2"]}'
    options = ["--platform", platform, "--platform-spec", spec, "--protocol", "tcp", "--env", text]
    options += ["--bind", "127.0.0.1"]
    result = CliRunner().invoke(ditask, ["--main", "program.main", *options], env=variables)
    assert result.exit_code == 1
    assert message in result.output


@pytest.mark.process
@pytest.mark.timeout(180)
def test_processes_have_their_variables_also_after_a_restart(tmp_path: Path) -> None:
    program = """
        import json, os, sys, time
        from pathlib import Path
        from dmiddleware import Context, Task, middleware

        def main():
            with Task(Context()) as task:
                node = task.router.node_id
                names = ("A", "B", "CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS")
                found = {name: os.environ.get(name) for name in names}
                with open(f"node-{node}", "a") as file:
                    file.write(json.dumps(found) + chr(10))

                @middleware(roles=["collector"])
                def collect(ctx):
                    if len(Path("node-1").read_text().splitlines()) == 1:
                        raise ValueError("the first start fails")
                    task.emit("restarted", only_remote=True)

                @middleware(roles=["learner"])
                def learn(ctx):
                    task.wait_for("restarted", 100.0)
                    task.stop("all done")

                task.use(collect).use(learn).run()
    """
    (tmp_path / "program.py").write_text(textwrap.dedent(program))
    texts = ["A=all", "collector:CUDA_VISIBLE_DEVICES=", "learner:B=1", "1:B=ü", "0:A=zero"]
    options = [word for text in texts for word in ("--env", text)]
    options += ["--roles", "learner=1,collector=1", "--on-failure", "restart"]
    env = {"CUDA_VISIBLE_DEVICES": "5", "OMP_NUM_THREADS": "2"}
    with start(tmp_path, "--main", "program.main", *options, env=env) as launcher:
        text, _ = launcher.communicate(timeout=150)
    assert launcher.returncode == 0, text
    lines = {
        node: [json.loads(line) for line in (tmp_path / f"node-{node}").read_text().splitlines()]
        for node in (0, 1)
    }
    learner = {"A": "zero", "B": "1", "CUDA_VISIBLE_DEVICES": "5", "OMP_NUM_THREADS": "2"}
    collector = {"A": "all", "B": "ü", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "2"}
    assert lines == {0: [learner], 1: [collector] * 2}
