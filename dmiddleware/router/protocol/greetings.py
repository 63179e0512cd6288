"""The handshakes over all connections of a node, and which peers it admits."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

from dmiddleware.errors import AuthError, FrameError, HandshakeRefused
from dmiddleware.router.protocol.handshake import (
    MAX_HANDSHAKE_BYTES,
    DialerHandshake,
    Identity,
    ListenerHandshake,
    Refusal,
    Session,
)
from dmiddleware.router.protocol.membership import Membership
from dmiddleware.router.protocol.options import NodeOptions
from dmiddleware.router.protocol.peer import Peer, PeerConnection
from dmiddleware.router.wire.frame import (
    HEADER_SIZE,
    VERSION,
    Frame,
    FrameType,
    decode_frame,
    encode_frame,
    version_of,
)

__all__ = ["MAX_STRANGER_BYTES", "Greetings"]

MAX_STRANGER_BYTES: Final = MAX_HANDSHAKE_BYTES + HEADER_SIZE
"""The longest frame before authentication."""


class Greetings:
    """Processes the frames of handshakes.

    Args:
        identity: this node's identity.
        key: the run's key; None without one.
        options: limits of this node.
        nonce: returns 32 fresh random bytes.
        session_number: returns a fresh, non-zero number that was never returned before.
        peers: all known peers by node id.
        members: knows which processes have used each node id.
        make_room: removes the peers that have been forgotten.
        is_closing: whether this node admits no more peers.

    Attributes:
        incarnation: see :class:`~dmiddleware.router.protocol.node.NodeProtocol`.
    """

    def __init__(
        self,
        identity: Identity,
        key: bytes | None,
        *,
        options: NodeOptions,
        nonce: Callable[[], bytes],
        session_number: Callable[[], int],
        peers: Mapping[str, Peer],
        members: Membership,
        make_room: Callable[[], None],
        is_closing: Callable[[], bool],
    ) -> None:
        self.incarnation = 1
        self._identity = identity
        self._key = key
        self._options = options
        self._nonce = nonce
        self._peers = peers
        self._members = members
        self._make_room = make_room
        self._is_closing = is_closing
        self._session_number = session_number
        # The dialed connections over which a listener was sent this node's proof, by its instance.
        self._attempts: dict[bytes, PeerConnection] = {}

    def dial(self, connection: PeerConnection) -> None:
        """Start a handshake over a connection that this node has dialed."""
        handshake = DialerHandshake(
            self._identity,
            self._key,
            incarnation=self.incarnation,
            nonce=self._nonce(),
            limits=self._options.limits,
            known=self,
        )
        connection.handshake = handshake
        self._put(connection, FrameType.HELLO, handshake.hello())

    def on_frame(
        self, connection: PeerConnection, raw: memoryview
    ) -> tuple[FrameType, Session | None]:
        """Process a frame before the session.

        Returns:
            The type of the frame, ``REFUSED`` if it was refused, and the session if it starts now.

        Raises:
            FrameError: if it is not a valid frame; close the connection.
            AuthError: if the listener does not have the key; close the connection.
            HandshakeRefused: if one of the two refuses the other; close the connection.
        """
        if isinstance(connection.handshake, DialerHandshake):
            return self._on_listener(connection, connection.handshake, raw)
        if connection.handshake is None:
            connection.handshake = ListenerHandshake(
                self._identity,
                self._key,
                limits=self._options.limits,
                nonce=self._nonce,
                session_number=self._session_number,
                incarnation=lambda: self.incarnation,
                known=self,
            )
        return self._on_dialer(connection, connection.handshake, raw)

    def on_end(self, connection: PeerConnection) -> None:
        """Note that a connection has ended."""
        if (
            connection.identity is not None
            and self._attempts.get(connection.identity.instance) is connection
        ):
            del self._attempts[connection.identity.instance]

    def is_under_way(self, identity: Identity) -> bool:
        """Return whether a listener may have started a session that this node does not know yet."""
        return identity.instance in self._attempts

    def least_incarnation(self, identity: Identity) -> int:
        """Return the least incarnation that a process may have."""
        return self._members.least_incarnation(identity)

    def admit(self, identity: Identity, incarnation: int, *, dialed: bool) -> Refusal | None:
        """Return why a process may not join, or None if it may.

        Args:
            identity: identity of the process.
            incarnation: its incarnation before this handshake.
            dialed: whether this node has dialed it.
        """
        node_id, peer_id = self._identity.node_id, identity.node_id
        if self._is_closing():
            return Refusal("closing", f"node {node_id} is closing")
        peer = self._peers.get(peer_id)
        if peer is None and self._is_full():
            return Refusal(
                "full",
                f"node {node_id} already has {self._options.max_peers} peers, the most that it "
                "accepts; raise max_peers in its NodeOptions",
            )
        if (
            peer is not None
            and peer.connection is not None
            and peer.session.identity.instance == identity.instance
            and self._stays(peer.connection, peer_id, dialed=dialed)
        ):
            # Otherwise the two connections would keep replacing each other.
            return Refusal("connected", f"nodes {node_id} and {peer_id} are already connected")
        return self._members.admit(identity, incarnation)

    def _stays(self, connection: PeerConnection, peer: str, *, dialed: bool) -> bool:
        """Return whether a connection stays if there is another one with the same process.

        A node that dials twice keeps its first connection; its listener cannot know whether that
        one still works. If each of the two has dialed, both keep the one that the same node dialed.
        """
        if connection.dialed == dialed:
            return dialed
        return connection.dialed == (self._identity.node_id < peer)

    def _is_full(self) -> bool:
        """Return whether one more peer would be too many; forgotten ones make room."""
        most = self._options.max_peers
        if len(self._peers) >= most:
            self._make_room()
        return len(self._peers) >= most

    def _on_dialer(
        self, connection: PeerConnection, handshake: ListenerHandshake, raw: memoryview
    ) -> tuple[FrameType, Session | None]:
        frame, session = Frame(FrameType.HELLO), None
        try:
            frame = _read(raw)
            if frame.type is FrameType.HELLO:
                challenge = handshake.on_hello(frame.metadata)
                self._put(connection, FrameType.CHALLENGE, challenge)
            elif frame.type is FrameType.AUTH:
                welcome, session = handshake.on_auth(frame.metadata)
                self._put(connection, FrameType.WELCOME, welcome)
            else:
                raise FrameError(f"got {frame.type.name} before the handshake")
        except (HandshakeRefused, AuthError) as error:
            refusal = handshake.refusal(error, frame.metadata)
            self._put(connection, FrameType.REFUSED, refusal)
            connection.is_over = True
            return FrameType.REFUSED, None
        return frame.type, session

    def _on_listener(
        self, connection: PeerConnection, handshake: DialerHandshake, raw: memoryview
    ) -> tuple[FrameType, Session | None]:
        frame, session = _read(raw), None
        if frame.type is FrameType.REFUSED:
            raise handshake.on_refused(frame.metadata)
        if frame.type is FrameType.CHALLENGE and connection.identity is None:
            auth = handshake.on_challenge(frame.metadata)
            identity = connection.identity = handshake.listener
            assert identity is not None
            if self.is_under_way(identity):
                # The listener would replace the other connection, which may just be complete.
                raise HandshakeRefused(
                    f"node {identity.node_id} is being dialed over another connection",
                    code="connected",
                )
            self._attempts[identity.instance] = connection
            self._put(connection, FrameType.AUTH, auth)
        elif frame.type is FrameType.WELCOME:
            session = handshake.on_welcome(frame.metadata)
            self.on_end(connection)
        else:
            raise FrameError(
                f"got {frame.type.name} in the handshake; check the address, and install the same "
                "version of dmiddleware on all hosts"
            )
        return frame.type, session

    def _put(self, connection: PeerConnection, kind: FrameType, content: bytes) -> None:
        frame = Frame(kind, incarnation=self.incarnation, metadata=content)
        # The first states, which are urgent, must not overtake it.
        connection.route.put(encode_frame(frame, max_size=MAX_STRANGER_BYTES), urgent=True)


def _read(raw: memoryview) -> Frame:
    version = version_of(raw)
    if version not in (None, VERSION):
        raise HandshakeRefused(
            f"the two sides have protocol versions {version} and {VERSION}; install the same "
            "version of dmiddleware on all hosts",
            code="version",
        )
    return decode_frame(raw)
