"""Two replay buffers in one draw: own experience, and demonstrations or other offline data."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping, Sequence
from typing import Annotated, Any, Final, Literal

import torch

from dmiddleware.data.buffer_state import check_state
from dmiddleware.data.replay_buffer import ReplayBuffer
from dmiddleware.data.tensor_buffer import TensorBuffer
from dmiddleware.errors import ConfigError, NotEnoughData, StructureError
from dmiddleware.schedule import Counters, Schedule, Scheduled
from dmiddleware.seeding import derive_seed
from dmiddleware.settings import Fraction, Settings, TakesSettings, plain_values, takes_options
from dmiddleware.tree import Batch, leaves, nest, with_columns

__all__ = ["MixedReplay", "MixedReplaySettings"]

_NEEDED: Final = ("obs", "action", "reward", "next_obs", "terminated")
_ONE_PER_ITEM: Final = frozenset(("index", "weight"))


class MixedReplaySettings(Settings):
    """The options of :class:`MixedReplay`."""

    share: Annotated[float | Schedule, Scheduled(Fraction)] = 0.5
    """Which share of a sample are demonstrations; 1 draws nothing else."""
    reward: Literal["env", "sqil"] = "env"
    """``"sqil"``: demonstrations have the reward 1, and all other rows 0."""


class MixedReplay(TakesSettings[MixedReplaySettings]):
    """A replay buffer whose samples come from two others, in a fixed or scheduled ratio.

    Pushed rows go to ``own``. Samples have the columns that both buffers have, and
    ``is_expert``, bool: whether a row is a demonstration. Both buffers may be of any kind, also
    prioritized, or with sequences; both take n-step length, discount and burn-in from the policy.

    - An off-policy algorithm that draws half of its rows from offline data is RLPD (Ball et al.,
      "Efficient Online Reinforcement Learning with Offline Data", 2023, section 4.1; it also has
      layer normalization in the critics, many critics and many updates).
    - With ``reward="sqil"`` it is SQIL (Reddy et al., "SQIL: Imitation Learning via Reinforcement
      Learning with Sparse Rewards", 2020, algorithm 1): an off-policy algorithm imitates the
      demonstrations. The paper has soft Q-learning; SAC is the same for continuous actions.
    - With a schedule from 1 to a lower share, the same chain learns offline first, and then online.

    While the share is 1, the buffer counts as holding the rows of both; otherwise those of ``own``,
    so that a learner waits for experience.

    Args:
        own: where collected rows go.
        demonstrations: rows ``[N, …]`` or ``[T, E, …]``, as a collector returns them or
            :func:`~dmiddleware.data.load_rows` reads them; or a buffer that holds them, such as a
            prioritized one, built with the policy's ``n_step`` and ``discount``.
        settings: the options, each by keyword; see :class:`MixedReplaySettings`.

    Attributes:
        own: as given.
        demonstrations: the buffer of the demonstrations; None until :meth:`bind` or the first draw,
            if they were given as rows.

    Raises:
        ConfigError: if an option is not valid, or a buffer is none, is empty, is used twice, or
            draws sequences of another length than the other.
        StructureError: if the demonstrations lack a column.

    Example:
        >>> from dmiddleware.data import as_tree
        >>> def rows(n, value):
        ...     obs = torch.full((n, 2), value)
        ...     return as_tree({
        ...         "obs": obs, "next_obs": obs, "action": torch.zeros(n, dtype=torch.int64),
        ...         "reward": torch.full((n,), 7.0), "terminated": torch.zeros(n, dtype=torch.bool),
        ...     })
        >>> buffer = MixedReplay(TensorBuffer(100, seed=0), rows(10, 1.0), reward="sqil")
        >>> _ = buffer.push(rows(10, 0.0))
        >>> buffer.sample_ahead(4, at_most=1)[0].reward
        tensor([0., 0., 1., 1.])
    """

    @takes_options(MixedReplaySettings)
    def __init__(
        self, own: ReplayBuffer, demonstrations: ReplayBuffer | Batch, settings: MixedReplaySettings
    ) -> None:
        if not isinstance(own, ReplayBuffer):
            raise ConfigError(f"own must be a buffer such as TensorBuffer, got {own!r:.100}")
        self.own = own
        self._settings = settings
        self._schedule = Schedule.of(settings.share)
        self._share = self._schedule.start
        self._start_columns: frozenset[str] = frozenset()
        # Whether own rows and demonstrations have no priorities, while the others have.
        self._is_uniform = [False, isinstance(demonstrations, Batch)]
        self._rows: Batch | None = None
        self.demonstrations: ReplayBuffer | None = None
        if isinstance(demonstrations, Batch):
            missing = [name for name in _NEEDED if name not in demonstrations]
            if missing:
                raise StructureError(
                    f"demonstrations have the columns {', '.join(_NEEDED)}, but these have no "
                    f"{' and no '.join(missing)}; collect them with RolloutCollector or "
                    "StepCollector"
                )
            if settings.reward == "sqil":
                ones = torch.ones_like(demonstrations["reward"])
                demonstrations = with_columns(demonstrations, reward=ones)
            if not demonstrations["reward"].numel():
                raise ConfigError("the demonstrations have no rows; record some before")
            self._rows = demonstrations
        else:
            self._check_buffer(demonstrations)
            settings.require(settings.reward == "env", "reward", "'env' for a buffer; give rows")
            self.demonstrations = demonstrations

    def _check_buffer(self, demonstrations: object) -> None:
        if not isinstance(demonstrations, ReplayBuffer):
            raise ConfigError(
                "demonstrations must be a batch of rows, which as_tree(...) makes of a dictionary "
                f"of arrays, or a buffer such as TensorBuffer, got {demonstrations!r:.100}"
            )
        if demonstrations is self.own or not len(demonstrations):
            problem = "is the other one" if demonstrations is self.own else "is empty"
            raise ConfigError(f"the buffer of demonstrations {problem}; push them to one before")
        lengths = self.own.unroll_len, demonstrations.unroll_len
        if lengths[0] != lengths[1]:
            raise ConfigError(
                "both buffers must draw sequences of one length, but they have unroll_len="
                f"{lengths[0]} and {lengths[1]}"
            )

    @property
    def size(self) -> int:
        """Capacity in rows: the own buffer's, and that of the demonstrations while it counts."""
        return self.own.size + self._n_counted

    @property
    def settings(self) -> dict[str, Any]:
        """Its options as plain values, and those of both buffers."""
        shown = self.demonstrations
        return {
            "type": type(self).__name__,
            **plain_values(self._settings),
            "own": self.own.settings,
            "demonstrations": None if shown is None else shown.settings,
        }

    @property
    def schedules(self) -> dict[str, Schedule]:
        """The settings that are schedules, also the own buffer's, by name."""
        share = {} if self._schedule.is_constant else {"share": self._schedule}
        return {**share, **self.own.schedules}

    @property
    def reads_counters(self) -> bool:
        """Whether draws read the counters although no setting is a schedule."""
        shown = self.demonstrations
        return self.own.reads_counters or (
            shown is not None and (shown.reads_counters or bool(shown.schedules))
        )

    @property
    def lacks_priorities(self) -> bool:
        """Whether the own buffer draws by priority, but no priority was ever set."""
        return self.own.lacks_priorities

    @property
    def n_step(self) -> int | None:
        """The number of steps that a sampled ``reward`` sums over."""
        return self.own.n_step

    @property
    def unroll_len(self) -> int | None:
        """The number of rows of a sequence after its burn-in; None for single rows."""
        return self.own.unroll_len

    def bind(
        self,
        *,
        n_step: int,
        discount: float | None,
        burn_in: int | None,
        start_columns: Collection[str],
    ) -> None:
        """Give both buffers what the policy knows; see :meth:`ReplayBuffer.bind`."""
        self._start_columns = frozenset(start_columns)
        for buffer in (self.own, self.demonstrations):
            if buffer is not None:
                buffer.bind(
                    n_step=n_step, discount=discount, burn_in=burn_in, start_columns=start_columns
                )

    @property
    def _n_counted(self) -> int:
        """How many demonstrations count as held: all while nothing else is drawn."""
        if self._share < 1:
            return 0
        rows = self._rows
        return len(self._shown) if rows is None else rows["reward"].numel()

    @property
    def _shown(self) -> ReplayBuffer:
        """The buffer of the demonstrations, with the options of the own one."""
        if self.demonstrations is None:
            assert self._rows is not None
            settings, rows = self.own.settings, self._rows
            options: dict[str, Any] = {
                name: settings.get(name) for name in ("n_step", "discount", "unroll_len")
            }
            if self.unroll_len is not None:
                options |= {
                    "burn_in": settings.get("burn_in"),
                    "start_columns": self._start_columns,
                }
            seed = settings.get("seed")
            shown = TensorBuffer(
                rows["reward"].numel(),
                **options,
                seed=None if seed is None else derive_seed(seed, "demonstrations"),
            )
            shown.push(rows)
            self.demonstrations, self._rows = shown, None
        return self.demonstrations

    def __len__(self) -> int:
        """Return the number of own rows; while only demonstrations are drawn, of all rows."""
        return len(self.own) + self._n_counted

    def push(self, batch: Batch, /) -> Sequence[int]:
        """Store collected rows in the own buffer; see :meth:`ReplayBuffer.push`."""
        return self.own.push(batch)

    def sample_ahead(
        self, n: int, *, at_most: int, counters: Counters | None = None
    ) -> list[Batch]:
        """Draw from both buffers; see :meth:`ReplayBuffer.sample_ahead`.

        Demonstrations are the last rows of a batch, and their ``index`` is below 0.

        Raises:
            NotEnoughData: if the own buffer has too few rows.
            ConfigError: if there are too few demonstrations.
            StructureError: if a column differs between both.
        """
        if counters is not None:
            self._share = self._schedule.at(counters)
        n_shown = round(self._share * n)
        if 0 < self._share < 1 < n:
            n_shown = min(max(n_shown, 1), n - 1)
        collected: list[Batch] = []
        if n_shown < n:
            collected = self.own.sample_ahead(n - n_shown, at_most=at_most, counters=counters)
        shown: list[Batch] = []
        while n_shown and len(shown) < max(len(collected), 1):
            shown += self._draw_shown(n_shown, max(len(collected), 1) - len(shown), counters)
        return [self._as_sample(*pair, n=n) for pair in itertools.zip_longest(collected, shown)]

    def _draw_shown(self, n: int, at_most: int, counters: Counters | None) -> list[Batch]:
        try:
            return self._shown.sample_ahead(n, at_most=at_most, counters=counters)
        except NotEnoughData as error:
            raise ConfigError(
                f"a sample takes {n} demonstrations, but {error}; record more, or lower share or "
                "the policy's batch_size"
            ) from None

    def _as_sample(self, own: Batch | None, shown: Batch | None, *, n: int) -> Batch:
        """Return the rows of both as one sample of ``n``; None: all are of the other buffer."""
        of_own = {} if own is None else dict(leaves(own))
        of_shown = {} if shown is None else dict(leaves(shown))
        if of_shown:
            of_shown["index"] = -1 - of_shown["index"]
        if of_own and self._settings.reward == "sqil":
            of_own["reward"] = torch.zeros_like(of_own["reward"])
        n_own = len(of_own.get("index", ()))
        for side, (columns, others) in enumerate(((of_own, of_shown), (of_shown, of_own))):
            if columns and "weight" in others and "weight" not in columns:
                self._is_uniform[side] = True
                columns["weight"] = torch.ones(
                    len(columns["index"]), device=columns["index"].device
                )
        mixed = of_own or of_shown
        if of_own and of_shown:
            mixed = {
                path: self._joined(path, column, of_shown[path])
                for path, column in of_own.items()
                if path in of_shown
            }
        index = mixed["index"]
        is_expert = torch.arange(n, device=index.device) >= n_own
        if self.unroll_len is not None:
            is_expert = is_expert.expand(mixed["mask"].shape)
        return nest({**mixed, "is_expert": is_expert})

    def _joined(self, path: str, own: torch.Tensor, shown: torch.Tensor) -> torch.Tensor:
        name = path.partition(".")[0]
        is_sequence = self.unroll_len is not None
        dim = int(is_sequence and name not in _ONE_PER_ITEM and name not in self._start_columns)
        rest = (*shown.shape[:dim], *shown.shape[dim + 1 :])
        if rest != (*own.shape[:dim], *own.shape[dim + 1 :]):
            raise StructureError(
                f"{path} of the demonstrations has rows of shape {tuple(shown.shape[dim + 1 :])}, "
                f"but those of the buffer have {tuple(own.shape[dim + 1 :])}; record them in the "
                "same environment"
            )
        moved = shown.to(own)
        if shown.dtype != own.dtype and not own.dtype.is_floating_point:
            changed = moved.to(shown.dtype) != shown
            if changed.any():
                raise StructureError(
                    f"{path} of the demonstrations has the value {shown[changed][0].item()}, but "
                    f"the buffer's has integers ({own.dtype}); convert it, or record them in the "
                    "same environment"
                )
        return torch.cat([own, moved], dim)

    def update_priority(self, index: Any, priority: Any) -> int:
        """Set the priorities of rows in the buffers from which they were drawn.

        Those of a buffer that draws uniformly beside a prioritized one have none.
        """
        index = torch.as_tensor(index)
        priority = torch.as_tensor(priority, device=index.device)
        is_own = index >= 0
        own_is_uniform, shown_is_uniform = self._is_uniform
        n_set = 0
        if not own_is_uniform:
            n_set = self.own.update_priority(index[is_own], priority[is_own])
        if shown_is_uniform or is_own.all():
            return n_set
        return n_set + self._shown.update_priority(-1 - index[~is_own], priority[~is_own])

    def state_dict(self) -> dict[str, Any]:
        """Return everything that later samples depend on, with the demonstrations."""
        return {
            "own": self.own.state_dict(),
            "demonstrations": self._shown.state_dict(),
            "share": self._share,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned.

        Raises:
            CheckpointMismatch: if one of the buffers has other options.
        """
        check_state("MixedReplay", state, ("own", "demonstrations", "share"))
        self.own.load_state_dict(state["own"])
        self._shown.load_state_dict(state["demonstrations"])
        self._share = state["share"]
