"""Advantages and n-step returns.

Computed over 256 steps of 8 environments. The references are hand-written for speed: one loop over
time with one pass over all environments per step (for n-step returns, one pass over all rows for
each of the n rewards), with rows unpacked once and memory allocated once.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from dmiddleware.rl import gae, nstep_return
from tests.benchmarks.report import Row, interleaved

T, E = 256, 8
N_STEP = 5
DISCOUNT, GAE_LAMBDA = 0.99, 0.95
CALLS = 30
AT_MOST = 1.2


def _rollout() -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    reward, value, next_value = torch.randn(3, T, E, generator=generator)
    terminated = torch.rand(T, E, generator=generator) < 0.02
    truncated = torch.rand(T, E, generator=generator) < 0.01
    return reward, value, next_value, terminated, terminated | truncated


def gae_by_step_torch(
    reward: torch.Tensor,
    value: torch.Tensor,
    next_value: torch.Tensor,
    terminated: torch.Tensor,
    done: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    delta = reward + DISCOUNT * next_value * (~terminated) - value
    factor = (DISCOUNT * GAE_LAMBDA) * (~done).float()
    adv = torch.empty_like(reward)
    rows = zip(delta.unbind(0), factor.unbind(0), adv.unbind(0), strict=True)
    last = torch.zeros(E)
    for delta_row, factor_row, adv_row in reversed(list(rows)):
        last = torch.addcmul(delta_row, factor_row, last, out=adv_row)
    return adv, adv + value


def gae_by_step_numpy(
    reward: np.ndarray,
    value: np.ndarray,
    next_value: np.ndarray,
    terminated: np.ndarray,
    done: np.ndarray,
) -> tuple[np.ndarray, np.ndarray]:
    adv = reward + np.float32(DISCOUNT) * next_value * ~terminated - value
    factor = np.float32(DISCOUNT * GAE_LAMBDA) * ~done
    last, scratch = np.zeros(E, np.float32), np.empty(E, np.float32)
    for adv_row, factor_row in reversed(list(zip(adv, factor, strict=True))):
        np.multiply(factor_row, last, out=scratch)
        last = np.add(adv_row, scratch, out=adv_row)
    return adv, adv + value


def nstep_by_pass(
    reward: torch.Tensor, terminated: torch.Tensor, done: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    total = reward.clone()
    discount = torch.full_like(reward, DISCOUNT)
    row = torch.arange(T).unsqueeze(1).repeat(1, E)
    ends = terminated.clone()
    going = ~done
    for k in range(1, N_STEP):
        goes_on = going[: T - k]
        total[: T - k] += DISCOUNT**k * reward[k:] * goes_on
        discount[: T - k] *= torch.where(goes_on, DISCOUNT, 1.0)
        row[: T - k] += goes_on
        ends[: T - k] |= goes_on & terminated[k:]
        going = goes_on & ~done[k:]
    return total, discount, row, ends


def rows() -> list[Row]:
    """Measure; both sides give the same numbers, which is checked first."""
    rollout = _rollout()
    arrays = tuple(column.numpy() for column in rollout)
    reward, _, _, terminated, done = rollout

    def ours_gae() -> tuple[torch.Tensor, ...]:
        return gae(*rollout, discount=DISCOUNT, gae_lambda=GAE_LAMBDA)

    def ours_nstep() -> tuple[torch.Tensor, ...]:
        return nstep_return(reward, terminated, done, n=N_STEP, discount=DISCOUNT)

    cases: list[tuple[str, str, Callable[[], object], Callable[[], object]]] = [
        ("GAE over [256, 8]", "torch, by time step", ours_gae, lambda: gae_by_step_torch(*rollout)),
        ("GAE over [256, 8]", "numpy, by time step", ours_gae, lambda: gae_by_step_numpy(*arrays)),
        (
            f"{N_STEP}-step return over [256, 8]",
            "torch, by reward ahead",
            ours_nstep,
            lambda: nstep_by_pass(reward, terminated, done),
        ),
    ]
    return [_measured(*case) for case in cases]


def _measured(
    name: str, against: str, ours: Callable[[], object], reference: Callable[[], object]
) -> Row:
    for mine, theirs in zip(ours(), reference(), strict=True):  # type: ignore[call-overload]
        np.testing.assert_allclose(mine, theirs, rtol=1e-4, atol=1e-4)

    pair = interleaved(ours, reference, calls=CALLS)
    return Row.of_time(name, pair, calls=CALLS, against=against, at_most=AT_MOST)
