"""Data-parallel learning over ``torch.distributed``: same parameters, averaged gradients."""

from __future__ import annotations

import datetime
import itertools
import json
import logging
import os
import socket
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any, Final, TypeVar
from weakref import WeakValueDictionary

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import (  # type: ignore[attr-defined]  # torch's stubs lack them
    FileStore,
    TCPStore,
)
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous
from torch.utils.hooks import RemovableHandle

from dmiddleware.distributed.accelerate_launch import check_accelerate_launch
from dmiddleware.distributed.agent_store import agree_on_start, connect, has_agent_store, named_run
from dmiddleware.errors import ConfigError, RankLost

__all__ = [
    "GradientReducer",
    "broadcast_model",
    "collective",
    "collective_device",
    "data_parallel",
    "gather_from_ranks",
    "largest_over_ranks",
    "rank_and_world_size",
    "require_process_group",
    "sum_over_ranks",
]

T = TypeVar("T", bound=torch.Tensor)

BEAT_S: Final = 0.5
"""Seconds between the heartbeats of a rank."""
STORE_VARIABLE: Final = "DITASK_RANK_STORE"
"""The variable with the folder in which the ranks of one host meet."""

_STORE_S: Final = 5.0
_PATIENCE_S: Final = 5.0
_logger = logging.getLogger(__name__)
_MAX_TEXT: Final = 300
_ENDS: Final = ("has failed", "has ended")
_BUCKET_BYTES: Final = 25 * 2**20


@contextmanager
def data_parallel(*, backend: str | None = None, timeout_s: float = 300.0) -> Iterator[int]:
    """Join the process group that the environment describes; without one, run alone.

    ``ditask --roles learner=2,…`` (in its learners), torchrun and other launchers describe it by
    the variables ``MASTER_ADDR``, ``MASTER_PORT``, ``RANK``, ``WORLD_SIZE`` and ``LOCAL_RANK``.
    If ``WORLD_SIZE`` is not set, or 1, this process joins nothing, and is rank 0 of 1.

    The ranks that one ``ditask`` has started meet in a folder that only this user can enter. Others
    meet at a port of torch's, without a key: keep it, and the ports of the backend, behind a
    firewall. Ranks of one host listen on loopback addresses only.

    Args:
        backend: ``"gloo"`` or ``"nccl"``. None: gloo for tensors on the CPU, and nccl for those on
            GPUs if each process of this host has a GPU of its own, otherwise gloo.
        timeout_s: the deadline in seconds for joining, and for every collective operation.

    Yields:
        This process's rank.

    Raises:
        ConfigError: if one of the variables is missing or not a number, or ``accelerate launch``
            has set what has no effect here.
        RankLost: from a collective operation that another rank did not take part in.
    """
    check_accelerate_launch()
    if "WORLD_SIZE" not in os.environ:
        yield 0
        return
    rank, size = _number("RANK"), _number("WORLD_SIZE")
    timeout = datetime.timedelta(seconds=timeout_s)
    if size == 1:
        with named_run(connect(timeout)) if has_agent_store() else nullcontext():
            yield 0
        return
    local = _number("LOCAL_RANK", rank)
    has_own_gpu = torch.cuda.device_count() >= _number("LOCAL_WORLD_SIZE", size)
    if torch.cuda.is_available():
        torch.cuda.set_device(local % torch.cuda.device_count())
    default = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() and has_own_gpu else "gloo"
    folder = os.environ.get(STORE_VARIABLE, "")
    uses_agent = has_agent_store() and not folder
    if folder or _is_loopback(os.environ.get("MASTER_ADDR", "")):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo" if sys.platform == "linux" else "lo0")
    address = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
    try:
        with _waiting(
            f"rank {rank} waits at {address} for the others of {size} ranks, at most "
            f"{timeout_s:g} s; start a process for each RANK from 0 to {size - 1}"
        ):
            store = _open_store(folder, rank, size, timeout)
            store.set_timeout(timeout)
            start = agree_on_start(store, rank, size, timeout) if uses_agent else "start"
            dist.init_process_group(
                backend or default,
                store=PrefixStore(f"{start}/group", store),
                rank=rank,
                world_size=size,
                timeout=timeout,
            )
    except RuntimeError as error:
        raise RankLost(
            f"rank {rank} could not join the group of {size} ranks at {address} within "
            f"{timeout_s:g} s: {str(error).splitlines()[0]}; check that all ranks were started"
        ) from error
    # Another thread may wait in the first connection.
    heartbeats = (
        _HeartbeatFolder(Path(folder))
        if folder
        else _HeartbeatStore(PrefixStore(start, connect(timeout)))
    )
    membership = _Membership(heartbeats, rank, size)
    try:
        with named_run(store) if uses_agent else nullcontext():
            yield rank
    except BaseException as error:
        membership.leave(f"has failed: {type(error).__name__}: {error}")
        raise
    finally:
        membership.leave("has ended")
        dist.destroy_process_group()


class _Membership:
    """Heartbeats of all ranks, to name the one that is missing when a collective fails.

    Like torch's default group, a process has at most one.

    Args:
        heartbeats: where they are stored.
        rank: this process's rank.
        size: number of ranks.
    """

    current: _Membership | None = None

    def __init__(
        self, heartbeats: _HeartbeatFolder | _HeartbeatStore, rank: int, size: int
    ) -> None:
        self._heartbeats = heartbeats
        self._rank = rank
        self._size = size
        self._left = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="rank-beat", daemon=True)
        self._thread.start()
        _Membership.current = self

    def leave(self, how: str) -> None:
        """Tell the other ranks how this one has ended; only the first call counts."""
        if self._left.is_set():
            return
        self._left.set()
        self._thread.join(_STORE_S)
        _Membership.current = None
        with suppress(RuntimeError, OSError):
            self._heartbeats.write(f"end-{self._rank}", _one_line(how))

    def describe_missing(self) -> str:
        """Return which ranks are missing, and why; it takes a few beats to find out."""
        try:
            before = self._beats()
            self._left.wait(3 * BEAT_S)
            after = self._beats()
            others = [rank for rank in range(self._size) if rank != self._rank]
            ended = {rank: how for rank in others if (how := self._heartbeats.read(f"end-{rank}"))}
        except (RuntimeError, OSError):
            return (
                "rank 0, which stores the group's state, cannot be reached: it was probably killed"
            )
        silent = [r for r in others if r not in ended and before[r] == after[r]]
        missing = [f"rank {rank} {_one_line(how)}" for rank, how in sorted(ended.items())]
        missing += [f"rank {rank} gives no sign of life: it was killed or hangs" for rank in silent]
        return "; ".join(missing) or (
            "all ranks are alive, but not all took part within timeout_s; give data_parallel() a "
            "larger one if a rank needs longer between two updates"
        )

    def _beat(self) -> None:
        number = 0
        with suppress(RuntimeError, OSError):  # rank 0 has ended, and with it the store
            while True:
                self._heartbeats.write(f"beat-{self._rank}", str(number))
                number += 1
                if self._left.wait(BEAT_S):
                    return

    def _beats(self) -> list[str]:
        return [self._heartbeats.read(f"beat-{rank}") for rank in range(self._size)]


class _HeartbeatFolder:
    """Heartbeats in files of a folder that only this user can enter."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def write(self, name: str, text: str) -> None:
        unfinished = self._folder / f"{name}.unfinished"
        unfinished.write_text(text, errors="replace")
        unfinished.replace(self._folder / name)

    def read(self, name: str) -> str:
        """Return the text; empty if there is none."""
        try:
            with (self._folder / name).open("rb") as file:
                return file.read(_MAX_TEXT).decode(errors="replace")
        except FileNotFoundError:
            if not self._folder.is_dir():
                raise
            return ""


class _HeartbeatStore:
    """Heartbeats in the group's store, to which strangers may write too.

    They can claim that a rank has ended. So no text of theirs reaches an error, unless only this
    host can connect.
    """

    def __init__(self, store: Store) -> None:
        self._store = PrefixStore("life", store)
        self._store.set_timeout(datetime.timedelta(seconds=_STORE_S))
        self._is_local = _is_loopback(os.environ.get("MASTER_ADDR", ""))

    def write(self, name: str, text: str) -> None:
        self._store.set(name, text if self._is_local else text.partition(":")[0])

    def read(self, name: str) -> str:
        """Return the text; empty if there is none."""
        # Reading a key that was never set would wait for it.
        if not self._store.check([name]):
            return ""
        raw = self._store.get(name)
        text = raw[:_MAX_TEXT].decode(errors="replace")
        if self._is_local or text.isdecimal():
            return text
        return text if text in _ENDS else "is said to have ended"


@contextmanager
def collective() -> Iterator[None]:
    """Name the missing rank if the collective operation in this block fails.

    Raises:
        RankLost: instead of torch's error.
    """
    try:
        yield
    except RuntimeError as error:
        membership = _Membership.current
        if membership is None:
            raise
        raise RankLost(
            f"{membership.describe_missing()}. The ranks learn together, so rank "
            f"{dist.get_rank()} cannot continue; restart all of them"
        ) from error


def rank_and_world_size() -> tuple[int, int]:
    """Return this process's rank and the number of ranks; ``(0, 1)`` without a process group."""
    if not (dist.is_available() and dist.is_initialized()):
        return 0, 1
    return dist.get_rank(), dist.get_world_size()


def require_process_group() -> None:
    """Reject ``multi_gpu=True`` outside of a process group, unless there is a single rank.

    Raises:
        ConfigError: saying how to start the processes.
    """
    is_only_rank = os.environ.get("WORLD_SIZE") == "1"
    if not is_only_rank and not (dist.is_available() and dist.is_initialized()):
        raise ConfigError(
            "multi_gpu is True, but this process is not in a torch.distributed process group; "
            "start the program with torchrun and wrap it in "
            "`with dmiddleware.distributed.data_parallel():`, or set multi_gpu=False"
        )


def broadcast_model(model: nn.Module) -> None:
    """Overwrite parameters and buffers with those of rank 0; every rank must call it."""
    with torch.no_grad(), collective():
        for tensor in model.state_dict().values():
            if isinstance(tensor, torch.Tensor):
                dist.broadcast(tensor, src=0)


def sum_over_ranks(values: Sequence[float]) -> list[float]:
    """Return each value summed over all ranks; every rank must pass equally many values."""
    if rank_and_world_size()[1] == 1:
        return list(values)
    total = torch.tensor(values, dtype=torch.float64, device=collective_device())
    with collective():
        dist.all_reduce(total)
    summed: list[float] = total.tolist()
    return summed


def largest_over_ranks(number: torch.Tensor) -> None:
    """Replace a number by the largest of all ranks, in place; every rank must call it."""
    with collective():
        dist.all_reduce(number, op=dist.ReduceOp.MAX)


def gather_from_ranks(value: Any) -> list[Any]:
    """Return the values of all ranks in their order; every rank must call it.

    Args:
        value: what JSON can express.
    """
    size = rank_and_world_size()[1]
    data = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
    if size == 1:
        return [value]
    device = collective_device()
    lengths = [torch.zeros(1, dtype=torch.int64, device=device) for _ in range(size)]
    with collective():
        dist.all_gather(lengths, torch.tensor([len(data)], device=device))
        longest = max(int(length.item()) for length in lengths)
        padded = torch.zeros(longest, dtype=torch.uint8, device=device)
        padded[: len(data)] = data
        gathered = [torch.empty_like(padded) for _ in range(size)]
        dist.all_gather(gathered, padded)
    return [
        json.loads(bytes(row[: int(length.item())].tolist()))
        for row, length in zip(gathered, lengths, strict=True)
    ]


def collective_device() -> torch.device:
    """Return where tensors must be that the process group exchanges."""
    # nccl transfers CUDA tensors only.
    if dist.get_backend() == "nccl":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


class GradientReducer:
    """Averages a model's gradients over all ranks, each weighted by the rows of its batch.

    The ranks' batches then count as one: the gradient of a mean over 40 rows on one rank and 24 on
    another is the gradient of the mean over all 64. Parameters without a gradient count as zeros,
    so ranks whose losses use different parameters stay in sync.

    Args:
        model: its parameters that require a gradient are reduced.
        overlap: reduce each gradient while backward still computes the earlier layers' ones
            (config ``bp_update_sync=False``). Reductions start in one fixed order on every rank,
            whatever the order in which gradients become ready, since collectives match by order.
    """

    def __init__(self, model: nn.Module, *, overlap: bool = False) -> None:
        self._model = model
        self._parameters = _trained_parameters(model)
        self._share = 1.0 / dist.get_world_size()
        self._rows: tuple[int, torch.Tensor, dist.Work] | None = None
        self._ready: set[int] = set()
        self._works: list[dist.Work] = []
        self._started = 0
        self._hooks: list[RemovableHandle] = []
        self._number = next(_numbers)
        _reducers[self._number] = self
        device = self._parameters[0].device if self._parameters else "cpu"
        self._order = torch.zeros((), device=device)
        if overlap:
            for position, parameter in enumerate(self._parameters):
                hook = self._make_hook(position)
                self._hooks.append(
                    parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
                )

    def begin(self, n_rows: int) -> None:
        """Start an update; every rank must call it for each update.

        Args:
            n_rows: the rows in this rank's batch.
        """
        self.share()
        device = self._parameters[0].device if self._parameters else collective_device()
        total = torch.tensor([float(n_rows)], dtype=torch.float64, device=device)
        with collective():
            work = dist.all_reduce(total, async_op=True)
        assert work is not None
        self._rows = n_rows, total, work

    def share(self) -> float:
        """Return this rank's part of the rows of all ranks in this update."""
        if self._rows is not None:
            n_rows, total, work = self._rows
            with collective():
                work.wait()
            # Without any rows the loss is not finite, which is reported elsewhere.
            self._share = n_rows / max(float(total.item()), 1.0)
            self._rows = None
        return self._share

    def reduce(self, model: nn.Module | None = None) -> None:
        """Average the gradients over the ranks; call it after backward and before the step.

        Args:
            model: None: the reducer's own. With ``overlap``, only its reductions start earlier.
        """
        if model is not None and model is not self._model:
            self._reduce_in_buckets(_trained_parameters(model))
            return
        if not self._hooks:
            self._reduce_in_buckets(self._parameters)
            return
        self._start_until(len(self._parameters))
        with collective():
            for work in self._works:
                work.wait()
        self._ready.clear()
        self._works.clear()
        self._started = 0

    def average(self, gradients: Sequence[torch.Tensor]) -> None:
        """Average gradients over the ranks, in place; a compiled update may contain it."""
        self._exchange("average", gradients)

    def add(self, numbers: torch.Tensor) -> None:
        """Replace numbers by their sums over the ranks, in place; a compiled update may contain it.

        Args:
            numbers: on the device of the gradients; as many on all ranks.
        """
        self._exchange("add", [numbers])

    def agree_on_largest(self, number: torch.Tensor) -> None:
        """Replace a number by the largest of all ranks, in place; a compiled update may contain it.

        Args:
            number: on the device of the gradients.
        """
        self._exchange("largest", [number])

    def _exchange(self, operation: str, tensors: Sequence[torch.Tensor]) -> None:
        if torch.compiler.is_compiling():
            torch.ops.dmiddleware.exchange(list(tensors), self._order, self._number, operation)
        else:
            self.make(operation, tensors)

    def make(self, operation: str, tensors: Sequence[torch.Tensor]) -> None:
        """Exchange tensors outside of a compiled function: ``average``, ``add`` or ``largest``."""
        if operation == "average":
            share = self.share()
            for bucket in _buckets(tensors):
                averaged = _summed([tensor.mul_(share) for tensor in bucket])
                for tensor, result in zip(bucket, averaged, strict=True):
                    tensor.copy_(result)
            return
        (numbers,) = tensors
        if operation == "largest":
            largest_over_ranks(numbers)
            return
        with collective():
            dist.all_reduce(numbers)

    def close(self) -> None:
        """Remove the hooks from the parameters; may be called twice."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def _reduce_in_buckets(self, parameters: Sequence[nn.Parameter]) -> None:
        """Reduce all gradients in few large messages, since each message takes its time."""
        share = self.share()
        for bucket in _buckets(parameters):
            gradients = [
                torch.zeros_like(p) if p.grad is None else p.grad.mul_(share) for p in bucket
            ]
            for parameter, result in zip(bucket, _summed(gradients), strict=True):
                parameter.grad = result

    def _make_hook(self, position: int) -> Callable[[torch.Tensor], None]:
        def reduce_when_ready(_: torch.Tensor) -> None:
            self._ready.add(position)
            end = self._started
            while end in self._ready:
                end += 1
            self._start_until(end)

        return reduce_when_ready

    def _start_until(self, end: int) -> None:
        share = self.share()
        with collective():
            for parameter in self._parameters[self._started : end]:
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                parameter.grad.mul_(share)
                work = dist.all_reduce(parameter.grad, async_op=True)
                assert work is not None
                self._works.append(work)
        self._started = max(self._started, end)


_numbers = itertools.count()
_reducers: Final[WeakValueDictionary[int, GradientReducer]] = WeakValueDictionary()
"""The reducers that compiled updates find by their numbers, as long as something holds them."""


@torch.library.custom_op(
    "dmiddleware::exchange",
    # Each exchange seems to change ``order``, so the compiler keeps them in the order of the
    # program: all ranks must make the same ones.
    mutates_args=("tensors", "order"),
    schema="(Tensor(a!)[] tensors, Tensor(b!) order, int number, str operation) -> ()",
)
def _exchange(
    tensors: list[torch.Tensor], order: torch.Tensor, number: int, operation: str
) -> None:
    _reducers[number].make(operation, tensors)


def _trained_parameters(model: nn.Module) -> list[nn.Parameter]:
    """Return the parameters in the order in which backward reaches them: the last layers first."""
    return [p for p in model.parameters() if p.requires_grad][::-1]


def _buckets(tensors: Sequence[T]) -> Iterator[list[T]]:
    """Yield tensors, together if they have one dtype and are not too large."""
    bucket: list[T] = []
    n_bytes = 0
    for tensor in tensors:
        is_other = bucket and tensor.dtype != bucket[-1].dtype
        if is_other or n_bytes >= _BUCKET_BYTES:
            yield bucket
            bucket, n_bytes = [], 0
        bucket.append(tensor)
        n_bytes += tensor.numel() * tensor.element_size()
    if bucket:
        yield bucket


def _summed(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return tensors of one dtype summed over the ranks, in one message."""
    flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
    with collective():
        dist.all_reduce(flat)
    parts = torch.split(flat, [tensor.numel() for tensor in tensors])
    return [part.view_as(tensor) for part, tensor in zip(parts, tensors, strict=True)]


def _open_store(folder: str, rank: int, size: int, timeout: datetime.timedelta) -> Store:
    """Return the store in which the ranks of the group find each other."""
    if folder:
        # torch would create the file for others to read.
        Path(folder).mkdir(mode=0o700, exist_ok=True)
        return FileStore(str(Path(folder) / "group"), size)
    address, port = os.environ.get("MASTER_ADDR", ""), os.environ.get("MASTER_PORT", "")
    if has_agent_store():
        return connect(timeout)
    if rank or not _is_loopback(address) or not port.isdecimal():
        store: Store = next(rendezvous("env://", rank, size, timeout=timeout))[0]
        return store
    # With a socket of ours, because torch's own listens on all interfaces.
    listening = socket.create_server((socket.gethostbyname(address), int(port)), backlog=128)
    return TCPStore(
        address, listening.getsockname()[1], size, True, timeout,
        master_listen_fd=listening.detach(), use_libuv=False,
    )  # fmt: skip


@contextmanager
def _waiting(text: str) -> Iterator[None]:
    """Log a line if the block takes longer than a start of several processes should."""
    timer = threading.Timer(_PATIENCE_S, lambda: _logger.warning("%s", text))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _is_loopback(host: str) -> bool:
    return host == "localhost" or host.startswith("127.")


def _one_line(text: str) -> str:
    """Return a text from a store without what could pass for other lines of an error."""
    return "".join(c if c.isprintable() else " " for c in text[:_MAX_TEXT])


def _number(name: str, default: int | None = None) -> int:
    text = os.environ.get(name, "" if default is None else str(default))
    if not text.isdecimal():
        raise ConfigError(
            f"WORLD_SIZE is set, but {name} is {text!r}, which is not a number; start the program "
            "with ditask or torchrun, which set both, or remove WORLD_SIZE from the environment"
        )
    return int(text)
