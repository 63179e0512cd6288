"""deploy/Dockerfile, as far as it can be tested without building the image."""

from __future__ import annotations

import json
import re
import shutil
import tomllib
from pathlib import Path

import pytest
from dockerfile_parse import DockerfileParser

from tests.deploy import container, container_program
from tests.waiting import DEADLINE_S, read

ROOT = Path(__file__).resolve().parents[2]
DOCKERFILE = ROOT / "deploy" / "Dockerfile"
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def instructions(name: str) -> list[str]:
    with DOCKERFILE.open("rb") as file:
        parsed = DockerfileParser(fileobj=file).structure
    return [one["value"] for one in parsed if one["instruction"] == name]


def copied() -> list[str]:
    """Return what the Dockerfile copies from the repository."""
    return [source for line in instructions("COPY") for source in line.split()[:-1]]


def test_all_files_that_the_package_is_built_from_are_copied() -> None:
    project = PYPROJECT["project"]
    assert {"pyproject.toml", project["readme"], *project["license-files"]} <= set(copied())
    packages = {
        name.rstrip("*") for name in PYPROJECT["tool"]["setuptools"]["packages"]["find"]["include"]
    }
    assert packages <= set(copied())
    assert all((ROOT / source).exists() for source in copied())


def test_the_build_context_has_what_is_copied_and_nothing_else() -> None:
    lines = (ROOT / "deploy" / "Dockerfile.dockerignore").read_text().splitlines()
    rules = [line for line in lines if not line.startswith("#")]
    assert rules[0] == "*"
    assert {rule[1:] for rule in rules if rule.startswith("!")} == set(copied())


def test_everything_is_installed_from_the_package_index_with_the_tested_versions() -> None:
    (install,) = [line for line in instructions("RUN") if "pip" in line]
    assert install == "pip install --no-cache-dir -c constraints.txt ."
    assert not re.search(r"apt|curl|wget|git|https?:", " ".join(instructions("RUN")))
    assert not instructions("ADD")
    (base,) = instructions("FROM")
    version = re.fullmatch(r"python:(3\.\d+)-slim", base)
    assert version is not None
    classifier = f"Programming Language :: Python :: {version[1]}"
    assert classifier in PYPROJECT["project"]["classifiers"]


def test_ditask_is_process_1_of_a_user_without_privileges() -> None:
    assert json.loads(instructions("ENTRYPOINT")[0]) == ["ditask"]
    assert instructions("USER") == [f"{container.UID}:{container.UID}"]
    assert instructions("WORKDIR")[-1] == instructions("VOLUME")[0] == "/work"
    with DOCKERFILE.open("rb") as file:
        variables = DockerfileParser(fileobj=file).envs
    assert variables["TMPDIR"] == variables["HOME"] == "/tmp"


@pytest.mark.process
@pytest.mark.timeout(180)
def test_large_arrays_travel_with_64_mb_of_shared_memory_and_a_read_only_root(
    tmp_path: Path,
) -> None:
    container.skip_without_containers(tmp_path)
    volume, output, hosts = tmp_path / "work", tmp_path / "output", tmp_path / "hosts"
    volume.mkdir()
    hosts.write_text("127.0.0.1 localhost\n")
    shutil.copy(container_program.__file__, volume / "program.py")
    command = ["ditask", "--main", "program.main", "--roles", "learner=1,collector=1"]
    env = {"TMPDIR": "/tmp", "HOME": "/tmp"}
    with container.start(volume, command, env, hosts=hosts, output=output) as started:
        try:
            assert started.wait(DEADLINE_S) == 0, read(output)
        finally:
            started.kill()
    assert "received 216 MiB in order" in read(output)
    assert list(volume.glob("logs/*/node-0.log"))
