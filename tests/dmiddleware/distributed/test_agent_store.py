"""Starts of ranks that find the keys of earlier starts in torchrun's store."""

from __future__ import annotations

import datetime
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch.distributed as dist

from dmiddleware.distributed.agent_store import agree_on_start, named_run, next_shared_name

WITHIN = datetime.timedelta(seconds=30)


def start(store: dist.Store, size: int) -> set[str]:
    """Start all ranks, and return the names on which they have agreed."""
    with ThreadPoolExecutor(size) as pool:
        ranks = [pool.submit(agree_on_start, store, rank, size, WITHIN) for rank in range(size)]
        return {one.result(60) for one in ranks}


@pytest.mark.parametrize("size", [2, 5])
def test_the_ranks_of_each_start_agree_on_a_name_of_their_own(size: int) -> None:
    store = dist.HashStore()
    names = [start(store, size) for _ in range(3)]
    assert [len(one) for one in names] == [1, 1, 1]
    assert len(set.union(*names)) == 3


def test_greetings_of_ranks_that_were_killed_do_not_count() -> None:
    store = dist.HashStore()
    short = datetime.timedelta(seconds=0.1)
    with pytest.raises(RuntimeError):  # rank 0 never comes
        agree_on_start(store, 1, 2, short)
    with pytest.raises(RuntimeError, match="1 of 2 ranks"):
        agree_on_start(store, 0, 2, short)
    assert len(start(store, 2)) == 1


def test_a_run_keeps_its_name_for_as_long_as_the_store_lives() -> None:
    store = dist.HashStore()
    with named_run(store):
        first, second = next_shared_name(), next_shared_name()
    assert next_shared_name() == ""
    with named_run(store):
        third = next_shared_name()
    with named_run(dist.HashStore()):
        other = next_shared_name()
    runs = [name.partition("/")[0] for name in (first, second, third, other)]
    assert runs[0] == runs[1] == runs[2] != runs[3]
    assert len({first, second, third}) == 3
