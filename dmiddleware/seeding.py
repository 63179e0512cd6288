"""Seeds: one run seed, from which every random generator's own seed derives."""

from __future__ import annotations

import hashlib
import random
import sys

import numpy as np

__all__ = ["derive_seed", "seed_libraries"]


def derive_seed(run_seed: int, *scope: str | int) -> int:
    """Derive a seed for one generator from the run's seed and the generator's place.

    Two places never share a seed by accident, and the same place always has the same one: in every
    process, on every machine, in every Python version.

    Args:
        run_seed: the seed of the whole run.
        scope: the place, from the outside in, for example ``("collector", 0, 3)``: role, node id,
            env index.

    Returns:
        An integer in ``[0, 2**31)``, which every library accepts.

    Example:
        >>> derive_seed(0, "collector", 0, 3) == derive_seed(0, "collector", 0, 3)
        True
        >>> derive_seed(0, "collector", 0, 3) == derive_seed(0, "evaluator", 0, 3)
        False
    """
    text = "\x1f".join(map(_tagged, (int(run_seed), *scope)))
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 33


def _tagged(part: str | int) -> str:
    """Tell 1 from "1", but not a role from its name, nor numpy's integers from Python's."""
    if isinstance(part, int | np.integer):
        return f"int:{int(part)}"
    return f"str:{str.__str__(part)}"


def seed_libraries(seed: int) -> None:
    """Seed the global generators of ``random``, numpy and, if it is loaded, torch.

    Components of this project have generators of their own; this is for code that draws from the
    libraries' global ones, such as the initialisation of a network.
    """
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.manual_seed(seed)
