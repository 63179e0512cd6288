"""Step data in memory, and policies that travel as events."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from dmiddleware.data import pack_checkpoint
from dmiddleware.errors import ConfigError
from dmiddleware.pipeline import Context, Task
from dmiddleware.worker.errors import StepDataLost
from middleware.classic import RouterStore
from tests.waiting import wait_until


def arrived(store, name, have=-1):
    """Return a policy's newest version, once it has arrived."""
    versions = []

    def is_newer():
        versions.append(store.newest(name, have))
        return versions[-1] is not None

    wait_until(is_newer, f"a version of {name} that is newer than {have}")
    return versions[-1]


@pytest.fixture
def store():
    with Task(Context()) as task:
        yield RouterStore(task)


def test_step_data_comes_back_until_it_is_deleted(store):
    value = {"obs": torch.arange(4.0), "action": np.int64(1), "tag": "x", "steps": [None, (1, 2)]}
    ref = store.put("d", value)
    value["obs"].zero_()
    read = store.get(ref)
    assert read["obs"].tolist() == [0, 1, 2, 3], "it is a copy"
    assert (read["action"], read["tag"], read["steps"]) == (1, "x", [None, (1, 2)])
    assert store.missing([ref, "other"]) == {"other"}
    store.delete([ref, "other"])
    with pytest.raises(StepDataLost, match="ask for another") as error:
        store.get(ref)
    assert error.value.data_id == "d"


def test_clear_deletes_everything(store):
    store.put("d", 1)
    store.hold_batch({"e": store.take(["d"])["d"]})
    store.clear()
    assert store.missing(["d", "e"]) == {"d", "e"}


@pytest.mark.parametrize(
    "packed", [b"", b"x", b"\x08" + bytes(15), b"\x09" + bytes(7) + b"junk junk"]
)
def test_damaged_step_data_is_lost(store, packed):
    store.hold({"d": np.frombuffer(packed, np.uint8)})
    with pytest.raises(StepDataLost, match="damaged"):
        store.get("d")


@pytest.mark.parametrize(
    "value",
    [
        torch.ones(3, 2, dtype=torch.bfloat16),
        {"wide": torch.ones(1, dtype=torch.float64), "odd": torch.ones(3, dtype=torch.uint8)},
        {"empty": torch.ones(0, 4), "scalar": torch.tensor(2), "flag": torch.tensor(True)},
        [np.arange(3, dtype=np.int16), np.float32(0.5), "text", b"bytes", None, 2**70, (1, [2])],
    ],
)
def test_values_of_all_types_come_back(store, value):
    read = store.get(store.put("d", value))
    assert type(read) is type(value)
    assert pack_checkpoint(read) == pack_checkpoint(value)


def test_what_was_read_can_be_changed(store):
    store.put("d", {"x": torch.zeros(2)})
    store.get("d")["x"] += 1
    assert store.get("d")["x"].tolist() == [0, 0]


def test_what_cannot_be_packed_is_refused(store):
    with pytest.raises(TypeError, match="checkpoint cannot hold"):
        store.put("d", {"x": object()})


@pytest.mark.parametrize("name", ["", "a/b", "a*", 5])
def test_a_policys_name_is_checked(store, name):
    for call in (lambda: store.publish(name, 0, {}), lambda: store.newest(name, -1)):
        with pytest.raises(ConfigError, match="cannot be the name"):
            call()


def test_readers_get_the_newest_version_also_those_that_come_late(nodes):
    writer, early, late = (RouterStore(nodes.task(n, r)) for n, r in enumerate("abc"))
    assert early.newest("p", -1) is None
    for version in range(5):
        writer.publish("p", version, {"model": {"w": torch.full((2,), float(version))}})
    writer.publish("other", 9, {})
    for reader in (early, late):
        seen = [-1]
        while seen[-1] < 4:
            version, state = arrived(reader, "p", seen[-1])
            assert state["model"]["w"].tolist() == [float(version)] * 2
            seen.append(version)
        assert seen == sorted(seen)
        assert reader.newest("p", 4) is None


def test_an_older_version_does_not_replace_a_newer_one(nodes):
    writer, reader = (RouterStore(nodes.task(n, r)) for n, r in enumerate("ab"))
    assert reader.newest("p", -1) is None
    for version in (3, 2):
        writer.publish("p", version, {"version": version})
        arrived(reader, "p")
    assert arrived(reader, "p")[0] == 3
