"""Demonstrations in the samples of a replay buffer."""

from __future__ import annotations

from typing import Annotated, Final, Literal

import torch
from annotated_types import Gt, Lt

from dmiddleware.data.samplers import UniformSampler
from dmiddleware.data.tensor_buffer import TensorBuffer
from dmiddleware.errors import ConfigError, StructureError
from dmiddleware.settings import Settings, TakesSettings, takes_options
from dmiddleware.tree import Batch, leaves, nest, with_columns

__all__ = ["DemonstrationReplay", "DemonstrationReplaySettings"]

_NEEDED: Final = ("obs", "action", "reward", "next_obs", "terminated")


class DemonstrationReplaySettings(Settings):
    """The options of :class:`DemonstrationReplay`."""

    share: Annotated[float, Gt(0), Lt(1)] = 0.5
    """Which share of a sample's rows are demonstrations."""
    reward: Literal["env", "sqil"] = "env"
    """``"sqil"``: demonstrations have the reward 1, and all other rows 0."""


class DemonstrationReplay(TakesSettings[DemonstrationReplaySettings]):
    """Replaces a share of the sampled rows by demonstrations, such as an expert's.

    With ``reward="sqil"`` it is SQIL (Reddy et al., "SQIL: Imitation Learning via Reinforcement
    Learning with Sparse Rewards", 2020, algorithm 1): an off-policy algorithm imitates the
    demonstrations, whose actions have the reward 1, while its own have 0. The paper has soft
    Q-learning; SAC is the same for continuous actions. As in the paper, half of the rows are
    demonstrations.

    It transforms the samples of a buffer that draws uniformly::

        shown = DemonstrationReplay(expert_rows, reward="sqil")
        buffer = TensorBuffer(100_000, transform=shown)

    Samples have the columns that the buffer's rows and the demonstrations share, and ``is_expert``,
    bool. Demonstrations have n-step returns where the buffer has them. They are not part of the
    buffer's state.

    Args:
        demonstrations: rows ``[N, …]`` or ``[T, E, …]``, as a collector returns them.
        settings: the options, each by keyword; see :class:`DemonstrationReplaySettings`.

    Raises:
        ConfigError: if an option is not valid; from ``TensorBuffer``, if it draws by priority, or
            sequences; from ``buffer.sample``, if there are fewer demonstrations than a sample
            needs.
        StructureError: if the demonstrations lack a column; from ``buffer.sample``, if they differ
            from the buffer's rows.

    Example:
        >>> from dmiddleware.data import as_tree
        >>> def rows(n, value):
        ...     obs = torch.full((n, 2), value)
        ...     return as_tree({
        ...         "obs": obs, "next_obs": obs, "action": torch.zeros(n, dtype=torch.int64),
        ...         "reward": torch.full((n,), 7.0), "terminated": torch.zeros(n, dtype=torch.bool),
        ...     })
        >>> shown = DemonstrationReplay(rows(10, 1.0), reward="sqil")
        >>> buffer = TensorBuffer(100, transform=shown, seed=0)
        >>> _ = buffer.push(rows(10, 0.0))
        >>> buffer.sample(4).reward
        tensor([0., 0., 1., 1.])
    """

    @takes_options(DemonstrationReplaySettings)
    def __init__(self, demonstrations: Batch, settings: DemonstrationReplaySettings) -> None:
        missing = [name for name in _NEEDED if name not in demonstrations]
        if missing:
            raise StructureError(
                f"demonstrations have the columns {', '.join(_NEEDED)}, but these have no "
                f"{' and no '.join(missing)}; collect them with RolloutCollector or StepCollector"
            )
        self.settings = settings
        self._is_sqil = settings.reward == "sqil"
        if self._is_sqil:
            ones = torch.ones_like(demonstrations["reward"])
            demonstrations = with_columns(demonstrations, reward=ones)
        self._demonstrations = demonstrations
        self._buffer: TensorBuffer | None = None

    def attach(self, buffer: TensorBuffer) -> None:
        """Check that the buffer draws single steps uniformly, and take its n-step returns.

        Raises:
            ConfigError: if it does not.
        """
        if buffer.unroll_len is not None or not isinstance(buffer.sampler, UniformSampler):
            raise ConfigError(
                "DemonstrationReplay needs a buffer that draws single steps uniformly, but this "
                f"one has unroll_len={buffer.unroll_len} and a {type(buffer.sampler).__name__}; "
                "leave out unroll_len and sampler"
            )
        self._buffer = None  # it follows the buffer's options, which are those of the policy

    def __call__(self, batch: Batch, buffer: TensorBuffer) -> Batch:
        """Return a sample ``[n, …]`` whose last rows are demonstrations."""
        n = len(batch["index"])
        n_shown = max(1, round(self.settings.share * n))
        rows = self._rows(buffer)
        if n_shown > len(rows):
            raise ConfigError(
                f"a sample of {n} rows takes {n_shown} demonstrations, but there are only "
                f"{len(rows)}; record more, or lower share or the policy's batch_size"
            )
        rows.generator = buffer.generator  # whose state is saved
        columns, shown = dict(leaves(batch)), dict(leaves(rows.sample(n_shown)))
        is_expert = torch.arange(n) >= n - n_shown
        if self._is_sqil:
            columns["reward"].zero_()
        mixed = {
            name: _with_rows(column, shown[name], name)
            for name, column in columns.items()
            if name in shown and name != "index"
        }
        return nest({**mixed, "index": columns["index"], "is_expert": is_expert})

    def _rows(self, buffer: TensorBuffer) -> TensorBuffer:
        """Return the demonstrations, with the n-step returns of a buffer."""
        if self._buffer is None:
            n_rows = self._demonstrations["reward"].numel()
            self._buffer = TensorBuffer(n_rows, n_step=buffer.n_step, discount=buffer.discount)
            self._buffer.push(self._demonstrations)
        return self._buffer


def _with_rows(column: torch.Tensor, shown: torch.Tensor, name: str) -> torch.Tensor:
    """Return ``[n, …]``, a column whose last rows are those of demonstrations."""
    if shown.shape[1:] != column.shape[1:]:
        raise StructureError(
            f"{name} of the demonstrations has rows of shape {tuple(shown.shape[1:])}, but those "
            f"of the buffer have {tuple(column.shape[1:])}; record them in the same environment"
        )
    column[len(column) - len(shown) :] = shown.to(column.dtype)
    return column
