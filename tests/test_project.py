"""The project's files agree with each other."""

import re
import tomllib
from pathlib import Path
from typing import Any

import yaml

import dmiddleware

ROOT = Path(__file__).resolve().parents[1]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def workflow(name: str) -> dict[str, Any]:
    """Return the jobs of a workflow."""
    path = ROOT / f".github/workflows/{name}.yml"
    return yaml.safe_load(path.read_text(encoding="utf-8"))["jobs"]


def commands(name: str) -> str:
    """Return all commands of a workflow, one a line."""
    return "\n".join(
        step.get("run", "") for job in workflow(name).values() for step in job["steps"]
    )


def test_the_version_is_the_same_everywhere():
    version = PYPROJECT["project"]["version"]
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    released = re.findall(r"^## \[(\d+\.\d+\.\d+)\] - \d{4}-\d{2}-\d{2}$", changelog, re.MULTILINE)
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert version == released[0] == citation["version"] == dmiddleware.__version__


def test_the_citation_has_the_address_of_the_documentation_and_the_readme_names_it():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert citation["url"] == PYPROJECT["project"]["urls"]["Documentation"]
    assert "(CITATION.cff)" in (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_addresses_of_the_project_page_are_those_of_the_documentation():
    urls = PYPROJECT["project"]["urls"]
    assert list(urls) == ["Documentation", "Changelog"]
    assert urls["Changelog"] == f"{urls['Documentation']}/page/changelog.html"
    assert (ROOT / "docs/changelog.md").exists()


def test_the_classifiers_name_linux_and_the_versions_of_python_that_are_tested():
    classifiers = PYPROJECT["project"]["classifiers"]
    systems = [name for name in classifiers if name.startswith("Operating System")]
    assert systems == ["Operating System :: POSIX :: Linux"]
    jobs = workflow("ci")
    assert {job["runs-on"] for job in jobs.values()} == {"ubuntu-latest"}
    tested = jobs["test"]["strategy"]["matrix"]["python"]
    versions = re.findall(r"Programming Language :: Python :: (3\.\d+)", "\n".join(classifiers))
    assert versions == tested
    assert PYPROJECT["project"]["requires-python"] == f">={tested[0]}"


def test_the_nightly_workflow_runs_the_slow_tests_the_short_faults_and_a_short_bench():
    lines = commands("nightly").splitlines()
    assert "make test-slow" in lines
    assert any("-m pytest -m 'not slow' tests/faults" in line for line in lines)
    (bench,) = [line for line in lines if "-m tests.benchmarks" in line]
    for name in bench.partition("tests.benchmarks ")[2].split():
        assert (ROOT / f"tests/benchmarks/bench_{name}.py").exists()


def test_a_release_needs_an_entry_of_the_changelog_and_a_wheel_that_works_alone():
    text = commands("release")
    places = [
        text.index(part)
        for part in (
            "CHANGELOG.md",
            "python -m build",
            "python -m venv /tmp/fresh",
            "/tmp/fresh/bin/pip install dist/*.whl",
            "/tmp/fresh/bin/ditask train",
        )
    ]
    assert places == sorted(places)


def test_only_the_helper_that_waits_sleeps_in_tests():
    """Wait for a condition, by `tests.waiting.wait_until` where nothing else can be waited for."""
    # Benchmarks may sleep until a machine is quiet.
    sleeping = [
        path.relative_to(ROOT).as_posix()
        for path in (ROOT / "tests").rglob("*.py")
        if "benchmarks" not in path.parts
        and re.search(r"\btime\.sleep\b|\bimport .*\bsleep\b", path.read_text(encoding="utf-8"))
    ]
    assert sleeping == ["tests/waiting.py"]


def test_the_workflow_runs_the_commands_that_people_run():
    steps = [step.get("run", "") for step in workflow("ci")["test"]["steps"]]
    assert steps[-2:] == ["make check", "make test"]
    ci = (ROOT / ".ci/run").read_text(encoding="utf-8").strip().splitlines()
    assert ci[-2:] == ["make check", "make test"]


def test_the_workflows_run_commands_that_exist():
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"^([a-z-]+):.*##", makefile, re.MULTILINE))
    for path in (ROOT / ".github/workflows").glob("*.yml"):
        text = commands(path.stem)
        assert set(re.findall(r"\bmake ([a-z-]+)", text)) <= targets, path
        for module in re.findall(r"-m (tests\.\w+)", text):
            assert (ROOT / module.replace(".", "/") / "__main__.py").exists(), path


def test_every_pinned_dependency_is_one_version():
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    names = [line.split("==")[0].lower() for line in lines if line and not line.startswith("#")]
    assert sorted(set(names)) == sorted(names)
