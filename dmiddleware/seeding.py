"""Seeds: the seed of every random generator is derived from one seed of the run."""

from __future__ import annotations

import hashlib
import operator
import random
import sys
import threading

__all__ = ["GLOBAL_GENERATORS", "derive_seed", "seed_libraries"]

GLOBAL_GENERATORS = threading.RLock()
"""Hold this lock to set the state of a library's global generator."""


def derive_seed(run_seed: int, *scope: str | int) -> int:
    """Derive the seed of one random generator from the seed of the run.

    Different scopes get different seeds, and the same scope always gets the same one: in every
    process, on every machine, in every Python version.

    Args:
        run_seed: the seed of the whole run.
        scope: identifies the generator, from the outside in, for example ``("collector", 0, 3)``:
            role, node id, env index.

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
    """Distinguish 1 from "1", but not a role from its name, or numpy integers from Python's."""
    if isinstance(part, str):
        return f"str:{str.__str__(part)}"
    return f"int:{operator.index(part)}"


def seed_libraries(seed: int) -> None:
    """Seed the global generators of ``random``, numpy and, if it is loaded, torch.

    The components of this project use separate generators; this is for code that uses the global
    ones, such as the initialization of a network.
    """
    # Loading numpy takes a quarter of the start of a process that does not use it.
    import numpy as np

    with GLOBAL_GENERATORS:
        random.seed(seed)
        np.random.seed(seed % 2**32)
        torch = sys.modules.get("torch")
        if torch is None:
            return
        # torch.manual_seed imports torch's compiler, which takes longer than torch itself.
        has_device = torch.accelerator.is_available()
        (torch.manual_seed if has_device else torch.default_generator.manual_seed)(seed)
