"""The result of one injected fault: its requirements, and what was measured."""

from __future__ import annotations

from dataclasses import dataclass, field

__all__ = ["Check", "FaultResult"]


@dataclass(frozen=True, slots=True)
class Check:
    """One requirement.

    Attributes:
        variant: the fault, with its figures; variants with the same requirement share a cell.
        requirement: what has to hold, in words.
        measured: what was measured, in words and figures.
        holds: whether the requirement is met.
        value: the measured figure, if the requirement is a bound.
    """

    variant: str
    requirement: str
    measured: str
    holds: bool
    value: float | None = None


@dataclass(slots=True)
class FaultResult:
    """An injected fault and its checks.

    Attributes:
        injected: the fault, with its figures.
        transport: one of :data:`tests.faults.process_cluster.TRANSPORTS`.
        checks: the requirements and measurements.
    """

    injected: str
    transport: str
    checks: list[Check] = field(default_factory=list)

    @property
    def holds(self) -> bool:
        """Whether all requirements are met."""
        return all(check.holds for check in self.checks)

    def check(
        self, requirement: str, measured: object, holds: object, *, variant: str = ""
    ) -> None:
        """Add a requirement and its measurement, of one variant if there are several."""
        if isinstance(measured, bool):
            measured = "yes" if measured else "no"
        self.checks.append(Check(variant or self.injected, requirement, str(measured), bool(holds)))

    def at_most(
        self, what: str, value: float, bound: float, unit: str = "s", *, variant: str = ""
    ) -> None:
        """Require that a value is at most ``bound``."""
        requirement, measured = f"{what} ≤ {bound:g} {unit}", f"{value:.3g} {unit}"
        holds = bool(value <= bound)
        self.checks.append(
            Check(
                variant or self.injected,
                requirement.strip(),
                measured.strip(),
                holds,
                float(value),
            )
        )

    def __str__(self) -> str:
        lines = [f"{self.injected} ({self.transport}):"]
        for check in self.checks:
            variant = "" if check.variant == self.injected else f" ({check.variant})"
            mark = "holds" if check.holds else "MISSED"
            lines.append(f"  {check.requirement}{variant}: {check.measured}: {mark}")
        return "\n".join(lines)
