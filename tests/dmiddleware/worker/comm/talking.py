"""The coordinator's conversations over a link, as messages that tests send and receive."""

from __future__ import annotations

import time
from collections import deque

from dmiddleware.worker.coordinator.conversation import Conversations

_STEP_S = 0.02


class Talking:
    """Asks the workers of a link whatever its messages need, as a coordinator does in its loop."""

    def __init__(self, link, **options):
        self.link = link
        self.conversations = Conversations(link, clock=time.monotonic, **options)
        self.told = deque()
        self.uid, self.peers, self.close = link.uid, link.peers, link.close

    def send(self, peer, message):
        self.conversations.say(peer, message)
        self.told.extend(self.conversations.ask())

    def receive(self, timeout_s):
        deadline = time.monotonic() + timeout_s
        while not self.told and time.monotonic() < deadline:
            self.told.extend(self.conversations.receive(min(_STEP_S, timeout_s)))
            self.told.extend(self.conversations.ask())
        return self.told.popleft() if self.told else None
