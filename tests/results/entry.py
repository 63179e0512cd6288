"""One row of the results: a command that trains, and what it must reach."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass

from dmiddleware.zoo import algorithms

__all__ = ["Entry"]


@dataclass(frozen=True)
class Entry:
    """A training whose result docs/results.md reports.

    The command is ``ditask train ALGORITHM ENV OPTIONS --seed SEED --exp-name NAME`` with the tuned
    settings of the zoo, or ``python -m PROGRAM OPTIONS …``. Its run folder ``runs/NAME`` has the
    file ``result.json``, which ``Experiment`` writes. A program without an experiment prints its
    figure.

    Attributes:
        section: the heading that the row stands under.
        algorithm: the name as its paper writes it.
        env: the environment's id.
        program: the module of the program, for example ``examples.cartpole_dqn``, or the algorithm
            that ``ditask train`` trains, for example ``sac``.
        options: further words of the command line: the environment's id, if ``program`` is an
            algorithm, flags, and options with their values.
        nodes: the number of processes that ``ditask`` starts; 1 runs the program alone.
        seeds: one training for each.
        at_least: the least figure that each seed must reach, or None.
        at_most: the largest figure that a seed may have, or None.
        of_last: whether these bars are for the last policy instead of the best.
        beats: another entry, whose mean over its seeds must be exceeded, or None.
        figure: what the figure is, for example ``mean return`` or ``success rate``.
        printed: a regular expression whose first group finds the figure in what the command prints;
            empty: the figure is ``mean_return`` of ``result.json``.
        part: the named part of the chain whose figure it is; empty: that of the whole chain.
        logged: a figure of the run's log, such as ``learn/policy_lag``; the page tells its mean.
        literature: a published figure, in words.
        source: where it is published.
        minutes: about how long one training takes on two cores, to plan by.
        prepare: the words of a command, after ``python -m``, that makes what the training needs. It
            runs first, and its time does not count.
        prepare_minutes: about how long it takes where nothing is there yet.
    """

    section: str
    algorithm: str
    env: str
    program: str
    options: tuple[str, ...] = ()
    nodes: int = 1
    seeds: tuple[int, ...] = (0,)
    at_least: float | None = None
    at_most: float | None = None
    of_last: bool = False
    beats: Entry | None = None
    figure: str = "mean return"
    printed: str = ""
    part: str = ""
    logged: str = ""
    literature: str = ""
    source: str = ""
    minutes: float = 1.0
    prepare: tuple[str, ...] = ()
    prepare_minutes: float = 0.0

    @property
    def label(self) -> str:
        """The algorithm, and in how many processes it runs if they are several."""
        return self.algorithm if self.nodes == 1 else f"{self.algorithm}, {self.nodes} processes"

    @property
    def name(self) -> str:
        """The name of the training's records, for example ``pendulum_algo_td3``."""
        words = [self.program.rpartition(".")[2], *self.options]
        if self.nodes > 1:
            words.append(f"{self.nodes}_nodes")
        if self.part:
            words.append(self.part)
        return "_".join(re.sub(r"[-/.:]", "_", word.strip("-")) for word in words)

    @property
    def is_in_zoo(self) -> bool:
        """Whether ``ditask train`` trains it."""
        return self.program in algorithms()

    @property
    def command(self) -> str:
        """The command as a reader types it, without a seed, which is 0 by default."""
        return shlex.join(self.words(("python", "-m"), ("ditask",), self.options))

    def words(
        self, python: Sequence[str], ditask: Sequence[str], options: Sequence[str]
    ) -> list[str]:
        """Return the words of the command.

        Args:
            python: how Python runs a module.
            ditask: how ditask is called.
            options: in place of the entry's own.
        """
        nodes = ("--parallel-workers", str(self.nodes)) if self.nodes > 1 else ()
        if self.is_in_zoo:
            return [*ditask, *nodes, "train", self.program, *options]
        if self.nodes == 1:
            return [*python, self.program, *options]
        after = ("--", *options) if options else ()
        return [*ditask, "--main", f"{self.program}.main", *nodes, *after]
