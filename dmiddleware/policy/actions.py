"""From what a network returns to the actions that an environment takes, and back; masks."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, Final, Literal, Self

import gymnasium as gym
import numpy as np
import torch
import torch.nn.functional as F

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
    SimpleKind,
    action_kind_of,
    action_parts,
    action_shape_of,
    inner_spaces,
)
from dmiddleware.policy.policy_settings import PolicySettings
from dmiddleware.rl import (
    Bernoulli,
    Categorical,
    Distribution,
    Gaussian,
    Hybrid,
    MultiCategorical,
    TanhGaussian,
)
from dmiddleware.settings import Numbers
from dmiddleware.tree import Batch, Nested, leaves, nest

__all__ = [
    "ActionBounding",
    "ActionCodec",
    "ActorSettings",
    "allows_choice",
    "check_allowed",
    "mask_of",
]

ActionBounding = Literal["rescale", "clip", "tanh"]
Bounds = Sequence[Any] | torch.Tensor


_ROUNDING: Final = 1e-4
"""How far an action may leave the bounds of a Box, as a part of half its width."""


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
        self._parts: dict[str, _Part] = {}
        self._only: _Part | None = None
        self._was_used = False
        self.is_lossless = True
        if parts:
            self._build(parts)

    @classmethod
    def for_space(
        cls,
        space: gym.Space[Any],
        *,
        bounding: ActionBounding = "rescale",
        low: Bounds | None = None,
        high: Bounds | None = None,
    ) -> Self:
        """Build the codec of a space.

        Args:
            space: the action space of one environment.
            bounding: as in the class.
            low: as in the class.
            high: as in the class.

        Raises:
            SpaceError: for an unsupported space.
            ConfigError: as in the class.
        """
        codec = cls(bounding=bounding, low=low, high=high)
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
            StructureError: if outputs are missing, or the mask has another length.
        """
        if not self._parts:
            self._build(_parts_of_outputs(outputs))
        if mask is not None:
            self._check_mask(mask)
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
            own = {name: pieces[place] for name, pieces in columns.items()}
            parts[path] = part.distribution(own, masks[place])
        return Hybrid(parts)

    def _check_mask(self, mask: torch.Tensor) -> None:
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
            return self._only.to_env(raw)
        return self._mapped(lambda part, leaf: part.to_env(leaf), raw)

    def before_first(self, n: int) -> Any:
        """Return what stands for the action before the first step of ``n`` episodes, ``[n, …]``.

        Zeros, as the environment takes them; for choices that do not start at zero, the first one.
        """
        parts = {path: part.before_first(n) for path, part in self._parts.items()}
        return parts[""] if self._only is not None else nest(parts)

    def to_raw(self, action: Any) -> Any:
        """Return raw actions ``[…]`` that :meth:`to_env` maps to these actions."""
        self._was_used = True
        if self._only is not None:
            return self._only.to_raw(action)
        return self._mapped(lambda part, leaf: part.to_raw(leaf), action)

    def check(self, action: Any, *, mask: torch.Tensor | None = None) -> None:
        """Reject actions of the environment outside of its space, as in a data set of others.

        Args:
            action: ``[…]``.
            mask: ``[…]`` bool, True where a row counts; None: all do.

        Raises:
            StructureError: with the first such action and what is allowed.
        """
        by_path = dict(leaves(action))
        for path, part in self._parts.items():
            outside = part.outside(by_path[path])
            if mask is not None:
                outside = outside & mask
            if outside.any():
                row = outside.nonzero()[0].tolist()
                name = f"the part {path!r} of the action" if path else "the action"
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
        by_path = dict(leaves(self.to_raw(action)))
        return torch.cat(
            [part.features(by_path[path]).float() for path, part in self._parts.items()], -1
        )

    def allows(self, mask: torch.Tensor, action: Any) -> torch.Tensor | None:
        """Return ``[…]`` bool, whether a mask allows the environment's actions; None: unknown.

        Args:
            mask: ``[…, A]`` bool, one entry per logit.
            action: ``[…]``, as the environment takes them.
        """
        if not self._parts:
            return allows_choice(mask, action)
        self._check_mask(mask)
        by_path = dict(leaves(action))
        masks = torch.split(mask, self._n_logits, -1)
        verdicts = [
            part.allows(own, part.to_raw(by_path[path]))
            for (path, part), own in zip(self._parts.items(), masks, strict=True)
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
        own = [(path, part.kind, part.sizes) for path, part in self._parts.items()]
        if own != [(part.name, part.kind, part.sizes) for part in parts]:
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
                path: {"kind": part.kind, "sizes": list(part.sizes), **part.state()}
                for path, part in self._parts.items()
            },
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned; what it lacks stays as it is.

        Raises:
            CheckpointMismatch: if it is that of another action.
        """
        saved: Mapping[str, Any] = state["parts"]
        known = [
            ActionPart(tuple(name.split(".")) if name else (), part["kind"], tuple(part["sizes"]))
            for name, part in saved.items()
        ]
        if known and not self._parts:
            self._build(known)
        for part in known:
            own = self._parts.get(part.name)
            if own is None or (own.kind, own.sizes) != (part.kind, part.sizes):
                raise CheckpointMismatch(
                    f"the checkpoint's actions are {state['parts']}, but this policy's are {self}; "
                    "load a checkpoint of the same kind of environment"
                )
            own.load(saved[part.name])
        self._was_used = bool(state["was_used"])

    def __repr__(self) -> str:
        parts = [
            f"{path}: {part.kind} {list(part.sizes)}".removeprefix(": ")
            for path, part in self._parts.items()
        ]
        return ", ".join(parts) or "unknown"

    def _build(self, parts: Sequence[ActionPart]) -> None:
        self._parts = {
            part.name: (
                _Box(part.sizes, self._bounding)
                if part.kind == "continuous"
                else _DISCRETE[part.kind](part.sizes)
            )
            for part in parts
        }
        self._only = self._parts.get("")
        self._n_logits = [part.n_logits for part in self._parts.values()]
        self.is_lossless = all(part.n_means == 0 for part in self._parts.values())
        if self._given is None:
            return
        if not isinstance(self._only, _Box):
            raise ConfigError(
                "action_low and action_high are the bounds of a Box of actions, but this policy's "
                f"actions are {self}; leave them out"
            )
        self._only.set_bounds(*self._given)

    def _mapped(self, convert: Callable[[_Part, torch.Tensor], torch.Tensor], action: Any) -> Any:
        if not self._parts:
            return action
        by_path = dict(leaves(action))
        mapped = {path: convert(part, by_path[path]) for path, part in self._parts.items()}
        return nest(mapped) if isinstance(action, Batch) else mapped


def check_allowed(
    obs: Nested,
    outputs: Mapping[Any, Any],
    *,
    mask: Any = None,
    allows: Callable[[torch.Tensor, Any], torch.Tensor | None],
    user: str,
) -> None:
    """Reject an action that its mask forbids.

    Args:
        obs: the observations ``[E, …]`` that the policy acted on.
        outputs: what it returned: ``{"action": [E, …]}``.
        mask: what is allowed, ``[E, A]`` bool; None takes the mask that the observations have.
        allows: whether a mask ``[…, A]`` allows actions ``[…]``, bool; None where that is unknown.
        user: the policy's method, for the message.

    Raises:
        PolicyOutputError: naming the action and the allowed ones.
    """
    if mask is None:
        mask = action_mask_of(obs)
    if mask is None:
        return
    mask, action = mask.cpu(), outputs["action"]
    if not isinstance(action, Batch | Mapping | tuple):
        action = torch.as_tensor(action)
    allowed = allows(mask, action)
    if allowed is None or bool(allowed.all()):
        return
    row = () if allowed.dim() == 0 else int((~allowed).nonzero()[0, 0])
    chosen = {path: leaf[row].tolist() for path, leaf in leaves(action)}
    raise PolicyOutputError(
        f"{user} chose the action {chosen.get('', chosen)}, but its action_mask allows only "
        f"{mask[row].nonzero().flatten().tolist()} (counted from 0); mask the model's logits, for "
        "example with dmiddleware.model.masked_logit(logit, obs), and do not ask for an action "
        "where none is allowed"
    )


def allows_choice(mask: torch.Tensor, action: Any) -> torch.Tensor | None:
    """Return ``[…]`` bool, whether a mask ``[…, A]`` allows choices ``[…]``, counted from 0.

    Returns:
        None for other actions, about which a mask alone says nothing.
    """
    if not isinstance(action, torch.Tensor) or action.dim() != mask.dim() - 1:
        return None
    return mask.gather(-1, action.long().unsqueeze(-1)).squeeze(-1)


class _Part(ABC):
    """One leaf of an action: raw actions are ``[…]`` or ``[…, n]``."""

    kind: ClassVar[SimpleKind]

    def __init__(self, sizes: tuple[int, ...]) -> None:
        self.sizes = sizes
        self.n_logits, self.n_means = sum(sizes), 0
        self._shape: tuple[int, ...] = (len(sizes),)
        self._start: Any = None  # of choices: an int, or one for each; None: not known, so 0

    @abstractmethod
    def distribution(
        self, outputs: Mapping[str, torch.Tensor], mask: torch.Tensor | None
    ) -> Distribution:
        """Return the distribution over raw actions."""

    def allows(self, mask: torch.Tensor, raw: torch.Tensor) -> torch.Tensor:
        """Return ``[…]`` bool, whether a mask ``[…, n_logits]`` allows raw actions."""
        raise NotImplementedError

    @abstractmethod
    def outside(self, action: torch.Tensor) -> torch.Tensor:
        """Return ``[…]`` bool, which of the environment's actions are not in its space."""

    @abstractmethod
    def describe(self) -> str:
        """Name the space, for a message."""

    def features(self, raw: torch.Tensor) -> torch.Tensor:
        """Return raw actions as numbers ``[…, n_logits + n_means]`` of any dtype."""
        return raw

    def before_first(self, n: int) -> torch.Tensor:
        """Return the environment's actions ``[n, …]`` that stand for none."""
        return self.to_env(torch.zeros(n, len(self.sizes), dtype=torch.int64))

    def to_env(self, raw: torch.Tensor) -> torch.Tensor:
        """Return the environment's actions."""
        return raw if len(self._shape) == 1 else raw.reshape((*raw.shape[:-1], *self._shape))

    def to_raw(self, action: torch.Tensor) -> torch.Tensor:
        """Return raw actions."""
        rank = len(self._shape)
        if rank == 1:
            return action
        lead = action.shape[: action.dim() - rank]
        return action.reshape((*lead, math.prod(self._shape)))

    def set_space(self, space: gym.Space[Any], *, was_used: bool) -> None:
        """Take the details of a space, or reject those that differ from the known ones."""
        start = _start_of(space)
        if self._start not in (None, start):
            raise SpaceError(
                f"the policy's actions count from {self._start}, but the environment takes "
                f"{space}; build another policy for it with for_env(env)"
            )
        self._start, self._shape = start, tuple(space.shape or ())

    def state(self) -> dict[str, Any]:
        """Return the details."""
        start = {} if self._start is None else {"start": self._start}
        return {"shape": list(self._shape), **start}

    def load(self, state: Mapping[str, Any]) -> None:
        """Restore the details; those that the state lacks stay as they are."""
        self._shape = tuple(state.get("shape", self._shape))
        self._start = state.get("start", self._start)


class _Discrete(_Part):
    kind = "discrete"

    def distribution(
        self, outputs: Mapping[str, torch.Tensor], mask: torch.Tensor | None
    ) -> Categorical:
        return Categorical(_required(outputs, "logit"), mask)

    def allows(self, mask: torch.Tensor, raw: torch.Tensor) -> torch.Tensor:
        return mask.gather(-1, raw.unsqueeze(-1)).squeeze(-1)

    def outside(self, action: torch.Tensor) -> torch.Tensor:
        raw = self.to_raw(action)
        return (raw < 0) | (raw >= self.n_logits)

    def describe(self) -> str:
        first = self._start or 0
        return f"the choices {first} to {first + self.n_logits - 1}"

    def features(self, raw: torch.Tensor) -> torch.Tensor:
        return F.one_hot(raw, self.n_logits)

    def before_first(self, n: int) -> torch.Tensor:
        return self.to_env(torch.zeros(n, dtype=torch.int64))

    def to_env(self, raw: torch.Tensor) -> torch.Tensor:
        return raw + self._start if self._start else raw

    def to_raw(self, action: torch.Tensor) -> torch.Tensor:
        action = _as_integers(action)
        return action - self._start if self._start else action


class _MultiDiscrete(_Part):
    kind = "multi_discrete"

    def distribution(
        self, outputs: Mapping[str, torch.Tensor], mask: torch.Tensor | None
    ) -> MultiCategorical:
        return MultiCategorical(_required(outputs, "logit"), self.sizes, mask)

    def allows(self, mask: torch.Tensor, raw: torch.Tensor) -> torch.Tensor:
        ends = torch.tensor(self.sizes, device=raw.device).cumsum(0)
        first = ends - ends.new_tensor(self.sizes)
        return mask.gather(-1, raw + first).all(-1)

    def outside(self, action: torch.Tensor) -> torch.Tensor:
        raw = self.to_raw(action)
        return ((raw < 0) | (raw >= torch.tensor(self.sizes, device=raw.device))).any(-1)

    def describe(self) -> str:
        first = "" if self._start is None else f", counted from {self._start}"
        return f"the numbers of choices {[*self.sizes]}{first}"

    def features(self, raw: torch.Tensor) -> torch.Tensor:
        choices = zip(raw.unbind(-1), self.sizes, strict=True)
        return torch.cat([F.one_hot(choice, size) for choice, size in choices], -1)

    def to_env(self, raw: torch.Tensor) -> torch.Tensor:
        return super().to_env(self._shifted(raw, 1))

    def to_raw(self, action: torch.Tensor) -> torch.Tensor:
        return self._shifted(_as_integers(super().to_raw(action)), -1)

    def _shifted(self, action: torch.Tensor, sign: int) -> torch.Tensor:
        if self._start is None or not any(self._start):
            return action
        return action + sign * torch.tensor(self._start, device=action.device)


class _MultiBinary(_Part):
    kind = "multi_binary"

    def __init__(self, sizes: tuple[int, ...]) -> None:
        super().__init__(sizes)
        self._shape = sizes

    def distribution(
        self, outputs: Mapping[str, torch.Tensor], mask: torch.Tensor | None
    ) -> Bernoulli:
        return Bernoulli(_required(outputs, "logit"), mask)

    def allows(self, mask: torch.Tensor, raw: torch.Tensor) -> torch.Tensor:
        return ((raw == 0) | mask).all(-1)

    def outside(self, action: torch.Tensor) -> torch.Tensor:
        raw = self.to_raw(action)
        return ((raw != 0) & (raw != 1)).any(-1)

    def describe(self) -> str:
        return "the values 0 and 1"

    def before_first(self, n: int) -> torch.Tensor:
        return self.to_env(torch.zeros(n, *self.sizes, dtype=torch.int64))


class _Box(_Part):
    kind = "continuous"

    def __init__(self, sizes: tuple[int, ...], bounding: ActionBounding) -> None:
        super().__init__(sizes)
        self.n_logits, self.n_means = 0, sizes[0]
        self._shape = sizes
        self._bounding = bounding
        self._bounds: tuple[torch.Tensor, torch.Tensor] | None = None
        self._scales: dict[torch.device, tuple[torch.Tensor, ...]] = {}

    def distribution(
        self, outputs: Mapping[str, torch.Tensor], mask: torch.Tensor | None
    ) -> Gaussian | TanhGaussian:
        mu = _required(outputs, "mu")
        sigma = outputs["sigma"] if "sigma" in outputs else torch.zeros_like(mu)
        kind = TanhGaussian if self._bounding == "tanh" else Gaussian
        return kind(mu, sigma)

    def before_first(self, n: int) -> torch.Tensor:
        return torch.zeros(n, *self._shape)

    def to_env(self, raw: torch.Tensor) -> torch.Tensor:
        if self._bounds is not None:
            low, high, center, half, _ = self._scale(raw.device)
            if self._bounding != "clip":
                raw = center + raw * half
            raw = raw.clamp(low, high)
        return super().to_env(raw)

    def to_raw(self, action: torch.Tensor) -> torch.Tensor:
        action = super().to_raw(action)
        if action.dtype != torch.float32:  # of data that was made by hand
            action = action.float()
        if self._bounds is None or self._bounding == "clip":
            return action
        _, _, center, _, divisor = self._scale(action.device)
        return (action - center) / divisor

    def outside(self, action: torch.Tensor) -> torch.Tensor:
        action = super().to_raw(action)
        if self._bounds is None:
            return torch.zeros(action.shape[:-1], dtype=torch.bool, device=action.device)
        low, high, _, half, _ = self._scale(action.device)
        margin = _ROUNDING * half
        return ((action < low - margin) | (action > high + margin)).any(-1)

    def describe(self) -> str:
        if self._bounds is None:
            return "a Box without bounds"
        low, high = (bound.tolist() for bound in self._bounds)
        return f"the bounds {low} and {high}"

    def _scale(self, device: torch.device) -> tuple[torch.Tensor, ...]:
        """Return the bounds, centers, half widths, and what maps actions back, on a device."""
        scale = self._scales.get(device)
        if scale is None:
            assert self._bounds is not None
            low, high = self._bounds
            bounded = low.isfinite() & high.isfinite()
            center = torch.where(bounded, high / 2 + low / 2, 0.0)
            half = torch.where(bounded, high / 2 - low / 2, 1.0)
            # Where both bounds are equal, the only action is that of any raw one, such as 0.
            divisor = half.masked_fill(half == 0, 1.0)
            scale = tuple(each.to(device) for each in (low, high, center, half, divisor))
            self._scales[device] = scale
        return scale

    def set_bounds(self, low: torch.Tensor, high: torch.Tensor) -> None:
        """Set the bounds, ``[A]``.

        Raises:
            ConfigError: if they are not as long as the action.
            SpaceError: if tanh is to map to an infinite bound.
        """
        if low.shape != self.sizes:
            raise ConfigError(
                f"action_low and action_high must be as long as the action, {self.sizes[0]}, got "
                f"{low.tolist()} and {high.tolist()}"
            )
        if self._bounding == "tanh" and not bool((low.isfinite() & high.isfinite()).all()):
            raise SpaceError(
                f"action_bounding='tanh' needs finite bounds, got {low.tolist()} and "
                f"{high.tolist()}; give the env finite ones with "
                "gymnasium.wrappers.TransformAction, or use an algorithm with 'rescale'"
            )
        self._bounds, self._scales = (low, high), {}

    def set_space(self, space: gym.Space[Any], *, was_used: bool) -> None:
        assert isinstance(space, gym.spaces.Box)
        super().set_space(space, was_used=was_used)
        low, high = _inner_bounds(space)
        if self._bounds is None:
            if not was_used:
                self.set_bounds(low, high)
            return
        own_low, own_high = self._bounds
        if not any(
            torch.equal(own_low, lower) and torch.equal(own_high, upper)
            for lower, upper in ((low, high), _nearest_bounds(space))
        ):
            raise SpaceError(
                f"the policy gives actions from {own_low.tolist()} to {own_high.tolist()}, the "
                f"environment takes {low.tolist()} to {high.tolist()}; set action_low and "
                "action_high to the environment's bounds"
            )
        self.set_bounds(low, high)

    def state(self) -> dict[str, Any]:
        if self._bounds is None:
            return super().state()
        low, high = self._bounds
        return {**super().state(), "low": low.clone(), "high": high.clone()}

    def load(self, state: Mapping[str, Any]) -> None:
        super().load(state)
        if "low" in state:
            self.set_bounds(*(state[name].to("cpu", torch.float32) for name in ("low", "high")))


_DISCRETE: dict[SimpleKind, type[_Part]] = {
    part.kind: part for part in (_Discrete, _MultiDiscrete, _MultiBinary)
}


def _nearest_bounds(space: gym.spaces.Box) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the float32 numbers nearest to the bounds of a Box, ``[A]``."""
    with np.errstate(over="ignore"):
        low, high = (bound.flatten().astype(np.float32) for bound in (space.low, space.high))
    return torch.from_numpy(low), torch.from_numpy(high)


def _inner_bounds(space: gym.spaces.Box) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the least and the largest float32 numbers in a Box, ``[A]``.

    A float64 bound, such as 0.3, may lie between two of them.
    """
    low, high = (bound.numpy() for bound in _nearest_bounds(space))
    infinity = np.float32(np.inf)
    least = np.where(low < space.low.flatten(), np.nextafter(low, infinity), low)
    largest = np.where(high > space.high.flatten(), np.nextafter(high, -infinity), high)
    has_some = least <= largest  # else, the nearest number has to do
    return (
        torch.from_numpy(np.where(has_some, least, low)),
        torch.from_numpy(np.where(has_some, largest, high)),
    )


def _required(outputs: Mapping[str, torch.Tensor], name: str) -> torch.Tensor:
    if name not in outputs:
        raise StructureError(
            f"the model returned {', '.join(outputs) or 'nothing'}, but the action needs {name}; "
            "return it"
        )
    return outputs[name]


def _parts_of_outputs(outputs: Mapping[str, torch.Tensor]) -> tuple[ActionPart, ...]:
    """Return the action of a model that does not declare its actions."""
    if "logit" in outputs and "mu" in outputs:
        raise StructureError(
            "the model returned logit and mu, and the action space is not known; build the policy "
            "with for_env(env)"
        )
    if "logit" in outputs:
        return action_parts("discrete", outputs["logit"].shape[-1])
    return action_parts("continuous", _required(outputs, "mu").shape[-1])


def _as_integers(action: torch.Tensor) -> torch.Tensor:
    if action.is_floating_point():
        raise StructureError(
            f"discrete actions must be integers, got {action.dtype}; convert them with .long(), or "
            "learn from a model with action_space='continuous'"
        )
    return action.long()


def _checked_bounds(low: Bounds, high: Bounds) -> tuple[torch.Tensor, torch.Tensor]:
    below, above = (torch.as_tensor(bound, dtype=torch.float32) for bound in (low, high))
    if below.shape != above.shape or below.dim() == 0 or not bool((below < above).all()):
        raise ConfigError(
            "action_low and action_high must be as long as the action, each lower bound below its "
            f"upper one, got {below.tolist()} and {above.tolist()}"
        )
    return below.flatten(), above.flatten()


def _start_of(space: gym.Space[Any]) -> int | list[int] | None:
    """Return from where the choices of a space count; None: it has no choices."""
    match space:
        case gym.spaces.Discrete():
            return int(space.start)
        case gym.spaces.MultiDiscrete():
            return [int(first) for first in space.start.flatten()]
    return None


def _leaf_spaces(space: gym.Space[Any]) -> Iterator[gym.Space[Any]]:
    """Yield the leaves of an action space in the order of :func:`action_parts`."""
    if not isinstance(space, gym.spaces.Dict | gym.spaces.Tuple):
        yield space
        return
    inner = dict(inner_spaces(space))
    for name in sorted_names(inner):
        yield from _leaf_spaces(inner[name])
