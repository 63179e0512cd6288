"""All faults at full size, as ``make faults`` injects them."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from tests.faults.classic_faults import killed_classic
from tests.faults.delivery_faults import KB, MB, burst, slow_consumer, slow_weight_reader
from tests.faults.dialed_at_once import dialed_at_once
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
from tests.faults.process_cluster import SHARED_MEMORY, TRANSPORTS
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

__all__ = ["FAULTS", "GROUPS", "Fault"]

LOCAL = ("ipc",)
HOSTS = ("tcp", "tls+tcp")
PLAIN = ("ipc", "tcp")
STREAMS = ("ipc", "tcp", "tls+tcp")


@dataclass(frozen=True, slots=True)
class Fault:
    """A fault that can be injected.

    Attributes:
        name: its name on the command line.
        what: what it is, with its figures.
        transports: those over which it is injected.
        variants: functions that inject it over a transport.
        why_not: returns why it cannot be injected here; empty: it can.
    """

    name: str
    what: str
    transports: tuple[str, ...]
    variants: tuple[Callable[[str], FaultResult], ...]
    why_not: Callable[[], str] = str


GROUPS: dict[str, tuple[Fault, ...]] = {
    "Bursts, slow consumers and slow readers": (
        Fault(
            "burst",
            "bursts of 20,000 x 1 KB and of 500 x 1 MB, both ways",
            TRANSPORTS,
            tuple(
                partial(burst, count=count, size=size, from_listener=from_listener)
                for count, size in ((20_000, KB), (500, MB))
                for from_listener in (False, True)
            ),
        ),
        Fault(
            "slow-consumer",
            "a consumer that is 10 times too slow, 720 x 256 KB",
            TRANSPORTS,
            (partial(slow_consumer, count=720, size=256 * KB, slow_s=0.01, bound=64 * MB),),
        ),
        Fault(
            "slow-reader",
            "a slow reader of weights, 50 versions of 10 MB",
            TRANSPORTS,
            (partial(slow_weight_reader, count=50, size=10 * MB, slow_s=1.0),),
        ),
        Fault(
            "large-frames",
            "5 events of 20 MB to 64 peers at once",
            ("tcp",),
            (partial(large_frames, peers=64, size_mb=20, rounds=5),),
        ),
    ),
    "Hostile peers and strangers": (
        *(
            Fault(
                name,
                f"1,000,000 random bytes on 100 connections, and {frames:,} mutated frames",
                transports,
                (
                    partial(
                        noise, n_bytes=1_000_000, connections=100, frames=frames, slower_at_most=2.0
                    ),
                ),
            )
            # Over TLS, fewer strangers are accepted in a second.
            for name, transports, frames in (
                ("noise", PLAIN, 100_000),
                ("noise-tls", ("tls+tcp",), 10_000),
            )
        ),
        Fault("lengths", "claimed lengths of 2^33 and 2^63", STREAMS, (false_lengths,)),
        Fault(
            "oversize",
            "a message of 2 MB where the sender's or the receiver's limit is 1 MB",
            STREAMS,
            (oversize,),
        ),
        Fault(
            "refusals",
            "wrong key, no key, replayed frames, flipped bit, old version",
            STREAMS,
            (refusals,),
        ),
        Fault("forged", "18 forged refusals to a dialer", STREAMS, (forged_refusals,)),
        Fault(
            "replayed", "replayed replies of a listener that hangs", STREAMS, (replayed_replies,)
        ),
        Fault("malformed", "malformed handshakes", STREAMS, (malformed_handshakes,)),
        Fault(
            "pickles",
            "a pickle with a side effect, by default and with one end opted in",
            STREAMS,
            (pickles,),
        ),
        Fault("silence", "300 silent connections", STREAMS, (silence,)),
        Fault(
            "hogs",
            "8 connections without the key that send 60 MB each",
            STREAMS,
            (memory_hogs,),
        ),
        Fault("unread", "requests for 5 s whose replies are not read", STREAMS, (unread_replies,)),
    ),
    "Processes that start, hang, fork or die": (
        Fault("fork", "a fork after use, and a close inside a callback", PLAIN, (fork_and_close,)),
        Fault(
            "start-order",
            "8 nodes in random start order, 50 times",
            STREAMS,
            (partial(start_order, times=50),),
        ),
        Fault(
            "dial-at-once",
            "24 processes that dial one listener at the same moment, 100 times",
            ("tls+tcp",),
            (partial(dialed_at_once, dialers=24, times=100),),
        ),
        Fault(
            "stop",
            "SIGSTOP for 10 s, of the listener and of the dialer",
            TRANSPORTS,
            tuple(partial(stopped, hang_s=10.0, listener=listener) for listener in (True, False)),
        ),
        Fault(
            "one-node-id",
            "3 restarts with clocks behind, a second process, and a zombie",
            STREAMS,
            (partial(one_node_id, restarts=3),),
        ),
        Fault(
            "kill-sender",
            "kill -9 of one of 3 senders at random, 20 times",
            TRANSPORTS,
            (partial(killed_dialers, kills=20),),
        ),
        Fault(
            "kill-receiver",
            "kill -9 of the receiver, 5 times",
            TRANSPORTS,
            (partial(killed_listener, kills=5),),
        ),
        Fault(
            "kill-handler",
            "kill -9 of a receiver that takes 20 ms per event, 3 times; "
            "2,000 events acknowledged when handled",
            TRANSPORTS,
            (partial(killed_handler, kills=3, count=2_000),),
        ),
        Fault(
            "soak",
            "ten minutes with a fault every 10 s",
            STREAMS,
            (partial(soak, lasts_s=600.0, fault_every_s=10.0, check_slope=True),),
        ),
    ),
    "Networks that break": (
        Fault(
            "cut",
            "500 cuts of one or all connections in use",
            STREAMS,
            (partial(cut_connections, times=500),),
        ),
        Fault(
            "partition",
            "a partition of 40 s between two hosts",
            HOSTS,
            (partial(partition, cut_s=40.0),),
            why_not,
        ),
        Fault(
            "slow-network",
            "200 ms delay with 1% loss, 2,000 messages each way",
            HOSTS,
            (partial(slow_network, count=2_000),),
            why_not,
        ),
    ),
    "Shared memory": (
        Fault(
            "shared-kill",
            "kill -9 during transfers of 2 MB, 20 times on each side",
            (SHARED_MEMORY,),
            (partial(killed_in_transfer, kills=20),),
        ),
        Fault(
            "shared-full",
            "full shared memory, 100 x 2 MB",
            (SHARED_MEMORY,),
            (partial(full, count=100),),
            why_not_full,
        ),
    ),
    "Trainings": (
        Fault(
            "restart",
            "a learner that raises or is killed, and is restarted at once or in 3 s",
            PLAIN,
            tuple(
                partial(failed_learner, ends=ends, slow_s=slow_s)
                for ends in ("raises", "kill -9")
                for slow_s in (0.0, 1.5)
            ),
        ),
        Fault(
            "kill-collector",
            "kill -9 of a random collector in training, 21 times",
            PLAIN,
            (partial(killed_collectors, kills=7, seeds=(0, 1, 2), env_steps=240_000),),
        ),
        Fault(
            "kill-learner",
            "kill -9 of the learner in training, 5 times, with a clock behind",
            PLAIN,
            (partial(killed_learner, kills=5),),
        ),
        Fault(
            "kill-rank",
            "kill -9 of one of two ranks that learn as one, 4 times",
            PLAIN,
            (partial(killed_rank, kills=3),),
        ),
        Fault(
            "kill-classic",
            "kill -9 of each role of a classic training, 3 times",
            PLAIN,
            (partial(killed_classic, roles=("collector", "learner", "coordinator") * 3),),
        ),
        Fault(
            "kill-launcher",
            "kill -9 of ditask, 5 times, and output that cannot be written",
            LOCAL,
            (partial(killed_launcher, kills=5), full_output),
        ),
        Fault(
            "kill-run",
            "kill -9 of all processes of a training at 20 random moments",
            LOCAL,
            (partial(killed_run, kills=20),),
        ),
    ),
}
"""The faults by the heading of their table."""

FAULTS = tuple(itertools.chain(*GROUPS.values()))
