"""Imports stay until the process ends, so the garbage collector need not look at them."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest

from dmiddleware.env import make_env_manager
from dmiddleware.process.garbage import kept_for_good
from tests.dmiddleware.launch.ditask_process import start


@pytest.fixture(autouse=True)
def _collector_as_before() -> Iterator[None]:
    was_enabled = gc.isenabled()
    yield
    (gc.enable if was_enabled else gc.disable)()


@pytest.mark.parametrize("ends_by_error", [False, True])
def test_the_collector_does_not_see_what_the_block_created(ends_by_error: bool) -> None:
    gc.enable()
    with suppress(ZeroDivisionError), kept_for_good():
        assert not gc.isenabled()
        kept = ["a list that the collector tracks"]
        if ends_by_error:
            _ = 1 / 0
    later = ["another one"]

    tracked = gc.get_objects()
    assert not any(one is kept for one in tracked)
    assert any(one is later for one in tracked)
    assert gc.isenabled()


def test_a_collector_that_was_off_stays_off() -> None:
    gc.disable()
    with kept_for_good():
        pass
    assert not gc.isenabled()


def test_nodes_keep_the_module_of_their_program(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(
        "import gc\n"
        "from pathlib import Path\n"
        "KEPT = ['of the module']\n"
        "def main():\n"
        "    seen = any(one is KEPT for one in gc.get_objects())\n"
        "    Path('found').write_text(f'{seen} {gc.isenabled()}')\n"
    )
    with start(tmp_path, "--main", "program.main", "--roles", "learner=1") as node:
        output, _ = node.communicate(timeout=60)
    assert node.returncode == 0, output
    assert (tmp_path / "found").read_text() == "False True"


class SeenByTheCollector(gym.Env[np.ndarray, int]):
    """Its observation is whether the collector sees it, and whether it is enabled."""

    observation_space = gym.spaces.Box(0, 1, (2,))
    action_space = gym.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        seen = any(one is self for one in gc.get_objects())
        return np.array([seen, gc.isenabled()], np.float32), {}

    def step(self, action):
        return self.reset()[0], 0.0, False, False, {}


def test_worker_processes_keep_their_envs() -> None:
    with make_env_manager(SeenByTheCollector, env_num=2, mode="async") as envs:
        assert np.array_equal(envs.ready_obs, [[0, 1], [0, 1]])
