"""A seed for what draws from torch's global generators: first weights, and dropout."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from dmiddleware.seeding import GLOBAL_GENERATORS

__all__ = ["torch_seeded"]


@contextmanager
def torch_seeded(seed: int, device: torch.device | str = "cpu") -> Iterator[None]:
    """Seed torch's global generators while the block runs, and restore them after it.

    Threads take turns. Otherwise two tasks in threads of one process would draw each other's
    numbers, and could deadlock: torch reads the state of a generator under a lock, and while it
    makes the tensor for it, Python may run another thread, which then waits for this lock and lets
    no thread run.

    Args:
        seed: the seed inside of the block.
        device: if it is a CUDA device, its generator is seeded and restored too.
    """
    device = torch.device(device)
    on_gpu = device.type == "cuda"
    with GLOBAL_GENERATORS, torch.random.fork_rng([device] if on_gpu else []):
        # Unlike torch.manual_seed, this does not import torch's compiler, or touch other devices.
        torch.default_generator.manual_seed(seed)
        if on_gpu:
            with torch.cuda.device(device):
                torch.cuda.manual_seed(seed)
        yield
