"""Distributions over actions: what acting, evaluating and learning do with a policy's outputs.

They do what ``torch.distributions`` does, without its argument checks, which cost more than the
arithmetic for a handful of environments. A *raw* action is what a distribution draws: the number of
a choice from 0, or a point of a Gaussian. :class:`~dmiddleware.policy.ActionCodec` maps it to the
environment's action.

Masks are bool, True where an action is allowed, and have one entry per logit. A forbidden action
gets the lowest finite logit, not minus infinity, so entropies and gradients stay finite (Huang and
Ontañón, "A Closer Look at Invalid Action Masking", 2022). Where a mask allows nothing, as for a
player who is not to move, the logits stay as they are.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, Self

import numpy as np
import torch
import torch.nn.functional as F

from dmiddleware.errors import StructureError
from dmiddleware.tree import Batch, Value, leaves_by_path, nest

__all__ = [
    "Bernoulli",
    "Categorical",
    "Distribution",
    "Gaussian",
    "Hybrid",
    "MultiCategorical",
    "TanhGaussian",
    "mask_logit",
]

_HALF_LOG_2PI = 0.5 * math.log(2.0 * math.pi)
# The largest float32 below 1 that atanh maps to a finite number with some room to spare.
_SQUASH_LIMIT = 1.0 - 1e-6
_N_NODES = 32


class Distribution(Protocol):
    """A distribution over raw actions for each of the leading dimensions ``[…]``.

    Raw actions are tensors; those of a :class:`Hybrid` are batches.
    """

    def sample(self, generator: torch.Generator | None = None) -> Value:
        """Draw raw actions, without gradient.

        Args:
            generator: source of randomness, on the device of the outputs; None: torch's own.
        """
        ...

    def mode(self) -> Value:
        """Return the most likely raw actions."""
        ...

    def log_prob(self, raw: Any) -> torch.Tensor:
        """Return ``[…]`` log-probabilities (densities) of raw actions."""
        ...

    def entropy(self) -> torch.Tensor:
        """Return ``[…]`` entropies, in nats."""
        ...

    def kl_divergence(self, other: Self) -> torch.Tensor:
        """Return ``[…]``, KL(self ‖ other) in nats, of a distribution with the same mask."""
        ...


def mask_logit(logit: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    """Give forbidden actions the lowest finite logit; rows that allow nothing stay as they are.

    Args:
        logit: ``[…, A]``, logits or action values.
        mask: ``[…, A]`` bool, True where the action is allowed; None allows everything.
    """
    if mask is None:
        return logit
    forbidden = ~mask & mask.any(-1, keepdim=True)
    return logit.masked_fill(forbidden, torch.finfo(logit.dtype).min)


class Categorical:
    """One choice of ``A``. Raw actions are ``[…]`` int64, counted from 0.

    Args:
        logit: ``[…, A]``, not necessarily normalized.
        mask: ``[…, A]`` bool; None allows everything.

    Attributes:
        logit: with the mask applied.

    Example:
        >>> logit, mask = torch.zeros(2, 3), torch.tensor([[True, True, True], [False, True, True]])
        >>> distribution = Categorical(logit, mask)
        >>> distribution.mode()
        tensor([0, 1])
        >>> distribution.log_prob(torch.tensor([0, 1])).exp()
        tensor([0.3333, 0.5000])
    """

    def __init__(self, logit: torch.Tensor, mask: torch.Tensor | None = None) -> None:
        self.logit = mask_logit(logit, mask)
        self._log_probs: torch.Tensor | None = None

    @property
    def log_probs(self) -> torch.Tensor:
        """The log-probability of each choice, ``[…, A]``."""
        if self._log_probs is None:
            self._log_probs = F.log_softmax(self.logit, dim=-1)
        return self._log_probs

    def sample(self, generator: torch.Generator | None = None) -> torch.Tensor:
        """Draw a choice ``[…]`` int64.

        Raises:
            RuntimeError: if a logit on the CPU is NaN.
        """
        probs = self.log_probs.exp()
        if not probs.is_cpu:
            # The same as multinomial, without its check, which would wait for the device.
            return (probs / torch.empty_like(probs).exponential_(generator=generator)).argmax(-1)
        flat = probs if probs.dim() == 2 else probs.reshape(-1, probs.shape[-1])
        return torch.multinomial(flat, 1, generator=generator).reshape(probs.shape[:-1])

    def mode(self) -> torch.Tensor:
        """Return the most likely choice, ``[…]`` int64."""
        return self.logit.argmax(-1)

    def log_prob(self, raw: torch.Tensor) -> torch.Tensor:
        """Return ``[…]`` log-probabilities of choices ``[…]`` int64."""
        return self.log_probs.gather(-1, raw.unsqueeze(-1)).squeeze(-1)

    def entropy(self) -> torch.Tensor:
        """Return ``[…]`` entropies, in nats."""
        return -(self.log_probs.exp() * self.log_probs).sum(-1)

    def kl_divergence(self, other: Self) -> torch.Tensor:
        """Return ``[…]``, KL(self ‖ other) in nats, of a distribution with the same mask."""
        return (self.log_probs.exp() * (self.log_probs - other.log_probs)).sum(-1)


class MultiCategorical:
    """Several independent choices. Raw actions are ``[…, K]`` int64, counted from 0.

    Args:
        logit: ``[…, sum(sizes)]``, the logits of all choices one after the other.
        sizes: how many options each of the ``K`` choices has.
        mask: ``[…, sum(sizes)]`` bool; None allows everything.

    Attributes:
        choices: the choices as one :class:`Categorical` ``[…, K]``; its last dimension is that of
            the choice with the most options.

    Raises:
        StructureError: if the number of logits is not ``sum(sizes)``.

    Example:
        >>> MultiCategorical(torch.tensor([[0.0, 1.0, 0.0, 0.0, 5.0]]), (2, 3)).mode()
        tensor([[1, 2]])
    """

    def __init__(
        self, logit: torch.Tensor, sizes: Sequence[int], mask: torch.Tensor | None = None
    ) -> None:
        lowest = torch.finfo(logit.dtype).min
        allowed = None if mask is None else _by_choice(mask, sizes, False)
        self.choices = Categorical(_by_choice(logit, sizes, lowest), allowed)

    def sample(self, generator: torch.Generator | None = None) -> torch.Tensor:
        """Draw choices ``[…, K]`` int64."""
        return self.choices.sample(generator)

    def mode(self) -> torch.Tensor:
        """Return the most likely choices, ``[…, K]`` int64."""
        return self.choices.mode()

    def log_prob(self, raw: torch.Tensor) -> torch.Tensor:
        """Return ``[…]`` log-probabilities of choices ``[…, K]`` int64."""
        return self.choices.log_prob(raw).sum(-1)

    def entropy(self) -> torch.Tensor:
        """Return ``[…]`` entropies, in nats."""
        return self.choices.entropy().sum(-1)

    def kl_divergence(self, other: Self) -> torch.Tensor:
        """Return ``[…]``, KL(self ‖ other) in nats, of a distribution with the same mask."""
        return self.choices.kl_divergence(other.choices).sum(-1)


class Bernoulli:
    """Several independent bits. Raw actions are ``[…, N]`` int8, 0 or 1.

    Args:
        logit: ``[…, N]``, the logarithm of the odds that a bit is 1.
        mask: ``[…, N]`` bool, True where the bit may be 1; None allows everything. Where nothing
            is allowed, all bits are 0.

    Attributes:
        logit: with the mask applied.
    """

    def __init__(self, logit: torch.Tensor, mask: torch.Tensor | None = None) -> None:
        lowest = torch.finfo(logit.dtype).min
        self.logit = logit if mask is None else logit.masked_fill(~mask, lowest)

    def sample(self, generator: torch.Generator | None = None) -> torch.Tensor:
        """Draw bits ``[…, N]`` int8."""
        lots = torch.rand(self.logit.shape, generator=generator, device=self.logit.device)
        return (lots < self.logit.sigmoid()).to(torch.int8)

    def mode(self) -> torch.Tensor:
        """Return the most likely bits, ``[…, N]`` int8."""
        return (self.logit > 0).to(torch.int8)

    def log_prob(self, raw: torch.Tensor) -> torch.Tensor:
        """Return ``[…]`` log-probabilities of bits ``[…, N]``."""
        return -_bit_errors(self.logit, raw.to(self.logit.dtype)).sum(-1)

    def entropy(self) -> torch.Tensor:
        """Return ``[…]`` entropies, in nats."""
        return _bit_errors(self.logit, self.logit.sigmoid()).sum(-1)

    def kl_divergence(self, other: Self) -> torch.Tensor:
        """Return ``[…]``, KL(self ‖ other) in nats, of a distribution with the same mask."""
        return _bit_errors(other.logit, self.logit.sigmoid()).sum(-1) - self.entropy()


class Gaussian:
    """A diagonal Gaussian. Raw actions are ``[…, A]`` floating point, unbounded.

    Args:
        mu: ``[…, A]`` means.
        sigma: ``[…, A]`` standard deviations, positive.
    """

    def __init__(self, mu: torch.Tensor, sigma: torch.Tensor) -> None:
        self.mu, self.sigma = mu, sigma
        self._draw: tuple[torch.Tensor, torch.Tensor] | None = None

    def sample(self, generator: torch.Generator | None = None) -> torch.Tensor:
        """Draw ``[…, A]``, without gradient."""
        raw = self.rsample(generator)
        return raw.detach() if raw.requires_grad else raw

    def rsample(
        self, generator: torch.Generator | None = None, *, noise: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Draw ``[…, A]``; gradients flow to ``mu`` and ``sigma``.

        Args:
            generator: draws the noise; None: torch's own.
            noise: ``[…, A]`` standard normal noise that was drawn before.
        """
        if noise is None:
            noise = torch.empty_like(self.mu).normal_(generator=generator)
        raw = self.mu + self.sigma * noise
        self._draw = raw, noise
        return raw

    def mode(self) -> torch.Tensor:
        """Return the means, ``[…, A]``."""
        return self.mu

    def log_prob(self, raw: torch.Tensor) -> torch.Tensor:
        """Return ``[…]`` log-densities of ``raw`` ``[…, A]``."""
        draw = self._draw
        if draw is not None and raw is draw[0] and not torch.is_grad_enabled():
            normalized = draw[1]
        else:
            normalized = (raw - self.mu) / self.sigma
        return (-0.5 * normalized.square() - self.sigma.log() - _HALF_LOG_2PI).sum(-1)

    def entropy(self) -> torch.Tensor:
        """Return ``[…]`` entropies, in nats."""
        return (self.sigma.log() + (0.5 + _HALF_LOG_2PI)).sum(-1)

    def kl_divergence(self, other: Self) -> torch.Tensor:
        """Return ``[…]``, KL(self ‖ other) in nats."""
        scale = self.sigma / other.sigma
        shift = (self.mu - other.mu) / other.sigma
        return (0.5 * (scale.square() + shift.square() - 1.0) - scale.log()).sum(-1)


class TanhGaussian:
    """The tanh of a diagonal Gaussian. Raw actions are ``[…, A]`` in ``(-1, 1)``.

    Densities are corrected for the tanh as in Haarnoja et al., "Soft Actor-Critic" (2018),
    appendix C. The log-density of the last draw is exact, also where tanh saturates.

    Args:
        mu: ``[…, A]`` means of the Gaussian.
        sigma: ``[…, A]`` its standard deviations, positive.
    """

    def __init__(self, mu: torch.Tensor, sigma: torch.Tensor) -> None:
        self._base = Gaussian(mu, sigma)
        self._draw: tuple[torch.Tensor, torch.Tensor] | None = None

    def sample(self, generator: torch.Generator | None = None) -> torch.Tensor:
        """Draw ``[…, A]``, without gradient."""
        before = self._base.sample(generator)
        self._draw = before.tanh(), before
        return self._draw[0]

    def rsample(
        self, generator: torch.Generator | None = None, *, noise: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Draw ``[…, A]``; gradients flow to ``mu`` and ``sigma``.

        Args:
            generator: draws the noise; None: torch's own.
            noise: ``[…, A]`` standard normal noise that was drawn before.
        """
        before = self._base.rsample(generator, noise=noise)
        drawn = before.tanh()
        self._draw = drawn, before
        return drawn

    def mode(self) -> torch.Tensor:
        """Return the tanh of the means (the median of each dimension), ``[…, A]``."""
        return self._base.mu.tanh()

    def log_prob(self, raw: torch.Tensor) -> torch.Tensor:
        """Return ``[…]`` log-densities of ``raw`` ``[…, A]``.

        An action that is not this object's last draw is clamped to within 1e-6 of -1 and 1, where
        the density is undefined.
        """
        if self._draw is not None and raw is self._draw[0]:
            before = self._draw[1]
        else:
            before = raw.clamp(-_SQUASH_LIMIT, _SQUASH_LIMIT).atanh()
        return self._base.log_prob(before) - _log_tanh_slope(before).sum(-1)

    def entropy(self) -> torch.Tensor:
        """Return ``[…]`` entropies, in nats.

        They have no closed form; the expected slope of tanh is computed by Gauss-Hermite quadrature
        with 32 nodes, so the result is differentiable and needs no draws.
        """
        nodes, weights = _hermite_nodes(self._base.mu.device, self._base.mu.dtype)
        at = self._base.mu.unsqueeze(-1) + self._base.sigma.unsqueeze(-1) * nodes
        return self._base.entropy() + (_log_tanh_slope(at) * weights).sum((-2, -1))

    def kl_divergence(self, other: Self) -> torch.Tensor:
        """Return ``[…]``, KL(self ‖ other) in nats; tanh does not change it."""
        return self._base.kl_divergence(other._base)


class Hybrid:
    """Independent distributions by name, for Dict and Tuple action spaces.

    Raw actions are batches whose leaves are the raw actions of the parts.

    Args:
        parts: the distributions by dotted path (``"arm.grip"``); all have the leading dimensions
            ``[…]``.
    """

    def __init__(self, parts: Mapping[str, Distribution]) -> None:
        self.parts = parts

    def sample(self, generator: torch.Generator | None = None) -> Batch:
        """Draw from each part, in order."""
        return nest({path: part.sample(generator) for path, part in self.parts.items()})

    def mode(self) -> Batch:
        """Return the mode of each part."""
        return nest({path: part.mode() for path, part in self.parts.items()})

    def log_prob(self, raw: Value) -> torch.Tensor:
        """Return ``[…]`` log-probabilities, summed over the parts.

        Raises:
            StructureError: if ``raw`` does not have exactly the parts.
        """
        by_path = leaves_by_path(raw)
        if by_path.keys() != self.parts.keys():
            raise StructureError(
                f"the action has the parts {', '.join(by_path)}, but the distribution has "
                f"{', '.join(self.parts)}"
            )
        log_probs = [part.log_prob(by_path[path]) for path, part in self.parts.items()]
        return torch.stack(log_probs).sum(0)

    def entropy(self) -> torch.Tensor:
        """Return ``[…]`` entropies, in nats, summed over the parts."""
        return torch.stack([part.entropy() for part in self.parts.values()]).sum(0)

    def kl_divergence(self, other: Self) -> torch.Tensor:
        """Return ``[…]``, KL(self ‖ other) in nats, summed over the parts."""
        parts = self.parts.items()
        return torch.stack([part.kl_divergence(other.parts[path]) for path, part in parts]).sum(0)


def _by_choice(flat: torch.Tensor, sizes: Sequence[int], fill: float) -> torch.Tensor:
    """Turn ``[…, sum(sizes)]`` into ``[…, K, max(sizes)]``, filled up at the end."""
    if flat.shape[-1] != sum(sizes):
        raise StructureError(
            f"{len(sizes)} choices of {list(sizes)} options need {sum(sizes)} logits, but there "
            f"are {flat.shape[-1]}"
        )
    most = max(sizes)
    if min(sizes) == most:
        return flat.reshape(*flat.shape[:-1], len(sizes), most)
    parts = torch.split(flat, list(sizes), dim=-1)
    return torch.stack(
        [F.pad(part, (0, most - part.shape[-1]), value=fill) for part in parts], dim=-2
    )


def _bit_errors(logit: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.binary_cross_entropy_with_logits(logit, target, reduction="none")


def _log_tanh_slope(before: torch.Tensor) -> torch.Tensor:
    # log(1 - tanh(x)^2) written so that it neither overflows nor cancels for large |x|.
    return 2.0 * (math.log(2.0) - before - F.softplus(-2.0 * before))


@functools.lru_cache(maxsize=8)
def _hermite_nodes(device: torch.device, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    nodes, weights = np.polynomial.hermite_e.hermegauss(_N_NODES)
    weights = weights / weights.sum()
    return (
        torch.tensor(nodes, device=device, dtype=dtype),
        torch.tensor(weights, device=device, dtype=dtype),
    )
