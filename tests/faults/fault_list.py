"""All faults at full size, as ``make faults`` injects them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from tests.faults.classic_faults import killed_classic
from tests.faults.delivery_faults import KB, MB, burst, slow_consumer, slow_weight_reader
from tests.faults.fault_result import FaultResult
from tests.faults.hostile_peers import (
    false_lengths,
    forged_refusals,
    malformed_handshakes,
    noise,
    oversize,
    pickles,
    refusals,
    replayed_replies,
)
from tests.faults.killed_run import killed_run
from tests.faults.large_frames import large_frames
from tests.faults.launcher_faults import full_output, killed_launcher
from tests.faults.network_faults import cut_connections, partition, slow_network
from tests.faults.network_namespaces import why_not
from tests.faults.process_faults import (
    fork_and_close,
    killed_dialers,
    killed_handler,
    killed_listener,
    one_node_id,
    start_order,
    stopped,
)
from tests.faults.restart_faults import failed_learner
from tests.faults.shared_memory_faults import full, killed_in_transfer, why_not_full
from tests.faults.soak import soak
from tests.faults.strangers import memory_hogs, silence, unread_replies
from tests.faults.training_faults import killed_collectors, killed_learner, killed_rank

__all__ = ["FAULTS", "Fault"]

BOTH = ("ipc", "tcp")


@dataclass(frozen=True, slots=True)
class Fault:
    """A fault that can be injected.

    Attributes:
        name: its name on the command line.
        what: its heading on the page.
        injections: functions that inject it, one per transport and variant.
        why_not: returns why it cannot be injected here; empty: it can.
    """

    name: str
    what: str
    injections: tuple[Callable[[], FaultResult], ...]
    why_not: Callable[[], str] = str


def _over_both(
    function: Callable[..., FaultResult], **figures: object
) -> tuple[Callable[[], FaultResult], ...]:
    return tuple(partial(function, transport, **figures) for transport in BOTH)


FAULTS = (
    Fault(
        "burst",
        "bursts of small and of large messages",
        tuple(
            partial(burst, transport, count=count, size=size, from_listener=from_listener)
            for transport in BOTH
            for count, size in ((20_000, KB), (500, MB))
            for from_listener in (False, True)
        ),
    ),
    Fault(
        "slow-consumer",
        "a consumer that is 10 times too slow",
        _over_both(slow_consumer, count=720, size=256 * KB, slow_s=0.01, bound=64 * MB),
    ),
    Fault(
        "slow-reader",
        "a slow reader of weights",
        _over_both(slow_weight_reader, count=50, size=10 * MB, slow_s=1.0),
    ),
    Fault(
        "noise",
        "1,000,000 random bytes on 100 connections and 100,000 mutated frames",
        _over_both(noise, n_bytes=1_000_000, connections=100, frames=100_000, slower_at_most=2.0),
    ),
    Fault(
        "large-frames",
        "20 MB to 64 peers at once",
        (partial(large_frames, "tcp", peers=64, size_mb=20, rounds=5),),
    ),
    Fault("lengths", "claimed lengths of 2^33 and 2^63", _over_both(false_lengths)),
    Fault("oversize", "oversize messages", _over_both(oversize)),
    Fault("refusals", "wrong key, no key, replay, flipped bit, old version", _over_both(refusals)),
    Fault("forged", "forged refusals", _over_both(forged_refusals)),
    Fault("replayed", "replayed replies of a listener that hangs", _over_both(replayed_replies)),
    Fault("malformed", "malformed handshakes", _over_both(malformed_handshakes)),
    Fault("pickles", "a pickle, by default and with one end opted in", _over_both(pickles)),
    Fault("silence", "300 silent connections", _over_both(silence)),
    Fault("hogs", "long requests on 8 connections without the key", _over_both(memory_hogs)),
    Fault("unread", "requests whose replies are not read", _over_both(unread_replies)),
    Fault("fork", "a fork after use, and a close inside a callback", _over_both(fork_and_close)),
    Fault(
        "start-order", "8 nodes in random start order, 50 times", _over_both(start_order, times=50)
    ),
    Fault(
        "stop",
        "SIGSTOP for 10 s, on each side",
        tuple(
            partial(stopped, transport, hang_s=10.0, listener=listener)
            for transport in BOTH
            for listener in (True, False)
        ),
    ),
    Fault(
        "one-node-id",
        "restarts with clocks behind, a second process, and a zombie",
        _over_both(one_node_id, restarts=3),
    ),
    Fault("kill-sender", "kill -9 of a sender, 20 times", _over_both(killed_dialers, kills=20)),
    Fault(
        "kill-receiver", "kill -9 of the receiver, 5 times", _over_both(killed_listener, kills=5)
    ),
    Fault(
        "kill-handler",
        "kill -9 of a receiver before it has handled what it received, 3 times",
        _over_both(killed_handler, kills=3, count=2_000),
    ),
    Fault(
        "kill-classic",
        "kill -9 of each role of a classic training, 3 times",
        _over_both(killed_classic, roles=("collector", "learner", "coordinator") * 3),
    ),
    Fault(
        "restart",
        "a learner that raises or is killed, and is restarted",
        tuple(
            partial(failed_learner, transport, ends=ends, slow_s=slow_s)
            for transport in BOTH
            for ends in ("raises", "kill -9")
            for slow_s in (0.0, 1.5)
        ),
    ),
    Fault("cut", "500 cuts of connections in use", _over_both(cut_connections, times=500)),
    Fault("partition", "a partition of 40 s", (partial(partition, cut_s=40.0),), why_not),
    Fault(
        "slow-network", "200 ms delay with 1% loss", (partial(slow_network, count=2_000),), why_not
    ),
    Fault(
        "shared-kill",
        "kill -9 during transfers through shared memory, 20 times on each side",
        (partial(killed_in_transfer, kills=20),),
    ),
    Fault("shared-full", "full shared memory", (partial(full, count=100),), why_not_full),
    Fault(
        "kill-collector",
        "kill -9 of a random collector in training, 21 times",
        _over_both(killed_collectors, kills=7, seeds=(0, 1, 2), env_steps=240_000),
    ),
    Fault(
        "kill-learner",
        "kill -9 of the learner in training, 5 times, with a clock behind",
        _over_both(killed_learner, kills=5),
    ),
    Fault(
        "kill-rank",
        "kill -9 of one of two ranks that learn as one, 4 times",
        _over_both(killed_rank, kills=3),
    ),
    Fault(
        "kill-launcher",
        "kill -9 of ditask, 5 times, and output that cannot be written",
        (partial(killed_launcher, kills=5), full_output),
    ),
    Fault(
        "kill-run",
        "kill -9 of all processes of a training at 20 random moments",
        (partial(killed_run, "ipc", kills=20),),
    ),
    Fault(
        "soak",
        "ten minutes with a fault every 10 s",
        _over_both(soak, lasts_s=600.0, fault_every_s=10.0, check_slope=True),
    ),
)
