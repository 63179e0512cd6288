"""Record a hash of every algorithm's parameters after 200 updates, to compare two trees.

``python -m tests.parameter_hashes FILE`` writes the hashes; ``--compare FILE`` computes them again
and lists those that differ. ``--compiled`` compiles the updates. Each hash is of one machine: other
processors round differently, so record and compare on the same one.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
from pathlib import Path
from typing import Any

import torch

from dmiddleware.env import make_env_manager
from dmiddleware.policy import DecisionTransformerPolicy
from dmiddleware.rl import with_returns_to_go
from dmiddleware.rollout import RolloutCollector
from tests.dmiddleware.policy.every_policy import (
    EVERY,
    N_ENVS,
    buffer_of,
    env_for,
    made,
    on_policy_batch,
    to_store,
)

N_ROUNDS = 4
N_UPDATES = 200
BATCH_SIZE = 16


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.parameter_hashes", description=__doc__)
    parser.add_argument("file", type=Path, help="a JSON file: policy → hash")
    parser.add_argument("--compare", action="store_true", help="read the file and compare with it")
    parser.add_argument("--compiled", action="store_true", help="compile the updates")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    hashes: dict[str, str] = {}
    for cls in EVERY:
        has_obs_norm = getattr(cls.settings_class()(), "obs_norm", None)
        hashes[cls.__name__] = hash_of(cls, compile=arguments.compiled)
        if has_obs_norm is not None:
            name = f"{cls.__name__} obs_norm={not has_obs_norm}"
            hashes[name] = hash_of(cls, compile=arguments.compiled, obs_norm=not has_obs_norm)
    for name, value in hashes.items():
        print(f"{name}: {value}")
    if not arguments.compare:
        arguments.file.write_text(json.dumps(hashes, indent=1) + "\n")
        return 0
    before = json.loads(arguments.file.read_text())
    changed = [name for name in before | hashes if before.get(name) != hashes.get(name)]
    print(f"{len(changed)} of {len(before)} differ: {', '.join(changed) or 'none'}")
    return 1 if changed else 0


def hash_of(cls: Any, **options: Any) -> str:
    """Return the hash of the parameters after all updates, in rounds of collecting and learning."""
    policy = made(cls, **options)
    with make_env_manager(lambda: env_for(cls), env_num=N_ENVS, seed=0) as envs:
        collector = RolloutCollector(policy, envs)
        buffer = None
        for _ in range(N_ROUNDS):
            rows = to_store(policy, policy.train_batch(collector.collect(N_ENVS * 24)))
            if policy.on_policy:
                data = on_policy_batch(policy, rows)
            elif buffer is None:
                buffer = buffer_of(policy, rows)
            else:
                if isinstance(policy, DecisionTransformerPolicy):
                    rows = with_returns_to_go(rows)
                buffer.push(rows)
            for _ in range(N_UPDATES // N_ROUNDS):
                policy.learn_mode.forward(data if buffer is None else buffer.sample(BATCH_SIZE))
    digest = hashlib.sha256()
    for name, value in sorted(policy.learn_mode.state_dict()["model"].items()):
        digest.update(name.encode())
        digest.update(value.detach().cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()[:16]


if __name__ == "__main__":
    sys.exit(main())
