"""What the door serves under the names of DI-engine's modules."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterator

import cloudpickle
import pytest

import dmiddleware.ding as door


@pytest.fixture(autouse=True)
def opened() -> Iterator[None]:
    door.open_door()
    yield
    door.close_door()


def test_a_module_does_not_hide_what_its_package_has_under_the_same_name() -> None:
    import ding.framework.task
    from ding.framework import task
    from ding.framework.task import Task

    assert ding.framework.task is task
    assert task is not Task and not hasattr(task, "__path__")


def test_all_that_a_face_offers_is_there_and_none_of_what_it_refuses() -> None:
    faces = [module.name for module in pkgutil.walk_packages(door.__path__, f"{door.__name__}.")]
    for face in map(importlib.import_module, faces):
        offered, refused = getattr(face, "__all__", ()), getattr(face, "REFUSED", {})
        assert [name for name in offered if not hasattr(face, name)] == [], face.__name__
        assert [name for name in refused if hasattr(face, name)] == [], face.__name__


def test_a_network_that_is_not_here_is_refused_with_one_to_use() -> None:
    with pytest.raises(ImportError, match="use MAVAC with PPO"):
        from ding.model import MAQAC  # noqa: F401


def test_functions_that_name_a_module_can_be_sent_to_other_processes() -> None:
    import ding.framework
    import gym

    for module in (gym, ding.framework):
        assert cloudpickle.loads(cloudpickle.dumps(lambda named=module: named))() is module
