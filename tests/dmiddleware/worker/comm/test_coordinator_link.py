"""How a coordinator finds its link by name."""

from __future__ import annotations

import importlib.metadata

import pytest

from dmiddleware.errors import RegistryError
from dmiddleware.worker.comm import link
from dmiddleware.worker.comm.link import (
    COORDINATOR_LINK_REGISTRY,
    WORKER_ENTRY_POINTS,
    create_coordinator_link,
)
from dmiddleware.worker.comm.memory_link import MemoryNetwork


def _cfg(name):
    return {"main": {}, "system": {"coordinator": {"type": name}}}


def test_a_registered_function_gets_the_whole_config():
    made = (MemoryNetwork().connect("c", "coordinator"), object())
    COORDINATOR_LINK_REGISTRY.register("memory_for_a_test")(lambda cfg: (*made, cfg))
    cfg = _cfg("memory_for_a_test")
    assert create_coordinator_link(cfg) == (*made, cfg)


def test_an_installed_package_can_provide_a_link(monkeypatch, tmp_path):
    (tmp_path / "provider_for_a_test.py").write_text(
        "from dmiddleware.worker.comm.link import COORDINATOR_LINK_REGISTRY\n"
        "COORDINATOR_LINK_REGISTRY.register('provided')(lambda cfg: ('link', 'store'))\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    entry = importlib.metadata.EntryPoint(
        name="provided", value="provider_for_a_test", group=WORKER_ENTRY_POINTS
    )
    asked = []
    monkeypatch.setattr(link, "entry_points", lambda **keys: asked.append(keys) or [entry])
    assert create_coordinator_link(_cfg("provided")) == ("link", "store")
    assert asked == [{"group": WORKER_ENTRY_POINTS, "name": "provided"}]


def test_an_unknown_name_lists_the_known_ones():
    with pytest.raises(RegistryError, match="coordinator link"):
        create_coordinator_link(_cfg("carrier_pigeon"))
