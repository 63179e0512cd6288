"""The result of one injected fault: its requirements, and what was measured."""

from __future__ import annotations

from dataclasses import dataclass, field

__all__ = ["Check", "FaultResult"]


@dataclass(frozen=True, slots=True)
class Check:
    """One requirement.

    Attributes:
        requirement: what has to hold, in words.
        measured: what was measured, in words and figures.
        holds: whether the requirement is met; None: it could not be measured.
    """

    requirement: str
    measured: str
    holds: bool | None


@dataclass(slots=True)
class FaultResult:
    """An injected fault and its checks.

    Attributes:
        injected: the fault, with its figures.
        transport: ``ipc`` or ``tcp``.
        checks: the requirements and measurements.
    """

    injected: str
    transport: str
    checks: list[Check] = field(default_factory=list)

    @property
    def holds(self) -> bool:
        """Whether all requirements that could be measured are met."""
        return all(check.holds is not False for check in self.checks)

    def check(self, requirement: str, measured: object, holds: bool | None) -> None:
        """Add a requirement and its measurement."""
        self.checks.append(Check(requirement, str(measured), holds))

    def at_most(self, what: str, value: float, bound: float, unit: str = "s") -> None:
        """Require that a value is at most ``bound``."""
        self.check(
            f"{what} ≤ {bound:g} {unit}".strip(), f"{value:.3g} {unit}".strip(), value <= bound
        )

    def __str__(self) -> str:
        lines = [f"{self.injected} ({self.transport}):"]
        for check in self.checks:
            mark = {True: "holds", False: "MISSED", None: "not measured"}[check.holds]
            lines.append(f"  {check.requirement}: {check.measured}: {mark}")
        return "\n".join(lines)
