"""Every code block on every page runs, and every name and link on a page exists."""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import doctest
import importlib
import importlib.util
import inspect
import io
import os
import re
import shlex
import tomllib
import types
from pathlib import Path

import pytest
from click.testing import CliRunner

from dmiddleware.launch.cli import _COMMANDS as COMMANDS
from dmiddleware.launch.cli import ditask
from dmiddleware.rl import Schedule
from examples import cartpole_dqn
from tests.docs.pages import ROOT, Block, blocks, name, pages
from tests.variants import mostly_slow

PAGES = pages()
WITH_CODE = [page for page in PAGES if any(b.language == "python" for b in blocks(page))]
# These run in `make test`: the first page, one of each kind, and all options of a block.
QUICK = (
    "README.md",
    "docs/algorithms/dqn.md",
    "docs/classic.md",
    "docs/guide/context.md",
    "docs/guide/distributed.md",
    "docs/guide/environments.md",
    "docs/guide/policies.md",
    "docs/guide/writing-middleware.md",
    "docs/howto/custom-policy.md",
    "docs/howto/testing-distributed.md",
)
OUTPUT = doctest.OutputChecker()
# Long messages are wrapped on the page, and "..." replaces parts that differ from run to run.
OUTPUT_FLAGS = doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS
UNTIL_SOLVED = "max_env_step=60_000"
KNOWN_LANGUAGES = {"python", "output", "console", "text", "toml", "yaml"}
# A page shows the error for these.
NAMES_OF_OTHERS = ("--policy.gamma", "--total-timesteps")
SHELL_WORDS = r"(?:ditask|python|make|pip|git|torchrun|sbatch|docker|kubectl|ray|nohup|openssl)"


def compiled(block: Block, path: Path):
    """Compile a block so that a traceback shows the page and its line."""
    text = "\n" * (block.line - 1) + block.text
    return compile(text, str(path), "exec", dont_inherit=True)


def shortened(block: Block) -> Block:
    """Let a program that trains until CartPole is solved stop long before that."""
    return dataclasses.replace(block, text=block.text.replace(UNTIL_SOLVED, "max_env_step=2_000"))


def run(block: Block, path: Path, module: types.ModuleType) -> str:
    """Run a block in its page's namespace and return what it printed.

    A block opened with ``python raises=SomeError`` must end with that error; the error's message
    counts as printed. One opened with ``python needs=module`` is skipped where that package of an
    extra is not installed, except in CI.
    """
    printed = io.StringIO()
    expected = block.options.get("raises")
    with contextlib.redirect_stdout(printed):
        if expected is None:
            exec(compiled(block, path), module.__dict__)
        else:
            with pytest.raises(Exception) as caught:
                exec(compiled(block, path), module.__dict__)
            assert caught.type.__name__ == expected, caught.value
            print(f"{caught.type.__name__}: {caught.value}")
    return printed.getvalue()


def is_installed(block: Block) -> bool:
    needed = block.options.get("needs")
    return needed is None or "CI" in os.environ or importlib.util.find_spec(needed) is not None


@pytest.mark.parametrize(
    "path", mostly_slow(WITH_CODE, keep=[WITH_CODE.index(ROOT / page) for page in QUICK]), ids=name
)
def test_code_blocks_of_a_page_run_in_order(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    # As in a program: definitions in __main__ are sent to other processes by value.
    module = types.ModuleType("__main__")
    # The pages of a folder may use what its index defines.
    index = path.with_name("index.md")
    if index in WITH_CODE and index != path:
        for block in blocks(index):
            if block.language == "python":
                run(block, index, module)
    printed, skips = None, False
    for block in blocks(path):
        if block.language == "python":
            skips = not is_installed(block)
            printed = None if skips else run(shortened(block), path, module)
        elif block.language == "output" and not skips:
            where = f"{block.page}:{block.line}"
            assert printed is not None, f"{where}: output without a code block before it"
            same = OUTPUT.check_output(block.text, printed, OUTPUT_FLAGS)
            assert same, f"{where}: the block above prints\n{printed}"
            printed = None


@pytest.mark.slow
@pytest.mark.learning
def test_the_program_of_the_readme_solves_cartpole(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    page, module = ROOT / "README.md", types.ModuleType("__main__")
    (program,) = (block for block in blocks(page) if block.language == "python")
    assert UNTIL_SOLVED in program.text
    printed = run(program, page, module)
    result = re.search(r"mean return ([\d.]+) over 100 fresh episodes", printed)
    assert result is not None and float(result[1]) >= 400, printed


@pytest.mark.parametrize("path", PAGES, ids=name)
def test_blocks_have_a_known_language(path):
    # A block with a misspelt language would silently not run.
    for block in blocks(path):
        directive = block.language.startswith("{")
        assert directive or block.language in KNOWN_LANGUAGES, f"{block.page}:{block.line}"


def test_shell_commands_are_in_console_blocks():
    # A command in another block would silently not be checked.
    for path in PAGES:
        for block in blocks(path):
            if block.language == "text":
                assert not re.search(rf"^{SHELL_WORDS} \S", block.text, re.MULTILINE), block


def shell_commands() -> list[tuple[str, list[str]]]:
    """Return the commands of all pages, and where they are; a command may have several lines."""
    found = []
    for page in PAGES:
        for block in blocks(page):
            if block.language != "console":
                continue
            for line in block.text.replace("\\\n", " ").splitlines():
                if line.startswith("$ "):
                    command = shlex.split(line[2:], comments=True)
                    found.append((f"{block.page}:{block.line}: {line}", command))
    return found


def test_shell_commands_name_existing_targets_and_modules():
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for where, command in shell_commands():
        words = [word for word in command if "=" not in word]
        if words[0] == "make":
            assert set(words[1:]) <= targets, where
        elif words[1:2] == ["-m"] and "." in words[2]:
            module = ROOT / words[2].replace(".", "/")
            assert module.with_suffix(".py").exists() or (module / "__main__.py").exists(), where


def help_of(module: str, words: list[str]) -> str:
    """Return the help of an example; of one that parses by itself, its source."""
    example = importlib.import_module(module)
    if not hasattr(example, "run_program"):
        return (ROOT / f"{module.replace('.', '/')}.py").read_text()
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.suppress(SystemExit):
        example.run_program(example.main, [*words, "--help"])
    return printed.getvalue()


def test_options_of_examples_in_shell_commands_exist():
    for where, command in shell_commands():
        if command[1:2] == ["-m"] and command[2].startswith("examples."):
            words = command[3:]
            names = [word for word in words if word.startswith("--")]
            if "--config" in words:  # its file comes from a run
                del words[words.index("--config") : words.index("--config") + 2]
            text = help_of(command[2], words) if names else ""
            for word in names:
                assert re.search(rf'[│ "]{word}[ ,"]', text), f"{where}: {word}"


def ditask_help(*words: str) -> str:
    return CliRunner().invoke(ditask, [*words, "--help"], catch_exceptions=False).output


def help_of_ditask(words: list[str]) -> str:
    """Return the help in which the options of a command line of ditask are."""
    command = next((word for word in words if word in COMMANDS), None)
    text = ditask_help()
    if command is None:
        return text
    text += ditask_help(command)
    at = words.index("train") + 1 if "train" in words else len(words)
    if len(words[at : at + 2]) == 2:
        text += ditask_help("train", *words[at : at + 2])
    return text


def test_options_of_ditask_in_shell_commands_exist():
    checked = 0
    for where, command in shell_commands():
        if "ditask" in command:
            words = [word.rstrip(";") for word in command[command.index("ditask") + 1 :]]
            words = words[: words.index("--")] if "--" in words else words
            names = [word.partition("=")[0] for word in words if word.startswith("--")]
            text = help_of_ditask(words) if names else ""
            for word in names:
                exists = re.search(rf"[│ ]{word}[ ,\n]", text) is not None
                assert exists == (word not in NAMES_OF_OTHERS), f"{where}: {word}"
                checked += 1
    assert checked > 50


@pytest.mark.parametrize("path", PAGES, ids=name)
def test_links_between_files_lead_to_existing_files(path):
    text = re.sub(r"^(`{3,}).*?^\1$", "", path.read_text(encoding="utf-8"), flags=re.M | re.S)
    for target in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", text):
        if not target.startswith(("http://", "https://", "mailto:")):
            assert (path.parent / target).exists(), f"{name(path)} links to {target}"


def test_every_page_is_linked_from_the_index():
    reached = set()
    for path in PAGES:
        for block in blocks(path):
            if block.language == "{toctree}":
                for line in block.text.splitlines():
                    entry = re.sub(r".*<(.*)>", r"\1", line.strip())
                    if entry and not entry.startswith(":"):
                        # An entry may be a pattern; the page itself is then linked elsewhere.
                        found = set(path.parent.glob(f"{entry}.md")) - {path}
                        reached |= {page.resolve() for page in found}
    docs = {page.resolve() for page in PAGES if page.parent != ROOT}
    assert docs - reached == {ROOT / "docs" / "index.md"}


def test_the_changelog_has_an_entry_for_the_version():
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert f"## [{version}]" in (ROOT / "CHANGELOG.md").read_text()


def test_the_two_commands_are_on_the_first_screen_of_the_readme():
    first_screen = "\n".join((ROOT / "README.md").read_text().splitlines()[:40])
    assert "make train" in first_screen
    assert "make test" in first_screen


@pytest.mark.parametrize("page", ["README.md", "docs/guide/first-run.md"])
def test_the_first_program_has_the_settings_of_the_first_example(page):
    text = "\n".join(one.text for one in blocks(ROOT / page) if one.language == "python")
    program = inspect.signature(cartpole_dqn.main).parameters
    for call, parameter in {
        "DQNPolicy.for_env": "policy",
        "StepCollector": "collector",
        "OffPolicyLearner": "learner",
        "InteractionEvaluator": "evaluator",
    }.items():
        settings = program[parameter].default
        assert type(settings)(**keywords(text, call)) == settings, call


def test_the_front_page_has_how_to_install_and_the_program_of_the_readme():
    front, readme = blocks(ROOT / "docs/index.md"), blocks(ROOT / "README.md")
    (program,) = (block for block in readme if block.language == "python")
    assert program.text in [block.text for block in front]
    commands = next(block.text for block in front if block.language == "console")
    assert "pip install" in commands and "ditask train dqn CartPole-v1" in commands


def test_a_word_that_people_search_for_leads_to_one_page_that_exists():
    tree = ast.parse((ROOT / "docs/conf.py").read_text())
    (searched,) = (
        ast.literal_eval(statement.value)
        for statement in tree.body
        if isinstance(statement, ast.Assign) and ast.unparse(statement.targets[0]) == "SEARCHED"
    )
    assert [page for page in searched if not (ROOT / f"docs/{page}.md").exists()] == []
    words = [word.lower() for page in searched for word in searched[page]]
    assert sorted(set(words)) == sorted(words)
    assert {"early stopping", "windows", "n_sample", "gradients", "vecnormalize"} <= set(words)


def keywords(text: str, function: str) -> dict[str, object]:
    """Return the keyword arguments of a program's first call of a function, but for the seed."""
    calls = (node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call))
    call = next(one for one in calls if ast.unparse(one.func) == function)
    return {
        one.arg: eval(ast.unparse(one.value), {"Schedule": Schedule})
        for one in call.keywords
        if one.arg != "seed"
    }
