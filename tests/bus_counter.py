"""Counts what crosses the bus between a device and the host in a step of a training chain.

``python -m tests.bus_counter`` prints the counts of PPO, PQN, DQN and SAC on envs that return
tensors. It needs no device: ``cpu:0`` stands for one, and a tensor is on it if it was made there,
or from a tensor that is. On the CPU all of these are the same memory; only the marks differ.
"""

from __future__ import annotations

import contextlib
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final, TypeAlias
from unittest import mock

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

from dmiddleware import Task
from dmiddleware.data import TensorBuffer
from dmiddleware.env import VectorEnvManager
from dmiddleware.policy import (
    DDPGPolicy,
    DQNPolicy,
    Policy,
    PPOPolicy,
    PQNPolicy,
    SACPolicy,
    TD3Policy,
    TQCPolicy,
)
from dmiddleware.policy.action_codec import ActionCodec
from dmiddleware.policy.part_codec import PartCodec
from dmiddleware.policy.q_learning import QLearningPolicy
from dmiddleware.zoo.tensor_envs import CartPole, Pendulum, TensorEnv
from middleware import (
    DataPusher,
    EpsGreedyHandler,
    GAEEstimator,
    OffPolicyLearner,
    OnlineRLContext,
    OnPolicyLearner,
    StepCollector,
)

DEVICE: Final = "cpu:0"
_PROJECT: Final = f"{Path(__file__).resolve().parents[1]}/"
_PACKAGES: Final = (f"{_PROJECT}dmiddleware/", f"{_PROJECT}middleware/")
_CONTINUOUS: Final = (DDPGPolicy, SACPolicy, TD3Policy, TQCPolicy)
_MARK: Final = "_is_on_device"
_HOST_VALUES: Final = frozenset(
    {
        torch.Tensor.item,
        torch.Tensor.tolist,
        torch.Tensor.cpu,
        torch.Tensor.__bool__,
        torch.Tensor.__float__,
        torch.Tensor.__int__,
        torch.Tensor.__index__,
    }
)
_ARRAYS: Final = frozenset({torch.Tensor.numpy, torch.Tensor.__array__})
_INDEXING: Final = ("index", "index_put", "index_put_")
_THAT_WAIT: Final = (
    *("_local_scalar_dense", "multinomial"),
    *("nonzero", "masked_select", "_unique2", "unique_dim"),
)
"""Operations that wait for a device: for a value, a check, or the size of what they return."""


Codec: TypeAlias = ActionCodec | PartCodec
"""Has bounds on the CPU, and copies of them where they are needed."""


class Bus:
    """The traffic of the bus, by the line of the project that made it.

    Args:
        is_strict: whether an operation on tensors of both sides is an error, as it is on a GPU.

    Attributes:
        waits: reads of a value of the device, which wait for all that was asked of it before.
        copies: tensors of the host that an operation on the device needed.
        copied_bytes: their size.
    """

    def __init__(self, *, is_strict: bool = False) -> None:
        self.is_strict = is_strict
        self.waits: Counter[str] = Counter()
        self.copies: Counter[str] = Counter()
        self.copied_bytes = 0

    def clear(self) -> None:
        self.waits.clear()
        self.copies.clear()
        self.copied_bytes = 0

    @contextlib.contextmanager
    def watched(self) -> Iterator[Bus]:
        """Count what happens in a ``with`` block."""
        with _Operations(self), _Calls(self):
            yield self


def _mark(value: Any) -> Any:
    for leaf in tree_flatten(value)[0]:
        if isinstance(leaf, torch.Tensor):
            setattr(leaf, _MARK, True)
    return value


def _is_marked(value: object) -> bool:
    return isinstance(value, torch.Tensor) and getattr(value, _MARK, False)


def _site() -> str:
    """Return the innermost line of the project."""
    frame = sys._getframe(1)
    while frame is not None:
        path = frame.f_code.co_filename
        if path.startswith(_PACKAGES):
            return f"{path.removeprefix(_PROJECT)}:{frame.f_lineno}"
        frame = frame.f_back
    return "elsewhere"


def _is_mask(index: object) -> bool:
    return isinstance(index, torch.Tensor) and index.dtype in (torch.bool, torch.uint8)


class _Calls(TorchFunctionMode):
    """Sees calls by name: of what returns values to Python, and of devices."""

    def __init__(self, bus: Bus) -> None:
        super().__init__()
        self._bus = bus

    def __torch_function__(  # noqa: C901  # a case for each way to name a device
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        first = args[0] if args else None
        attribute = getattr(func, "__self__", None)
        if attribute is torch.Tensor.device and _is_marked(first):
            return torch.device(DEVICE)
        if attribute is torch.Tensor.is_cpu:
            return not _is_marked(first)
        if attribute in (torch.Tensor.data, torch.Tensor.grad):
            result = func(*args, **kwargs)
            return _mark(result) if _is_marked(first) else result
        if func in _ARRAYS and _is_marked(first):
            raise TypeError(f"can't convert a tensor of {DEVICE} to numpy; use Tensor.cpu() first")
        if func in _HOST_VALUES and _is_marked(first):
            self._bus.waits[_site()] += 1
            return func(_unmarked(first), *args[1:], **kwargs)
        if func is torch.nn.functional.one_hot and _is_marked(first):
            return _mark(func(_unmarked(first), *args[1:], **kwargs))  # it makes zeros inside
        if func is torch.Tensor.new_tensor and _is_marked(first):
            return self._made_from_values(func, args, kwargs)
        if func is torch.Tensor.to:
            return self._moved(func, args, kwargs)
        device = kwargs.get("device")
        result = func(*args, **kwargs)
        if device is not None and str(device) == DEVICE and isinstance(result, torch.Tensor):
            if func in (torch.tensor, torch.as_tensor) and not _is_marked(first):
                self._note_copy(result)
            _mark(result)
        return result

    def _made_from_values(self, func: Any, args: Any, kwargs: Any) -> Any:
        result = func(*args, **kwargs)
        self._note_copy(result)
        return _mark(result)

    def _moved(self, func: Any, args: Any, kwargs: Any) -> Any:
        if "/torch/" in sys._getframe(2).f_code.co_filename:
            return func(*args, **kwargs)  # torch's own code sees that the devices are the same
        target = kwargs.get("device", args[1] if len(args) > 1 else None)
        is_device = isinstance(target, str | torch.device)
        result = func(*args, **kwargs)
        if not is_device:
            return result
        if str(target) == DEVICE:
            if not _is_marked(args[0]):
                self._note_copy(result)
            return _mark(result)
        if _is_marked(args[0]):
            self._bus.waits[_site()] += 1
            return _unmarked(result)
        return result

    def _note_copy(self, tensor: torch.Tensor) -> None:
        self._bus.copies[_site()] += 1
        self._bus.copied_bytes += tensor.numel() * tensor.element_size()


def _unmarked(tensor: torch.Tensor) -> torch.Tensor:
    with torch._C.DisableTorchFunction(), torch.utils._python_dispatch._disable_current_modes():
        return tensor.detach().view(tensor.shape)


class _Operations(TorchDispatchMode):
    """Sees every operation: where its inputs are, and so its outputs."""

    def __init__(self, bus: Bus) -> None:
        super().__init__()
        self._bus = bus

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        inputs = [leaf for leaf in tree_flatten((args, kwargs))[0] if torch.is_tensor(leaf)]
        result = func(*args, **kwargs)
        if not any(map(_is_marked, inputs)):
            return result
        name = func.overloadpacket.__name__
        if name == "copy_" and not _is_marked(args[0]):
            self._bus.waits[_site()] += 1
            return result
        has_mask = name in _INDEXING and any(map(_is_mask, args[1]))
        if has_mask or name in _THAT_WAIT:
            self._bus.waits[_site()] += 1
        for leaf in inputs:
            # A number of the host, as a tensor without dimensions, is an argument of the kernel.
            if not _is_marked(leaf) and leaf.dim() > 0:
                if self._bus.is_strict and name not in (*_INDEXING, "copy_"):
                    raise RuntimeError(f"{name}: expected all tensors to be on one device")
                self._bus.copies[_site()] += 1
                self._bus.copied_bytes += leaf.numel() * leaf.element_size()
        return _mark(result)


def on_device() -> Any:
    """Build policies on ``cpu:0``."""
    return mock.patch("dmiddleware.policy.policy.device_for", lambda cfg: DEVICE)


def env_of(kind: type[Policy]) -> type[TensorEnv]:
    """Return the simulator that an algorithm is tried in."""
    return Pendulum if issubclass(kind, _CONTINUOUS) else CartPole


def chain(
    kind: type[Policy],
    env_num: int = 64,
    buffer: Mapping[str, Any] | None = None,
    **options: Any,
) -> tuple[Policy, list[Any]]:
    """Return a policy, and the chain that trains it in envs of its device."""
    envs = VectorEnvManager(lambda: env_of(kind)(env_num, DEVICE), env_num, seed=0)
    if kind.on_policy:
        policy: Any = kind.for_env(envs, seed=0, batch_size=2 * env_num, **options)
        collector = StepCollector(policy, envs, n_sample=16 * env_num)
        explore = [] if policy.explores else [EpsGreedyHandler(policy)]
        estimators = [] if kind.learns_from_trajectories else [GAEEstimator(policy)]
        return policy, [*explore, collector, *estimators, OnPolicyLearner(policy)]
    policy = kind.for_env(envs, seed=0, batch_size=env_num, **options)
    replay = TensorBuffer(100 * env_num, device=DEVICE, seed=0, **(buffer or {}))
    return policy, [
        *([EpsGreedyHandler(policy)] if issubclass(kind, QLearningPolicy) else []),
        StepCollector(policy, envs, n_sample=env_num),
        DataPusher(replay),
        OffPolicyLearner(policy, replay, update_per_collect=4),
    ]


def place(policy: Policy) -> None:
    """Mark what a policy has on its device; networks are moved there by their parameters."""
    seen: set[int] = set()
    waiting: list[Any] = [dict(policy.components), policy._runner, policy.model]
    while waiting:
        value = waiting.pop()
        if id(value) in seen or isinstance(value, torch.Generator | type | Codec):
            continue
        seen.add(id(value))
        if isinstance(value, torch.Tensor):
            _mark(value)
        elif isinstance(value, dict):
            waiting += [*value.keys(), *value.values()]
        elif isinstance(value, list | tuple | set):
            waiting += value
        elif hasattr(value, "__dict__"):
            waiting.append(vars(value))
        elif isinstance(getattr(value, "__self__", None), torch.optim.Optimizer):
            waiting.append(value.__self__)


def count(kind: type[Policy], *, n_before: int = 4, **options: Any) -> Bus:
    """Count one step of the chain of an algorithm, after a few others."""
    bus = Bus()
    with on_device(), bus.watched(), Task(OnlineRLContext(), seed=0) as task:
        policy, parts = chain(kind, **options)
        place(policy)
        for part in parts:
            task.use(part)
        task.run(n_before)
        bus.clear()
        task.run(1)
    return bus


def main(show: Callable[..., None] = print) -> None:
    for kind in (PPOPolicy, PQNPolicy, DQNPolicy, SACPolicy):
        bus = count(kind)
        show(
            f"{kind.__name__}: {bus.waits.total()} waits, {bus.copies.total()} copies "
            f"({bus.copied_bytes} bytes)"
        )
        for name, sites in (("wait", bus.waits), ("copy", bus.copies)):
            for site, times in sites.most_common():
                show(f"  {times:4} {name} {site}")


if __name__ == "__main__":
    main()
