"""The arguments of a program under ditask: what follows ``--``."""

from __future__ import annotations

import json
import textwrap
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from dmiddleware.errors import LaunchError
from dmiddleware.launch.cli import ditask
from dmiddleware.launch.main_function import check_main
from tests.dmiddleware.launch.ditask_process import start
from tests.variants import mostly_slow

PROGRAM = '''
    import argparse, json, multiprocessing, os, sys
    from pathlib import Path
    import click
    from dmiddleware import Context, Task, middleware
    from dmiddleware.settings import Settings

    AT_IMPORT = list(sys.argv)

    def write(**found):
        path = Path(f"found.{os.getpid()}.json")
        path.write_text(json.dumps({"argv": sys.argv, "at_import": AT_IMPORT, **found}))

    def plain():
        write()

    def with_defaults(argv=None, *more, limit=3, **others):
        parser = argparse.ArgumentParser()
        parser.add_argument("--seed", type=int, default=0)
        parser.add_argument("names", nargs="*")
        found = parser.parse_args(argv)
        write(seed=found.seed, names=found.names, prog=parser.prog)

    @click.command()
    @click.option("--seed", type=int, default=0)
    @click.argument("names", nargs=-1)
    def by_click(seed, names):
        write(seed=seed, names=names, prog=click.get_current_context().info_name)

    def spawned():
        process = multiprocessing.get_context("spawn").Process(target=write)
        process.start()
        process.join()

    def restarted():
        write()
        with Task(Context()) as task:

            @middleware(roles=["collector"])
            def collect(ctx):
                if len(list(Path().glob("found.*"))) < 3:
                    raise ValueError("the first start fails")
                task.emit("restarted", only_remote=True)

            @middleware(roles=["learner"])
            def learn(ctx):
                task.wait_for("restarted", 100.0)
                task.stop("all done")

            task.use(collect).use(learn).run()

    def typed(seed: int = 0, name: str = "a"):
        """Count."""
        write(seed=seed, name=name)

    class Policy(Settings):
        """A policy."""

        seed: int = 0
        """A seed."""

    def with_settings(policy: Policy = Policy()):
        """Count."""
        write()

    def needs(argv, /, seed, *, limit, more=1):
        pass

    def wrapped(function):
        return lambda argv: function(argv)

    also_needs = wrapped(needs)
'''


def run(folder: Path, function: str, *options: str) -> tuple[int, str, list[dict[str, Any]]]:
    (folder / "package").mkdir()
    (folder / "package" / "program.py").write_text(textwrap.dedent(PROGRAM))
    with start(folder, "--main", f"package.program.{function}", *options) as launcher:
        text, _ = launcher.communicate(timeout=100)
    found = [json.loads(path.read_text()) for path in folder.glob("found.*")]
    return launcher.returncode, text, found


ARGUMENTS = ["--seed", "3", "a b", "--", "-x", "", "ü", "--main"]


@pytest.mark.process
@pytest.mark.parametrize("function", mostly_slow(["spawned", "plain"], keep=1))
def test_what_follows_two_dashes_is_sys_argv_of_every_process(
    tmp_path: Path, function: str
) -> None:
    options = ("--parallel-workers", "2", "--", *ARGUMENTS)
    code, text, found = run(tmp_path, function, *options)
    assert code == 0, text
    file = str(tmp_path / "package" / "program.py")
    assert [one["argv"] for one in found] == [[file, *ARGUMENTS]] * 2
    assert [one["at_import"] for one in found] == [[file, *ARGUMENTS]] * 2


@pytest.mark.process
@pytest.mark.parametrize("function", mostly_slow(["with_defaults", "by_click"], keep=1))
def test_parsers_read_the_arguments(tmp_path: Path, function: str) -> None:
    options = ("--roles", "learner=1", "--", "--seed", "3", "a", "b")
    code, text, found = run(tmp_path, function, *options)
    assert code == 0, text
    (one,) = found
    assert (one["seed"], one["names"], one["prog"]) == (3, ["a", "b"], "program.py")


@pytest.mark.process
@pytest.mark.parametrize("function", mostly_slow(["with_defaults", "by_click"], keep=1))
def test_a_program_shows_its_own_help(tmp_path: Path, function: str) -> None:
    code, text, _ = run(tmp_path, function, "--parallel-workers", "2", "--", "--help")
    assert code == 0, text
    assert text.lower().count("usage: program.py") == 2
    assert "ditask-" not in text and "Traceback" not in text


@pytest.mark.process
def test_a_function_with_types_is_called_with_the_arguments(tmp_path: Path) -> None:
    options = ("--parallel-workers", "2", "--", "--seed", "3")
    code, text, found = run(tmp_path, "typed", *options)
    assert code == 0, text
    assert [(one["seed"], one["name"]) for one in found] == [(3, "a")] * 2


@pytest.mark.process
@pytest.mark.parametrize(
    ("arguments", "words"),
    mostly_slow(
        [
            (
                ("--policy.sede", "3"),
                "Unrecognized options: --policy.sede, 3 Perhaps you meant: --policy.seed INT",
            ),
            (("--seed", "x"), "Error parsing --seed: "),
        ],
        keep=1,
    ),
)
def test_wrong_arguments_are_refused_in_words_and_nothing_runs(
    tmp_path: Path, arguments: tuple[str, ...], words: str
) -> None:
    function = "typed" if arguments[0] == "--seed" else "with_settings"
    code, text, found = run(tmp_path, function, "--parallel-workers", "2", "--", *arguments)
    assert code == 1 and not found
    assert f"refused the arguments that follow --: {words}" in text
    assert "[node " not in text, "no node prints the message again"
    assert "Traceback" not in text


@pytest.mark.process
def test_an_unknown_option_is_refused_once_before_anything_starts(tmp_path: Path) -> None:
    options = ("--parallel-workers", "2", "--", "--sede", "3")
    code, text, found = run(tmp_path, "typed", *options)
    assert code == 1 and not found
    line = next(
        at
        for at, one in enumerate(textwrap.dedent(PROGRAM).splitlines(), 1)
        if one.startswith("def typed")
    )
    assert text.splitlines() == [
        f"Error: --main package.program.typed has no option --sede (program.py:{line}); "
        "did you mean --seed?"
    ]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["--seed", "3", "--nmae=x"],
            r"no option --nmae \(program.py:\d+\); did you mean --name\?",
        ),
        (["--sede.x", "1"], r"no option --sede.x .*; did you mean --seed.x\?"),
        (["--total-timesteps", "9"], "no option --total-timesteps .*; here it is the limit of the"),
        (["--nonsense"], "no option --nonsense .*; it has --seed, --name"),
        (["--seed", "3", "--no-name", "--config", "a.yaml", "-h", "--help", "--", "x"], ""),
    ],
)
def test_options_are_checked_by_the_names_of_parameters(
    tmp_path: Path, arguments: list[str], message: str
) -> None:
    (tmp_path / "program.py").write_text(textwrap.dedent(PROGRAM))
    with pytest.raises(LaunchError, match=message) if message else nullcontext():
        check_main("program.typed", tmp_path, arguments)
    for function in ("plain", "with_defaults", "by_click"):
        check_main(f"program.{function}", tmp_path, arguments)


@pytest.mark.process
def test_the_help_of_a_function_with_types_is_shown_once(tmp_path: Path) -> None:
    code, text, _ = run(tmp_path, "typed", "--parallel-workers", "2", "--", "--help")
    assert code == 0, text
    assert text.count("usage: ") == 1 and "--seed INT" in text


@pytest.mark.process
def test_a_restarted_node_has_the_same_arguments(tmp_path: Path) -> None:
    options = ("--roles", "learner=1,collector=1", "--on-failure", "restart", "--", *ARGUMENTS)
    code, text, found = run(tmp_path, "restarted", *options)
    assert code == 0, text
    assert [one["argv"][1:] for one in found] == [ARGUMENTS] * 3


@pytest.mark.slow
@pytest.mark.process
def test_without_two_dashes_there_are_no_arguments(tmp_path: Path) -> None:
    code, text, found = run(tmp_path, "plain")
    assert code == 0, text
    assert len(found[0]["argv"]) == 1


@pytest.mark.process
def test_a_function_that_needs_arguments_is_refused_when_it_is_imported(tmp_path: Path) -> None:
    code, text, _ = run(tmp_path, "also_needs", "--", "--seed", "3")
    assert code == 1
    assert "parameters without a default (argv)" in text and "sys.argv" in text


def test_a_function_that_needs_arguments_is_refused_before_the_start(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(textwrap.dedent(PROGRAM))
    with pytest.raises(LaunchError, match=r"argv, seed, limit\).*program.py:\d+.*sys.argv"):
        check_main("program.needs", tmp_path)
    for function in ("plain", "with_defaults", "by_click"):
        check_main(f"program.{function}", tmp_path)


@pytest.mark.parametrize("options", [["--seed", "3"], ["3"], ["--", "1"]])
def test_arguments_of_the_program_must_follow_two_dashes(options: list[str]) -> None:
    result = CliRunner().invoke(ditask, ["--main", "nowhere", *options])
    if options[0] == "--":
        assert result.exit_code == 1 and "does not name a function" in result.output
    else:
        assert result.exit_code == 2
        assert "arguments of the program follow --" in result.output


def test_the_help_names_the_arguments_of_the_program() -> None:
    result = CliRunner().invoke(ditask, ["--help"])
    assert "[OPTIONS] [-- ARGUMENTS]" in result.output
