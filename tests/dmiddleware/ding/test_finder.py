"""What the door serves under the names of DI-engine's modules."""

from __future__ import annotations

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


def test_functions_that_name_a_module_can_be_sent_to_other_processes() -> None:
    import ding.framework
    import gym

    for module in (gym, ding.framework):
        assert cloudpickle.loads(cloudpickle.dumps(lambda named=module: named))() is module
