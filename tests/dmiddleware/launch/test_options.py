"""The options of a run, which the command line and launch() share."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from dmiddleware.errors import LaunchError
from dmiddleware.launch.cli import ditask
from dmiddleware.launch.options import LaunchOptions, PlatformSpec, options_and_flags
from dmiddleware.launch.plan import NodePlan
from dmiddleware.launch.resources import local_shares, resources_of

MAIN = "program.main"


def test_the_command_line_has_every_field_and_no_other_option() -> None:
    fields = {field.name for field in dataclasses.fields(LaunchOptions)} - {"arguments"}
    assert {info.name for info, _ in options_and_flags()} == fields
    parameters = {parameter.name for parameter in ditask.params}
    assert parameters - {"version"} == fields
    text = CliRunner().invoke(ditask, ["--help"]).output
    for name in fields:
        assert "--" + name.replace("_", "-") in text


def test_both_ways_give_the_same_options() -> None:
    texts: dict[str, Any] = {
        "main": MAIN,
        "roles": "learner=1,collector=2",
        "ports": "5000,5001",
        "node_ids": "4",
        "labels": "a, b",
        "attach_to": "tcp://127.0.0.1:5000",
        "protocol": "tcp",
        "resources": ("learner:gpu=1,cpu=4", "collector:cpu=0.5"),
    }
    python: dict[str, Any] = {
        "roles": (("learner", 1), ("collector", 2)),
        "ports": [5000, 5001],
        "node_ids": [4],
        "labels": ["a", "b"],
        "attach_to": ["tcp://127.0.0.1:5000"],
        "protocol": "tcp",
        "resources": {"learner": {"gpu": 1.0, "cpu": 4.0}, "collector": {"cpu": 0.5}},
    }
    assert LaunchOptions.from_texts(texts) == LaunchOptions(main=MAIN, **python)


def test_what_a_run_records_of_the_options_gives_the_same_options() -> None:
    options = LaunchOptions(
        main=MAIN,
        arguments=("--seed", "3"),
        env=("WANDB_API_KEY=secret",),
        package=Path(".."),
        roles=(("learner", 1), ("collector", 2)),
        ports=(5000, 5001),
        labels=("a", "b"),
        protocol="tcp",
        resources={"learner": {"gpu": 1.0, "cpu": 4.0}, "collector": {"cpu": 0.5}},
        hang_timeout=600.0,
        ding=True,
        max_restarts=9,
        platform="slurm",
        platform_spec=PlatformSpec(roles=("learner=1", "collector=2")),
    )
    texts = options.recorded()
    assert texts["roles"] == "learner=1,collector=2"
    assert "secret" not in str(texts) and MAIN not in str(texts)
    words = [
        word
        for name, one in texts.items()
        for text in (one if isinstance(one, list) else [one])
        for word in (f"--{name.replace('_', '-')}", *([] if text is True else [str(text)]))
    ]
    given = ditask.make_context("ditask", ["--main", MAIN, "--env", *options.env, *words]).params
    del given["arguments"]
    again = LaunchOptions.from_texts(
        {name: value for name, value in given.items() if value is not None}, options.arguments
    )
    assert again == options
    assert not LaunchOptions.from_texts({"main": MAIN, "resources": ()}).recorded()


def test_the_options_that_are_not_given_are_the_defaults() -> None:
    default = LaunchOptions(main=MAIN)
    assert LaunchOptions.from_texts({"main": MAIN}) == default
    assert default.platform_spec == PlatformSpec()
    for field in dataclasses.fields(LaunchOptions):
        if field.name != "main":
            assert getattr(default, field.name) == field.default


def test_nng_is_the_only_choice_of_the_message_queue_type() -> None:
    assert LaunchOptions(main=MAIN, mq_type="nng") == LaunchOptions(main=MAIN)
    for mq_type in ("redis", "socket", "NNG", ""):
        with pytest.raises(LaunchError, match="nng carries all events"):
            LaunchOptions(main=MAIN, mq_type=mq_type)
    result = CliRunner().invoke(ditask, ["--main", MAIN, "--mq-type", "redis"])
    assert result.exit_code == 1
    assert "nng carries all events" in " ".join(result.output.split())


@pytest.mark.parametrize("option", ["--redis-host", "--redis-port"])
def test_an_option_of_di_engine_for_the_messages_is_refused_with_the_reason(option: str) -> None:
    result = CliRunner().invoke(ditask, ["--main", MAIN, option, "nng"])
    assert result.exit_code == 2
    assert "events travel over connections" in " ".join(result.output.split())
    keyword = option.lstrip("-").replace("-", "_")
    with pytest.raises(LaunchError, match="events travel over connections"):
        LaunchOptions(main=MAIN, **{keyword: "nng"})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        (("learner",), "role:name=amount"),
        (("learner:",), "role:name=amount"),
        (("learner:gpu=1", "learner:cpu=2"), "once for each role"),
        (("learner:gpu=many",), "amount 'many'"),
    ],
)
def test_resources_of_another_form_are_refused(texts: tuple[str, ...], message: str) -> None:
    with pytest.raises(LaunchError, match=message):
        LaunchOptions.from_texts({"main": MAIN, "resources": texts})


def gpus(folder: Path, n: int) -> Path:
    for number in range(n):
        (folder / f"0000:{number:02}:00.0").mkdir()
    return folder


def plans(*roles: str) -> list[NodePlan]:
    return [NodePlan(number, roles=(role,)) for number, role in enumerate(roles)]


def test_processes_of_a_host_get_gpus_of_their_own_and_threads(tmp_path: Path) -> None:
    resources = {"learner": {"gpu": 2.0, "cpu": 4.0}, "collector": {"gpu": 0.0}}
    shares = local_shares(
        resources, plans("collector", "learner", "evaluator"), {}, gpus=gpus(tmp_path, 3)
    )
    assert shares == [
        {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"},
        {"CUDA_VISIBLE_DEVICES": "0,1", "OMP_NUM_THREADS": "4"},
        {"OMP_NUM_THREADS": "1"},
    ]
    visible = {"CUDA_VISIBLE_DEVICES": "5,GPU-a,7", "OMP_NUM_THREADS": "2"}
    learner = local_shares(resources, plans("learner", "collector"), visible)[0]
    assert learner == {"CUDA_VISIBLE_DEVICES": "5,GPU-a", "OMP_NUM_THREADS": "4"}


@pytest.mark.parametrize(
    ("resources", "message"),
    [
        ({"learner": {"gpu": 1.0}, "collector": {"gpu": 2.0}}, "node 1 .collector. needs 2 GPUs"),
        ({"learner": {"gpu": 0.5}}, "cannot have 0.5 GPUs"),
        ({"lerner": {"gpu": 1.0}}, "no role 'lerner'; did you mean learner"),
    ],
)
def test_resources_that_a_host_lacks_are_refused(
    tmp_path: Path, resources: dict[str, dict[str, float]], message: str
) -> None:
    with pytest.raises(LaunchError, match=message):
        local_shares(resources, plans("learner", "collector"), {}, gpus=gpus(tmp_path, 2))


def test_a_process_of_several_roles_needs_the_most_of_them() -> None:
    resources = {"collector": {"cpu": 1.0, "gpu": 0.0}, "evaluator": {"cpu": 3.0}}
    assert resources_of(resources, ("collector", "evaluator")) == {"cpu": 3.0, "gpu": 0.0}
    assert resources_of(resources, ()) == {}
