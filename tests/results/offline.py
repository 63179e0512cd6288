"""Results of learning from data alone; behavior cloning is what the others have to beat."""

from __future__ import annotations

from tests.results.entry import Entry

__all__ = ["ENTRIES"]

_NAMES = {
    "bc": "BC",
    "td3_bc": "TD3+BC",
    "bcq": "BCQ",
    "cql": "CQL",
    "edac": "EDAC",
    "iql": "IQL",
    "dt": "Decision Transformer",
}


def _entries(
    env: str,
    plan: dict[str, tuple[int, float]],
    data_minutes: float,
    *,
    seeds: tuple[int, ...] = (0,),
    compiled: tuple[str, ...] = (),
) -> list[Entry]:
    """Return an entry for each algorithm of a plan, which tells its updates and its minutes."""
    cloning: Entry | None = None
    entries = []
    for algo, (n_updates, minutes) in plan.items():
        flags = ("--policy.compile",) if algo in compiled else ()
        entry = Entry(
            section="Offline, from random, medium and expert play",
            algorithm=_NAMES[algo],
            env=env,
            program="examples.offline",
            options=("--algo", algo, "--env.id", env, "--max-train-iter", str(n_updates), *flags),
            seeds=seeds,
            beats=cloning,
            minutes=minutes,
            prepare=("examples.make_offline_data", "--env-id", env),
            prepare_minutes=data_minutes,
        )
        cloning = cloning or entry
        entries.append(entry)
    return entries


# CQL values 12 more actions of each row, and a transformer learns from 20 times as many rows, so
# they get fewer updates, except CQL on HalfCheetah: all critics need most of the updates there.
# Compiling does not pay for a transformer, nor in a short training.
ENTRIES = [
    *_entries(
        "Pendulum-v1",
        {
            "bc": (20_000, 1),
            "td3_bc": (20_000, 4),
            "bcq": (5_000, 3),
            "edac": (3_000, 3),
            "cql": (5_000, 4),
            "iql": (20_000, 3),
            "dt": (5_000, 10),
        },
        1,
        seeds=(0, 1, 2),
    ),
    *_entries(
        "HalfCheetah-v5",
        {
            "bc": (100_000, 3),
            "td3_bc": (100_000, 10),
            "cql": (100_000, 50),
            "iql": (100_000, 15),
            "dt": (25_000, 40),
        },
        22,
        compiled=("td3_bc", "cql"),
    ),
]
