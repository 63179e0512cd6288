import http.client
import json
import socket
import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dmiddleware.errors import ConfigError, TransportError
from dmiddleware.worker.comm.http import client as client_module
from dmiddleware.worker.comm.http import server as server_module
from dmiddleware.worker.comm.http.client import HttpClient, encoded
from dmiddleware.worker.comm.http.server import MAX_BODY_BYTES, Code, HttpServer, Refusal, Route
from dmiddleware.worker.comm.http.signing import WINDOW_S, HttpNode, sign
from dmiddleware.worker.errors import RequestFailed

KEY = b"k" * 32
SERVER, CLIENT = HttpNode("run", 0, "server"), HttpNode("run", 0, "client")


class Endpoints:
    """A server that remembers what its endpoints were given."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, dict[str, Any]]] = []
        self.is_open = True
        self.server = HttpServer(
            SERVER, "127.0.0.1", 0,
            {
                ("POST", "/do"): Route(self._note),
                ("POST", "/hello"): Route(self._note, to_anyone=True),
                ("POST", "/busy"): Route(self._refuse),
                ("POST", "/broken"): Route(self._break),
                ("GET", "/ping"): Route(self._note, own_token=True),
            },
            key=KEY,
            is_open=lambda: self.is_open,
        )  # fmt: skip

    def _note(self, sender: HttpNode, body: dict[str, Any]) -> dict[str, Any]:
        self.calls.append((sender.uid, body))
        return {"n": len(self.calls)}

    def _refuse(self, sender: HttpNode, body: dict[str, Any]) -> None:
        raise Refusal(409, Code.BUSY, "busy")

    def _break(self, sender: HttpNode, body: dict[str, Any]) -> None:
        raise ZeroDivisionError("oh")

    def client(self, node: HttpNode = CLIENT, **options: Any) -> HttpClient:
        options = {"key": KEY, "to": "server", **options}
        return HttpClient(f"http://127.0.0.1:{self.server.port}", node, **options)

    def send(
        self, method: str, path: str, body: bytes, headers: dict[str, str]
    ) -> tuple[int, dict[str, Any]]:
        """Send a request as it is, and return the status and the content of the reply."""
        connection = http.client.HTTPConnection("127.0.0.1", self.server.port, timeout=20)
        try:
            connection.request(method, path, body, headers)
            reply = connection.getresponse()
            return reply.status, json.loads(reply.read())
        finally:
            connection.close()

    def send_signed(self, path: str, body: bytes, now: float | None = None, **changes: Any) -> int:
        options = {"key": KEY, "node": CLIENT, "to": "server", **changes}
        header = sign(
            options["key"], options["node"], now or time.time(), "POST", path, body,
            to=options["to"],
        )  # fmt: skip
        return self.send("POST", path, body, {"Authorization": header})[0]


@pytest.fixture(scope="module")
def shared() -> Iterator[Endpoints]:
    endpoints = Endpoints()
    endpoints.server.open()
    yield endpoints
    endpoints.server.close()


@pytest.fixture
def endpoints(shared: Endpoints) -> Endpoints:
    shared.calls.clear()
    shared.is_open = True
    return shared


def test_a_signed_request_is_answered(endpoints: Endpoints) -> None:
    assert endpoints.client().request("POST", "/do", {"a": [1, None, float("inf")]}) == {"n": 1}
    assert endpoints.calls == [("client", {"a": [1, None, float("inf")]})]
    assert endpoints.client().request("POST", "/do") == {"n": 2}


def test_a_reply_has_success_code_message_and_data(endpoints: Endpoints) -> None:
    header = sign(KEY, CLIENT, time.time(), "POST", "/do", b"", to="server")
    status, content = endpoints.send("POST", "/do", b"", {"Authorization": header})
    assert (status, content) == (200, {"success": True, "code": 0, "message": "", "data": {"n": 1}})
    status, content = endpoints.send("POST", "/do", b"", {})
    assert status == 401
    assert content["success"] is False
    assert content["code"] == Code.NOT_SIGNED
    assert content["data"] == {}


def test_a_request_without_a_signature_does_nothing(endpoints: Endpoints) -> None:
    for header in ({}, {"Authorization": ""}, {"Authorization": "HMAC a b c d"}):
        for path in ("/do", "/hello", "/ping", "/nowhere"):
            assert endpoints.send("POST", path, b"{}", header)[0] == 401
    assert endpoints.calls == []


def test_a_request_with_a_wrong_signature_does_nothing(endpoints: Endpoints) -> None:
    assert endpoints.send_signed("/do", b"{}", key=b"x" * 32) == 401
    assert endpoints.send_signed("/do", b"{}", key=b"") == 401
    assert endpoints.send_signed("/do", b"{}", to="another-server") == 401
    assert endpoints.send_signed("/do", b"{}", to="") == 401
    header = sign(KEY, CLIENT, time.time(), "POST", "/do", b"{}", to="server")
    assert endpoints.send("POST", "/do", b'{"a":1}', {"Authorization": header})[0] == 401
    assert endpoints.send("POST", "/busy", b"{}", {"Authorization": header})[0] == 401
    assert endpoints.calls == []


def test_a_request_that_is_too_old_does_nothing(endpoints: Endpoints) -> None:
    for age in (WINDOW_S + 5, -WINDOW_S - 5):
        assert endpoints.send_signed("/do", b"{}", time.time() - age) == 401
    assert endpoints.calls == []
    assert endpoints.send_signed("/do", b"{}", time.time() - WINDOW_S + 10) == 200


def test_a_request_that_is_sent_again_does_nothing(endpoints: Endpoints) -> None:
    header = sign(KEY, CLIENT, time.time(), "POST", "/do", b"{}", to="server")
    statuses = [endpoints.send("POST", "/do", b"{}", {"Authorization": header})[0] for _ in "123"]
    assert statuses == [200, 401, 401]
    assert len(endpoints.calls) == 1


def test_the_body_of_an_unsigned_request_is_not_even_decoded(
    endpoints: Endpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoded: list[bytes] = []

    def loads(body: bytes) -> Any:
        decoded.append(body)
        return json.loads(body)

    monkeypatch.setattr(server_module, "json", SimpleNamespace(loads=loads))
    used = sign(KEY, CLIENT, time.time(), "POST", "/do", b"{}", to="server")
    endpoints.send("POST", "/do", b"{}", {"Authorization": used})
    assert decoded == [b"{}"]
    assert endpoints.send("POST", "/do", b"{}", {"Authorization": used})[0] == 401
    assert endpoints.send("POST", "/do", b"{}", {})[0] == 401
    assert endpoints.send_signed("/do", b"{}", key=b"x" * 32) == 401
    assert endpoints.send_signed("/do", b"{}", time.time() - 100) == 401
    assert decoded == [b"{}"]


def test_other_runs_and_channels_are_refused(endpoints: Endpoints) -> None:
    for node, code in (
        (HttpNode("other", 0, "client"), Code.OTHER_RUN),
        (HttpNode("run", 1, "client"), Code.OTHER_CHANNEL),
    ):
        with pytest.raises(RequestFailed) as caught:
            endpoints.client(node).request("POST", "/do")
        assert (caught.value.status, caught.value.code) == (403, code)
    assert endpoints.calls == []


def test_an_endpoint_of_the_owner_needs_the_own_token(endpoints: Endpoints) -> None:
    with pytest.raises(RequestFailed) as caught:
        endpoints.client().request("GET", "/ping")
    assert caught.value.status == 401
    own = endpoints.client(SERVER, key=endpoints.server.own_token)
    assert own.request("GET", "/ping") == {"n": 1}
    with pytest.raises(RequestFailed) as caught:
        own.request("POST", "/do")
    assert caught.value.status == 401


def test_a_server_that_is_closing_refuses_all_but_its_owner(endpoints: Endpoints) -> None:
    endpoints.is_open = False
    with pytest.raises(RequestFailed) as caught:
        endpoints.client().request("POST", "/do")
    assert (caught.value.status, caught.value.code) == (409, 101)
    assert endpoints.client(SERVER, key=endpoints.server.own_token).request("GET", "/ping")


def test_a_refusal_carries_its_code(endpoints: Endpoints) -> None:
    with pytest.raises(RequestFailed, match="busy") as caught:
        endpoints.client().request("POST", "/busy")
    assert (caught.value.status, caught.value.code) == (409, 601)


def test_unknown_endpoints_are_not_found(endpoints: Endpoints) -> None:
    for path in ("/nowhere", "/do?", "/do/", "/%64o"):
        assert endpoints.send_signed(path, b"") == 404
    assert endpoints.calls == []


@pytest.mark.parametrize(
    "body", [b"x", b"[]", b"1", b'{"a":', b"\xff", b"[" * 100_000, b"1" * 10_000, b"null"]
)
def test_bodies_that_are_not_json_objects_are_refused(endpoints: Endpoints, body: bytes) -> None:
    assert endpoints.send_signed("/do", body) == 400
    assert endpoints.calls == []


def status_of_an_unsent_body(endpoints: Endpoints, header: str, length: int) -> int:
    """Send a request without its body, and return the status of the reply."""
    connection = http.client.HTTPConnection("127.0.0.1", endpoints.server.port, timeout=20)
    connection.putrequest("POST", "/do")
    connection.putheader("Authorization", header)
    connection.putheader("Content-Length", str(length))
    connection.endheaders()
    reply = connection.getresponse()
    reply.read()
    connection.close()
    return reply.status


def test_a_body_that_is_too_long_is_refused_unread(endpoints: Endpoints) -> None:
    header = sign(KEY, CLIENT, time.time(), "POST", "/do", b"", to="server")
    assert status_of_an_unsent_body(endpoints, header, MAX_BODY_BYTES + 1) == 413
    assert endpoints.calls == []


def test_the_body_of_an_old_or_repeated_request_is_not_even_read(endpoints: Endpoints) -> None:
    old = sign(KEY, CLIENT, time.time() - 100, "POST", "/do", b"", to="server")
    used = sign(KEY, CLIENT, time.time(), "POST", "/do", b"", to="server")
    endpoints.send("POST", "/do", b"", {"Authorization": used})
    for header in (old, used, "", "HMAC a b c d"):
        assert status_of_an_unsent_body(endpoints, header, 100) == 401


def test_a_body_of_unknown_length_is_refused(endpoints: Endpoints) -> None:
    header = sign(KEY, CLIENT, time.time(), "POST", "/do", b"{}", to="server")
    connection = http.client.HTTPConnection("127.0.0.1", endpoints.server.port, timeout=20)
    connection.request("POST", "/do", iter([b"{", b"}"]), {"Authorization": header})
    assert connection.getresponse().status == 411
    connection.close()
    assert endpoints.calls == []


def test_a_body_that_breaks_off_is_refused(endpoints: Endpoints) -> None:
    header = sign(KEY, CLIENT, time.time(), "POST", "/do", b"{}  ", to="server")
    with socket.create_connection(("127.0.0.1", endpoints.server.port), timeout=20) as connection:
        lines = ["POST /do HTTP/1.1", f"Authorization: {header}", "Content-Length: 4", "", "{}"]
        connection.sendall("\r\n".join(lines).encode())
        connection.shutdown(socket.SHUT_WR)
        assert connection.recv(1000).split()[1] == b"400"
    assert endpoints.calls == []


def test_an_error_in_an_endpoint_is_answered_and_the_server_goes_on(endpoints: Endpoints) -> None:
    with pytest.raises(RequestFailed, match="ZeroDivisionError") as caught:
        endpoints.client().request("POST", "/broken")
    assert caught.value.status == 500
    assert endpoints.client().request("POST", "/do") == {"n": 1}


@settings(max_examples=60, deadline=None)
@given(
    body=st.one_of(
        st.binary(max_size=300),
        st.recursive(
            st.none() | st.booleans() | st.floats() | st.text(max_size=20) | st.integers(),
            lambda inner: st.lists(inner) | st.dictionaries(st.text(max_size=10), inner),
            max_leaves=20,
        ).map(lambda value: json.dumps(value).encode()),
    ),
    path=st.sampled_from(["/do", "/hello", "/busy", "/nowhere", "/ping"]),
    is_signed=st.booleans(),
)
def test_no_body_makes_the_server_answer_with_more_than_a_refusal(
    shared: Endpoints, body: bytes, path: str, is_signed: bool
) -> None:
    shared.is_open = True
    before = len(shared.calls)
    status = shared.send_signed(
        path, body, to="" if path == "/hello" else "server", key=KEY if is_signed else b"x" * 32
    )
    assert status == 200 or 400 <= status < 500
    if not is_signed:
        assert status == 401
        assert len(shared.calls) == before


@settings(max_examples=60, deadline=None)
@given(st.binary(min_size=1, max_size=200))
def test_no_bytes_stop_the_server(shared: Endpoints, data: bytes) -> None:
    shared.is_open = True
    with socket.create_connection(("127.0.0.1", shared.server.port), timeout=20) as connection:
        connection.sendall(data)
        connection.shutdown(socket.SHUT_WR)
        reply = connection.recv(10_000)
    assert b" 5" not in reply[:12] or b"505" in reply[:12] or b"501" in reply[:12]
    assert shared.client().request("POST", "/do")


def test_a_reply_that_is_not_signed_with_the_key_is_not_trusted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    impostor = HttpServer(
        SERVER, "127.0.0.1", 0, {("POST", "/do"): Route(lambda node, body: {"lie": 1})}, key=KEY
    )
    impostor.open()
    try:
        address = f"http://127.0.0.1:{impostor.port}"
        assert HttpClient(address, CLIENT, key=KEY, to="server").request("POST", "/do")
        # It cannot verify a request, but answers all the same.
        monkeypatch.setattr(server_module.SignedRequest, "check_head", lambda *_, **__: None)
        impostor._key = b"x" * 32
        with pytest.raises(RequestFailed, match="not with the run's key") as caught:
            HttpClient(address, CLIENT, key=KEY, to="server").request("POST", "/do")
        assert caught.value.code is None
    finally:
        impostor.close()


def test_a_server_of_another_protocol_is_not_trusted() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
        client = HttpClient(f"http://127.0.0.1:{port}", CLIENT, key=KEY)

        def answer() -> None:
            accepted, _ = listening.accept()
            with accepted:
                accepted.recv(10_000)
                accepted.sendall(b"HTTP/1.0 200 OK\r\n\r\nhello")

        thread = threading.Thread(target=answer)
        thread.start()
        with pytest.raises(RequestFailed, match="not with JSON"):
            client.request("GET", "/ping")
        thread.join()


def test_a_server_that_is_gone_does_not_answer() -> None:
    endpoints = Endpoints()
    endpoints.server.open()
    client = endpoints.client()
    endpoints.server.close()
    endpoints.server.close()
    with pytest.raises(RequestFailed, match="not answered") as caught:
        client.request("POST", "/do")
    assert caught.value.status is None
    with pytest.raises(TransportError, match="closed"):
        endpoints.server.open()


def test_a_port_that_is_taken_is_an_error_and_ends_nothing(endpoints: Endpoints) -> None:
    second = HttpServer(SERVER, "127.0.0.1", endpoints.server.port, {}, key=KEY)
    with pytest.raises(TransportError, match="choose another port"):
        second.open()
    second.close()


def test_a_server_that_others_can_reach_needs_a_key() -> None:
    with pytest.raises(ConfigError, match="key"):
        HttpServer(SERVER, "0.0.0.0", 0, {})
    HttpServer(SERVER, "0.0.0.0", 0, {}, key=KEY)
    with pytest.raises(ConfigError, match="key"):
        HttpClient("http://10.0.0.1:80", CLIENT)


@pytest.mark.parametrize(
    "address", ["", "127.0.0.1:80", "https://127.0.0.1:80", "http://127.0.0.1", "http://:80",
                "http://127.0.0.1:x", "http://127.0.0.1:80/path", "file:///etc/passwd"],
)  # fmt: skip
def test_addresses_that_are_not_http_addresses_are_refused(address: str) -> None:
    with pytest.raises(ConfigError, match="address"):
        HttpClient(address, CLIENT)


def test_arrays_and_tensors_are_sent_as_lists() -> None:
    body = {"a": np.arange(2), "b": torch.tensor(1.5), "c": np.float32(2)}
    assert json.loads(encoded(body)) == {"a": [0, 1], "b": 1.5, "c": 2.0}
    with pytest.raises(TypeError, match="object"):
        encoded({"a": object()})


def test_without_flask_the_constructors_say_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(server_module, "Flask", None)
    with pytest.raises(ConfigError, match=r"dmiddleware\[flask\]"):
        Endpoints()
    monkeypatch.setattr(client_module, "requests", None)
    with pytest.raises(ConfigError, match=r"dmiddleware\[flask\]"):
        HttpClient("http://127.0.0.1:1", CLIENT)
