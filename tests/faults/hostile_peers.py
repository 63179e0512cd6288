"""Hostile peers: random bytes, broken frames, false lengths, wrong keys, pickles."""

from __future__ import annotations

import contextlib
import pickle
import random
import signal
import statistics
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from dmiddleware.errors import EncodeError, FrameTooLarge, HandshakeRefused, RouterError
from dmiddleware.pipeline import Event
from dmiddleware.router import NodeOptions
from dmiddleware.router.protocol.handshake import Identity
from dmiddleware.router.wire.frame import (
    VERSION,
    Frame,
    FrameType,
    decode_frame,
    encode_frame,
    type_of,
)
from tests.accepting import accepting
from tests.dmiddleware.router.tampering import TamperingTransport, forged_refusal
from tests.faults.delivery_faults import KB, MB, Peak
from tests.faults.fault_result import FaultResult
from tests.faults.node_program import Sends
from tests.faults.process_cluster import KEY, Cluster, Process, address_for, cluster
from tests.faults.raw_peer import RawPeer, Stranger, valid_frames
from tests.router_state import locked_node
from tests.waiting import wait_until

__all__ = [
    "false_lengths",
    "forged_refusals",
    "malformed_handshakes",
    "noise",
    "oversize",
    "pickles",
    "refusals",
    "replayed_replies",
]

_SEED = 5


def noise(
    transport: str, *, n_bytes: int, connections: int, frames: int, slower_at_most: float | None
) -> FaultResult:
    """Write random bytes on many connections, then mutated frames.

    Args:
        transport: what connects the nodes.
        n_bytes: total number of random bytes.
        connections: number of connections.
        frames: number of mutated frames.
        slower_at_most: factor by which the round trip of other peers may grow; None: not checked.
    """
    result = FaultResult(
        f"{n_bytes:,} random bytes on {connections} connections, {frames:,} mutated frames",
        transport,
    )
    rng = random.Random(_SEED)
    with cluster(transport) as nodes:
        learner = nodes.listener(echo=True)
        pings = Sends(event="ping", size=64, pace_s=0.002)
        friend = nodes.dialer(1, echo=True, sends=pings, expected=1)
        friend.await_line("ready")
        friend.send_command("send")
        friend.await_line("round trip", count=400)
        attack_at = time.monotonic()
        with Peak(learner) as peak:
            _random_bytes(nodes, rng, n_bytes, connections)
            _mutated_frames(nodes, rng, frames)
            friend.await_line("round trip", since=time.monotonic(), count=50)
        refused = learner.status()["refused"]
        trips = [(line[1], line[2]) for line in friend.ledger.lines("round trip")]
        quiet = _p99([took for at, took in trips if at < attack_at])
        under_attack = _p99([took for at, took in trips if at >= attack_at])
        alive = learner.alive and not friend.ledger.lines("no answer")
        friend.stop()
        learner.stop()
    result.check("no crash", f"{refused:,} refused, other peers served", alive and refused > 0)
    result.at_most("memory growth", peak.growth / MB, 50, "MB")
    if slower_at_most is not None:
        result.at_most("round trip of other peers, p99", under_attack / quiet, slower_at_most, "x")
    return result


def false_lengths(transport: str, *, lengths: tuple[int, ...] = (1 << 33, 1 << 63)) -> FaultResult:
    """Claim impossible lengths, in the transport's header and in a frame.

    Args:
        transport: what connects the nodes.
        lengths: the lengths to claim.
    """
    result = FaultResult(
        f"claimed lengths of {' and '.join(f'2^{x.bit_length() - 1}' for x in lengths)}", transport
    )
    with cluster(transport) as nodes:
        learner = nodes.listener()
        learner.await_line("listening")
        with nodes.raw_peer() as first:
            first.send(bytes(96))
            first.closed_after()
        with Peak(learner, every_s=0.002) as peak:
            took = [_claim(nodes, length) for length in lengths]
            took += [_claim_in_frame(nodes, length) for length in lengths]
        learner.stop()
    slowest = max((3.0 if one is None else one) for one in took)
    result.at_most("connection closed", slowest, 1.0)
    result.at_most("nothing allocated: memory growth", peak.growth / MB, 1.0, "MB")
    return result


def oversize(transport: str, *, bound: int = MB) -> FaultResult:
    """Emit a message that is larger than the sender's or the receiver's limit.

    Args:
        transport: what connects the nodes.
        bound: the smaller side's limit for events, in bytes.
    """
    result = FaultResult(
        f"a message of {2 * bound // KB:,} KB where the limit is {bound // KB:,} KB", transport
    )
    small, large = NodeOptions(max_event_bytes=bound), NodeOptions()
    ways = {
        "sender's limit, dialer sends": (large, small, True),
        "receiver's limit, dialer sends": (small, large, True),
        "receiver's limit, listener sends": (large, small, False),
    }
    for way, (of_listener, of_dialer, dialer_sends) in ways.items():
        with cluster(transport) as nodes:
            error, reconnects, works = _emit_too_much(
                nodes, of_listener, of_dialer, dialer_sends=dialer_sends, size=2 * bound
            )
        typed = error == FrameTooLarge.__name__
        result.check("typed error at the sender", error, typed, variant=way)
        measured = f"{reconnects} reconnects"
        fine = works and reconnects <= 1
        result.check("≤ 1 reconnect, then works again", measured, fine, variant=way)
    return result


def refusals(transport: str) -> FaultResult:
    """Connect with a wrong key, no key, a replayed frame, a flipped bit, or an old version."""
    result = FaultResult("wrong key, no key, replayed frame, flipped bit, old version", transport)
    with cluster(transport) as nodes:
        learner = nodes.listener(receives=("e",))
        learner.await_line("listening")
        ways: dict[str, Callable[[], None]] = {
            "wrong key": lambda: _knock(nodes, bytes(range(1, 33))),
            "no key": lambda: _knock(nodes, None),
            "replayed frame": lambda: _misuse(nodes, 11, _replay),
            "frame replayed in a later session": lambda: _misuse(nodes, 12, _replay_later),
            "flipped bit": lambda: _misuse(nodes, 13, _flip),
            "old version": lambda: _old_version(nodes),
        }
        for name, connect in ways.items():
            refused = learner.status()["refused"]
            started_at = time.monotonic()
            connect()
            took = time.monotonic() - started_at
            counted = _refused(learner, refused + 1) - refused
            result.at_most("refused", took, 1.0, variant=name)
            result.check("counted as refused", f"{counted}", counted >= 1, variant=name)
        traffic = learner.status()["traffic"].get("e", {"received": 0, "undecodable": 0})
    # Both replayed frames were valid the first time.
    seen = traffic["received"] + traffic["undecodable"]
    result.check("decoded payloads beyond the 2 valid frames", seen - 2, seen == 2)
    return result


def pickles(transport: str) -> FaultResult:
    """Send an object whose unpickling has a side effect."""
    result = FaultResult("pickle payload, by default and with one end opted in", transport)
    both = (pickle.dumps, pickle.loads)
    nothing, something = "no side effect", "a side effect if both opted in, as a control"
    for name, sends, takes, requirement in (
        ("by default", None, None, nothing),
        ("only the sender opted in", both, None, nothing),
        ("only the receiver opted in", None, both, nothing),
        ("both opted in", both, both, something),
    ):
        with cluster(transport) as nodes:
            done, undecodable = _send_pickle(nodes, sends, takes)
        measured = f"{'happened' if done else 'none'}, {undecodable} undecodable"
        result.check(requirement, measured, done is (requirement == something), variant=name)
    return result


def forged_refusals(
    transport: str,
    *,
    codes: tuple[str, ...] = ("replaced", "run", "key", "node_id_taken", "version", "stale"),
) -> FaultResult:
    """Forge refusals during a dialer's handshakes and in its session.

    Args:
        transport: what connects the nodes.
        codes: the kinds of refusals, each of which is forged once in each phase.
    """
    phases = (FrameType.HELLO, FrameType.AUTH, FrameType.HEARTBEAT)
    to_forge = [(phase, code) for phase in phases for code in codes]
    n_forged = len(to_forge)
    result = FaultResult(f"{n_forged} forged refusals", transport)

    def forge(request: bytes) -> bytes | None:
        if to_forge and type_of(request) is to_forge[0][0]:
            return forged_refusal(to_forge.pop(0)[1])
        return None

    with cluster(transport) as nodes, contextlib.ExitStack() as stack:
        learner = nodes.listener(receives=("e",))
        learner.await_line("listening")
        tampering = TamperingTransport(forge, tls=nodes.tls)
        dialer = nodes.router(1, dial=[nodes.address], transport=tampering)
        stack.enter_context(dialer)
        took = wait_until(lambda: not to_forge, "all forged refusals", deadline_s=3.0 * n_forged)
        wait_until(lambda: dialer.subscribers("e") == [0], "the connection")
        payload = np.zeros(8, np.uint8)
        dialer.emit(Event("e"), (1, 0, 0, zlib.crc32(payload), payload), {})
        learner.await_line("got")
        result.check("the dialer survives and is connected", f"after {took:.3g} s", True)
        result.check("delivery works", "an event arrived", True)
    return result


def replayed_replies(transport: str) -> FaultResult:
    """Stop a listener, and replay its earlier frames to its dialer."""
    result = FaultResult("replayed frames of a listener that hangs", transport)
    recorded: dict[FrameType, bytes] = {}
    answers = {
        FrameType.HELLO: FrameType.CHALLENGE,
        FrameType.AUTH: FrameType.WELCOME,
        FrameType.HEARTBEAT: FrameType.HEARTBEAT,
        FrameType.STATE: FrameType.STATE,
    }
    frames: list[float] = []
    hangs = False

    def forge(frame: bytes) -> bytes | None:
        if not hangs:
            return None
        frames.append(time.monotonic())
        return recorded[answers[type_of(frame)]]

    def note(frame: bytes) -> None:
        recorded[type_of(frame)] = frame

    with cluster(transport) as nodes, contextlib.ExitStack() as stack:
        learner = nodes.listener()
        learner.await_line("listening")
        tampering = TamperingTransport(forge, note, tls=nodes.tls)
        dialer = nodes.router(1, dial=[nodes.address], transport=tampering)
        stack.callback(dialer.close, deadline_s=0.1)
        dialer.start()
        dialer.wait_for_peers(1, timeout_s=20.0)
        needed = set(answers.values())
        wait_until(lambda: needed <= recorded.keys(), "one frame of each kind")
        learner.signal(signal.SIGSTOP)
        hangs = True
        result.at_most("node.left", wait_until(lambda: not dialer.peer_ids(), "node.left"), 4.0)
        started_at = time.monotonic()
        before = len(frames)
        wait_until(lambda: time.monotonic() > started_at + 3.0, "3 s of replays")
        result.at_most("frames in a second", (len(frames) - before) / 3.0, 20.0, "")
        hangs = False
        resumed_at = learner.signal(signal.SIGCONT)
        wait_until(lambda: dialer.peer_ids() == [0], "the connection")
        result.at_most("back after the attack", time.monotonic() - resumed_at, 5.0)
    return result


def malformed_handshakes(transport: str) -> FaultResult:
    """Send handshakes with impossible fields, and then connect a new peer."""
    fields: dict[str, tuple[object, ...]] = {
        "node_id": ("abc", "", "-1", "01", "9" * 30, 7, None),
        "run_id": ("x" * 300, 1),
        "instance": (b"", "x"),
        "roles": (["x"] * 100, 1, ["x" * 300], ["a\nb"]),
        "labels": ([1], {}, ["\x1b[31m"]),
        "incarnation": (0, -1, 2**64 - 1, "1", 1.5),
        "nonce": (b"", "x"),
        "max_event_bytes": (0, -1, 2**64 - 1),
        "inbox_bytes": (0, -1, "x"),
        "outbox_bytes": (0, None),
        "max_event_names": (0, -1, 2**64 - 1),
        "keyed": (2, None),
    }
    count = sum(map(len, fields.values()))
    result = FaultResult(f"{count} malformed handshakes", transport)
    with cluster(transport) as nodes, contextlib.ExitStack() as stack:
        learner = nodes.listener()
        learner.await_line("listening")
        for name, values in fields.items():
            for value in values:
                _send_malformed(nodes, name, value)
        refused = _refused(learner, count)
        result.check("refused and counted", f"{refused} of {count}", refused == count)
        started_at = time.monotonic()
        router = nodes.router(1, dial=[nodes.address])
        stack.enter_context(router)
        router.wait_for_peers(1, timeout_s=20.0)
        result.at_most("a new peer joins", time.monotonic() - started_at, 2.0)
    return result


def _refused(learner: Process, expected: int) -> int:
    """Return how many refusals a node has counted, which it does after it has closed."""
    with contextlib.suppress(TimeoutError):
        wait_until(lambda: learner.status()["refused"] >= expected, "the refusals", deadline_s=2.0)
    count: int = learner.status()["refused"]
    return count


def _send_malformed(nodes: Cluster, name: str, value: object) -> None:
    raw = Stranger(7, KEY).hello()
    hello = msgspec.msgpack.decode(decode_frame(raw).metadata)
    inside = next(one for one in (hello, hello["identity"], hello["limits"]) if name in one)
    inside[name] = value
    frame = Frame(FrameType.HELLO, metadata=msgspec.msgpack.encode(hello))
    with nodes.raw_peer() as peer:
        peer.send(encode_frame(frame, max_size=8192))
        answer = peer.answer()
        assert answer is None or answer[6] == FrameType.REFUSED, (name, value)


def _random_bytes(nodes: Cluster, rng: random.Random, n_bytes: int, connections: int) -> None:
    share = max(1, n_bytes // connections)
    for number in range(connections):
        # Over TLS, every other connection sends them instead of a greeting.
        with nodes.raw_peer(secured=number % 2 == 0) as peer:
            raw = rng.randbytes(share)
            peer.write(peer.head(share) + raw if number % 4 == 0 else raw)


def _mutated_frames(nodes: Cluster, rng: random.Random, frames: int) -> None:
    good = valid_frames()
    left = frames
    while left:
        with nodes.raw_peer(timeout_s=0.2) as peer:
            # A connection is closed at its first bad frame, so the rest may never be read.
            for _ in range(min(left, 4)):
                left -= 1
                if not peer.send(_mutated(rng, rng.choice(good))):
                    break
            peer.closed_after()


def _mutated(rng: random.Random, frame: bytes) -> bytes:
    raw = bytearray(frame)
    for _ in range(rng.randint(1, 4)):
        way = rng.randrange(4)
        place = rng.randrange(len(raw))
        if way == 0:
            raw[place] ^= 1 << rng.randrange(8)
        elif way == 1:
            del raw[place:]
            raw += b"\0"
        elif way == 2:
            raw[place:place] = rng.randbytes(rng.randint(1, 16))
        else:
            end = min(len(raw), place + 8)
            raw[place:end] = rng.choice([bytes(8), b"\xff" * 8])[: end - place]
    return bytes(raw)


def _p99(times: list[float]) -> float:
    return statistics.quantiles(times, n=100)[98]


def _claim(nodes: Cluster, length: int) -> float | None:
    with nodes.raw_peer() as peer:
        peer.write(peer.head(length) + bytes(100))
        return peer.closed_after()


def _claim_in_frame(nodes: Cluster, length: int) -> float | None:
    raw = bytearray(
        encode_frame(Frame(FrameType.DATA, session=1, buffers=[bytes(64)]), max_size=1 << 20)
    )
    raw[40:48] = raw[96:104] = length.to_bytes(8, "little")
    raw[8:16] = bytes(8)
    with nodes.raw_peer() as peer:
        peer.send(raw)
        return peer.closed_after()


def _emit_too_much(
    nodes: Cluster,
    of_listener: NodeOptions,
    of_dialer: NodeOptions,
    *,
    dialer_sends: bool,
    size: int,
) -> tuple[str, int, bool]:
    """Return the sender's error, the number of reconnects, and whether delivery still works."""
    address = address_for(nodes.transport, nodes.folder, "large")
    event: list[str] = []
    arrived: list[int] = []

    def take(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        event.append(name)
        if name == "e":
            arrived.append(len(args[0]))

    with (
        nodes.router(0, listen=address, options=of_listener) as listener,
        nodes.router(1, dial=[address], options=of_dialer) as dialer,
    ):
        sender, receiver = (dialer, listener) if dialer_sends else (listener, dialer)
        receiver.attach(accepting(take, waits=True))
        receiver.subscribe("e", active=True)
        wait_until(lambda: bool(sender.subscribers("e")), "the subscription")
        error = "none"
        try:
            sender.emit(Event("e"), (bytes(size),), {})
        except RouterError as raised:
            error = type(raised).__name__
        sender.emit(Event("e"), (bytes(10),), {})
        with contextlib.suppress(TimeoutError):
            wait_until(lambda: 10 in arrived, "the next message", deadline_s=4.0)
        meetings = event.count("node.joined") + event.count("node.rejoined")
        with locked_node(listener) as node:
            sessions = {peer.session.number for peer in node.peers.values()}
        return error, max(0, meetings - 1), 10 in arrived and len(sessions) == 1


def _knock(nodes: Cluster, key: bytes | None) -> None:
    with nodes.router(9, dial=[nodes.address], key=key, start_timeout_s=0.3) as stranger:
        try:
            stranger.wait_for_peers(1, timeout_s=5.0)
        except HandshakeRefused:
            return
    raise AssertionError("a stranger without the key was accepted")


def _misuse(
    nodes: Cluster, node_id: int, how: Callable[[Stranger, str, RawPeer, Cluster], None]
) -> None:
    with nodes.raw_peer() as peer:
        stranger = Stranger(node_id, KEY)
        how(stranger, stranger.join(peer), peer, nodes)


def _replay(stranger: Stranger, learner: str, peer: RawPeer, nodes: Cluster) -> None:
    frame = stranger.data(learner, "e", "once")
    peer.send(frame)
    peer.send(frame)
    assert peer.closed_after() is not None


def _replay_later(stranger: Stranger, learner: str, peer: RawPeer, nodes: Cluster) -> None:
    frame = stranger.data(learner, "e", "once")
    peer.send(frame)
    with nodes.raw_peer() as later:
        stranger.join(later)
        later.send(frame)
        assert later.closed_after() is not None


def _flip(stranger: Stranger, learner: str, peer: RawPeer, nodes: Cluster) -> None:
    frame = bytearray(stranger.data(learner, "e", "never"))
    frame[100] ^= 1
    peer.send(frame)
    assert peer.closed_after() is not None


def _old_version(nodes: Cluster) -> None:
    identity = Identity("run", "14", bytes(16))
    hello = {"version": VERSION - 1, "identity": identity, "nonce": bytes(32), "keyed": True}

    greeting = Frame(FrameType.HELLO, metadata=msgspec.msgpack.encode(hello))
    raw = bytearray(encode_frame(greeting, max_size=4096))
    for version in (VERSION, VERSION - 1):
        raw[4:6] = version.to_bytes(2, "little")
        with nodes.raw_peer() as peer:
            peer.send(raw)
            answer = peer.answer()
            assert answer is not None and answer[6] == FrameType.REFUSED


class Trap:
    """Creates a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self._path,)


Pickle = tuple[Callable[[Any], bytes], Callable[[bytes], Any]]


def _send_pickle(nodes: Cluster, sends: Pickle | None, takes: Pickle | None) -> tuple[bool, int]:
    """Return whether the side effect happened, and the number of undecodable events."""
    address = address_for(nodes.transport, nodes.folder, "pickle")
    trap = nodes.folder / "sprung"
    arrived: list[object] = []
    with (
        nodes.router(0, listen=address, pickle=takes) as receiver,
        nodes.router(1, dial=[address], pickle=sends) as sender,
    ):
        receiver.attach(accepting(lambda name, args, kwargs: arrived.append(name), waits=True))
        receiver.subscribe("e", active=True)
        wait_until(lambda: bool(sender.subscribers("e")), "the subscription")
        with contextlib.suppress(EncodeError):
            sender.emit(Event("e"), (Trap(trap),), {})
        sender.emit(Event("e"), (1,), {})
        wait_until(lambda: "e" in arrived, "the event after the pickle")
        return trap.exists(), receiver.traffic()["e"].undecodable
