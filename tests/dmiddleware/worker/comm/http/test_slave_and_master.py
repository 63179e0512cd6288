import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest

from dmiddleware.errors import ConfigError, TransportError, WaitTimeout
from dmiddleware.testing import FakeClock
from dmiddleware.worker.comm.http import Code, Master, Slave, SlaveConnection
from dmiddleware.worker.comm.http.client import HttpClient
from dmiddleware.worker.comm.http.signing import HttpNode
from dmiddleware.worker.errors import (
    ConnectionRefuse,
    DisconnectionRefuse,
    RequestFailed,
    TaskFail,
    TaskRefuse,
)
from tests.waiting import wait_until

KEY = b"k" * 32
DEADLINE_S = 20.0
QUICK = {"request_retries": 2, "request_retry_waiting": 0.02}


class Adder(Slave):
    """Adds the numbers of a task, and waits where a task says so."""

    def __init__(self, **options: Any) -> None:
        super().__init__(port=0, key=KEY, **{"heartbeat_span": 0.2, **QUICK, **options})
        self.tasks: list[dict[str, Any]] = []
        self.may_go_on = threading.Event()
        self.lost = threading.Event()
        self.not_taken: list[Mapping[str, Any]] = []
        self.was_not_taken = threading.Event()

    def _process_task(self, task: dict[str, Any]) -> Mapping[str, Any]:
        self.tasks.append(task)
        if task.get("wait"):
            assert self.may_go_on.wait(DEADLINE_S)
        if task.get("fail"):
            raise TaskFail({"why": "asked"}, "it was asked to fail")
        if task.get("object"):
            return {"object": object()}
        return {"sum": sum(task["numbers"])}

    def _before_connection(self, data: dict[str, Any]) -> None:
        if data.get("refuse"):
            raise ConnectionRefuse("not you")

    def _before_disconnection(self, data: dict[str, Any]) -> None:
        if data.get("refuse"):
            raise DisconnectionRefuse("not now")

    def _before_task(self, data: dict[str, Any]) -> None:
        if data.get("refuse"):
            raise TaskRefuse("not this")

    def _lost_connection(self, address: str, error: Exception) -> None:
        self.lost.set()

    def _result_not_taken(self, task: dict[str, Any], result: Mapping[str, Any]) -> None:
        self.not_taken.append(result)
        self.was_not_taken.set()


def new_master(**options: Any) -> Master:
    return Master(port=0, key=KEY, **{"heartbeat_check_span": 0.05, **QUICK, **options})


@pytest.fixture
def slave() -> Iterator[Adder]:
    with Adder() as slave:
        yield slave
        slave.may_go_on.set()


@pytest.fixture
def master() -> Iterator[Master]:
    with new_master() as master:
        yield master


@pytest.fixture
def connection(master: Master, slave: Adder) -> Iterator[SlaveConnection]:
    with master.new_connection("adder", "127.0.0.1", slave.port) as connection:
        yield connection


def test_a_slave_does_the_tasks_of_its_master(connection: SlaveConnection, slave: Adder) -> None:
    for n in range(20):
        task = connection.new_task({"numbers": [n, 1]})
        assert task.status == "idle"
        task.start().join(DEADLINE_S)
        assert (task.status, task.result) == ("completed", {"sum": n + 1})
    assert len(slave.tasks) == 20


def test_callbacks_get_the_result(connection: SlaveConnection) -> None:
    done, failed = threading.Event(), threading.Event()
    results: list[Any] = []

    def note(event: threading.Event) -> Callable[[Mapping[str, Any]], None]:
        def callback(result: Mapping[str, Any]) -> None:
            results.append(dict(result))
            event.set()

        return callback

    task = connection.new_task({"numbers": [1]}).on_complete(note(done)).on_fail(note(failed))
    task.start()
    assert done.wait(DEADLINE_S)
    assert results == [{"sum": 1}]
    late = threading.Event()
    task.on_complete(note(late)).on_fail(note(failed))
    assert late.wait(DEADLINE_S)
    connection.new_task({"fail": True}).on_fail(note(failed)).start().join(DEADLINE_S)
    assert failed.wait(DEADLINE_S)
    assert results[2] == {"why": "asked"}


def test_a_callback_may_start_the_next_task(connection: SlaveConnection) -> None:
    results: list[Any] = []
    done = threading.Event()

    def next_task(result: Mapping[str, Any]) -> None:
        results.append(result["sum"])
        if len(results) == 10:
            done.set()
        else:
            connection.new_task({"numbers": [len(results)]}).on_complete(next_task).start()

    connection.new_task({"numbers": [0]}).on_complete(next_task).start()
    assert done.wait(DEADLINE_S)
    assert results == list(range(10))


def test_a_callback_that_raises_does_not_stop_the_next_one(connection: SlaveConnection) -> None:
    done = threading.Event()
    task = connection.new_task({"numbers": []})
    task.on_complete(lambda result: result["nothing"]).on_complete(lambda result: done.set())
    task.start().join(DEADLINE_S)
    assert done.wait(DEADLINE_S)


def test_a_failed_task_has_the_result_and_the_message_of_its_failure(
    connection: SlaveConnection,
) -> None:
    task = connection.new_task({"fail": True}).start().join(DEADLINE_S)
    assert (task.status, task.result) == ("failed", {"why": "asked"})
    assert "asked to fail" in task.message


def test_an_error_in_a_task_is_reported_with_its_traceback(connection: SlaveConnection) -> None:
    task = connection.new_task({"numbers": ["a"]}).start().join(DEADLINE_S)
    assert task.status == "failed"
    assert "_process_task" in task.message
    assert "TypeError" in task.message


def test_a_result_that_is_not_json_fails_the_task(connection: SlaveConnection) -> None:
    task = connection.new_task({"object": True}).start().join(DEADLINE_S)
    assert task.status == "failed"
    assert "object" in task.message


def test_a_task_that_is_not_json_is_refused_at_once(connection: SlaveConnection) -> None:
    task = connection.new_task({"numbers": object()})
    with pytest.raises(TypeError, match="JSON"):
        task.start()
    assert task.status == "start_failed"
    assert connection.new_task({"numbers": [1]}).start().join(DEADLINE_S).status == "completed"


def test_a_task_starts_once(connection: SlaveConnection) -> None:
    task = connection.new_task({"numbers": [1]}).start().join(DEADLINE_S)
    with pytest.raises(ConfigError, match="create another"):
        task.start()


def test_a_slave_does_one_task_at_a_time(connection: SlaveConnection, slave: Adder) -> None:
    first = connection.new_task({"wait": True, "numbers": [1]}).start()
    assert first.status == "started"
    second = connection.new_task({"numbers": [2]}).start().join(DEADLINE_S)
    assert second.status == "start_failed"
    with pytest.raises(WaitTimeout, match="started"):
        first.join(0.01)
    slave.may_go_on.set()
    assert first.join(DEADLINE_S).result == {"sum": 1}
    assert len(slave.tasks) == 1


class Caller:
    """Sends single requests to a slave, as a master would."""

    def __init__(self, slave: Adder, uid: str = "master") -> None:
        self._address = slave.address
        self._node = HttpNode("run", 0, uid)
        self._first_client = self._client = HttpClient(slave.address, self._node, key=KEY)

    def connect(self, address: str = "http://127.0.0.1:9", **data: Any) -> None:
        body = {"master": {"address": address}, "data": data}
        uid = self._first_client.request("POST", "/connect", body)["slave"]["uid"]
        self._client = HttpClient(self._address, self._node, key=KEY, to=uid)

    def give(self, task_id: str, **data: Any) -> dict[str, Any]:
        return self.request("POST", "/task/new", {"task": {"id": task_id}, "data": data})

    def request(self, method: str, path: str, body: Any) -> dict[str, Any]:
        return self._client.request(method, path, body)


def refused(call: Callable[[], object]) -> tuple[int | None, int | None]:
    with pytest.raises(RequestFailed) as caught:
        call()
    return caught.value.status, caught.value.code


def test_the_same_task_again_is_acknowledged_and_not_done_twice() -> None:
    with Adder(request_retries=10**6, heartbeat_span=60.0) as slave:
        caller = Caller(slave)
        caller.connect()
        first = caller.give("a", wait=True, numbers=[])
        assert first == caller.give("a", wait=True, numbers=[]) == {"task": {"id": "a"}}
        assert refused(lambda: caller.give("b", numbers=[])) == (409, Code.BUSY)
        assert len(slave.tasks) == 1
        slave.may_go_on.set()


def test_refused_requests_have_the_status_and_the_code_of_their_reason(slave: Adder) -> None:
    caller = Caller(slave)
    assert refused(lambda: caller.connect(refuse=True)) == (403, 503)
    caller.connect()
    assert refused(Caller(slave, "another").connect) == (409, 501)
    assert refused(lambda: caller.give("a", refuse=True)) == (403, 602)
    release = {"data": {"refuse": True}}
    assert refused(lambda: caller.request("DELETE", "/disconnect", release)) == (403, 504)
    caller.request("DELETE", "/disconnect", {})
    assert not slave.is_connected
    assert refused(lambda: caller.request("DELETE", "/disconnect", {})) == (409, 502)
    assert refused(lambda: caller.give("a", numbers=[])) == (409, 502)
    slave.shutdown()
    assert refused(lambda: caller.give("a", numbers=[])) == (409, 101)
    assert slave.tasks == []


@pytest.mark.parametrize(
    "body", [{}, {"task": 1}, {"task": {}}, {"task": {"id": 1}}, {"task": {"id": ""}},
             {"task": {"id": "a"}, "data": 1}],
)  # fmt: skip
def test_malformed_tasks_are_refused(slave: Adder, body: dict[str, Any]) -> None:
    caller = Caller(slave)
    caller.connect()
    assert refused(lambda: caller.request("POST", "/task/new", body)) == (400, Code.MALFORMED)
    assert slave.tasks == []


@pytest.mark.parametrize("address", [1, None, "", "ftp://127.0.0.1:1", "http://127.0.0.1"])
def test_masters_with_unusable_addresses_are_refused(slave: Adder, address: Any) -> None:
    assert refused(lambda: Caller(slave).connect(address)) == (400, Code.MALFORMED)
    assert not slave.is_connected


def test_connecting_again_is_acknowledged(slave: Adder, connection: SlaveConnection) -> None:
    assert connection.connect() is connection
    assert connection.is_connected
    caller = Caller(slave, "another")
    assert refused(caller.connect) == (409, 501)
    connection.disconnect()
    connection.disconnect()
    caller.connect()
    caller.connect()


def test_refusals_reach_the_user_of_a_master(master: Master, slave: Adder) -> None:
    connection = master.new_connection("adder", "127.0.0.1", slave.port)
    assert connection.new_task({}).start().status == "start_failed"
    assert refused(lambda: connection.connect({"refuse": True})) == (403, 503)
    assert not connection.is_connected
    connection.connect()
    task = connection.new_task({"refuse": True}).start()
    assert task.status == "start_failed"
    assert "not this" in task.message
    assert refused(lambda: connection.disconnect({"refuse": True})) == (403, 504)
    assert connection.is_connected


def test_a_master_without_the_key_gets_nothing_done(slave: Adder) -> None:
    for key, run_id, channel, status in (
        (b"x" * 32, "run", 0, 401), (b"", "run", 0, 401),
        (KEY, "other", 0, 403), (KEY, "run", 1, 403),
    ):  # fmt: skip
        with Master(port=0, key=key, run_id=run_id, channel=channel, **QUICK) as stranger:
            connection = stranger.new_connection("adder", "127.0.0.1", slave.port)
            assert refused(connection.connect)[0] == status
    assert not slave.is_connected


def test_a_result_is_sent_until_the_master_acknowledges_it(
    connection: SlaveConnection, slave: Adder, master: Master, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests: list[str] = []
    send = HttpClient.request

    def unreliable(client: HttpClient, method: str, path: str, *rest: Any, **options: Any) -> Any:
        if path != "/slave/task/complete":
            return send(client, method, path, *rest, **options)
        requests.append(path)
        if len(requests) in (1, 2):
            raise RequestFailed("lost on the way there")
        answer = send(client, method, path, *rest, **options)
        if len(requests) in (3, 4):
            raise RequestFailed("lost on the way back")
        return answer

    monkeypatch.setattr(HttpClient, "request", unreliable)
    results: list[Any] = []
    task = connection.new_task({"numbers": [3]}).on_complete(results.append).start()
    assert task.join(DEADLINE_S).result == {"sum": 3}
    assert connection.new_task({"numbers": [4]}).start().join(DEADLINE_S).result == {"sum": 4}
    assert len(requests) == 6
    wait_until(lambda: len(results) == 1, "the result")
    assert slave.not_taken == []


def test_a_master_that_dies_is_lost_and_another_one_is_accepted(slave: Adder) -> None:
    first = new_master()
    first.start()
    connection = first.new_connection("adder", "127.0.0.1", slave.port).connect()
    connection.new_task({"wait": True, "numbers": [1]}).start()
    first._server.close()  # as if its process had been killed
    assert slave.lost.wait(DEADLINE_S)
    slave.may_go_on.set()
    assert slave.was_not_taken.wait(DEADLINE_S)
    assert slave.not_taken == [{"sum": 1}]
    with new_master() as second:
        other = second.new_connection("adder", "127.0.0.1", slave.port)
        with other:
            task = other.new_task({"numbers": [2]}).start().join(DEADLINE_S)
            assert task.result == {"sum": 2}
    first.close()


def test_a_slave_whose_heartbeats_stop_is_lost_and_its_task_fails() -> None:
    clock = FakeClock()
    with Adder() as slave, new_master(clock=clock.now, heartbeat_tolerance=17.0) as master:
        connection = master.new_connection("adder", "127.0.0.1", slave.port).connect()
        task = connection.new_task({"wait": True, "numbers": [1]}).start()
        clock.advance(16.0)
        wait_until(lambda: connection.last_beat == clock.now(), "a heartbeat")
        assert connection.is_connected
        slave._connection.lost.set()  # type: ignore[union-attr]
        clock.advance(18.0)
        task.join(DEADLINE_S)
        assert task.status == "failed"
        assert "no heartbeat" in task.message
        assert not connection.is_connected
        slave.may_go_on.set()
        assert slave.was_not_taken.wait(DEADLINE_S)


def test_heartbeats_keep_a_slave_connected(slave: Adder) -> None:
    clock = FakeClock()
    with new_master(clock=clock.now, heartbeat_tolerance=17.0) as master:
        connection = master.new_connection("adder", "127.0.0.1", slave.port).connect()
        for _ in range(4):
            clock.advance(16.0)
            wait_until(lambda: connection.last_beat == clock.now(), "a heartbeat")
        assert connection.is_connected
        assert slave.is_connected


def test_a_slave_that_is_gone_fails_the_next_task(master: Master) -> None:
    with Adder() as slave:
        connection = master.new_connection("adder", "127.0.0.1", slave.port).connect()
    task = connection.new_task({"numbers": [1]}).start()
    assert task.status == "start_failed"
    assert not connection.is_connected
    assert refused(connection.connect) == (None, None)


def test_a_slave_that_the_master_forgot_accepts_another_one(slave: Adder, master: Master) -> None:
    connection = master.new_connection("adder", "127.0.0.1", slave.port).connect()
    connected_at = connection.last_beat
    wait_until(lambda: connection.last_beat > connected_at, "a heartbeat")
    connection.lose("a test")
    assert slave.lost.wait(DEADLINE_S)
    connection.connect()
    assert connection.new_task({"numbers": [1]}).start().join(DEADLINE_S).result == {"sum": 1}


def test_the_result_of_an_unknown_task_is_not_taken(
    slave: Adder, connection: SlaveConnection, master: Master
) -> None:
    client = HttpClient(
        master.address, HttpNode("run", 0, connection.uid), key=KEY, to=master._node.uid
    )
    for path in ("/slave/task/complete", "/slave/task/fail"):
        body = {"task": {"id": "unknown"}, "result": {}}
        assert refused(lambda: client.request("PUT", path, body)) == (409, Code.UNKNOWN_TASK)  # noqa: B023
        assert refused(lambda: client.request("PUT", path, {})) == (400, Code.MALFORMED)  # noqa: B023
    stranger = HttpClient(master.address, HttpNode("run", 0, "x"), key=KEY, to=master._node.uid)
    assert refused(lambda: stranger.request("GET", "/slave/heartbeat")) == (409, 502)


def test_a_task_fails_when_its_slave_is_released(slave: Adder, master: Master) -> None:
    connection = master.new_connection("adder", "127.0.0.1", slave.port).connect()
    task = connection.new_task({"wait": True, "numbers": []}).start()
    connection.disconnect()
    assert task.join(DEADLINE_S).status == "failed"
    slave.may_go_on.set()
    assert slave.was_not_taken.wait(DEADLINE_S)


def test_closing_the_master_releases_its_slaves(slave: Adder) -> None:
    with new_master() as master:
        master.new_connection("adder", "127.0.0.1", slave.port).connect()
        master.new_connection("nobody", "127.0.0.1", 9)
        assert slave.is_connected
    assert not slave.is_connected


def test_ping_answers_while_the_server_runs() -> None:
    for node in (Adder(), new_master()):
        with node:
            assert node.ping()
        assert not node.ping()


def test_the_owner_may_shut_down_over_http() -> None:
    for node in (Adder(), new_master()):
        node.start()
        own = HttpClient(node.address, node._node, key=node._server.own_token, to=node._node.uid)
        own.request("DELETE", "/shutdown")
        node.join()
        assert not node.ping()


def test_start_and_close_may_be_called_twice() -> None:
    for node in (Adder(), new_master()):
        node.start()
        node.start()
        node.close()
        node.close()
        with pytest.raises(TransportError, match="closed"):
            node.start()
    Adder().close()
    new_master().close()


def test_no_thread_outlives_a_slave_and_its_master() -> None:
    before = threading.active_count()
    with (
        Adder() as slave,
        new_master() as master,
        master.new_connection("adder", "127.0.0.1", slave.port) as connection,
    ):
        connection.new_task({"numbers": [1]}).start().join(DEADLINE_S)
    wait_until(lambda: threading.active_count() <= before, "the end of the threads")


def test_connecting_before_the_start_is_an_error(slave: Adder) -> None:
    connection = new_master().new_connection("adder", "127.0.0.1", slave.port)
    with pytest.raises(RequestFailed, match="start"):
        connection.connect()


@pytest.mark.parametrize(
    ("build", "word"),
    [
        (lambda: Slave(heartbeat_span=0.1), "heartbeat_span"),
        (lambda: Slave(request_retries=-1), "request_retries"),
        (lambda: Slave(host="0.0.0.0"), "key"),
        (lambda: Slave(channel=-1), "channel"),
        (lambda: Slave(run_id="a b"), "run id"),
        (lambda: Master(heartbeat_tolerance=0), "heartbeat_tolerance"),
        (lambda: Master(heartbeat_check_span=0), "heartbeat_check_span"),
        (lambda: Master(request_retry_waiting=-1), "request_retry_waiting"),
        (lambda: Master(host="0.0.0.0", key=KEY), "my_address"),
        (lambda: Master(host="10.0.0.1"), "key"),
        (lambda: Master().new_connection("a", "10.0.0.1", 1), "cannot reach"),
        (lambda: Master(my_address="http://10.0.0.1:1").new_connection("a", "10.0.0.1", 1), "key"),
    ],
)
def test_impossible_values_are_refused(build: Callable[[], object], word: str) -> None:
    with pytest.raises(ConfigError, match=word):
        build()


def test_the_defaults_are_the_classic_ones() -> None:
    slave, master = Slave(), Master()
    assert slave.address == "http://127.0.0.1:7236"
    assert master.address == "http://127.0.0.1:7235"
    assert not slave.is_connected
    with pytest.raises(NotImplementedError):
        slave._process_task({})


def test_each_side_serves_a_flask_application_with_the_endpoints_of_the_interface() -> None:
    def endpoints(node: Slave | Master) -> set[str]:
        rules = node._server.app.url_map.iter_rules()
        return {f"{min(rule.methods or ())} {rule.rule}" for rule in rules}

    own = {"GET /ping", "DELETE /shutdown"}
    assert endpoints(Adder()) == own | {"POST /connect", "DELETE /disconnect", "POST /task/new"}
    assert endpoints(Master(port=0)) == own | {
        "GET /slave/heartbeat", "PUT /slave/task/complete", "PUT /slave/task/fail",
    }  # fmt: skip
