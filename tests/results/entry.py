"""One row of the results: a command that trains, and what its return must reach."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Entry"]


@dataclass(frozen=True)
class Entry:
    """A training whose result docs/results.md reports.

    The command is ``python -m PROGRAM OPTIONS --seed SEED --exp-name NAME``, or ``ditask`` with the
    same program. Its run folder ``runs/NAME`` has the file ``result.json``, which ``Experiment``
    writes.

    Attributes:
        section: the heading that the row stands under.
        algorithm: the name as its paper writes it.
        env: the environment's id.
        program: the module of the program, for example ``examples.pendulum_sac``.
        options: further words of the command line.
        nodes: the number of processes that ``ditask`` starts; 1 runs the program alone.
        seeds: one training for each.
        at_least: the least mean return that the best policy must reach, or None.
        literature: a published figure, in words.
        source: where it is published.
        minutes: about how long one training takes on two cores, to plan by.
    """

    section: str
    algorithm: str
    env: str
    program: str
    options: tuple[str, ...] = ()
    nodes: int = 1
    seeds: tuple[int, ...] = (0,)
    at_least: float | None = None
    literature: str = ""
    source: str = ""
    minutes: float = 1.0

    @property
    def name(self) -> str:
        """The name of the training's runs, without the seed."""
        words = (self.program.rpartition(".")[2], *self.options)
        return "_".join(word.strip("-").replace("/", "_") for word in words)
