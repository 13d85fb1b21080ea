"""The arms of a page with their runs, and why an arm's times do not count."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from ampcompare.analysis.runs.time_validity import invalid_reason
from ampcompare.base.formatting import printable
from ampcompare.records.comparison import ArmSummary, Comparison
from ampcompare.records.run import RunRecord
from ampcompare.report.html.shared_settings import listed

__all__ = ["ArmRuns", "arms_with_runs", "not_drawn", "rounded", "time_marks"]


@dataclass(frozen=True)
class ArmRuns:
    """An arm: its index among the rows, its summary and its records."""

    index: int
    row: ArmSummary
    records: Sequence[RunRecord]

    @property
    def name(self) -> str:
        return printable(self.row.arm, 60) or "(no name)"

    @property
    def ran(self) -> list[RunRecord]:
        return [record for record in self.records if record.status in ("completed", "diverged")]

    @property
    def completed(self) -> list[RunRecord]:
        return [record for record in self.records if record.status == "completed"]

    @property
    def timed(self) -> list[RunRecord]:
        """Those of `ran` whose times figures may draw: none if the times of the arm are invalid."""
        return [] if self.row.invalid_time else [record for record in self.ran if not invalid_reason(record)]

    @property
    def time_fault(self) -> str:
        """Why its times do not count, such as `invalid: load 9.0 on 2 cores`; "" if they do."""
        if self.row.invalid_time:
            return printable(f"invalid: {self.row.invalid_time}", 100)
        half = next((record.half for record in self.ran if record.half), None) or self.row.half or ""
        if half.endswith("emulated"):
            return printable(half, 60)
        is_fault = self.row.time_verdict.startswith(("invalid", "not comparable"))
        return printable(self.row.time_verdict, 100) if is_fault else ""


def arms_with_runs(comparison: Comparison) -> list[ArmRuns]:
    """Return the arms in the order of the rows."""
    by_arm: dict[str, list[RunRecord]] = {row.arm: [] for row in comparison.arms}
    for record in comparison.records:
        by_arm.setdefault(record.arm, []).append(record)
    return [ArmRuns(index, row, by_arm[row.arm]) for index, row in enumerate(comparison.arms)]


def time_marks(arms: Sequence[ArmRuns]) -> str:
    """Return one sentence that names the arms whose times do not count, by reason; "" if there are none."""
    faults: dict[str, list[str]] = {}
    for arm in arms:
        if arm.time_fault:
            faults.setdefault(arm.time_fault, []).append(arm.name)
    if not faults:
        return ""
    return f"Times that do not count: {'; '.join(f'{listed(names)} ({fault})' for fault, names in faults.items())}."


def not_drawn(arms: Sequence[ArmRuns], drawn: Collection[int], why: Callable[[ArmRuns], str]) -> str:
    """Return a sentence for each reason why arms are not in a figure that shows others."""
    reasons: dict[str, list[str]] = {}
    for arm in arms:
        if drawn and arm.index not in drawn and (reason := why(arm)):
            reasons.setdefault(reason, []).append(arm.name)
    return "".join(f" Not drawn: {listed(names)} ({reason})." for reason, names in reasons.items())


def rounded(value: float, digits: int = 5) -> float:
    """Return a number with this many digits; a whole one as an int, which is shorter in JSON."""
    short = float(f"{value:.{digits}g}")
    return int(short) if short.is_integer() else short
