"""Placement from recorded environments of Slurm and Kubernetes."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dmiddleware.errors import LaunchError
from dmiddleware.launch.platforms import Placement, expand_slurm_hosts, place, slurm_step

SLURM = {
    "SLURM_JOB_ID": "4711",
    "SLURM_JOB_NODELIST": "gpu[01-02,07]",
    "SLURM_NTASKS": "3",
    "SLURM_NNODES": "3",
    "SLURM_PROCID": "1",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "1",
    "SLURM_TASKS_PER_NODE": "1(x3)",
}
STEP = SLURM | {
    "SLURM_STEP_NODELIST": "gpu[02,07]",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
}
K8S_JOB = {
    "HOSTNAME": "train-2",
    "POD_NAME": "train-2-x7k9q",
    "POD_IP": "10.8.0.12",
    "JOB_COMPLETION_INDEX": "2",
    "DITASK_REPLICAS": "3",
    "DITASK_SERVICE": "train.rl.svc.cluster.local",
}
K8S_SET = {
    "HOSTNAME": "train-0",
    "DITASK_REPLICAS": "2",
    "DITASK_SERVICE": "train",
}


def test_slurm_gives_the_index_and_the_hosts() -> None:
    placement = place("slurm", SLURM)
    assert (placement.index, placement.count) == (1, 3)
    assert placement.hosts == ("gpu01", "gpu02", "gpu07")
    assert placement.address == "gpu02"
    assert placement.hub_address(2) == "tcp://gpu07:25515"


def test_a_step_on_a_part_of_the_hosts_uses_only_these() -> None:
    placement = place("slurm", STEP)
    assert placement.hosts == ("gpu02", "gpu07")
    assert (placement.index, placement.address) == (1, "gpu07")


def test_each_step_of_each_job_has_a_name_that_it_keeps_when_it_is_requeued() -> None:
    array = {"SLURM_ARRAY_JOB_ID": "4710"}
    others = [
        {},
        {"SLURM_JOB_ID": "4712"},
        {"SLURM_STEP_ID": "0"},
        {"SLURM_STEP_ID": "1"},
        {"SLURM_STEP_ID": "11"},
        {"SLURM_JOB_ID": "47111"},
        array | {"SLURM_ARRAY_TASK_ID": "1"},
        array | {"SLURM_ARRAY_TASK_ID": "1", "SLURM_STEP_ID": "1"},
        array | {"SLURM_ARRAY_TASK_ID": "11"},
        {"SLURM_ARRAY_TASK_ID": "2"},
    ]
    names = [slurm_step(SLURM | other) for other in others]
    assert len(set(names)) == len(others)
    assert names[0] == "slurm-4711"
    assert names[7] == "slurm-4710_1.1"
    assert slurm_step(SLURM | {"SLURM_RESTART_COUNT": "3"}) == names[0]
    assert slurm_step({}) == ""


def test_hosts_that_use_tls_dial_over_tls() -> None:
    placement = place("slurm", SLURM, scheme="tls+tcp")
    assert placement.hub_address(0) == "tls+tcp://gpu01:25515"


@pytest.mark.parametrize(
    "names",
    [
        {},
        {"POD_NAME": ""},
        {"HOSTNAME": "worker-node"},
        {"HOSTNAME": "train-2-x7k9q"},
    ],
    ids=[
        "both",
        "without POD_NAME",
        "on the host's network",
        "with HOSTNAME set to the pod's name",
    ],
)
def test_pods_of_an_indexed_job_are_reached_by_job_and_index(names: dict[str, str]) -> None:
    placement = place("k8s", K8S_JOB | names, port=6000)
    assert (placement.index, placement.count) == (2, 3)
    assert placement.address == "train-2.train.rl.svc.cluster.local"
    assert placement.hub_address(0) == "tcp://train-0.train.rl.svc.cluster.local:6000"


def test_the_name_of_an_indexed_job_may_end_in_a_number() -> None:
    names = {"HOSTNAME": "train-2-2", "POD_NAME": "train-2-2-x7k9q"}
    assert place("k8s", K8S_JOB | names).hosts[0] == "train-2-0.train.rl.svc.cluster.local"


def test_a_stateful_set_of_kubernetes_gives_the_index() -> None:
    placement = place("k8s", K8S_SET)
    assert (placement.index, placement.hosts) == (0, ("train-0.train", "train-1.train"))


def test_a_pod_listens_on_its_own_address_because_its_name_may_not_resolve_yet() -> None:
    assert place("k8s", K8S_JOB).bind == "10.8.0.12"
    assert place("k8s", K8S_SET).bind == "0.0.0.0"


def test_an_ipv6_host_is_dialled_in_brackets() -> None:
    placement = Placement(1, ("fd00::1", "fd00::2"))
    assert placement.hub_address(0) == "tcp://[fd00::1]:25515"


def test_without_a_platform_there_is_one_launcher() -> None:
    assert place("local", {}).count == 1


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("node1", ["node1"]),
        ("a,b", ["a", "b"]),
        ("gpu[08-11]", ["gpu08", "gpu09", "gpu10", "gpu11"]),
        ("a[1,3-4],login", ["a1", "a3", "a4", "login"]),
        ("r[1-2]-ib", ["r1-ib", "r2-ib"]),
        ("rack[1-2]n[01-02]", ["rack1n01", "rack1n02", "rack2n01", "rack2n02"]),
        (
            "rack[0,3]_blade[8-10]x,login",
            [
                "rack0_blade8x",
                "rack0_blade9x",
                "rack0_blade10x",
                "rack3_blade8x",
                "rack3_blade9x",
                "rack3_blade10x",
                "login",
            ],
        ),
        ("n[1-2][3,5]", ["n13", "n15", "n23", "n25"]),
        ("a[098-101]", ["a098", "a099", "a100", "a101"]),
        ("tux[0-1,12] login", ["tux0", "tux1", "tux12", "login"]),
        ("[1-2]", ["1", "2"]),
    ],
)
def test_host_lists_are_expanded(text: str, hosts: list[str]) -> None:
    assert expand_slurm_hosts(text) == hosts


RANGES = st.tuples(st.integers(0, 30), st.integers(0, 5), st.integers(1, 4))
NAMES = st.from_regex(r"[a-z][a-z-]{0,3}", fullmatch=True)


@given(
    st.lists(
        st.tuples(NAMES, st.lists(st.tuples(st.lists(RANGES, min_size=1, max_size=3), NAMES))),
        min_size=1,
        max_size=3,
    )
)
@settings(max_examples=40)
def test_expanding_any_list_gives_what_loops_over_its_brackets_give(hosts: list[Any]) -> None:
    texts, expected = [], []
    for first, brackets in hosts:
        text, names = first, [first]
        for ranges, literal in brackets[:2]:
            numbers = [
                f"{number:0{width}}"
                for start, count, width in ranges
                for number in range(start, start + count + 1)
            ]
            written = ",".join(
                f"{start:0{width}}-{start + count:0{width}}" if count else f"{start:0{width}}"
                for start, count, width in ranges
            )
            text += f"[{written}]{literal}"
            longer = []
            for name in names:
                for number in numbers:
                    longer.append(name + number + literal)
            names = longer
        texts.append(text)
        expected += names
    assert expand_slurm_hosts(",".join(texts)) == expected


@pytest.mark.parametrize("text", ["", ",", "a[1-2", "a1-2]", "a[[1]]", "a[]", "a[3-1]", "a[1-x]"])
def test_malformed_host_lists_are_refused(text: str) -> None:
    with pytest.raises(LaunchError, match="Slurm"):
        expand_slurm_hosts(text)


@pytest.mark.parametrize(
    ("platform", "env", "message"),
    [
        ("slurm", {}, "SLURM_PROCID is not set"),
        ("slurm", SLURM | {"SLURM_PROCID": "x"}, "is not a number"),
        ("slurm", SLURM | {"SLURM_PROCID": "3"}, "does not fit"),
        ("slurm", SLURM | {"SLURM_NTASKS": "6"}, "6 tasks on 3 hosts"),
        ("slurm", SLURM | {"SLURM_JOB_NODELIST": "a[x-y]"}, "not a range"),
        ("slurm", STEP | {"SLURM_STEP_NUM_TASKS": "4"}, "4 tasks on 2 hosts"),
        ("slurm", STEP | {"SLURM_PROCID": "2"}, "SLURM_STEP_NUM_TASKS=2"),
        ("k8s", K8S_SET | {"HOSTNAME": "pod"}, "JOB_COMPLETION_INDEX"),
        ("k8s", K8S_JOB | {"DITASK_REPLICAS": "2"}, "does not fit"),
        ("k8s", K8S_JOB | {"HOSTNAME": "host", "POD_NAME": "pod"}, "HOSTNAME='host'"),
        ("k8s", {k: v for k, v in K8S_SET.items() if k != "DITASK_SERVICE"}, "DITASK_SERVICE"),
    ],
)
def test_missing_and_malformed_variables_are_named(
    platform: str, env: dict[str, str], message: str
) -> None:
    with pytest.raises(LaunchError, match=message):
        place(platform, env)  # type: ignore[arg-type]
