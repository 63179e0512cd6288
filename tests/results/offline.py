"""Results of learning from data alone; behaviour cloning is what the others have to beat."""

from __future__ import annotations

from tests.results.entry import Entry

__all__ = ["ENTRIES"]

_NAMES = {"bc": "BC", "td3_bc": "TD3+BC", "cql": "CQL", "iql": "IQL", "dt": "Decision Transformer"}


def _entries(env: str, budget: int, minutes: dict[str, float], data_minutes: float) -> list[Entry]:
    cloning: Entry | None = None
    entries = []
    for algo, name in _NAMES.items():
        # An update of CQL values 12 more actions of each row, one of the transformer has 20 times
        # as many rows.
        n_updates = budget // 4 if algo in ("cql", "dt") else budget
        entry = Entry(
            section="Offline, from random, medium and expert play",
            algorithm=name,
            env=env,
            program="examples.offline",
            options=("--algo", algo, "--env", env, "--max-train-iter", str(n_updates)),
            seeds=(0, 1, 2) if env == "Pendulum-v1" else (0,),
            beats=cloning,
            minutes=minutes[algo],
            prepare=("examples.make_offline_data", env),
            prepare_minutes=data_minutes,
        )
        cloning = cloning or entry
        entries.append(entry)
    return entries


ENTRIES = [
    *_entries("Pendulum-v1", 20_000, {"bc": 1, "td3_bc": 2, "cql": 5, "iql": 3, "dt": 14}, 1),
    *_entries(
        "HalfCheetah-v5", 100_000, {"bc": 3, "td3_bc": 10, "cql": 20, "iql": 15, "dt": 60}, 31
    ),
]
