"""The handshake: both sides prove that they have the key, or the session is refused."""

from __future__ import annotations

import itertools

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dmiddleware.errors import AuthError, FrameError, HandshakeRefused
from dmiddleware.router.protocol.handshake import (
    MAX_HANDSHAKE_BYTES,
    DialerHandshake,
    Identity,
    ListenerHandshake,
    PeerLimits,
    Refusal,
    hkdf,
)
from dmiddleware.router.wire.frame import VERSION

KEY = bytes(range(32))
LIMITS = PeerLimits(
    max_event_bytes=1 << 26, inbox_bytes=1 << 28, outbox_bytes=1 << 20, max_event_names=9
)

OWN_LIMITS = msgspec.structs.replace(LIMITS, max_event_bytes=1 << 20)


class Known:
    """Admits all processes, or refuses them all for one reason."""

    def __init__(self, refusal: Refusal | None = None, least: int = 1) -> None:
        self.refusal = refusal
        self.least = least

    def least_incarnation(self, identity: Identity) -> int:
        return self.least

    def admit(self, identity: Identity, incarnation: int, *, dialed: bool) -> Refusal | None:
        return self.refusal


def listener(
    key: bytes | None = KEY,
    run_id: str = "run",
    refuse: Refusal | None = None,
    *,
    nonce: int = 1,
    incarnation: int = 1,
    known: Known | None = None,
) -> ListenerHandshake:
    nonces = itertools.count(nonce)
    sessions = itertools.count(1)
    return ListenerHandshake(
        Identity(run_id, "0", bytes(16), ("learner",)),
        key,
        limits=LIMITS,
        nonce=lambda: next(nonces).to_bytes(32, "big"),
        session_number=lambda: next(sessions),
        incarnation=lambda: incarnation,
        known=known or Known(refuse),
    )


def dialer(
    key: bytes | None = KEY,
    run_id: str = "run",
    nonce: int = 7,
    *,
    incarnation: int = 1,
    known: Known | None = None,
) -> DialerHandshake:
    return DialerHandshake(
        Identity(run_id, "1", b"\1" * 16, ("collector",), ("fast",)),
        key,
        incarnation=incarnation,
        nonce=nonce.to_bytes(32, "big"),
        limits=OWN_LIMITS,
        known=known or Known(),
    )


@pytest.mark.parametrize("key", [KEY, None])
def test_both_sides_agree_on_session_peer_and_key(key: bytes | None) -> None:
    ours, theirs = dialer(key), listener(key)
    welcome, at_listener = theirs.on_auth(ours.on_challenge(theirs.on_hello(ours.hello())))
    at_dialer = ours.on_welcome(welcome)
    assert at_dialer.number == at_listener.number == 1
    assert at_dialer.key == at_listener.key
    assert (at_dialer.key is None) == (key is None)
    assert at_dialer.limits == LIMITS
    assert at_listener.identity.node_id == "1"
    assert at_listener.identity.labels == ("fast",)
    assert at_dialer.identity.roles == ("learner",)


def test_two_sessions_of_the_same_nodes_have_different_keys() -> None:
    keys = set()
    for nonces in ((1, 1), (1, 2), (2, 1)):
        ours, theirs = dialer(nonce=nonces[0]), listener(nonce=nonces[1])
        _, session = theirs.on_auth(ours.on_challenge(theirs.on_hello(ours.hello())))
        keys.add(session.key)
    assert len(keys) == 3


def test_a_dialer_with_another_key_is_refused_by_the_listener() -> None:
    ours, theirs = dialer(bytes(32)), listener()
    answer = ours.on_challenge(theirs.on_hello(ours.hello()))
    with pytest.raises(AuthError, match="this run's key"):
        theirs.on_auth(answer)


def test_the_dialer_detects_a_listener_without_the_key() -> None:
    ours, theirs, impostor = dialer(), listener(), listener(bytes(32))
    answer = ours.on_challenge(theirs.on_hello(ours.hello()))
    welcome, _ = theirs.on_auth(answer)
    forged = msgspec.msgpack.decode(welcome)
    forged["proof"] = bytes(32)
    with pytest.raises(AuthError):
        ours.on_welcome(msgspec.msgpack.encode(forged))
    with pytest.raises(FrameError, match="AUTH before HELLO"):
        impostor.on_auth(answer)
    impostor.on_hello(ours.hello())
    with pytest.raises(AuthError):
        impostor.on_auth(answer)


def test_a_dialers_own_proof_is_not_accepted_from_the_listener() -> None:
    ours, theirs = dialer(), listener()
    answer = ours.on_challenge(theirs.on_hello(ours.hello()))
    proof = msgspec.msgpack.decode(answer)["proof"]
    welcome = {"session": 1, "incarnation": 1, "proof": proof}
    with pytest.raises(AuthError):
        ours.on_welcome(msgspec.msgpack.encode(welcome))


@pytest.mark.parametrize("field", msgspec.structs.asdict(LIMITS))
@pytest.mark.parametrize("of_dialer", [False, True])
def test_altered_limits_are_detected(of_dialer: bool, field: str) -> None:
    def altered(raw: bytes, *, if_dialer: bool) -> bytes:
        message = msgspec.msgpack.decode(raw)
        message["limits"][field] += if_dialer is of_dialer
        return msgspec.msgpack.encode(message)

    ours, theirs = dialer(), listener()
    challenge = theirs.on_hello(altered(ours.hello(), if_dialer=True))
    auth = ours.on_challenge(altered(challenge, if_dialer=False))
    with pytest.raises((AuthError, HandshakeRefused)):
        theirs.on_auth(auth)


def test_an_auth_cannot_be_replayed() -> None:
    ours, theirs = dialer(), listener()
    answer = ours.on_challenge(theirs.on_hello(ours.hello()))
    theirs.on_auth(answer)
    with pytest.raises(FrameError, match="AUTH before HELLO"):
        theirs.on_auth(answer)
    another = listener(nonce=9)
    another.on_hello(ours.hello())
    with pytest.raises(AuthError):
        another.on_auth(answer)


def test_a_dialer_says_hello_once() -> None:
    ours, theirs = dialer(), listener()
    challenge = theirs.on_hello(ours.hello())
    with pytest.raises(FrameError, match="second HELLO"):
        theirs.on_hello(dialer(nonce=8).hello())
    theirs.on_auth(ours.on_challenge(challenge))
    with pytest.raises(FrameError, match="second HELLO"):
        theirs.on_hello(ours.hello())


@pytest.mark.parametrize(("ours", "theirs"), [(KEY, None), (None, KEY)])
def test_a_key_on_one_side_only_is_explained(ours: bytes | None, theirs: bytes | None) -> None:
    with pytest.raises(HandshakeRefused, match="same key") as caught:
        listener(theirs).on_hello(dialer(ours).hello())
    assert caught.value.code == "key"


def test_a_node_of_another_run_is_refused() -> None:
    with pytest.raises(HandshakeRefused, match=r"run 'run'.*'other'"):
        listener().on_hello(dialer(run_id="other").hello())
    hello = dialer().hello()
    challenge = listener().on_hello(hello)
    with pytest.raises(HandshakeRefused, match=r"run 'other'.*'run'"):
        dialer(run_id="other").on_challenge(challenge)


@settings(deadline=None)
@given(
    of_dialer=st.integers(1, 9),
    of_listener=st.integers(1, 9),
    least_dialer=st.integers(1, 9),
    least_listener=st.integers(1, 9),
)
def test_both_sides_agree_on_incarnations_no_smaller_than_the_other_side_knows(
    of_dialer: int, of_listener: int, least_dialer: int, least_listener: int
) -> None:
    theirs = listener(incarnation=of_listener, known=Known(least=least_dialer))
    ours = dialer(incarnation=of_dialer, known=Known(least=least_listener))
    welcome, at_listener = theirs.on_auth(ours.on_challenge(theirs.on_hello(ours.hello())))
    at_dialer = ours.on_welcome(welcome)
    assert at_dialer.own_incarnation == at_listener.incarnation == max(of_dialer, least_dialer)
    assert at_listener.own_incarnation == at_dialer.incarnation == max(of_listener, least_listener)


@pytest.mark.parametrize("field", ["incarnation", "least_incarnation"])
def test_incarnations_cannot_be_altered_on_the_way(field: str) -> None:
    ours, theirs = dialer(), listener()
    auth = msgspec.msgpack.decode(ours.on_challenge(theirs.on_hello(ours.hello())))
    auth[field] += 1
    with pytest.raises(AuthError):
        theirs.on_auth(msgspec.msgpack.encode(auth))


def test_a_process_that_joins_during_a_handshake_makes_the_other_one_try_again() -> None:
    known = Known()
    ours, theirs = dialer(), listener(known=known)
    auth = ours.on_challenge(theirs.on_hello(ours.hello()))
    known.least = 2
    with pytest.raises(HandshakeRefused, match="another process") as refused:
        theirs.on_auth(auth)
    assert refused.value.code == "stale"


def test_the_dialer_too_may_refuse_the_other_side() -> None:
    theirs, known = listener(), Known(Refusal("replaced", "a newer process has joined"))
    ours = dialer(known=known)
    challenge = theirs.on_hello(ours.hello())
    with pytest.raises(HandshakeRefused, match="newer process") as refused:
        ours.on_challenge(challenge)
    assert not refused.value.verified
    known.refusal = None
    welcome, _ = theirs.on_auth(ours.on_challenge(challenge))
    known.refusal = Refusal("replaced", "a newer process has joined meanwhile")
    with pytest.raises(HandshakeRefused, match="meanwhile"):
        ours.on_welcome(welcome)


def test_another_version_is_refused_with_both_versions() -> None:
    hello = msgspec.msgpack.decode(dialer().hello())
    hello["version"] = 99
    with pytest.raises(HandshakeRefused, match=f"versions 99 and {VERSION}"):
        listener().on_hello(msgspec.msgpack.encode(hello))


def test_another_version_is_refused_even_if_its_hello_differs() -> None:
    hello = {"version": 0, "who": "nobody yet known"}
    with pytest.raises(HandshakeRefused, match=f"versions 0 and {VERSION}"):
        listener().on_hello(msgspec.msgpack.encode(hello))


def test_each_side_learns_the_limits_of_the_other() -> None:
    ours, theirs = dialer(), listener()
    welcome, at_listener = theirs.on_auth(ours.on_challenge(theirs.on_hello(ours.hello())))
    assert at_listener.limits == OWN_LIMITS
    assert ours.on_welcome(welcome).limits == LIMITS


def test_a_refusal_reaches_the_dialer_with_its_reason() -> None:
    theirs = listener(refuse=Refusal("node_id_taken", "collector-0 is here already"))
    ours = dialer()
    auth = ours.on_challenge(theirs.on_hello(ours.hello()))
    with pytest.raises(HandshakeRefused) as refused:
        theirs.on_auth(auth)
    received = ours.on_refused(theirs.refusal(refused.value, auth))
    assert received.verified
    assert received.code == "node_id_taken"
    assert "is here already" in str(received)


def test_a_refused_hello_is_signed_too() -> None:
    ours, theirs = dialer(run_id="other"), listener()
    with pytest.raises(HandshakeRefused) as refused:
        theirs.on_hello(ours.hello())
    assert ours.on_refused(theirs.refusal(refused.value, ours.hello())).verified


@pytest.mark.parametrize("change", ["code", "reason", "key", "nonce", "challenge", "no proof"])
def test_a_refusal_is_verified_only_for_its_own_attempt(change: str) -> None:
    theirs = listener(bytes(32) if change == "key" else KEY)
    ours = dialer()
    auth = ours.on_challenge(theirs.on_hello(ours.hello()))
    error = HandshakeRefused("a newer process replaced it", code="replaced")
    refusal = msgspec.msgpack.decode(theirs.refusal(error, auth))
    if change in refusal:
        refusal[change] += "x"
    elif change == "no proof":
        del refusal["proof"]
    elif change in ("nonce", "challenge"):
        ours = dialer(nonce=8 if change == "nonce" else 7)
        another = listener(nonce=2 if change == "challenge" else 1)
        ours.on_challenge(another.on_hello(ours.hello()))
    received = ours.on_refused(msgspec.msgpack.encode(refusal))
    assert not received.verified
    assert received.code == refusal["code"]


def test_a_forged_refusal_changes_nothing_on_a_terminal() -> None:
    ours = dialer()
    forged = {"code": "no\rkey", "reason": "first\nsecond \x1b[2J\u202e" + 999 * "x"}
    received = ours.on_refused(msgspec.msgpack.encode(forged))
    assert not received.verified
    for text in (received.code, str(received)):
        assert text.isprintable() and len(text) <= 500
    assert "first" in str(received) and "second" in str(received)


@pytest.mark.parametrize("of_dialer", [False, True])
def test_an_incarnation_that_no_run_reaches_is_refused_by_either_side(of_dialer: bool) -> None:
    huge = 1 << 40
    ours, theirs = dialer(), listener()
    if of_dialer:
        ours = dialer(incarnation=huge)
        auth = ours.on_challenge(theirs.on_hello(ours.hello()))
        with pytest.raises(FrameError, match="claims incarnation"):
            theirs.on_auth(auth)
    else:
        theirs = listener(incarnation=huge)
        with pytest.raises(FrameError, match="claims incarnation"):
            ours.on_challenge(theirs.on_hello(ours.hello()))
    # What one side claims to know about the other is bounded in the same way.
    ours, theirs = dialer(), listener()
    if of_dialer:
        ours = dialer(known=Known(least=huge))
        auth = ours.on_challenge(theirs.on_hello(ours.hello()))
        with pytest.raises(FrameError, match="claims incarnation"):
            theirs.on_auth(auth)
    else:
        theirs = listener(known=Known(least=huge))
        with pytest.raises(FrameError, match="claims incarnation"):
            ours.on_challenge(theirs.on_hello(ours.hello()))


def test_a_hello_over_the_limit_is_not_read() -> None:
    with pytest.raises(FrameError, match="at most 4096"):
        listener().on_hello(bytes(MAX_HANDSHAKE_BYTES + 1))


@given(st.binary(max_size=300))
def test_random_bytes_are_refused_in_a_handshake(raw: bytes) -> None:
    with pytest.raises(FrameError):
        listener().on_hello(raw)
    with pytest.raises(FrameError):
        listener().on_auth(raw)


def test_hkdf_matches_rfc_5869() -> None:
    # Test case 1, the first 32 of its 42 bytes.
    derived = hkdf(
        bytes.fromhex("0b" * 22),
        salt=bytes.fromhex("000102030405060708090a0b0c"),
        info=bytes.fromhex("f0f1f2f3f4f5f6f7f8f9"),
    )
    assert derived.hex() == "3cb25f25faacd57a90434f64d0362f2a2d2d0a90cf1a5a4c5db02d56ecc4c5bf"


CONTROLS = [["a\nb"], ["\x1b[31m"], ["\x9b"], ["\x7f"], ["a\u2028"], ["\u202e"]]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("node_id", "abc"),
        ("node_id", ""),
        ("node_id", "-1"),
        ("node_id", "01"),
        ("node_id", "1\n"),
        ("node_id", "\u0661"),
        ("node_id", "1" * 19),
        ("node_id", 1),
        ("instance", b""),
        ("instance", bytes(17)),
        ("run_id", "x" * 257),
        ("roles", ["x" * 257]),
        ("roles", ["collector"] * 65),
        ("roles", "collector"),
        *((field, value) for field in ("roles", "labels") for value in CONTROLS),
        *(("run_id", value[0]) for value in CONTROLS),
        ("labels", [1]),
        ("incarnation", 0),
        ("incarnation", -1),
        ("incarnation", 2**63),
        ("incarnation", 1.0),
        ("nonce", bytes(31)),
        ("max_event_bytes", 0),
        ("max_event_bytes", 8191),
        ("max_event_bytes", 2**63),
        ("inbox_bytes", 0),
        ("outbox_bytes", -1),
        ("max_event_names", 0),
        ("keyed", 1),
        ("extra", 1),
    ],
)
def test_a_hello_with_an_impossible_field_is_refused(field: str, value: object) -> None:
    hello = msgspec.msgpack.decode(dialer().hello())
    places = [hello, hello["limits"], hello["identity"]]
    fields = next((place for place in places if field in place), hello)
    fields[field] = value
    theirs = listener()
    with pytest.raises(FrameError, match="not a valid HELLO"):
        theirs.on_hello(msgspec.msgpack.encode(hello))
    theirs.on_hello(dialer().hello())


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("challenge", bytes(16)),
        ("proof", bytes(33)),
        ("incarnation", 0),
        ("least_incarnation", 2**49),
    ],
)
def test_an_auth_with_an_impossible_field_is_refused(field: str, value: object) -> None:
    ours, theirs = dialer(), listener()
    auth = ours.on_challenge(theirs.on_hello(ours.hello()))
    changed = msgspec.msgpack.decode(auth)
    changed[field] = value
    with pytest.raises(FrameError, match="not a valid AUTH"):
        theirs.on_auth(msgspec.msgpack.encode(changed))
    theirs.on_auth(auth)


@pytest.mark.parametrize(
    ("field", "value"),
    [("session", 0), ("incarnation", 0), ("proof", ""), ("limits", {})],
)
def test_a_welcome_with_an_impossible_field_is_refused(field: str, value: object) -> None:
    ours, theirs = dialer(), listener()
    welcome, _ = theirs.on_auth(ours.on_challenge(theirs.on_hello(ours.hello())))
    changed = msgspec.msgpack.decode(welcome)
    changed[field] = value
    with pytest.raises(FrameError, match="not a valid WELCOME"):
        ours.on_welcome(msgspec.msgpack.encode(changed))
    ours.on_welcome(welcome)


def test_an_identity_that_peers_would_refuse_is_found_at_home() -> None:
    Identity("run", "7", bytes(16), ("collector",)).check()
    for wrong in (
        Identity("run", "seven", bytes(16)),
        Identity("run", "7", bytes(15)),
        Identity("run\ud800", "7", bytes(16)),
        Identity("run\n", "7", bytes(16)),
        Identity("run", "7", bytes(16), roles=("\x1b[2J",)),
        Identity("run", "7", bytes(16), labels=("x" * 200,) * 30),
    ):
        with pytest.raises(ValueError, match=r"."):
            wrong.check()
