"""The project's files agree with each other."""

import re
import tomllib
from pathlib import Path

import yaml

import dmiddleware

ROOT = Path(__file__).resolve().parents[1]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


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


def test_the_workflow_runs_the_commands_that_people_run():
    workflow = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text(encoding="utf-8"))
    commands = [step.get("run", "") for step in workflow["jobs"]["test"]["steps"]]
    assert commands[-2:] == ["make check", "make test"]
    ci = (ROOT / ".ci/run").read_text(encoding="utf-8").strip().splitlines()
    assert ci[-2:] == ["make check", "make test"]


def test_the_workflows_run_commands_that_exist():
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"^([a-z-]+):.*##", makefile, re.MULTILINE))
    for workflow in (ROOT / ".github/workflows").glob("*.yml"):
        jobs = yaml.safe_load(workflow.read_text(encoding="utf-8"))["jobs"]
        commands = [step.get("run", "") for job in jobs.values() for step in job["steps"]]
        made = {target for text in commands for target in re.findall(r"\bmake ([a-z-]+)", text)}
        assert made <= targets, workflow
        modules = {name for text in commands for name in re.findall(r"-m (tests\.\w+)", text)}
        for module in modules:
            assert (ROOT / module.replace(".", "/") / "__main__.py").exists(), workflow


def test_every_pinned_dependency_is_one_version():
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    names = [line.split("==")[0].lower() for line in lines if line and not line.startswith("#")]
    assert sorted(set(names)) == sorted(names)
