"""What one injected fault came to: the demands on it, and what was measured."""

from __future__ import annotations

from dataclasses import dataclass, field

__all__ = ["Check", "FaultResult"]


@dataclass(frozen=True, slots=True)
class Check:
    """One demand.

    Attributes:
        demanded: in words.
        measured: in words and figures.
        holds: whether the one satisfies the other; None: it could not be measured.
    """

    demanded: str
    measured: str
    holds: bool | None


@dataclass(slots=True)
class FaultResult:
    """A fault and what became of it.

    Attributes:
        injected: the fault, with its figures.
        transport: over what.
        checks: one by one.
    """

    injected: str
    transport: str
    checks: list[Check] = field(default_factory=list)

    @property
    def holds(self) -> bool:
        """Whether all demands that could be measured hold."""
        return all(check.holds is not False for check in self.checks)

    def check(self, demanded: str, measured: object, holds: bool | None) -> None:
        """Add a demand and its figure."""
        self.checks.append(Check(demanded, str(measured), holds))

    def at_most(self, what: str, value: float, bound: float, unit: str = "s") -> None:
        """Demand that a figure is at most a bound."""
        self.check(f"{what} ≤ {bound:g} {unit}", f"{value:.3g} {unit}", value <= bound)

    def __str__(self) -> str:
        lines = [f"{self.injected} ({self.transport}):"]
        for check in self.checks:
            mark = {True: "holds", False: "MISSED", None: "not measured"}[check.holds]
            lines.append(f"  {check.demanded}: {check.measured}: {mark}")
        return "\n".join(lines)
