"""Forks, or closes a router inside a callback: ``python -m tests.faults.fork_program what where``.

It prints what happened, and exits with 0 unless there was an unexpected error.
"""

from __future__ import annotations

import os
import sys
import threading
from typing import Any

from dmiddleware.errors import RouterStateError
from dmiddleware.pipeline import Event
from dmiddleware.router import Router
from tests.accepting import accepting
from tests.waiting import wait_until

DEADLINE_S = 10.0


def fork(address: str) -> str:
    """Use a router in a forked process, and then in the parent."""
    arrived = threading.Event()
    with (
        Router(node_id=0, listen=address) as receiver,
        Router(node_id=1, dial=[address]) as sender,
    ):
        receiver.attach(
            accepting(lambda name, args, kwargs: arrived.set() if name == "e" else None, waits=True)
        )
        receiver.subscribe("e", active=True)
        wait_until(lambda: sender.subscribers("e"), "the subscription", deadline_s=DEADLINE_S)
        sender.emit(Event("e"), (1,), {})
        assert arrived.wait(DEADLINE_S)
        child = os.fork()
        if child == 0:
            os._exit(_use_in_child(sender))
        _, status = os.waitpid(child, 0)
        assert os.waitstatus_to_exitcode(status) == 0, f"the child ended with {status}"
        arrived.clear()
        sender.emit(Event("e"), (2,), {})
        assert arrived.wait(DEADLINE_S)
    return "RouterStateError in the child, the parent still works"


def _use_in_child(router: Router) -> int:
    for use in (lambda: router.emit(Event("e"), (1,), {}), router.close, router.start):
        try:
            use()
        except RouterStateError as error:
            if "fork" not in str(error):
                return 2
        else:
            return 3
    return 0


def close(address: str) -> str:
    """Close each side's router inside its own callback."""
    outcomes = []
    for node_id in (0, 1):
        with (
            Router(node_id=0, listen=address) as listener,
            Router(node_id=1, dial=[address]) as dialer,
        ):
            closing = (listener, dialer)[node_id]
            outcomes.append(_close_inside(closing))
    return f"the callback got: {', '.join(outcomes)}"


def _close_inside(router: Router) -> str:
    outcome: list[str] = []
    done = threading.Event()

    def deliver(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if done.is_set():
            return
        try:
            router.close(deadline_s=2.0)
        except RouterStateError as error:
            outcome.append(str(error))
        else:
            outcome.append("closed")
        finally:
            done.set()

    router.attach(accepting(deliver, waits=True))
    assert done.wait(DEADLINE_S), "close() inside a callback hangs"
    return outcome[0]


def main() -> None:
    what, address = sys.argv[1:]
    print({"fork": fork, "close": close}[what](address))


if __name__ == "__main__":
    main()
