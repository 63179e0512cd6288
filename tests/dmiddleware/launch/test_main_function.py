"""The function of --main: refused if calling it would run nothing."""

from __future__ import annotations

import importlib.metadata
import textwrap
from pathlib import Path

import pytest
from click.testing import CliRunner

from dmiddleware.errors import LaunchError
from dmiddleware.launch.cli import ditask
from dmiddleware.launch.main_function import call_main, check_main, reads_arguments
from tests.dmiddleware.launch.ditask_process import start

PROGRAM = """
    import asyncio, functools, sys

    sys.stderr.write("imported")

    def plain():
        def inner():
            yield 1
        return len([x for x in inner()])

    async def asynchronous():
        plain()

    def generator():
        if plain():
            yield 1

    async def asynchronous_generator():
        yield 1

    def runs(function):
        return lambda: asyncio.run(function())

    @runs
    async def decorated():
        pass

    async def replaced():
        yield 1

    replaced = plain

    hidden = functools.partial(asynchronous)
    also_hidden = lambda: generator()
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").write_text("raise RuntimeError('imported')")
    (tmp_path / "without" / "init").mkdir(parents=True)
    for file in (tmp_path / name / "program.py" for name in ("", "package", "without/init")):
        file.write_text(textwrap.dedent(PROGRAM))
    return tmp_path


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("asynchronous", r"async function \(program.py:11\).*asyncio.run\(asynchronous\(\)\)"),
        ("generator", r"generator function.*yield \(program.py:16\)"),
        ("asynchronous_generator", "async function"),
    ],
)
def test_functions_that_would_run_nothing_are_refused_unseen(
    folder: Path, name: str, message: str
) -> None:
    for module in ("program", "package.program", "without.init.program"):
        with pytest.raises(LaunchError, match=message):
            check_main(f"{module}.{name}", folder)


@pytest.mark.parametrize("name", ["plain", "decorated", "replaced", "hidden"])
def test_what_the_source_does_not_show_is_left_to_the_nodes(folder: Path, name: str) -> None:
    check_main(f"program.{name}", folder)
    (folder / "program.py").write_text("def plain(:")
    check_main(f"program.{name}", folder)


@pytest.mark.parametrize(
    "source", ["from os import *", "globals()['made'] = print", "def __getattr__(name): ..."]
)
def test_a_module_may_make_names_as_it_runs(tmp_path: Path, source: str) -> None:
    (tmp_path / "maker.py").write_text(source)
    check_main("maker.made", tmp_path)


@pytest.mark.parametrize(
    ("main", "message"),
    [
        ("program.plan", "module program has no function 'plan'; did you mean program.plain?"),
        ("program.unlike", "module program has no function 'unlike'"),
        ("progrm.plain", "found no module progrm in --package .*; did you mean program?"),
        ("package.progrm.plain", "no module package.progrm .*; did you mean package.program?"),
        ("program.plain.inner", "found no module program.plain in"),
        ("nowhere_at_all.main", "found no module nowhere_at_all in .* the import path$"),
    ],
)
def test_a_function_that_does_not_exist_is_refused_with_the_nearest(
    folder: Path, main: str, message: str
) -> None:
    with pytest.raises(LaunchError, match=message):
        check_main(main, folder)


@pytest.mark.parametrize(
    ("main", "message"),
    [("asynchronous", "async function"), ("plainn", "did you mean program.plain?")],
)
def test_a_refused_function_starts_nothing(
    folder: Path, monkeypatch: pytest.MonkeyPatch, main: str, message: str
) -> None:
    monkeypatch.chdir(folder)
    result = CliRunner().invoke(ditask, ["--main", f"program.{main}"])
    assert result.exit_code == 1
    assert result.output.count(message) == 1 and "[node" not in result.output
    assert not (folder / "logs").exists()


def test_a_result_that_still_has_to_run_is_an_error() -> None:
    async def work() -> None: ...

    with pytest.raises(LaunchError, match="returned a coroutine"):
        call_main(lambda: work(), "program.main")
    with pytest.raises(LaunchError, match="returned a generator"):
        call_main(lambda: (x for x in "a"), "program.main")
    call_main(lambda: 0, "program.main")


@pytest.mark.process
@pytest.mark.timeout(120)
def test_a_hidden_async_function_fails_in_the_node(folder: Path) -> None:
    with start(folder, "--main", "program.hidden") as launcher:
        text, _ = launcher.communicate(timeout=100)
    assert launcher.returncode == 1
    assert "async function" in text and "never awaited" not in text


def test_options_have_the_short_forms_of_di_engine():
    result = CliRunner().invoke(ditask, ["-v"])
    assert result.exit_code == 0
    assert importlib.metadata.version("dmiddleware") in result.output
    options = {option for one in ditask.params for option in one.opts}
    assert {"-p", "-m", "-v", "-h"} <= options | set(ditask.context_settings["help_option_names"])
    result = CliRunner().invoke(ditask, ["-p", ".", "-m", "nowhere.main"])
    assert "nowhere" in result.output


def typed(seed: int = 0) -> None: ...


def own_parser(argv: list[str] | None = None) -> None: ...


def test_a_function_with_types_reads_arguments() -> None:
    assert reads_arguments(typed)
    assert not reads_arguments(own_parser)
    assert not reads_arguments(lambda *args, **kwargs: None)
    assert not reads_arguments(lambda: None)
    assert not reads_arguments(lambda seed=0: None)
    assert not reads_arguments(print) and not reads_arguments(dict)
