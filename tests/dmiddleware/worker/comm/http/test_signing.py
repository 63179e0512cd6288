from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dmiddleware.errors import AuthError, ConfigError
from dmiddleware.testing import FakeClock
from dmiddleware.worker.comm.http.signing import (
    WINDOW_S,
    HttpNode,
    Replays,
    SignedRequest,
    check_address,
    read_key,
    reply_signature,
    sign,
)

KEY = b"k" * 32
NODE = HttpNode("run", 0, "slave-1")
NOW = 1_700_000_000.0


def signed(now: float = NOW, **changes: object) -> SignedRequest:
    request = {
        "key": KEY, "node": NODE, "now": now, "method": "POST", "path": "/a", "body": b"{}",
        "to": "me", **changes,
    }  # fmt: skip
    return SignedRequest.parsed(sign(**request))  # type: ignore[arg-type]


def test_a_signed_request_is_accepted() -> None:
    request = signed()
    assert request.node == NODE
    request.check(KEY, "POST", "/a", b"{}", to="me")


@pytest.mark.parametrize(
    "changes",
    [
        {"key": b"x" * 32},
        {"key": b""},
        {"method": "PUT"},
        {"path": "/b"},
        {"path": "/a?"},
        {"body": b"{} "},
        {"to": "other"},
        {"to": ""},
    ],
)
def test_a_request_that_differs_from_what_was_signed_is_refused(changes: dict[str, object]) -> None:
    with pytest.raises(AuthError, match="signature"):
        signed(**changes).check(KEY, "POST", "/a", b"{}", to="me")


def test_the_sender_the_nonce_and_the_time_are_signed_too() -> None:
    scheme, node, nonce, time, mac = sign(KEY, NODE, NOW, "GET", "/a", b"").split(" ")
    for changed in (
        (scheme, "run:1:slave-1", nonce, time, mac),
        (scheme, "other:0:slave-1", nonce, time, mac),
        (scheme, "run:0:slave-2", nonce, time, mac),
        (scheme, node, "0" * 32, time, mac),
        (scheme, node, nonce, "1700000001.000", mac),
        (scheme, node, nonce, time, "0" * 64),
    ):
        with pytest.raises(AuthError, match="signature"):
            SignedRequest.parsed(" ".join(changed)).check(KEY, "GET", "/a", b"")


@pytest.mark.parametrize(
    "header",
    [
        "",
        "HMAC",
        "Basic dXNlcjpwYXNz",
        sign(KEY, NODE, NOW, "GET", "/", b"")[:-1],
        sign(KEY, NODE, NOW, "GET", "/", b"") + "0",
        sign(KEY, NODE, NOW, "GET", "/", b"") + "\n",
        sign(KEY, NODE, NOW, "GET", "/", b"").replace("HMAC", "hmac"),
        sign(KEY, NODE, NOW, "GET", "/", b"").replace("run:0", "run:\u0660"),
    ],
)
def test_other_headers_are_refused(header: str) -> None:
    with pytest.raises(AuthError, match="not signed"):
        SignedRequest.parsed(header)


@given(st.text())
def test_any_text_as_a_header_is_refused(text: str) -> None:
    with pytest.raises(AuthError):
        SignedRequest.parsed(f"HMAC {text}")


@pytest.mark.parametrize("age", [-WINDOW_S - 1, WINDOW_S + 1, 1e9])
def test_requests_from_the_past_and_the_future_are_refused(age: float) -> None:
    replays = Replays(lambda: NOW)
    with pytest.raises(AuthError, match="clocks"):
        replays.check(signed(NOW - age))
    replays.add(signed(NOW - WINDOW_S + 1))


def test_a_nonce_is_accepted_once() -> None:
    replays = Replays(lambda: NOW)
    request = signed()
    replays.add(request)
    for check in (replays.check, replays.add):
        with pytest.raises(AuthError, match="nonce"):
            check(request)


def test_checking_a_request_does_not_use_its_nonce_up() -> None:
    replays = Replays(lambda: NOW)
    request = signed()
    replays.check(request)
    replays.add(request)


def test_requests_are_forgotten_once_they_are_too_old_to_be_accepted() -> None:
    clock = FakeClock()
    replays = Replays(lambda: NOW + clock.now())
    for _ in range(300):
        replays.add(signed(NOW + clock.now()))
        clock.advance(1.0)
    assert len(replays) <= 2 * WINDOW_S


def test_a_full_memory_refuses_what_it_might_have_forgotten() -> None:
    replays = Replays(lambda: NOW, limit=10)
    requests = [signed(NOW + i / 10) for i in range(20)]
    for request in requests:
        replays.add(request)
    assert len(replays) == 10
    for request in requests:
        with pytest.raises(AuthError, match="nonce"):
            replays.add(request)
    with pytest.raises(AuthError, match="nonce"):
        replays.add(signed(NOW + 0.5))
    replays.add(signed(NOW + 3))


@given(st.lists(st.tuples(st.floats(-70, 70), st.floats(0, 30)), max_size=60))
def test_no_request_is_ever_accepted_twice(steps: list[tuple[float, float]]) -> None:
    now = [NOW]
    replays = Replays(lambda: now[0], limit=8)
    accepted: list[SignedRequest] = []
    for offset, pause in steps:
        now[0] += pause
        try:
            request = signed(now[0] + offset)
            replays.add(request)
            accepted.append(request)
        except AuthError:
            pass
        assert len(replays) <= 8
        for request in accepted:
            with pytest.raises(AuthError):
                replays.check(request)


def test_the_signature_of_a_reply_depends_on_all_its_parts() -> None:
    parts = [
        (KEY, "0", 200, b"x"),
        (b"", "0", 200, b"x"),
        (KEY, "1", 200, b"x"),
        (KEY, "0", 201, b"x"),
        (KEY, "0", 200, b"y"),
    ]
    assert len({reply_signature(*part) for part in parts}) == len(parts)


@pytest.mark.parametrize(
    ("run_id", "channel", "uid"),
    [
        ("", 0, "a"),
        ("a b", 0, "a"),
        ("a:b", 0, "a"),
        ("a", -1, "a"),
        ("a", 2**31, "a"),
        ("a", True, "a"),
        ("a", 0, ""),
    ],
)
def test_unusable_names_of_nodes_are_refused(run_id: str, channel: int, uid: str) -> None:
    with pytest.raises(ConfigError):
        HttpNode(run_id, channel, uid)


def test_a_channel_may_be_any_positive_32_bit_number() -> None:
    node = HttpNode("run", 2**31 - 1, "a")
    header = sign(KEY, node, NOW, "GET", "/ping", b"")
    assert SignedRequest.parsed(header).node == node


def test_a_key_is_read_from_a_private_file(tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.write_text("0123456789abcdef" * 2 + "\n")
    file.chmod(0o600)
    assert read_key(str(file)) == b"0123456789abcdef" * 2
    assert read_key("") == b""


def test_unusable_key_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        read_key(str(tmp_path / "missing"))
    short = tmp_path / "short"
    short.write_text("k" * 31)
    short.chmod(0o600)
    with pytest.raises(ConfigError, match="at least 32"):
        read_key(str(short))
    public = tmp_path / "public"
    public.write_text("k" * 32)
    public.chmod(0o644)
    with pytest.raises(ConfigError, match="chmod 600"):
        read_key(str(public))


def test_addresses_other_than_loopback_need_a_key() -> None:
    for host in ("127.0.0.1", "127.9.9.9", "::1", "localhost"):
        check_address(host, b"")
    for host in ("0.0.0.0", "::", "10.0.0.1", "example.org", "127.0.0.1.example.org"):
        check_address(host, KEY)
        with pytest.raises(ConfigError, match="key"):
            check_address(host, b"")
