"""Policies as files of other tools: ONNX, and programs of torch.export."""

from __future__ import annotations

import dataclasses
import logging
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, Literal

import gymnasium as gym
import numpy as np
import numpy.typing as npt
import torch
from torch import nn
from torch.utils import _pytree as pytree

from dmiddleware.env.team import ACTION_MASK
from dmiddleware.errors import ConfigError
from dmiddleware.files.atomic_file import write_atomically
from dmiddleware.policy import HasModes, Policy
from dmiddleware.policy.acting import (
    STATE,
    first_inputs,
    info_names,
    previous_action_codec,
    probe_inputs,
)
from dmiddleware.runs.saved_policy import load_into, saved_policy
from dmiddleware.tree import from_numpy, leaves, to_dict

__all__ = ["SUFFIXES", "ExportFormat", "ExportedPolicy", "Port", "export_policy"]

ExportFormat = Literal["onnx", "torch"]

SUFFIXES: Final[Mapping[ExportFormat, str]] = {"onnx": ".onnx", "torch": ".pt2"}
"""How the names of files end."""
_ORDER: Final = ("obs", STATE, "is_first", "prev_action", "prev_reward", "action_mask")
_TRACED_ROWS: Final = 2
_TRIED_ROWS: Final = (1, 3)
_TOLERANCE: Final = 1e-4
_LARGEST: Final = 1e4


@dataclasses.dataclass(frozen=True)
class Port:
    """An input or an output of an exported policy.

    Attributes:
        name: such as ``"obs"``; of a nested one ``"obs.camera"``.
        shape: of one row; the first dimension, that of the rows, is left out.
        dtype: such as ``"float32"``.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str


@dataclasses.dataclass(frozen=True)
class ExportedPolicy:
    """A file that another tool loads.

    Attributes:
        path: the file.
        format: ``"onnx"`` or ``"torch"``.
        inputs: what it takes, in order.
        outputs: what it returns, in order.
        policy: the policy.
    """

    path: Path
    format: ExportFormat
    inputs: tuple[Port, ...]
    outputs: tuple[Port, ...]
    policy: Policy


def export_policy(
    path: str | Path,
    output: str | Path,
    *,
    format: ExportFormat = "onnx",
    action_mask: bool = False,
    policy: HasModes | None = None,
    model: nn.Module | None = None,
) -> ExportedPolicy:
    """Write a saved policy as a file that needs nothing of this project.

    The file takes observations ``[batch, …]`` as the env returns them, and returns the actions that
    the env takes: observations are normalized and actions are scaled inside. A policy with a memory
    also takes ``state`` and returns ``next_state``, and takes ``is_first``, ``prev_action`` and
    ``prev_reward`` if it looks at them; all of them as in its first step at the start of an
    episode. The file is tried before it is written: it must give the policy's own actions.

    Args:
        path: a run's folder or a checkpoint, as :func:`load_policy` takes it.
        output: the file to write; its folder is created if needed.
        format: ``"onnx"`` for onnxruntime and others, which needs the extra ``export``, or
            ``"torch"`` for ``torch.export.load``.
        action_mask: whether the file takes a mask of allowed actions, ``[batch, n]`` bool. Masks
            that are part of observations need no further input.
        policy: as :func:`load_policy` takes it.
        model: likewise.

    Raises:
        ConfigError: if the policy cannot be exported, the file ends in the wrong suffix, or a
            package is missing.
        RunFolderError: if there is no checkpoint.
        CheckpointError: as :func:`load_policy` raises it.
        OSError: if the file cannot be written.
    """
    output = Path(output)
    if output.suffix != SUFFIXES[format]:
        raise ConfigError(f"a file of the format {format} ends in {SUFFIXES[format]}, got {output}")
    if format == "onnx":
        _import_onnx()
    if policy is None:
        policy = saved_policy(path, model=model)
    else:
        load_into(policy, path)
    if not isinstance(policy, Policy):
        raise ConfigError(f"only a Policy can be exported, got a {type(policy).__name__}")
    return _Exporter(policy, action_mask=action_mask).write(output, format)


class _Exporter:
    """Writes a policy with the mode eval."""

    def __init__(self, policy: Policy, *, action_mask: bool) -> None:
        if policy.spaces is None or policy.acting_space is None:
            raise ConfigError("the policy has met no env, so its spaces are unknown; use for_env")
        self._policy = policy
        self._observation_space, self._action_space = policy.acting_space, policy.spaces[1]
        if infos := info_names(policy.act_inputs):
            raise ConfigError(
                f"the policy acts on {', '.join(infos)} of the infos, whose form no space "
                "describes; it cannot be exported. Make them part of the observations"
            )
        self._mask: torch.Tensor | None = None
        if action_mask:
            probe = (
                probe_inputs(policy.act_inputs, policy.initial_state, self._action_space, 1) or {}
            )
            if "action_mask" not in probe:
                raise ConfigError("the policy takes no action mask; export it without one")
            (_, mask) = next(leaves(probe["action_mask"]))
            self._mask = mask[0]
        policy.set_training(False)
        self._rng = np.random.default_rng(0)

    def write(self, output: Path, format: ExportFormat) -> ExportedPolicy:
        """Trace the policy, write it and try it."""
        traced = self._arguments(_TRACED_ROWS)
        acted = self._first_outputs(traced)  # before tracing, which would fill caches with fakes
        program = self._program(traced)
        inputs, outputs = (tuple(map(_port, _named(tree))) for tree in (traced, acted))
        output.parent.mkdir(parents=True, exist_ok=True)
        beside = output.with_name(f".{output.stem}.tmp{output.suffix}")
        try:
            if format == "onnx":
                _write_onnx(program, beside, inputs, outputs)
            else:
                # Not by its path, which may not be Unicode.
                with beside.open("wb") as file:
                    torch.export.save(program, file)
            self._try(beside, format, inputs, outputs)
            data = beside.read_bytes()
        finally:
            beside.unlink(missing_ok=True)
        write_atomically(output, lambda file: file.writelines([data]))
        return ExportedPolicy(output, format, inputs, outputs, self._policy)

    def _program(self, traced: Mapping[str, Any]) -> Any:
        rows = torch.export.Dim("batch", min=1)
        dynamic = pytree.tree_map(lambda _: {0: rows}, dict(traced))
        try:
            with torch.no_grad(), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                return torch.export.export(
                    _Acting(self._policy),
                    (),
                    dict(traced),
                    dynamic_shapes=dynamic,
                    strict=False,
                )
        except Exception as error:
            raise ConfigError(
                f"torch {torch.__version__} cannot trace {type(self._policy).__name__} with its "
                f"network {type(self._policy.model).__name__}: {error!s:.500}"
            ) from error

    def _arguments(self, n: int) -> dict[str, Any]:
        """Return random observations ``[n, …]``, with the other inputs of a first step."""
        space = self._observation_space
        items = [self._sample(space) for _ in range(n)]
        batch: Any = gym.vector.utils.create_empty_array(space, n)
        drawn = to_dict(from_numpy(gym.vector.utils.concatenate(space, items, batch)))
        obs = pytree.tree_map(_moderate, drawn)
        if isinstance(obs, Mapping) and (allowed := obs.get(ACTION_MASK)) is not None:
            allowed[..., min(1, allowed.shape[-1] - 1) :] = 1  # at least one action is allowed
        policy = self._policy
        codec = previous_action_codec(policy.act_inputs, self._action_space)
        first = first_inputs(policy.act_inputs, policy.initial_state, codec, n)
        arguments = {"obs": obs, **{name: to_dict(column) for name, column in first.items()}}
        if self._mask is not None:
            mask = self._mask.repeat(n, 1)
            mask[:, 0] = False
            arguments["action_mask"] = mask
        return {name: arguments[name] for name in _ORDER if name in arguments}

    def _sample(self, space: gym.Space[Any]) -> Any:
        space.seed(int(self._rng.integers(2**31)))
        return space.sample()

    def _policy_outputs(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Return what the policy itself answers."""
        copied = pytree.tree_map(torch.clone, dict(arguments))
        inputs = {name: from_numpy(value) for name, value in copied.items()}
        return _outputs(self._policy.eval_mode.forward(inputs.pop("obs"), **inputs))

    def _first_outputs(self, traced: Mapping[str, Any]) -> dict[str, Any]:
        """Return what the policy answers, and refuse one that draws its best actions."""
        generator = self._policy.eval_generator
        before = generator.get_state()
        acted = self._policy_outputs(traced)
        if not torch.equal(generator.get_state(), before):
            raise ConfigError(
                f"{type(self._policy).__name__} draws random numbers for its best action, so no "
                "file can be compared with it; it cannot be exported. Act with load_policy, or "
                "train an algorithm whose actor gives its best action itself"
            )
        return acted

    def _try(
        self, path: Path, format: ExportFormat, inputs: tuple[Port, ...], outputs: tuple[Port, ...]
    ) -> None:
        """Compare the file with the policy.

        Raises:
            ConfigError: if it acts in another way.
        """
        run = _onnx_runner(path, outputs) if format == "onnx" else _torch_runner(path)
        for n in _TRIED_ROWS:
            arguments = self._arguments(n)
            expected = dict(_named(self._policy_outputs(arguments)))
            actual = run(dict(arguments))
            for name, value in expected.items():
                if not np.allclose(actual[name], value, rtol=_TOLERANCE, atol=_TOLERANCE):
                    raise ConfigError(
                        f"the exported policy gives another {name} than the policy itself: "
                        f"{actual[name]!s:.100} for {value!s:.100}; nothing was written. Please "
                        "report it with the name of the algorithm"
                    )


def _moderate(value: torch.Tensor) -> torch.Tensor:
    """Return values that networks compute with, whatever the bounds of their space are."""
    return value.clamp(-_LARGEST, _LARGEST) if value.is_floating_point() else value


class _Acting(nn.Module):
    """A policy's best actions, as a module that can be traced."""

    def __init__(self, policy: Policy) -> None:
        super().__init__()
        self.model = policy.model
        self._policy = [policy]  # not a submodule

    def forward(
        self,
        obs: Any,
        state: Any = None,
        is_first: Any = None,
        prev_action: Any = None,
        prev_reward: Any = None,
        action_mask: Any = None,
    ) -> dict[str, Any]:
        """Return the outputs of the policy for its inputs; None: the policy does not take it."""
        (policy,) = self._policy
        optional = {
            "state": state,
            "is_first": is_first,
            "prev_action": prev_action,
            "prev_reward": prev_reward,
            "action_mask": action_mask,
        }
        inputs = {name: value for name, value in optional.items() if value is not None}
        n_rows = pytree.tree_leaves(obs)[0].shape[0]
        env_id: Any = torch.arange(n_rows)
        return _outputs(policy.act_eval(policy.obs_norm(obs), env_id, **inputs))


def _outputs(acted: Mapping[str, Any]) -> dict[str, Any]:
    outputs = {"action": to_dict(acted["action"])}
    return outputs | ({"next_state": to_dict(acted[STATE])} if STATE in acted else {})


def _named(tree: Any, path: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors of nested dictionaries with their dotted names, in the order of pytree."""
    if isinstance(tree, Mapping):
        for name, branch in tree.items():
            yield from _named(branch, f"{path}.{name}" if path else str(name))
    elif isinstance(tree, tuple):
        for at, branch in enumerate(tree):
            yield from _named(branch, f"{path}.{at}")
    else:
        yield path, tree


def _port(named: tuple[str, torch.Tensor]) -> Port:
    name, tensor = named
    return Port(name, tuple(tensor.shape[1:]), str(tensor.dtype).removeprefix("torch."))


def _import_onnx() -> Any:
    try:
        import onnxruntime
        import onnxscript  # noqa: F401 (torch.onnx needs it)
    except ImportError as error:
        raise ConfigError(
            "the format onnx needs further packages; run: pip install 'dmiddleware[export]', or "
            "choose --format torch"
        ) from error
    return onnxruntime


def _write_onnx(
    program: Any, path: Path, inputs: tuple[Port, ...], outputs: tuple[Port, ...]
) -> None:
    with _quiet("torch.onnx", "onnxscript", "onnx_ir"):
        onnx = torch.onnx.export(
            program,
            input_names=[port.name for port in inputs],
            output_names=[port.name for port in outputs],
            dynamo=True,
            verbose=False,
        )
        assert onnx is not None
        onnx.save(str(path), external_data=False)


@contextmanager
def _quiet(*names: str) -> Iterator[None]:
    """Leave out what concerns only the authors of the exporter."""
    loggers = [logging.getLogger(name) for name in names]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


def _onnx_runner(path: Path, outputs: tuple[Port, ...]) -> Any:
    session = _import_onnx().InferenceSession(path.read_bytes(), providers=["CPUExecutionProvider"])

    def run(arguments: Mapping[str, Any]) -> dict[str, npt.NDArray[Any]]:
        feed = {name: port.numpy() for name, port in _named(arguments)}
        values = session.run([port.name for port in outputs], feed)
        return {port.name: value for port, value in zip(outputs, values, strict=True)}

    return run


def _torch_runner(path: Path) -> Any:
    with path.open("rb") as file:
        acting = torch.export.load(file).module()

    def run(arguments: Mapping[str, Any]) -> dict[str, npt.NDArray[Any]]:
        outputs = acting(**pytree.tree_map(torch.clone, dict(arguments)))
        return {name: tensor.detach().numpy() for name, tensor in _named(outputs)}

    return run
