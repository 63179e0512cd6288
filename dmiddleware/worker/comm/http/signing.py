"""Signed requests: a signature proves the sender, the receiver, the time and the content.

Every request carries ``Authorization: HMAC <node> <nonce> <time> <signature>``. The signature is
the SHA-256 of the body, followed by the HMAC-SHA256, with the run's key, of these fields, the
method, the path, and the node for which the request is meant. So a server knows that the sender has
the key before it reads the body.
Every reply to a signed request is signed in the same way. This module owns no socket
and no clock.
"""

from __future__ import annotations

import hashlib
import heapq
import hmac
import ipaddress
import re
import secrets
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Self

from dmiddleware import run_key
from dmiddleware.errors import AuthError, ConfigError

__all__ = [
    "WINDOW_S",
    "HttpNode",
    "Replays",
    "SignedRequest",
    "check_address",
    "is_loopback",
    "read_key",
    "reply_signature",
    "sign",
]

WINDOW_S: Final = 60.0
"""How far the time of a request may be from the receiver's, in seconds."""

_NAME: Final = re.compile(r"[A-Za-z0-9_.-]{1,100}", re.ASCII)
_HEADER: Final = re.compile(
    r"HMAC (?P<node>[A-Za-z0-9_.-]{1,100}:[0-9]{1,10}:[A-Za-z0-9_.-]{1,100}) "
    r"(?P<nonce>[0-9a-f]{32}) (?P<time>[0-9]{1,12}\.[0-9]{3}) (?P<body_hash>[0-9a-f]{64})"
    r"(?P<mac>[0-9a-f]{64})",
    re.ASCII,
)


@dataclass(frozen=True, slots=True)
class HttpNode:
    """The sender or receiver of requests.

    Args:
        run_id: the run that it belongs to.
        channel: nodes of different channels refuse each other, also in one run.
        uid: its name, different in every process and after every start.

    Raises:
        ConfigError: for a name with other characters than letters, digits, ``_``, ``.`` and ``-``,
            or a negative channel.
    """

    run_id: str
    channel: int
    uid: str

    def __post_init__(self) -> None:
        for name in (self.run_id, self.uid):
            if not isinstance(name, str) or not _NAME.fullmatch(name):
                raise ConfigError(
                    f"a run id must have 1 to 100 letters, digits, '_', '.' and '-', got {name!r}"
                )
        if type(self.channel) is not int or not 0 <= self.channel < 2**31:
            raise ConfigError(f"channel must be an integer from 0 to 2³¹ - 1, got {self.channel!r}")

    def __str__(self) -> str:
        return f"{self.run_id}:{self.channel}:{self.uid}"

    @classmethod
    def parsed(cls, text: str) -> Self:
        """Return the node that ``str`` has turned into text."""
        run_id, channel, uid = text.split(":")
        return cls(run_id, int(channel), uid)


def sign(
    key: bytes, node: HttpNode, now: float, method: str, path: str, body: bytes, *, to: str = ""
) -> str:
    """Return the ``Authorization`` header of a request.

    Args:
        key: the run's key.
        node: the sender.
        now: the time, in seconds since the epoch.
        method: ``GET``, ``POST``, ``PUT`` or ``DELETE``.
        path: the path, with its query if there is one.
        body: the body, as sent.
        to: uid of the node for which the request is meant; empty if it is not known yet.
    """
    nonce, time = secrets.token_hex(16), f"{now:.3f}"
    body_hash = hashlib.sha256(body).hexdigest()
    mac = _mac(key, "request", str(node), nonce, time, body_hash, to, method, path)
    return f"HMAC {node} {nonce} {time} {body_hash}{mac}"


@dataclass(frozen=True, slots=True)
class SignedRequest:
    """What an ``Authorization`` header says; nothing of it is verified yet.

    Attributes:
        node: the sender.
        nonce: a random number that no other request has.
        time: when the sender signed it, in seconds since the epoch, as text.
        body_hash: the SHA-256 of the body, in hexadecimal digits.
        mac: the signature, in hexadecimal digits.
    """

    node: HttpNode
    nonce: str
    time: str
    body_hash: str
    mac: str

    @classmethod
    def parsed(cls, header: str) -> Self:
        """Return what a header says.

        Raises:
            AuthError: if it is not such a header.
        """
        match = _HEADER.fullmatch(header)
        if match is None:
            raise AuthError(
                "the request is not signed; send Authorization: HMAC <node> <nonce> <time> "
                "<signature>"
            )
        node = HttpNode.parsed(match["node"])
        return cls(node, match["nonce"], match["time"], match["body_hash"], match["mac"])

    def check(self, key: bytes, method: str, path: str, body: bytes, *, to: str = "") -> None:
        """Check the signature, and the body.

        Raises:
            AuthError: if the request was signed with another key or for another node, or has
                changed.
        """
        self.check_head(key, method, path, to=to)
        self.check_body(body)

    def check_body(self, body: bytes) -> None:
        """Check that the body is the one that was signed.

        Raises:
            AuthError: if it is another one.
        """
        if not hmac.compare_digest(hashlib.sha256(body).hexdigest(), self.body_hash):
            raise AuthError("the signature is that of another body; send the request again")

    def check_head(self, key: bytes, method: str, path: str, *, to: str = "") -> None:
        """Check the signature, which covers all but the body.

        Raises:
            AuthError: if the request was signed with another key or for another node, or has
                changed.
        """
        expected = _mac(
            *(key, "request", str(self.node), self.nonce, self.time, self.body_hash),
            *(to, method, path),
        )
        if not hmac.compare_digest(expected, self.mac):
            raise AuthError(
                "the signature is wrong; both sides need the same key, and the request must be "
                "meant for this node"
            )


def reply_signature(key: bytes, nonce: str, status: int, body: bytes) -> str:
    """Return the signature of the reply to a request with this nonce."""
    return _mac(key, "reply", nonce, str(status), body=body)


class Replays:
    """Recognizes old and repeated requests, in bounded memory.

    Args:
        clock: returns the seconds since the epoch.
        limit: how many requests to remember. If more arrive within the window, requests that are
            older than the oldest one remembered are refused, as they might be repeated.
    """

    def __init__(self, clock: Callable[[], float], *, limit: int = 100_000) -> None:
        self._clock = clock
        self._limit = limit
        self._lock = threading.Lock()
        self._nonces: set[str] = set()
        self._oldest: list[tuple[float, str]] = []  # a heap
        self._forgotten = float("-inf")

    def __len__(self) -> int:
        return len(self._nonces)

    def check(self, request: SignedRequest) -> None:
        """Check that a request is recent and new.

        Raises:
            AuthError: if it is not.
        """
        with self._lock:
            self._check(request)

    def add(self, request: SignedRequest) -> None:
        """Check a request whose signature was verified, and remember it.

        Raises:
            AuthError: if it is not recent, or was added before.
        """
        with self._lock:
            self._check(request)
            self._nonces.add(request.nonce)
            heapq.heappush(self._oldest, (float(request.time), request.nonce))
            expired = self._clock() - WINDOW_S
            while len(self._oldest) > self._limit or self._oldest[0][0] < expired:
                self._forgotten, nonce = heapq.heappop(self._oldest)
                self._nonces.remove(nonce)

    def _check(self, request: SignedRequest) -> None:
        time = float(request.time)
        if abs(self._clock() - time) > WINDOW_S:
            raise AuthError(
                f"the request was signed more than {WINDOW_S:g} s ago, or in the future; "
                "sign it again, and synchronize the clocks of both hosts"
            )
        if request.nonce in self._nonces or time <= self._forgotten:
            raise AuthError("the nonce was used before; sign the request again")


def read_key(file: str) -> bytes:
    """Return the run's key from a file; of no file (an empty name), the empty key.

    Raises:
        ConfigError: as :func:`dmiddleware.run_key.read_key`.
    """
    return run_key.read_key(file, option="key_file") if file else b""


def is_loopback(host: str) -> bool:
    """Return whether an address is only reachable from this host."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def check_address(host: str, key: bytes) -> None:
    """Check that an address is loopback, or that there is a key.

    Raises:
        ConfigError: if other hosts can reach the address and the key is empty.
    """
    if not key and not is_loopback(host):
        raise ConfigError(
            f"other hosts can reach {host}, so the run needs a key; set key_file on all workers "
            "(make a key with: openssl rand -hex 32)"
        )


def _mac(key: bytes, *fields: str, body: bytes = b"") -> str:
    digest = hmac.new(key, digestmod=hashlib.sha256)
    for field in (*(field.encode() for field in fields), body):
        # With its length, so that no two lists of fields read the same.
        digest.update(len(field).to_bytes(8, "big"))
        digest.update(field)
    return digest.hexdigest()
