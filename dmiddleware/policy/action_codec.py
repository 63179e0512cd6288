"""From what a network returns to the actions that an environment takes, and back; masks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Self, overload

import gymnasium as gym
import torch

from dmiddleware.errors import (
    CheckpointMismatch,
    ConfigError,
    PolicyOutputError,
    SpaceError,
    StructureError,
)
from dmiddleware.model.action_mask import action_mask_of, as_mask, sorted_names
from dmiddleware.model.spaces import (
    ActionPart,
    action_features,
    action_kind_of,
    action_parts,
    action_shape_of,
    inner_spaces,
)
from dmiddleware.policy.network_outputs import named_outputs, with_rows
from dmiddleware.policy.part_codec import (
    ActionBounding,
    PartCodec,
    codec_of,
)
from dmiddleware.policy.policy_settings import PolicySettings
from dmiddleware.rl import Distribution, Hybrid
from dmiddleware.settings import Numbers
from dmiddleware.tree import Batch, Nested, leaves, leaves_by_path, nest

__all__ = ["ActionCodec", "ActorSettings", "mask_of"]

Bounds = Sequence[Any] | torch.Tensor


class ActorSettings(PolicySettings):
    """The settings of policies whose actors return a distribution, or a bounded action."""

    action_low: Numbers | None = None
    """Lower bounds of a Box of actions; None uses the environment's."""
    action_high: Numbers | None = None
    """Upper bounds of a Box of actions; None uses the environment's."""
    action_bounding: ActionBounding = "rescale"
    """How to keep actions within the bounds: by mapping [-1, 1] to them, by clipping, or by mapping
    the tanh of a Gaussian to them."""


def mask_of(obs: Nested, given: Nested | None) -> torch.Tensor | None:
    """Return which actions are allowed, ``[…, A]`` bool: a given mask, or the observations' own.

    Args:
        obs: ``[…, *obs_shape]``.
        given: a mask from elsewhere; None takes the key ``action_mask`` of the observations.

    Returns:
        None: all actions are allowed.
    """
    if given is not None:
        return as_mask(given)
    return None if type(obs) is torch.Tensor else action_mask_of(obs)


class ActionCodec:
    """Maps between network outputs, raw actions and the actions of an environment.

    A network returns ``logit``, ``mu`` and ``sigma``, as far as the action has them (see
    :class:`~dmiddleware.model.Actor`). :meth:`distribution` turns these into a distribution over
    raw actions, in which log-probabilities are measured; :meth:`to_env` gives the environment's
    actions, and :meth:`to_raw` maps these back:

    - Discrete: the raw action counts from 0, the environment's from ``start``.
    - MultiDiscrete and MultiBinary: ``[…, K]``, in the environment of any shape.
    - Box: ``[…, A]`` floating point, in the environment of any shape, within its bounds:
      ``bounding="rescale"`` maps raw ``[-1, 1]`` to ``[low, high]`` and clips, so a new network,
      whose outputs are about 0 with a deviation of 1, explores the whole Box. ``"tanh"`` does the
      same with the tanh of a Gaussian, which needs no clipping. ``"clip"`` clips raw actions to
      ``[low, high]``. Dimensions without finite bounds are not changed; one with equal bounds has
      the same action for every raw one. Actions are float32, also within float64 bounds.
    - Dict and Tuple: a batch of the actions of the parts, by name (a Tuple's are "0", "1", …).

    Without a space, actions count from 0, and those of a Box are not bounded; :meth:`set_space`
    takes these details from a space.

    Args:
        parts: what the network gives, see :func:`~dmiddleware.model.action_parts`; empty: what the
            first space or the first outputs say.
        bounding: how actions stay within the bounds of a Box.
        low: lower bounds of the only Box; None uses the space's.
        high: upper bounds of the only Box.

    Attributes:
        is_lossless: whether :meth:`to_raw` recovers every raw action exactly.
        output_sizes: by the name of an output of the network, the numbers that an action needs;
            empty: the action is unknown.

    Raises:
        ConfigError: if only one bound is given, they differ in length, a lower bound is not below
            its upper bound, or the action is not a Box.

    Example:
        >>> space = gym.spaces.Dict(
        ...     {"move": gym.spaces.Discrete(3, start=1), "aim": gym.spaces.Box(-2, 2, (2,))}
        ... )
        >>> codec = ActionCodec.for_space(space)
        >>> codec.n_outputs
        5
        >>> outputs = {"logit": torch.tensor([[0.0, 0.0, 9.0]]), "mu": torch.ones(1, 2) / 2}
        >>> action = codec.to_env(codec.distribution(outputs).mode())
        >>> action["move"], action["aim"]
        (tensor([3]), tensor([[1., 1.]]))
    """

    def __init__(
        self,
        parts: Sequence[ActionPart] = (),
        *,
        bounding: ActionBounding = "rescale",
        low: Bounds | None = None,
        high: Bounds | None = None,
    ) -> None:
        if (low is None) != (high is None):
            raise ConfigError(
                f"action_low and action_high belong together, got {low!r} and {high!r}; "
                "give both, or neither"
            )
        self._bounding: ActionBounding = bounding
        self._given: tuple[torch.Tensor, torch.Tensor] | None = None
        if low is not None and high is not None:
            self._given = _checked_bounds(low, high)
        self._parts: dict[str, PartCodec] = {}
        self._only: PartCodec | None = None
        self.output_sizes: dict[str, int] = {}
        self._was_used = False
        self.is_lossless = True
        if parts:
            self._build(parts)

    @classmethod
    def for_space(cls, space: gym.Space[Any]) -> Self:
        """Build the codec of the action space of one environment.

        Raises:
            SpaceError: for an unsupported space.
        """
        codec = cls()
        codec.set_space(space)
        return codec

    @classmethod
    def for_policy(cls, cfg: object, parts: Sequence[ActionPart]) -> Self:
        """Build the codec that a policy's settings describe.

        Args:
            cfg: the settings of the policy; :class:`ActorSettings` if actions may be a Box.
            parts: what its model declares.
        """
        if not isinstance(cfg, ActorSettings):
            return cls(parts)
        return cls(parts, bounding=cfg.action_bounding, low=cfg.action_low, high=cfg.action_high)

    @property
    def n_outputs(self) -> int:
        """How many numbers a network returns for an action: its logits and its means."""
        return sum(part.n_logits + part.n_means for part in self._parts.values())

    def distribution(
        self, outputs: Mapping[str, torch.Tensor], mask: torch.Tensor | None = None
    ) -> Distribution:
        """Return the distribution over raw actions.

        Args:
            outputs: ``logit``, ``mu`` and ``sigma``, each ``[…, A]``, as far as the action has
                them. A model without ``sigma`` is deterministic: its standard deviation is 0.
            mask: ``[…, A]`` bool, one entry per logit, True where the action is allowed.

        Raises:
            PolicyOutputError: if outputs are missing.
            SpaceError: if they have another length than the action.
            StructureError: if the action is unknown, or the mask has another length.
        """
        if not self._parts:
            self._build(_parts_of_outputs(outputs))
        self.check_outputs(outputs)
        if mask is not None:
            self.check_mask(mask)
        if self._only is not None:
            return self._only.distribution(outputs, mask)
        n_means = [part.n_means for part in self._parts.values()]
        columns = {
            name: torch.split(outputs[name], self._n_logits if name == "logit" else n_means, -1)
            for name in ("logit", "mu", "sigma")
            if name in outputs
        }
        masks = [None] * len(n_means) if mask is None else torch.split(mask, self._n_logits, -1)
        parts = {}
        for place, (path, part) in enumerate(self._parts.items()):
            pieces_of_part = {name: pieces[place] for name, pieces in columns.items()}
            parts[path] = part.distribution(pieces_of_part, masks[place])
        return Hybrid(parts)

    def check_outputs(self, outputs: Any, *, draws: bool = False) -> None:
        """Reject outputs of a network that do not fit this action.

        Args:
            outputs: what the network returned.
            draws: whether a Box needs ``sigma`` too, because its actions are drawn.

        Raises:
            PolicyOutputError: if they are not a dictionary, or one of them is missing or not of
                floating-point numbers.
            SpaceError: if the last dimension of an output differs from the action's.
        """
        sizes = self.output_sizes
        named_outputs(outputs, *(name for name in sizes if draws or name != "sigma"))
        for name, size in sizes.items():
            output = outputs.get(name)
            is_numbers = type(output) is torch.Tensor and output.is_floating_point()
            if not is_numbers or output.shape[-1:] != (size,):
                self._check_output(name, output, size)

    def _check_output(self, name: str, output: Any, size: int) -> None:
        if output is None and name == "sigma":
            return
        if not isinstance(output, torch.Tensor) or output.dim() == 0:
            with_rows(output, ("…", size), what=name)
        if not output.is_floating_point():
            with_rows(output, output.shape, what=name)
        if output.shape[-1] != size:
            raise SpaceError(
                f"the output {name} of the model has {output.shape[-1]} numbers for an action, but "
                f"the action, {self}, needs {size}; give the last layer {size} outputs"
            )

    def check_mask(self, mask: torch.Tensor) -> None:
        """Reject a mask that does not have one entry for each discrete option.

        Args:
            mask: ``[…, A]``.

        Raises:
            StructureError: with both numbers.
        """
        n_logits = sum(self._n_logits)
        if n_logits == 0 or mask.shape[-1] != n_logits:
            raise StructureError(
                f"the action mask has {mask.shape[-1]} entries, but the action has {n_logits} "
                "discrete options; give one entry for each option"
            )

    def to_env(self, raw: Any) -> Any:
        """Return the environment's actions of raw actions ``[…]``.

        Those of a Dict or Tuple are batches, or dictionaries by dotted path if not given a batch.
        """
        self._was_used = True
        if self._only is not None:
            return raw if self._only.is_identity else self._only.to_env(raw)
        return self._mapped(lambda part, leaf: part.to_env(leaf), raw)

    def before_first(self, n: int) -> Any:
        """Return what stands for the action before the first step of ``n`` episodes, ``[n, …]``.

        Zeros, as the environment takes them; for choices that do not start at zero, the first one.
        """
        first = {path: part.before_first(n) for path, part in self._parts.items()}
        return first[""] if self._only is not None else nest(first)

    @overload
    def to_raw(self, action: torch.Tensor) -> torch.Tensor: ...
    @overload
    def to_raw(self, action: Nested) -> Nested: ...
    def to_raw(self, action: Nested) -> Nested:
        """Return raw actions ``[…]`` that :meth:`to_env` maps to these actions."""
        self._was_used = True
        if self._only is not None:
            is_raw = self._only.is_identity and action.dtype is torch.int64
            return action if is_raw else self._only.to_raw(action)
        return self._mapped(lambda part, leaf: part.to_raw(leaf), action)

    def check(
        self, action: Any, *, mask: torch.Tensor | None = None, lead: tuple[int, ...] | None = None
    ) -> None:
        """Reject actions outside of the environment's space, as in a data set of others.

        Actions have the parts and the shape that the space has, and values in it.

        Args:
            action: ``[…]``.
            mask: ``[…]`` bool, True where a row counts; None: all do.
            lead: the leading dimensions ``[…]``; None: not known.

        Raises:
            StructureError: with the first such action and what is allowed.
        """
        by_path = leaves_by_path(action)
        for path, part in self._parts.items():
            name = f"the part {path!r} of the action" if path else "the action"
            if path not in by_path:
                raise StructureError(
                    f"{name} is missing in the data set, whose actions have "
                    f"{', '.join(map(repr, by_path))}; build the policy for the space that they "
                    "come from"
                )
            shape, item = tuple(by_path[path].shape), part.item_shape
            rows = shape[: max(1, len(shape) - len(item))]
            if lead is not None and len(rows) > len(lead):  # such as [N, 1] for [N]
                rows = lead
            expected = (*rows, *item)
            if shape != expected:
                raise StructureError(
                    f"{name} has shape {shape}, but must be {expected}, as the policy's actions "
                    "are; build the policy for the space that the data set comes from, or reshape "
                    "its actions"
                )
            outside = part.outside(by_path[path])
            if mask is not None:
                outside = outside & mask
            if outside.any():
                row = outside.nonzero()[0].tolist()
                raise StructureError(
                    f"{name} in row {', '.join(map(str, row))} is "
                    f"{by_path[path][tuple(row)].tolist()}, outside of {part.describe()}; clip or "
                    "correct the actions of the data set, or build the policy for the space that "
                    "they come from"
                )

    def features(self, action: Any) -> torch.Tensor:
        """Return actions as the input of a network, ``[…, n_outputs]`` float32.

        Choices are one-hot, bits are 0 or 1, and numbers are relative to the bounds, as
        :meth:`to_raw` gives them.

        Args:
            action: ``[…]``, as the environment takes them.
        """
        return action_features([part.part for part in self._parts.values()], self.to_raw(action))

    def check_allowed(
        self, obs: Nested, outputs: Mapping[Any, Any], *, mask: Nested | None = None, user: str
    ) -> None:
        """Reject an action that its mask forbids.

        Args:
            obs: the observations ``[E, …]`` that the policy acted on.
            outputs: what it returned: ``{"action": [E, …]}``, as the environment takes them.
            mask: what is allowed, ``[E, A]`` bool; None takes the mask that the observations have.
            user: the policy's method, for the message.

        Raises:
            PolicyOutputError: naming the action and the allowed ones.
        """
        mask_given = mask_of(obs, mask)
        if mask_given is None:
            return
        on_cpu, action = mask_given.cpu(), outputs["action"]
        if not isinstance(action, Batch | Mapping | tuple):
            action = torch.as_tensor(action)
        allowed = self._allows(on_cpu, action)
        if allowed is None or bool(allowed.all()):
            return
        row = tuple((~allowed).nonzero()[0].tolist())  # of several agents, of one of them
        chosen = {path: leaf[row].tolist() for path, leaf in leaves(action)}
        raise PolicyOutputError(
            f"{user} chose the action {chosen.get('', chosen)}, but its action_mask allows only "
            f"{on_cpu[row].nonzero().flatten().tolist()} (counted from 0); mask the model's "
            "logits, for example with dmiddleware.model.masked_logit(logit, obs), and do not ask "
            "for an action where none is allowed"
        )

    def _allows(self, mask: torch.Tensor, action: Any) -> torch.Tensor | None:
        """Return ``[…]`` bool, whether a mask ``[…, A]`` allows actions ``[…]``; None: unknown."""
        if not self._parts:
            # Choices count from 0, and of other actions a mask alone says nothing.
            if not isinstance(action, torch.Tensor) or action.dim() != mask.dim() - 1:
                return None
            return mask.gather(-1, action.long().unsqueeze(-1)).squeeze(-1)
        self.check_mask(mask)
        by_path = leaves_by_path(action)
        masks = torch.split(mask, self._n_logits, -1)
        verdicts = [
            part.allows(part_mask, part.to_raw(by_path[path]))
            for (path, part), part_mask in zip(self._parts.items(), masks, strict=True)
            if part.n_logits
        ]
        return torch.stack(verdicts).all(0)

    def set_space(self, space: gym.Space[Any]) -> None:
        """Take ``start``, shapes and bounds of a space, or check that they are the same.

        Bounds are not taken if actions were mapped without bounds before.

        Raises:
            SpaceError: if the space does not fit the network, or differs from the one before.
        """
        parts = action_parts(action_kind_of(space), action_shape_of(space))
        if not self._parts:
            self._build(parts)
        if tuple(part.part for part in self._parts.values()) != parts:
            raise SpaceError(
                f"the policy's actions are {self}, but the environment takes {space}; build the "
                "policy with for_env(env)"
            )
        for part, leaf in zip(self._parts.values(), _leaf_spaces(space), strict=True):
            part.set_space(leaf, was_used=self._was_used)

    def state_dict(self) -> dict[str, Any]:
        """Return what is known of the space, by part."""
        return {
            "was_used": self._was_used,
            "parts": {
                path: {"kind": part.part.kind, "sizes": list(part.part.sizes), **part.state()}
                for path, part in self._parts.items()
            },
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned; what it lacks stays as it is.

        Raises:
            CheckpointMismatch: if it is that of another action.
        """
        saved: Mapping[str, Any] = state["parts"]
        described = [
            ActionPart(tuple(name.split(".")) if name else (), part["kind"], tuple(part["sizes"]))
            for name, part in saved.items()
        ]
        if described and not self._parts:
            self._build(described)
        for part in described:
            present = self._parts.get(part.name)
            if present is None or present.part != part:
                raise CheckpointMismatch(
                    f"the checkpoint's actions are {state['parts']}, but this policy's are {self}; "
                    "load a checkpoint of the same kind of environment"
                )
            present.load(saved[part.name])
        self._was_used = bool(state["was_used"])

    def __repr__(self) -> str:
        parts = [
            f"{path}: {part.part.kind} {list(part.part.sizes)}".removeprefix(": ")
            for path, part in self._parts.items()
        ]
        return ", ".join(parts) or "unknown"

    def _build(self, parts: Sequence[ActionPart]) -> None:
        self._parts = {part.name: codec_of(part, self._bounding) for part in parts}
        self._only = self._parts.get("")
        self._n_logits = [part.n_logits for part in self._parts.values()]
        n_means = sum(part.n_means for part in self._parts.values())
        sizes = {"logit": sum(self._n_logits), "mu": n_means, "sigma": n_means}
        self.output_sizes = {name: size for name, size in sizes.items() if size > 0}
        self.is_lossless = all(part.n_means == 0 for part in self._parts.values())
        if self._given is None:
            return
        if self._only is None or self._only.part.kind != "continuous":
            raise ConfigError(
                "action_low and action_high are the bounds of a Box of actions, but this policy's "
                f"actions are {self}; leave them out"
            )
        self._only.set_bounds(*self._given)

    def _mapped(
        self, convert: Callable[[PartCodec, torch.Tensor], torch.Tensor], action: Any
    ) -> Any:
        if not self._parts:
            return action
        by_path = leaves_by_path(action)
        mapped = {path: convert(part, by_path[path]) for path, part in self._parts.items()}
        return nest(mapped) if isinstance(action, Batch) else mapped


def _parts_of_outputs(outputs: Mapping[str, torch.Tensor]) -> tuple[ActionPart, ...]:
    """Return the action of a model that does not declare its actions."""
    if "logit" in outputs and "mu" in outputs:
        raise StructureError(
            "the model returned logit and mu, and the action space is not known; build the policy "
            "with for_env(env)"
        )
    if "logit" in outputs:
        return action_parts("discrete", outputs["logit"].shape[-1])
    if "mu" not in outputs:
        raise StructureError(
            f"the model returned {', '.join(outputs) or 'nothing'}, but the action needs mu; "
            "return it"
        )
    return action_parts("continuous", outputs["mu"].shape[-1])


def _checked_bounds(low: Bounds, high: Bounds) -> tuple[torch.Tensor, torch.Tensor]:
    below, above = (torch.as_tensor(bound, dtype=torch.float32) for bound in (low, high))
    if below.shape != above.shape or below.dim() == 0 or not bool((below < above).all()):
        raise ConfigError(
            "action_low and action_high must be as long as the action, each lower bound below its "
            f"upper one, got {below.tolist()} and {above.tolist()}"
        )
    return below.flatten(), above.flatten()


def _leaf_spaces(space: gym.Space[Any]) -> Iterator[gym.Space[Any]]:
    """Yield the leaves of an action space in the order of :func:`action_parts`."""
    if not isinstance(space, gym.spaces.Dict | gym.spaces.Tuple):
        yield space
        return
    inner = dict(inner_spaces(space))
    for name in sorted_names(inner):
        yield from _leaf_spaces(inner[name])
