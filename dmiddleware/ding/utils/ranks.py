"""The ranks of a data-parallel program, with DI-engine's names.

Without a process group, a program is rank 0 of 1, and nothing is exchanged.
"""

from __future__ import annotations

import math

import torch
import torch.distributed as dist
from easydict import EasyDict

from dmiddleware.worker import dist_finalize, dist_init
from dmiddleware.worker.ranks import rank_and_world_size

__all__ = [
    "DDPContext",
    "DistContext",
    "allreduce",
    "broadcast",
    "dist_finalize",
    "dist_init",
    "get_rank",
    "get_world_size",
    "to_ddp_config",
]


def get_rank() -> int:
    """Return this process's rank."""
    return rank_and_world_size()[0]


def get_world_size() -> int:
    """Return the number of ranks."""
    return rank_and_world_size()[1]


class DDPContext:
    """Joins the process group that the environment describes, and leaves it at the end."""

    def __enter__(self) -> None:
        dist_init()

    def __exit__(self, *error: object) -> None:
        dist_finalize()


DistContext = DDPContext


def to_ddp_config(cfg: EasyDict) -> EasyDict:
    """Divide a config's sizes of batches and samples by the number of ranks, in place."""
    policy = cfg.policy
    for section in (policy, policy.get("learn", {}), policy.get("collect", {})):
        for key in ("batch_size", "n_sample", "n_episode"):
            if key in section:
                section[key] = math.ceil(section[key] / get_world_size())
    return cfg


def broadcast(tensor: torch.Tensor, src: int = 0) -> None:
    """Write a rank's tensor into those of all ranks."""
    if get_world_size() > 1:
        dist.broadcast(tensor, src)


def allreduce(x: torch.Tensor) -> None:
    """Average a tensor over all ranks, in place."""
    if get_world_size() > 1:
        dist.all_reduce(x)
        x.div_(get_world_size())
