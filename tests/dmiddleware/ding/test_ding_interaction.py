from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from dmiddleware.ding import interaction
from dmiddleware.ding.finder import NotHere
from dmiddleware.ding.interaction import base, exception


class Adder(interaction.Slave):
    def _process_task(self, task: dict[str, Any]) -> Mapping[str, Any]:
        if "b" not in task:
            raise interaction.TaskFail({"missing": "b"}, "no b")
        return {"sum": task["a"] + task["b"]}

    def _before_connection(self, data: dict[str, Any]) -> None:
        if data.get("stranger"):
            raise interaction.ConnectionRefuse("a stranger")


@pytest.fixture
def slave() -> Iterator[Adder]:
    with Adder(None, 0) as started:
        yield started


def test_a_server_on_all_addresses_listens_on_loopback_without_a_key(
    caplog: pytest.LogCaptureFixture,
) -> None:
    assert interaction.Slave("0.0.0.0", 0).address == "http://127.0.0.1:0"
    assert "127.0.0.1 instead of 0.0.0.0" in caplog.text


def test_join_returns_after_the_callbacks_which_get_the_task_and_its_result(slave: Adder) -> None:
    calls: list[tuple[str, Mapping[str, Any], Mapping[str, Any]]] = []
    with (
        interaction.Master(port=0) as master,
        master.new_connection("adder", "0.0.0.0", slave.port) as connection,
    ):
        for data in ({"a": 2, "b": 3}, {"a": 2}):
            task = connection.new_task(data)
            task.on_complete(lambda task, result: calls.append(("completed", task, result)))
            task.on_fail(lambda task, result: calls.append(("failed", task, result)))
            task.start().join()
    assert calls == [
        ("completed", {"a": 2, "b": 3}, {"sum": 5}),
        ("failed", {"a": 2}, {"missing": "b"}),
    ]
    assert task.status == interaction.TaskStatus.FAILED


def test_a_master_has_its_connected_slaves_by_name(slave: Adder) -> None:
    with interaction.Master(port=0) as master:
        connection = master.new_connection("adder", "127.0.0.1", slave.port)
        assert "adder" not in master
        with connection:
            assert master["adder"] is connection
            del master["adder"]
            assert "adder" not in master
            with pytest.raises(KeyError):
                master["adder"]


def test_a_refusal_is_an_error_of_its_code(slave: Adder) -> None:
    class Stranger(interaction.Master):
        def _before_connect(self) -> dict[str, Any]:
            return {"stranger": True}

    with Stranger(port=0) as master:
        connection = master.new_connection("adder", "127.0.0.1", slave.port)
        refused = exception.get_slave_exception_class_by_error_code(503)
        with pytest.raises(refused, match="a stranger") as info:
            connection.connect()
    assert refused.__name__ == "SlaveSlaveConnectionRefused"
    assert (info.value.status_code, info.value.success) == (403, False)


def test_a_hook_that_would_never_be_called_is_refused() -> None:
    with pytest.raises(NotHere, match="_after_connect"):

        class Hooked(interaction.Master):
            def _after_connect(self, *reply: Any) -> None:
                pass


@pytest.mark.parametrize(
    ("address", "parts"),
    [
        ("http://1.2.3.4", ("1.2.3.4", 80, False, "")),
        ("https://1.2.3.4:8787/a/b", ("1.2.3.4", 8787, True, "/a/b")),
    ],
)
def test_an_address_is_split(address: str, parts: tuple[str, int, bool, str]) -> None:
    assert base.split_http_address(address) == parts


def test_an_engine_joins_paths() -> None:
    engine = base.HttpEngine("a.b", 7, path="/x/")
    assert engine.get_url("/y") == engine.get_url("y") == "http://a.b:7/x/y"
